"""Last words: what an attempt had written that was cut off with its worker, or with the machine.

log/.part-N.of    whose the output and the log in slot N are

The parts are on the disk whatever becomes of the worker; which attempt they belong to is written down beside them
before it begins, without a flush.
"""

import contextlib
import os
from collections.abc import Iterator

from worker import files
from worker.folder import Places
from worker.ledger import Ending, Row
from worker.output import INLINE_MAX, TAIL_MAX


class Owner:
    """Says, for one slot, whose the parts there are.  The file stays open from one attempt to the next."""

    def __init__(self, places: Places, slot: int) -> None:
        self._parts = places.part(slot), places.log_part(slot)
        self._path = _path(places, slot)
        self._fd = -1
        self._inode = -1
        self._size = 0

    def begin(self, step: str, number: int, started: float) -> None:
        """Note whose the parts are from now on, empty; where that cannot be written nobody will know."""
        with contextlib.suppress(OSError):
            if not self._in_place():
                self._open()
            size = os.pwrite(self._fd, f"{step} {number} {started!r}\n".encode(), 0)
            if size < self._size:
                os.ftruncate(self._fd, size)
            self._size = size

    def close(self) -> None:
        """Close the file, if it is open, and leave it where it is."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _in_place(self) -> bool:
        try:
            return self._fd >= 0 and os.stat(self._path).st_ino == self._inode
        except OSError:
            return False

    def _open(self) -> None:
        self.close()
        for part in self._parts:  # of an earlier worker; ours are empty when an attempt has ended
            with contextlib.suppress(OSError):
                if os.stat(part).st_size:
                    os.truncate(part, 0)
        files.clear_the_way(self._path)
        # Not O_TRUNC: some file systems take that for a file that is being replaced, and flush it.
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        found = os.fstat(self._fd)
        self._inode, self._size = found.st_ino, found.st_size


def found(places: Places, row: Row, ending: Ending) -> Ending:
    """Return the ending of an attempt that was cut off with what it had written, and how long it was seen alive.

    What is too long for the ledger gets its name in log/.
    """
    for slot in _slots(places):
        if _owner(places, slot) == f"{row.step} {row.number} {row.started!r}":
            break
    else:
        return ending
    took = max((at - row.started for at in map(_changed, (places.part(slot), places.log_part(slot)))), default=0.0)
    output, output_size = _end(places.part(slot))
    log, log_size = _end(places.log_part(slot))
    if log_size > INLINE_MAX:
        with contextlib.suppress(OSError):
            os.rename(places.log_part(slot), places.log(row.step, row.number))
    return ending._replace(took=max(0.0, took), output=output, output_size=output_size, log=log, log_size=log_size)


def _slots(places: Places) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for name in os.listdir(os.path.dirname(places.log_part(0))):
            number = name.removeprefix(".part-").removesuffix(".of")
            if name.startswith(".part-") and name.endswith(".of") and number.isdecimal():
                yield int(number)


def _owner(places: Places, slot: int) -> str:
    try:
        with open(files.open_plain(_path(places, slot)), encoding="utf-8") as file:
            return file.read(1000).rstrip("\n")
    except (OSError, ValueError):
        return ""


def _end(path: str) -> tuple[bytes, int]:
    """Return all of a part, or the end of it if it is long, and its size."""
    try:
        with open(files.open_plain(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(0 if size <= INLINE_MAX else size - TAIL_MAX)
            return file.read(INLINE_MAX), size
    except OSError:
        return b"", 0


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _path(places: Places, slot: int) -> str:
    return f"{places.log_part(slot)}.of"
