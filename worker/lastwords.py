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


def begin(places: Places, slot: int, step: str, number: int, started: float) -> None:
    """Note whose the parts of a slot are from now on, empty; where that cannot be written nobody will know."""
    for part in (places.part(slot), places.log_part(slot)):
        with contextlib.suppress(OSError):
            if os.stat(part).st_size:
                os.truncate(part, 0)
    owner = f"{step} {number} {started!r}\n".encode()
    with contextlib.suppress(OSError):
        files.clear_the_way(_path(places, slot))
        # Not O_TRUNC: some file systems take that for a file that is being replaced, and flush it.
        fd = os.open(_path(places, slot), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            os.ftruncate(fd, os.pwrite(fd, owner, 0))
        finally:
            os.close(fd)


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
