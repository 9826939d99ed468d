"""Succession: what a worker takes over from the one before it, or from one that nobody has heard of for a lease.

Attempts that have outlived their worker go on, or are found ended; those that cannot are closed, after everything
that is left of their processes was ended.  What is decided about them is decided in worker/recovery.py.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from worker import board as boards
from worker import clock, lastwords, ledger, recovery
from worker.crew import Crew
from worker.decide import Reason, Verdict
from worker.folder import Ends, Places
from worker.journal import NOTICE, Journal
from worker.ledger import Claim, Ledger, Row
from worker.ledger.effects import CLAIMED, Effect
from worker.results import Results
from worker.slots import Slots
from worker.standing import Standing

# A step that has outlived so many workers which were not well, within so many seconds, is taken for the cause.
_DEATHS_MAX, _DEATHS_IN = 10, 3600.0
_SAME_TIME = 0.001


class Predecessor(NamedTuple):
    """The worker before: whether it ended in order, so that no step died because of it.

    `ends`: how it ended, and others since a worker got as far as this, as systemd saw it.  `machine_died`: it was
    taken along by its machine.
    `stored`: the descriptors that systemd has kept from it; `same_place`: its runtime folder was ours.
    """

    in_order: bool
    ends: Ends
    stored: Mapping[str, int]
    same_place: bool
    machine_died: bool


class Kept(NamedTuple):
    """Where a run is written down, and who is told of it."""

    store: Ledger
    places: Places
    results: Results
    journal: Journal


class Ways(NamedTuple):
    """How the ledger is asked, how time passes, and who is told what became of an attempt."""

    persist: Callable[[Callable[[], Any]], Any]
    wait: Callable[[float], None]
    tell: Callable[[str, int, Verdict], None]


class Succession:
    """Takes over attempts, by their rows in the ledger."""

    def __init__(
        self, standing: Standing, crew: Crew, slots: Slots, kept: Kept, ways: Ways, boot: str, before: Predecessor
    ) -> None:
        self._standing = standing
        self._crew = crew
        self._slots = slots
        self._ledger, self._places, self._results, self._journal = kept
        self._persist, self._wait, self._tell = ways
        self._boot = boot
        self._before = before
        self._reasons: dict[str, tuple[Reason, str]] = {}  # why attempts do not go on, where that is not plain

    def enter(self, rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
        """Let the attempts of these unclosed rows go on that can; return those that never began, and those to close.

        No process of any other attempt is left when this returns.
        """
        left = {
            (memo.get("step"), memo.get("number")): (slot, memo)
            for slot, memo in self._slots.left()
            if memo.get("run") == self._places.run
        }
        unbegun, closing = [], []
        for row in rows:
            found = left.get((row.step, row.number))
            if not self._goes_on(row, found):
                closing.append(row)
            elif found is None:
                unbegun.append(row)
            else:
                self._standing.board.set(row.step, boards.RUNNING)
                text = f"{row.step}: attempt {row.number} goes on, it has outlived its worker"
                self._journal.event("step-adopted", text, step=row.step, attempt=row.number, priority=NOTICE)
        for name in self._slots.end_others(self._crew.slots(), self._wait):
            self._journal.event("leftovers", f"ended {name}, whose attempt does not go on", priority=NOTICE)
        return unbegun, closing

    def _goes_on(self, row: Row, found: tuple[int, dict[str, Any]] | None) -> bool:
        """Return whether an attempt that was `found` in a slot, or never began, is ours and goes on."""
        step = self._standing.plan.by_id.get(row.step)
        if step is None or row.worker != self._ledger.worker or row.boot != self._boot:
            return False
        if found is None and not self._slots.continuous:
            return False
        if self._standing.plan.digest(step) != row.definition:
            self._reasons[row.step] = ("stop", "the list defines it otherwise by now")
            return False
        if found is None:
            return True
        slot, memo = found
        if abs(memo.get("claimed", 0.0) - row.started) > _SAME_TIME:
            return False  # another attempt of that number, from before the ledger was put back
        now = clock.monotonic()
        deaths = [at for at in memo.get("deaths", []) if now - at < _DEATHS_IN] + [now] * len(self._before.ends.faults)
        if len(deaths) >= _DEATHS_MAX:
            self._reasons[row.step] = ("worker", f"{len(deaths)} workers died while it ran")
            return False
        memo["deaths"] = deaths
        return self._crew.adopt(row, step, self._standing.board.progress(step.id), slot, memo)

    def claims(self) -> list[Effect]:
        """Return the claims of effects that the worker before has granted to the steps which go on."""
        running = self._crew.running
        if not running:
            return []
        worker = self._ledger.worker if self._ledger.shared else None
        held: list[Effect] = self._persist(lambda: list(self._ledger.effects.all()))
        return [e for e in held if e.state == CLAIMED and e.step in running and e.worker and worker in (None, e.worker)]

    def begin(self, rows: Iterable[Row]) -> None:
        """Start attempts that were claimed by the worker before and never began."""
        for row in rows:
            step = self._standing.plan.by_id[row.step]
            harmless = step.task.redo == "always"
            claim = Claim(row.step, row.number, row.definition, row.started, row.boot, row.key, harmless, row.item)
            announce = functools.partial(self._announce, row)
            started = self._crew.start(claim, step, self._standing.board.progress(row.step), announce)
            self._standing.board.set(row.step, boards.RUNNING if started else boards.ELSEWHERE)

    def _announce(self, row: Row) -> None:
        self._journal.event("step-started", f"{row.step}: started", step=row.step, attempt=row.number)

    def give_back(self, rows: Iterable[Row]) -> list[Row]:
        """Note that these attempts never began and shall not, since the worker stops; return them."""
        found = list(rows)
        self._reasons |= {row.step: ("stop", "the worker was stopped before it began") for row in found}
        return found

    def close(self, rows: list[Row]) -> bool:
        """Close attempts that died with their worker, after ending what is left of their processes.

        Return whether there were any.
        """
        for name in recovery.end_leftovers(rows, self._places, self._wait):
            self._journal.event("leftovers", f"ended {name}, left by a dead worker", priority=NOTICE)
        plan, board, worker = self._standing.plan, self._standing.board, self._ledger.worker
        boot = "" if self._before.machine_died else self._boot
        stopped, ended = self._before.in_order, "".join(self._before.ends.faults[-1:])
        closed = recovery.judge_unclosed(rows, plan, board, boot, stopped, worker, ended, self._reasons)
        if not closed:
            return False
        by_key = {(row.step, row.number): row for row in rows}
        closed = [(v, lastwords.found(self._places, by_key[e.step, e.number], e)) for v, e in closed]
        lost = self._persist(lambda: self._ledger.record([ending for _, ending in closed], [], 0)).lost
        definitions = {row.step: row.definition for row in rows}
        for verdict, ending in closed:
            if ending.step not in lost:
                self._standing.mark(ending, definitions[ending.step])
                self._tell(ending.step, ending.number, verdict)
        return True

    def know_again(self, gone: list[Row]) -> None:
        """Record what a step that is no longer in the list has done, or perhaps done, under the same key."""
        found = recovery.renamed(self._standing.plan, self._standing.board, gone, self._places.run)
        for row, verdict, claim, ending in list(found):
            if verdict.outcome == ledger.DONE:
                ending = ending._replace(output=self._results.copy(row, ending.step), output_size=row.output_size)
            if not self._persist(functools.partial(self._ledger.record, [], [claim], 1)).claims:
                continue  # another worker was quicker
            self._persist(functools.partial(self._ledger.record, [ending], [], 0))
            self._standing.mark(ending, claim.definition)
            self._tell(ending.step, ending.number, verdict)
