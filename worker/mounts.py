"""Which file system holds a path, and whether SQLite can keep a write-ahead log there.

The log's index is memory that all its users share; over a network, and through most programs that serve files, it
is not shared, or cannot be mapped at all (sqlite.org/wal.html).
"""

import os
import re
import select

MOUNTINFO = "/proc/self/mountinfo"
_NO_SHARED_MEMORY = {
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuseblk", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "prl_fs", "smb3", "smbfs", "vboxsf", "virtiofs", "vmhgfs",
}  # fmt: skip
_ESCAPED = re.compile(r"\\([0-7]{3})")


def kind(path: str, mountinfo: str = MOUNTINFO) -> str:
    """Return the type of the file system that holds `path`, as proc(5) names it, or "" where that is not told."""
    real = os.path.realpath(path)
    best, found = -1, ""
    for point, name in listed(mountinfo):
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # the later one lies on top
            best, found = len(point), name
    return found


def listed(mountinfo: str = MOUNTINFO) -> list[tuple[str, str]]:
    """Return every mount point with the type of what is mounted there; empty where that is not told."""
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as file:
            parts = [line.partition(" - ") for line in file]
        return [
            (_ESCAPED.sub(lambda code: chr(int(code[1], 8)), mount.split(" ")[4]), device.split(" ")[0])
            for mount, _, device in parts
        ]
    except (OSError, IndexError):
        return []


def shares_memory(kind: str) -> bool:
    """Return whether processes that map a file of such a file system see the same bytes."""
    return kind not in _NO_SHARED_MEMORY and kind.partition(".")[0] != "fuse"


class Changes:
    """Tells whether something was mounted, or taken off, since it was last asked; `changes`: how often it was so."""

    def __init__(self) -> None:
        self.changes = 0
        self._fd = -1
        self._poll = select.poll()

    def changed(self) -> bool:
        """Return whether it is so, or this is the first question."""
        if self._fd < 0:
            self._fd = os.open(MOUNTINFO, os.O_RDONLY | os.O_CLOEXEC)
            self._poll.register(self._fd, select.POLLPRI)
        elif not self._poll.poll(0):
            return False
        self.changes += 1
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
