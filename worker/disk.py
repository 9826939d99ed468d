"""A full disk, or a ledger's server that is away, is waited out: the worker says what it waits for, keeps pinging,
and goes on when it can.
"""

import errno
from collections.abc import Callable
from typing import TypeVar

from worker import clock
from worker.errors import StateError
from worker.journal import ERROR, NOTICE, Journal
from worker.ledger import LedgerAway, LedgerLocked, StorageFull
from worker.scarcity import SCARCE
from worker.timespan import show

# After this a person is needed; until then running steps go on and nothing is lost.
PATIENCE = 6 * 3600.0
_RETRY = 1.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # what waiting may mend

T = TypeVar("T")


class Stopped(Exception):
    """The worker was told to stop while it waited."""


class Disk:
    """Writes that may have to wait."""

    def __init__(self, journal: Journal, wait: Callable[[float], None], stopping: Callable[[], bool]) -> None:
        """`wait` handles events until a time on the monotonic clock; `stopping` says whether to give up."""
        self._journal = journal
        self._wait = wait
        self.stopping = stopping
        self.waiting_for: str | None = None
        self.meanwhile: Callable[[], None] = _nothing  # what must go on while the disk is full
        self.look: Callable[[], None] = _nothing  # called again and again for as long as anything is waited for

    def persist(self, what: str, action: Callable[[], T]) -> T:
        """Return `action()`, repeated for as long as the disk is full.  `action` must be all or nothing.

        Raises Stopped when the worker is to stop first, StateError for what no waiting mends or when
        PATIENCE is spent.
        """
        gives_up = clock.monotonic() + PATIENCE
        while True:
            try:
                result = action()
            except (StorageFull, OSError) as exc:
                fault = exc
                if isinstance(exc, OSError) and exc.errno not in FULL + SCARCE:
                    raise StateError(f"{what}: cannot be written: {exc.strerror}", "mend that, start again") from exc
                self._tell(what, exc)
                if clock.monotonic() >= gives_up:
                    raise StateError(f"{what}: {exc}, for {show(PATIENCE)}", "mend that, start again") from exc
            else:
                if self.waiting_for is not None:
                    self._journal.event("waiting", f"{what}: there again; going on", priority=NOTICE)
                    self.waiting_for = None
                return result
            self._pause(away=isinstance(fault, LedgerAway))

    def _tell(self, what: str, exc: Exception) -> None:
        if self.waiting_for is None:
            self.waiting_for = what
            reason = exc.strerror if isinstance(exc, OSError) else str(exc)
            short = isinstance(exc, OSError) and exc.errno not in FULL
            wants = (
                "cannot be had now"
                if short
                else "cannot be reached"
                if isinstance(exc, LedgerAway)
                else "cannot be written"
            )
            till = "it" if short or isinstance(exc, LedgerAway) else awaited(exc)
            text = f"{what}: {wants} ({reason}); waiting for {till}, nothing is lost"
            self._journal.event("waiting", text, priority=ERROR)

    def _pause(self, away: bool) -> None:
        retry_at = clock.monotonic() + _RETRY
        if not away:
            self.meanwhile()
        while clock.monotonic() < retry_at:
            self.look()
            if self.stopping():
                raise Stopped
            self._wait(retry_at)


def awaited(exc: Exception) -> str:
    """Return what has to change before a call that raised `exc` can work, for people."""
    if isinstance(exc, LedgerAway):
        return "the server"
    if isinstance(exc, LedgerLocked):
        return "the program that has locked it"
    if isinstance(exc, TimeoutError):
        return "the file system"
    if isinstance(exc, OSError) and exc.errno == errno.EIO:
        return "the disk, which is failing"
    return "space"


def _nothing() -> None:
    pass
