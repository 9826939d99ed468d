"""Succession: what a worker takes over from the one before it, or from one that nobody has heard of for a lease.

Attempts that have outlived their worker go on, or are found ended; those that cannot are closed, after everything
that is left of their processes was ended.  What is decided about them is decided in worker/recovery.py.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from worker import board as boards
from worker import ledger, recovery
from worker.crew import Crew
from worker.decide import Verdict
from worker.folder import Places
from worker.journal import NOTICE, Journal
from worker.ledger import Claim, Ledger, Row
from worker.ledger.effects import CLAIMED, Effect
from worker.results import Results
from worker.slots import Slots
from worker.standing import Standing


class Predecessor(NamedTuple):
    """The worker before: whether it ended in order, so that no step died because of it; else how, as far as is known.

    `stored`: the descriptors that systemd has kept from it.
    """

    in_order: bool
    ended: str
    stored: Mapping[str, int]


class Succession:
    """Takes over attempts, by their rows in the ledger."""

    def __init__(
        self,
        standing: Standing,
        crew: Crew,
        slots: Slots,
        store: Ledger,
        places: Places,
        results: Results,
        journal: Journal,
        persist: Callable[[Callable[[], Any]], Any],
        wait: Callable[[float], None],
        tell: Callable[[str, int, Verdict], None],
        boot: str,
        before: Predecessor,
    ) -> None:
        """`tell` says what became of an attempt."""
        self._standing = standing
        self._crew = crew
        self._slots = slots
        self._ledger = store
        self._places = places
        self._results = results
        self._journal = journal
        self._persist = persist
        self._wait = wait
        self._tell = tell
        self._boot = boot
        self._before = before

    def enter(self, rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
        """Let the attempts of these unclosed rows go on that can; return those that never began, and those to close.

        No process of any other attempt is left when this returns.
        """
        left = {(memo.get("step"), memo.get("number")): (slot, memo) for slot, memo in self._slots.left()}
        unbegun, closing = [], []
        for row in rows:
            step = self._standing.plan.by_id.get(row.step)
            ours = row.worker == self._ledger.worker and row.boot == self._boot
            same = step is not None and self._standing.plan.digest(step) == row.definition
            found = left.get((row.step, row.number))
            if step is None or not same or not ours:
                closing.append(row)
            elif found is not None and self._crew.adopt(row, step, self._standing.board.progress(step.id), *found):
                self._standing.board.set(step.id, boards.RUNNING)
                text = f"{step.id}: attempt {row.number} goes on, it has outlived its worker"
                self._journal.event("step-adopted", text, step=step.id, attempt=row.number, priority=NOTICE)
            elif found is None and self._slots.continuous:
                unbegun.append(row)
            else:
                closing.append(row)
        for name in self._slots.end_others(self._wait):
            self._journal.event("leftovers", f"ended {name}, whose attempt does not go on", priority=NOTICE)
        return unbegun, closing

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
            claim = Claim(
                row.step, row.number, row.definition, row.started, row.boot, row.key, step.task.redo == "always"
            )
            self._standing.board.set(row.step, boards.RUNNING)
            self._crew.start(claim, step, self._standing.board.progress(row.step))

    def close(self, rows: list[Row]) -> bool:
        """Close attempts that died with their worker, after ending what is left of their processes.

        Return whether there were any.
        """
        for name in recovery.end_leftovers(rows, self._places, self._wait):
            self._journal.event("leftovers", f"ended {name}, left by a dead worker", priority=NOTICE)
        plan, board, worker = self._standing.plan, self._standing.board, self._ledger.worker
        stopped, ended = self._before.in_order, self._before.ended
        closed = recovery.judge_unclosed(rows, plan, board, self._boot, stopped, worker, ended)
        if not closed:
            return False
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
