"""The mark: how far a ledger in SQLite had come, kept apart from it, so that what it has lost is noticed.

LEDGER.mark    one line: whose it is, the newest revision that was durable, and what the line itself was stored as

A write-ahead log whose middle cannot be read is cut short there by SQLite, in silence.  After each durable commit the
revision is written here, in place and without a flush of its own: it never says more than the ledger had, and less
only after a power cut.  A ledger that is put into the folder by hand comes without its mark, or with another one's.
"""

import contextlib
import os
from typing import NamedTuple

from worker import files, mounts

ENDING = ".mark"
# Where a file keeps its number for as long as it lives; elsewhere a remount may change it.
_STEADY = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs"}


class Said(NamedTuple):
    """What a mark says: of which ledger, and how far it had come; `copied`: it is a copy, as with the whole folder."""

    id: str
    revision: int
    copied: bool


def read(ledger: str) -> Said | None:
    """Return the mark of the ledger at that path; None for one that cannot be read, which a power cut may leave.

    Raises FileNotFoundError.
    """
    try:
        with open(files.open_plain(ledger + ENDING), encoding="ascii") as file:
            id, revision, inode = file.read(200).split()
            here = os.fstat(file.fileno()).st_ino if _steady(ledger) else 0
            return Said(id, int(revision), bool(here) and int(inode) not in (0, here))
    except FileNotFoundError:
        raise
    except (OSError, ValueError):
        return None


class Mark:
    """The mark of an open ledger; nothing is said if it cannot be written."""

    def __init__(self, ledger: str, id: str) -> None:
        """Raises OSError if there is none."""
        self._id = id
        self._fd = os.open(ledger + ENDING, os.O_RDWR | os.O_CLOEXEC)
        self._inode = os.fstat(self._fd).st_ino if _steady(ledger) else 0

    def note(self, revision: int) -> None:
        """Note that the ledger has come so far, durably."""
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, _line(self._id, revision, self._inode), 0)

    def close(self) -> None:
        os.close(self._fd)


def begin(ledger: str, id: str, revision: int) -> None:
    """Make a mark, durably.  Raises OSError."""
    files.replace(ledger + ENDING, [_line(id, revision, 0)])


def _line(id: str, revision: int, inode: int) -> bytes:
    return b"%s %019d %020d\n" % (id.encode(), revision, inode)


def _steady(ledger: str) -> bool:
    return mounts.kind(os.path.dirname(os.path.abspath(ledger))) in _STEADY
