"""Results: what the done steps have in out/, made good from the ledger where it is missing.

Small results are in the ledger's rows and are shown as files; large ones are files alone.
"""

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from io import FileIO

from worker import files, plural
from worker.disk import Disk
from worker.folder import Places
from worker.journal import ERROR, NOTICE, WARNING, Journal
from worker.ledger import DONE, Ledger, Row

# A result up to this size has a digest: 16 MiB take some 20 ms.
_GUARDED_MAX = 16 * 1024 * 1024


class Results:
    """The files of one run's results; a full disk is waited out."""

    def __init__(self, store: Ledger, places: Places, disk: Disk, journal: Journal) -> None:
        self._ledger = store
        self._places = places
        self._disk = disk
        self._journal = journal
        self._done: dict[str, Row | None] = {}
        self._seen: dict[str, tuple[int, int, int]] = {}  # files that were found to be what they were
        self._name = "the ledger" if store.shared else places.ledger

    def restore(self, thorough: bool) -> None:
        """Write small results again that are missing, and name large ones that are lost.

        `thorough`: after a power cut a file may also be there and hold something else.
        """
        restored = 0
        for row in self._disk.persist(self._name, lambda: list(lost(self._ledger, self._places, thorough))):
            restored += self.take(row)
        if restored:
            text = f"{self._places.out}: {plural.of(restored, 'result')} written again from the ledger"
            self._journal.event("state", text, priority=NOTICE)

    def check(self, steps: Iterable[str]) -> None:
        """Write the results of these done steps again that are not what they were; name those that are lost."""
        for step in steps:
            if step not in self._done:  # what is done stays so; a task with items has no step of its name
                found = self._disk.persist(self._name, functools.partial(self._ledger.last_closed, step))
                self._done[step] = found if found is not None and found.outcome == DONE else None
            row = self._done[step]
            if row is None:
                continue
            path = self._places.output(step)
            try:
                status = os.stat(path)
                same = (status.st_ino, status.st_size, status.st_mtime_ns)
                if self._seen.get(step) == same or not row.digest or digest(None, path) == row.digest:
                    self._seen[step] = same
                    continue
            except FileNotFoundError:
                pass
            except OSError:
                continue
            if self.take(row):
                text = f"{path}: was not what {step} had written; written again from the ledger"
                self._journal.event("state", text, step=step, priority=WARNING)

    def lacking(self, steps: Iterable[str]) -> list[str]:
        """Return the files that are not here of these done steps' results, after `check` has looked at them."""
        rows = [row for step in steps if (row := self._done.get(step)) is not None and row.output_size]
        return [path for row in rows if not os.path.exists(path := self._places.output(row.step))]

    def take(self, row: Row) -> bool:
        """Write the result of a done step; return False, having said so, if the ledger does not have it."""
        path, output = self._places.output(row.step), self._read(row)
        if output is None:
            what = "is not what it was" if os.path.exists(path) else "is not here"
            text = f"{path}: the result {what}; the step stays done (it was too large for the ledger)"
            self._journal.event("state", text, step=row.step, priority=ERROR)
            return False
        self._disk.persist(path, functools.partial(files.publish, path, output))
        return True

    def copy(self, row: Row, step: str) -> bytes | None:
        """Give the result of a done step to `step` as well; return it, or None if it lies in its file alone."""
        output, source, path = self._read(row), self._places.output(row.step), self._places.output(step)
        if output is not None:
            self._disk.persist(path, functools.partial(files.publish, path, output))
        elif os.path.exists(source):
            with contextlib.suppress(FileExistsError):
                self._disk.persist(path, functools.partial(os.link, source, path))
        return output

    def discard(self, step: str) -> None:
        """Remove what an attempt has left that did not count."""
        with contextlib.suppress(OSError):
            os.unlink(self._places.output(step))

    def _read(self, row: Row) -> bytes | None:
        if not row.output_size:
            return b""
        self._disk.meanwhile()  # many of these may take long
        return self._disk.persist(self._name, functools.partial(self._ledger.output, row.seq))


def lost(store: Ledger, places: Places, thorough: bool) -> Iterator[Row]:
    """Yield the rows of the done steps whose results are missing in out/.

    Those that may be there and be something else are compared byte for byte: all if `thorough`, and where
    workers share the ledger those of steps that we have tried as well.
    """
    there = set(os.listdir(places.out))
    tried: set[str] = set()
    for row in store.rows():
        if row.outcome != DONE:
            if row.worker and row.worker == store.worker:
                tried.add(row.step)
            continue
        if row.step in there:
            if not thorough and row.step not in tried:
                continue
            output = store.output(row.seq)
            path = places.output(row.step)
            if output is None and not (row.digest and digest(None, path) not in ("", row.digest)):
                continue
            if output is not None and _holds(path, output):
                continue
        yield row


def digest(result: bytes | None, path: str) -> str:
    """Return the digest of a result, which is in the file at `path` where it is not given.

    Empty for one that is not there, or so large that the loop would stand still while it is read.
    """
    if result is not None:
        return hashlib.sha256(result).hexdigest()
    with contextlib.suppress(OSError), open(files.open_plain(path), "rb", buffering=0) as file:
        return _digest_of(file)
    return ""


def begin_digest(path: str) -> Callable[[], str]:
    """Let a thread make the digest of the large result at `path`; return what waits for it and returns it."""
    import threading  # for large results alone

    try:
        file = open(files.open_plain(path), "rb", buffering=0)  # noqa: SIM115 - the thread closes it
    except OSError:
        return str
    found: list[str] = []

    def work() -> None:
        with file, contextlib.suppress(OSError):
            found.append(_digest_of(file))

    def wait() -> str:
        thread.join()
        return "".join(found)

    thread = threading.Thread(target=work)
    thread.start()
    return wait


def _digest_of(file: FileIO) -> str:
    if os.fstat(file.fileno()).st_size > _GUARDED_MAX:
        return ""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _holds(path: str, content: bytes) -> bool:
    try:
        return files.read(path) == content
    except OSError:
        return False
