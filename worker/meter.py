"""The meter: counts what the run uses of its budget while the worker is at work.

Spend is in the ledger before anything else follows from it, time every few seconds, a restart once its worker starts.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from worker import budget, clock, points
from worker.attempt import Attempt
from worker.budget import COUNTED_END, HOURS, RESTARTS, USED, WORKED_UNTIL, Budget, State
from worker.companions import Companion
from worker.disk import Stopped
from worker.folder import Ends
from worker.ledger import Ending, Heard, Ledger, Row

# Time is written down this often; a worker that dies has worked at most so much longer.
_OFTEN, _SELDOM = 5.0, 60.0
_WORTH_IT = 1.0
# How far a step has got is written down at once, if that was not done so shortly before.
_PROGRESS_EVERY = 1.0


class Meter(Companion):
    """A companion of the run; see worker.budget for what counts."""

    def __init__(
        self,
        limits: Budget,
        ledger: Ledger,
        running: Mapping[str, Attempt],
        persist: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """`persist` repeats what the ledger cannot do yet."""
        self.limits = limits
        self._ledger = ledger
        self._running = running
        self._persist = persist
        self._state = State(limits, Budget(0, 0, 0))
        self._since = clock.monotonic()  # work since then is not counted yet
        self._resting = False  # the agent is paused, and no time counts
        self._read_at = -math.inf
        self._noted: dict[tuple[str, int], float] = {}  # what the ledger knows of the open attempts' spending
        self._progress: dict[tuple[str, int], float] = {}  # and of how far they have got
        self._progress_at = -math.inf  # when that may be noted again

    def open(self, unclosed: Iterable[Row], ends: Ends, cut_off: bool) -> None:
        """Count what the workers before this one have used and could not say.

        `cut_off`: the last one was at work on this run, on this boot of the machine, and did not end in order.
        """
        until = float(self._persist(lambda: self._ledger.fact(WORKED_UNTIL)) or math.inf)
        now = clock.wall()
        unsaid = min(max(0.0, (ends.at or now) - until), self._every()) if cut_off else 0.0
        rows = list(unclosed)
        self._noted = {(row.step, row.number): row.spend for row in rows}
        self._progress = {(row.step, row.number): row.progress for row in rows}
        counted = self._persist(lambda: self._ledger.fact(COUNTED_END)) or ""
        # Where systemd does not tell, nobody but us could have ended in order.
        restarts = ends.since(counted) if ends.at is not None else int(cut_off)
        self._add(restarts, unsaid, {COUNTED_END: ends.ids[-1]} if any(ends.ids[-1:]) else {})
        self.read()

    def read(self) -> None:
        """Take in what the ledger says: other workers of the run use the same budget."""
        self._state = self._persist(lambda: budget.read(self._ledger, self.limits))
        self._read_at = clock.monotonic()

    def hear(self) -> None:
        """Take in what others have used meanwhile; where nothing is limited, only now and then, for who asks us."""
        if self.limits != Budget() or clock.monotonic() >= self._read_at + _SELDOM:
            self.read()

    def ask(self) -> bool:
        """Before a claim: take in what others have spent, so that all of them together begin nothing at the limit.

        Return whether there was a reason to ask: the ledger is shared, and spending has a limit.
        """
        wanted = self._ledger.shared and self.limits.spend is not None
        if wanted:
            self.read()
        return wanted

    def state(self) -> State:
        """Return how the budget stands at this moment."""
        limits, used = self._state
        hours = (used.hours or 0) + self._uncounted() / 3600
        return State(limits, used._replace(hours=hours, spend=(used.spend or 0) + self._unsaid()))

    def owes(self) -> bool:
        """Return whether steps have spent something that the ledger does not know yet."""
        return self._unsaid() > 0

    def note(self) -> None:
        """Let the ledger know what the running steps have spent, before anything else follows from it.

        How far they have got is noted along, and by itself not more often than once a second.
        """
        said = {
            (a.step.id, a.number): Heard(a.said.progress, a.said.spend) for a in self._running.values() if not a.over
        }
        news = {key: heard for key, heard in said.items() if heard.spend > self._noted.get(key, 0)}
        now = clock.monotonic()
        if now >= self._progress_at:
            news |= {key: heard for key, heard in said.items() if heard.progress > self._progress.get(key, 0)}
        if news:
            self._persist(lambda: self._ledger.heard(news))
            points.at("spend-noted")
            for attempt, heard in news.items():
                self._count(attempt, heard.spend)
                self._progress[attempt] = heard.progress
            self._progress_at = now + _PROGRESS_EVERY
        for running in self._running.values():
            if not running.over and running.said.spend <= self._noted.get((running.step.id, running.number), 0):
                running.noted()

    def rest(self, resting: bool) -> None:
        """Count no time from now on, or count it again."""
        if resting != self._resting:
            self._add(0, 0.0)
            self._resting = resting

    def closed(self, endings: Sequence[Ending]) -> None:
        """Note that these have been recorded, with what they have spent."""
        for ending in endings:
            self._count((ending.step, ending.number), ending.spend)
            self._noted.pop((ending.step, ending.number), None)
            self._progress.pop((ending.step, ending.number), None)

    # -- as a companion

    def due_at(self) -> float:
        """Return when time is to be written down, or is over, or how far a step has got is to be noted."""
        running = (a for a in self._running.values() if not a.over)
        if any(a.said.progress > self._progress.get((a.step.id, a.number), 0) for a in running):
            return min(self._progress_at, self._time_due_at())
        return self._time_due_at()

    def _time_due_at(self) -> float:
        limits, used = self._state
        left = math.inf if limits.hours is None else max(0.0, limits.hours - (used.hours or 0)) * 3600
        return self._since + min(self._every(), left or math.inf)

    def keep(self, now: float) -> None:
        """Write the time down if that is due; `note` is called at each turn of the loop."""
        if now >= self._time_due_at():
            self._add(0, 0.0)

    def conclude(self, finished: str) -> None:
        """Write down what is not yet, if the disk takes it."""
        with contextlib.suppress(Stopped):
            self._add(0, 0.0)

    def settle(self) -> None:
        """Write down what the end of the worker has taken beside, if that is worth a transaction."""
        if clock.monotonic() - self._since >= _WORTH_IT:
            self.conclude("")

    def _uncounted(self) -> float:
        """Return the seconds of work that the ledger does not know yet."""
        return 0.0 if self._resting else clock.monotonic() - self._since

    def _every(self) -> float:
        return _SELDOM if self.limits.hours is None else _OFTEN

    def _unsaid(self) -> float:
        """Return what running steps have spent that the ledger does not know yet."""
        news = ((a.said.spend, self._noted.get((a.step.id, a.number), 0)) for a in self._running.values())
        return sum(said - noted for said, noted in news if said > noted)

    def _count(self, attempt: tuple[str, int], spend: float) -> None:
        used = self._state.used
        more = spend - self._noted.get(attempt, 0)
        self._noted[attempt] = spend
        self._state = self._state._replace(used=used._replace(spend=(used.spend or 0) + more))

    def _add(self, restarts: int, seconds: float, facts: Mapping[str, str] = {}) -> None:
        """Count this worker's time up to now, and so much more; nothing is counted twice, nor lost in between."""
        now = clock.monotonic()
        hours = (self._uncounted() + seconds) / 3600
        amounts = {USED[HOURS]: hours} | ({USED[RESTARTS]: restarts} if restarts else {})
        until = WORKED_UNTIL, repr(clock.wall())  # the same if it is done again, since an answer was lost
        self._persist(lambda: self._ledger.add(amounts, facts, until))
        self._since = now
        used = self._state.used
        used = used._replace(restarts=(used.restarts or 0) + restarts, hours=(used.hours or 0) + hours)
        self._state = self._state._replace(used=used)
