"""Savings: small files that steps keep for their later attempts travel with the ledger and the checkpoint.

The plain files of a step's own folder, up to 64 KiB in all, are looked at every few seconds while it runs, and once
more when an attempt has ended.  What is larger is known by name.  Hidden files, links, folders, and files that only
their owner may read (a token, say) stay where they are.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from worker import clock, files, plural
from worker.attempt import Attempt
from worker.companions import Companion
from worker.folder import Places
from worker.journal import NOTICE, WARNING, Journal
from worker.ledger import Ledger, Saved
from worker.signs import printable

_MOST = 64 * 1024
_FILES_MAX = 100
# How often it is looked, and how seldom where nothing was saved meanwhile: each look wakes an idle worker.
_EVERY, _SELDOM = 2.0, 8.0
_REST = 20  # between looks, in units of what one takes

_State = tuple[tuple[str, int, int], ...]  # names, sizes and times


class Savings(Companion):
    """A companion of the run that keeps what its steps have saved."""

    def __init__(
        self,
        ledger: Ledger,
        places: Places,
        running: Mapping[str, Attempt],
        persist: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """`persist` repeats what the ledger cannot do yet."""
        self._ledger = ledger
        self._places = places
        self._running = running
        self._persist = persist
        self._known: dict[str, _State] = {}  # as the ledger has it
        self._seen: set[str] = set()  # the steps that were at work at the last look
        self._pause = _EVERY
        self._look_at = clock.monotonic() + _EVERY

    def due_at(self) -> float:
        """Return when to look at the folders of the steps that run."""
        return self._look_at if any(not attempt.over for attempt in self._running.values()) else super().due_at()

    def keep(self, now: float) -> None:
        if now >= self._look_at:
            at_work = [a.step.id for a in list(self._running.values()) if not a.over and not a.lost]
            found = [self.take(step) for step in at_work]
            news = any(found) or any(step not in self._seen for step in at_work)
            self._seen = set(at_work)
            self._pause = _EVERY if news else min(2 * self._pause, _SELDOM)
            after = clock.monotonic()  # of a folder with a million files the names alone take half a second
            self._look_at = after + max(self._pause, _REST * (after - now))

    def take(self, step: str) -> bool:
        """Let the ledger have what the step has saved; return whether that is something else than before."""
        entries = list(_entries(self._places.state(step)))
        state = tuple((name, status.st_size, status.st_mtime_ns) for name, _path, status in entries)
        if state == self._known.get(step, ()):
            return False
        room, found = _MOST, []
        for name, path, status in entries:
            content = _read(path) if status.st_size <= room else None
            room -= len(content or b"")
            found.append(Saved(step, name, content, status.st_size, status.st_mtime))
        self._persist(lambda: self._ledger.save_files(step, found))
        self._known[step] = state
        return True


def bring_back(saved: list[Saved], folder: str, journal: Journal) -> None:
    """Put what a step has saved elsewhere into its own folder, if there is nothing.  Raises OSError."""
    if not saved or next(_entries(folder), None) is not None:
        return
    here = [one for one in saved if one.content is not None and files.is_plain_name(one.name)]
    for one in here:
        files.publish(os.path.join(folder, one.name), one.content or b"")
    step, missing = (
        saved[0].step,
        [f"{printable(one.name)} ({plural.of(one.size, 'byte')})" for one in saved if one.content is None],
    )
    if here:
        text = f"{step}: {plural.of(len(here), 'saved file')} brought back from the ledger"
        journal.event("state", text, step=step, priority=NOTICE)
    if missing:
        text = f"{step}: what it has saved is not here, and was too large for the ledger: {', '.join(missing)}"
        journal.event("state", text, step=step, priority=WARNING)


def _entries(folder: str) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield the name, the path and the status of the files of a folder that travel, by name.

    Of very many files only so many are asked what they are.
    """
    names: list[str] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        names += (entry.name for entry in entries if entry.is_file(follow_symlinks=False))
    left = _FILES_MAX
    for name in sorted(name for name in names if files.is_plain_name(name)):
        path = os.path.join(folder, name)
        try:
            status = _status(path)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
            yield name, path, status
            left -= 1
            if not left:
                return


def _status(path: str) -> os.stat_result:
    return os.stat(path, follow_symlinks=False)


def _read(path: str) -> bytes | None:
    """Return the bytes of a file; None if it is gone, is something else by now, or has grown."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        with open(fd, "rb") as file:
            data = file.read(_MOST + 1)
    except OSError:
        return None
    return data if len(data) <= _MOST else None
