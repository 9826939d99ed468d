"""Closing what somebody has sent: the last one to close a descriptor waits for whatever its end takes.

A TCP socket with SO_LINGER waits for its peer, a file of FUSE or NFS for its server, and a local socket for all that
is on its way in it.  So the loop itself closes nothing but pipes, memory and empty local streams;
a thread has the others.
"""

import contextlib
import fcntl
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable

RECEIVED_MAX = 253  # SCM_MAX_FD of the kernel: where there is room for fewer, it closes the others itself, at once
_FIONREAD = 0x541B  # of termios, which is an import of its own
_NO_LINGER = struct.pack("2i", 0, 0)
_THREADS_MAX = 64


# Closed by threads, each of which ends when there is nothing left to close.
_slow: deque[int] = deque()
_threads: set[object] = set()


def close(received: Iterable[int]) -> None:
    """Close descriptors that somebody has sent; this does not wait, whatever they are."""
    for fd in received:
        if _is_harmless(fd):
            os.close(fd)
        else:
            _end_lingering(fd)
            _slow.append(fd)
    if _slow and len(_threads) < _THREADS_MAX:
        import _thread  # for those who send what they should not

        me = object()
        _threads.add(me)
        try:
            _thread.start_new_thread(_close_all, (me,))
        except RuntimeError:  # none can be had: they stay open until the next time
            _threads.discard(me)


def _close_all(me: object) -> None:
    try:
        while True:
            fd = _slow.popleft()
            with contextlib.suppress(OSError):
                os.close(fd)
    except IndexError:
        _threads.discard(me)


def _is_harmless(fd: int) -> bool:
    """Return whether closing it waits for nobody: a pipe, a memfd, a local stream in which nothing can be any more.

    fstat(2), which would tell the kind, may itself wait for a server.
    """
    for question in (fcntl.F_GETPIPE_SZ, fcntl.F_GET_SEALS):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, question)
            return True
    with contextlib.suppress(OSError), contextlib.ExitStack() as after:
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)
        after.callback(one.detach)
        kind = (one.getsockopt(socket.SOL_SOCKET, option) for option in (socket.SO_DOMAIN, socket.SO_TYPE))
        if tuple(kind) == (socket.AF_UNIX, socket.SOCK_STREAM):
            one.shutdown(socket.SHUT_RDWR)  # what was sent to us before can be looked for; after this nothing comes
            return fcntl.ioctl(fd, _FIONREAD, bytes(4)) == bytes(4)
    return False


def _end_lingering(fd: int) -> None:
    """Let a socket's close wait for nobody; most of them end at once then."""
    with contextlib.suppress(OSError):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fd)  # of whatever kind it is; nothing is asked
        try:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        finally:
            one.detach()
