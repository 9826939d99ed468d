"""Peers: the other workers of a run whose ledger is shared.

What they begin and end is taken into the board, our own claims are renewed while their steps live, and the
claims of a worker that nobody has heard of for a lease are taken over.  Which step is whose is decided in the
ledger's transactions; what is known here may be old, and costs at most a claim that is refused.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from worker import clock
from worker.attempt import LIMIT_GRACE, Attempt
from worker.board import Replay
from worker.errors import StateHeld
from worker.journal import WARNING, Journal
from worker.ledger import Claim, Recorded, Row, StorageFull
from worker.results import Results
from worker.standing import Standing

if TYPE_CHECKING:
    from worker.ledger.remote import RemoteLedger

# How often a worker that has nothing to do looks by itself; it is waked when there is more.
_LOOK_IDLE, _LOOK_BUSY = 1.0, 10.0
# The news may miss what was slow to be committed; who has nothing to do reads everything that often.
_READ_EVERY = 30.0
# Steps that are offered to the ledger beyond those that are wanted: others may have taken the first ones meanwhile.
_SPARE_MIN, _SPARE_MAX = 2, 32


class Peers:
    """What this worker knows of the others.  `due_at` says when to call `hear`."""

    def __init__(
        self,
        ledger: "RemoteLedger",
        running: Mapping[str, Attempt],
        standing: Standing,
        results: Results,
        persist: Callable[[Callable[[], Any]], Any],
        journal: Journal,
        lease: float,
    ) -> None:
        """`lease`: how long a claim holds in seconds; it is renewed three times in that time."""
        self._lease = lease
        self._ledger = ledger
        self._running = running
        self._standing = standing
        self._results = results
        self._persist = persist
        self._journal = journal
        self._renew_at = self._look_at = self._read_at = -math.inf
        self._idle = False  # as the others know us
        self._behind = False  # others have taken what we wanted
        self.spare = _SPARE_MIN  # so many steps more than are wanted had better be claimed

    def due_at(self, idle: bool) -> float:
        """Return when to look next (monotonic clock): at once when we have run out of work, or were waked."""
        if self._ledger.woken() or self._behind or (idle and not self._idle):
            self._look_at = -math.inf
        return min(self._renew_at, self._look_at)

    def claimed(self, claims: Sequence[Claim], most: int, recorded: Recorded) -> bool:
        """Learn from what the ledger made of claims of which `most` were wanted.

        Return whether others have been quicker, so that claiming further ones is worth it, before we look.
        """
        self._standing.pass_over(recorded.taken)
        self._behind = len(recorded.claims) < min(most, len(claims))
        if self._behind:
            self.spare = min(2 * self.spare, _SPARE_MAX)
        elif recorded.claims:
            passed_over = claims.index(recorded.claims[-1]) + 1 - len(recorded.claims)
            self.spare = min(max(passed_over + _SPARE_MIN, self.spare - 1), _SPARE_MAX)
        return self._behind and bool(recorded.taken)

    def hear(self, awaited: Callable[[], None]) -> list[Row]:
        """Renew what is ours, and take in the news of others; return attempts that are ours to close now.

        `awaited` is called for each step that others have done meanwhile.
        """
        now, idle = clock.monotonic(), not self._running
        if now >= self._renew_at:
            self._renew(now, self._persist)
        if now < self._look_at:
            return []
        orphans: list[Row] = self._persist(self._ledger.orphans)
        news = self._persist(lambda: self._ledger.news(idle))
        self._idle, self._behind = idle, False
        regular = clock.monotonic() + (_LOOK_IDLE if idle else _LOOK_BUSY)
        self._look_at = min(regular, self._ledger.overdue_at)
        if idle and now >= self._read_at:
            self.read_all()
        for row in news:
            if self._standing.hear(row):
                awaited()
                self._results.take(row)
        return orphans

    def read_all(self) -> Replay:
        """Take in the whole ledger, and the results of what others have done."""
        found = self._standing.read(self._running)
        self._results.restore(thorough=False)
        self._read_at = clock.monotonic() + _READ_EVERY
        return found

    def renew(self) -> None:
        """Keep our claims while something else is waited for."""
        if clock.monotonic() >= self._renew_at:
            with contextlib.suppress(StorageFull):  # then there is nothing that we could do
                self._renew(clock.monotonic(), lambda action: action())

    def _renew(self, now: float, persist: Callable[[Callable[[], Any]], Any]) -> None:
        """Extend the claims of the steps that are within their limits; end those that are no longer ours."""
        alive = [name for name, attempt in self._running.items() if attempt.within_limits(now)]
        for name in persist(lambda: self._ledger.renew(alive)):
            attempt = self._running.get(name)
            if attempt is not None and not attempt.lost:
                text = f"{name}: its claim has run out and is another worker's; ending it, what it does is not recorded"
                self._journal.event("step-lost", text, step=name, attempt=attempt.number, priority=WARNING)
                attempt.lose(LIMIT_GRACE, clock.monotonic())
        for attempt in list(self._running.values()):
            attempt.go_on(clock.monotonic())
        if self._ledger.replaced:
            raise StateHeld(
                f"another worker goes by our name, {self._ledger.worker}, and has taken our place",
                "a state folder that was copied must be without its worker.json",
            )
        self._renew_at = clock.monotonic() + self._lease / 3

    def close(self) -> None:
        """End the thread that talks to the server; whoever has opened the ledger closes it."""
        self._ledger.close()


class Alone:
    """The same for a run that is shared with nobody."""

    spare = 0

    def __init__(self, running: Mapping[str, Attempt], standing: Standing) -> None:
        self._running = running
        self._standing = standing

    def due_at(self, idle: bool) -> float:
        return math.inf

    def claimed(self, claims: Sequence[Claim], most: int, recorded: Recorded) -> bool:
        return False

    def hear(self, awaited: Callable[[], None]) -> list[Row]:
        return []

    def read_all(self) -> Replay:
        return self._standing.read(self._running)

    def renew(self) -> None:
        pass

    def close(self) -> None:
        pass
