"""Who has sent a message: the pid that the kernel gives with it, and a descriptor of that process where it gives one.

A pid says who it was for as long as that process lives; the descriptor (SCM_PIDFD, Linux 6.5) cannot come to mean
another one, and tells the cgroup (PIDFD_GET_INFO, Linux 6.13), from Linux 6.16 on also of a process that has gone.
"""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from worker import process

_SO_PASSPIDFD, _SO_PEERPIDFD = 76, 77
SCM_PIDFD = 4
# struct pidfd_info of linux/pidfd.h, as it was at first: what is told, the cgroup's id, the parent's pid.
_INFO = struct.Struct("=QQ8xI36x")
_GET_INFO = 0xC000FF0B | _INFO.size << 16
_CGROUP, _EXIT = 1 << 2, 1 << 3


class Sender(NamedTuple):
    """The process `pid`, 0 if the kernel could not tell; `pidfd` is -1 where there is none."""

    pid: int
    pidfd: int = -1

    def lives(self) -> bool:
        """Return whether it has not ended."""
        if self.pidfd < 0:
            return process.lives(self.pid)
        return not process.has_ended(self.pidfd)

    def group(self) -> int | None:
        """Return the id (inode) of the cgroup in which it is, or was at its end; None if the kernel does not tell."""
        if self.pidfd < 0:
            return None
        told, group, _parent = _info(self.pidfd)
        return group if told & _CGROUP else None


def lineage(pid: int) -> Iterator[int]:
    """Yield a living process and those from which it descends, as far as the kernel tells."""
    while pid > 0:
        yield pid
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return
        try:
            told, _group, parent = _info(pidfd)
        finally:
            os.close(pidfd)
        # Where /proc hides a process (ProtectProc=), older kernels tell of no parent.
        pid = parent if told else process.parent_of(pid)


def _info(pidfd: int) -> tuple[int, int, int]:
    """Return what is told (0: nothing is), the id of the cgroup, and the pid of the parent."""
    info = bytearray(_INFO.pack(_CGROUP | _EXIT, 0, 0))
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return 0, 0, 0
    return _INFO.unpack(info)


@contextlib.contextmanager
def peer_of(connected: socket.socket, pid: int) -> Iterator[Sender]:
    """Yield the process `pid` that has made a connection; it can be asked inside the block."""
    try:
        pidfd = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pidfd = -1  # it has gone, or the kernel is older than Linux 6.5
    try:
        yield Sender(pid, pidfd)
    finally:
        if pidfd >= 0:
            os.close(pidfd)


def ask_for(receiver: socket.socket) -> None:
    """Let each message that `receiver` takes come with its sender's pid and, where the kernel can, its descriptor."""
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with contextlib.suppress(OSError):
        receiver.setsockopt(socket.SOL_SOCKET, _SO_PASSPIDFD, 1)
