"""The crew: the attempts that run now, from the claim to an ending that can be committed.

What is decided about them is decided elsewhere; here they get their places, notes and folders, and what they
leave is made durable.
"""

import contextlib
import functools
import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from worker import clock, decide, folder, ledger, points, results, savings
from worker import note as notes
from worker.attempt import Attempt
from worker.board import Progress
from worker.decide import Verdict
from worker.disk import Disk
from worker.errors import AgentError, StateError
from worker.events import Events
from worker.folder import Places
from worker.journal import Journal
from worker.ledger import Claim, Ending, Ledger, Row
from worker.output import Spool
from worker.plan import Step
from worker.results import Results
from worker.slot import Slot
from worker.slots import Slots
from worker.task import Task

T = TypeVar("T")


class Ended(NamedTuple):
    """An attempt that is over; `found` by its check, `again`: the one before it had been cut off."""

    attempt: Attempt
    verdict: Verdict
    ending: Ending
    found: bool
    again: bool


class Crew:
    """The running attempts, by step, and the slots that are free."""

    def __init__(
        self,
        running: dict[str, Attempt],
        places: Places,
        journal: Journal,
        events: Events,
        disk: Disk,
        store: Ledger,
        results: Results,
        slots: Slots,
        base: Mapping[str, str],
    ) -> None:
        """`base`: what every step finds in its environment."""
        self.running = running
        self.started = 0  # attempts that this worker has had
        self.budget_left: Callable[[], dict[str, float]] = dict  # by name, for the notes
        self.bystanders: Callable[[], Iterable[int]] = tuple  # processes of the worker's that are no step's
        self._places = places
        self._journal = journal
        self._events = events
        self._disk = disk
        self._ledger = store
        self._results = results
        self._base = base
        self._slots = slots

    def over(self) -> list[Attempt]:
        """Return the attempts that have ended and wait to be settled."""
        return [attempt for attempt in self.running.values() if attempt.over]

    def at_work(self) -> bool:
        """Return whether an attempt has not ended yet."""
        return not all(attempt.over for attempt in self.running.values())

    def at_stake(self) -> bool:
        """Return whether an attempt has not ended yet, or has ended well: unless recorded, its work is done again."""
        return any(not attempt.over or attempt.end().well for attempt in self.running.values() if not attempt.lost)

    def start(self, claim: Claim, step: Step, past: Progress, announce: Callable[[], None]) -> bool:
        """Start a claimed attempt, with a note about the one before it.

        Return False, nothing begun, if the claim is another worker's by now.  `announce` is called when the attempt is
        ready and still ours, right before its first program is spawned.
        """
        slot = self._disk.persist("a place for a step", self._slots.take)
        # An HTTP server's no is one; the exit status of another program is its word, and a check knows better.
        doubt = past.unsure or (past.begun and step.task.http is None)
        ask_first = doubt and step.task.redo == "check"
        attempt = self._attempt(step, claim, slot, ask_first)
        note = self._note(attempt, past) if claim.number > 1 else None
        self._tidy(slot, step)
        self._results.check(step.task.needs)
        if claim.number > 1:
            saved = self._persist(lambda: list(self._ledger.saved(step.id)))
            with contextlib.suppress(StateError):
                folder = self._places.state(step.id)
                self._disk.persist(folder, lambda: savings.bring_back(saved, folder, self._journal))
        if not self._persist(lambda: self._ledger.still_ours(step.id)):
            self._slots.give(slot)
            return False
        announce()
        self.running[step.id] = attempt
        self.started += 1
        slot.owner.begin(step.id, claim.number, claim.started)
        attempt.start(self._base, note, past.best, clock.now(), self._results.lacking(step.task.needs))
        return True

    def adopt(self, row: Row, step: Step, past: Progress, number: int, memo: Mapping[str, Any]) -> bool:
        """Go on with an attempt that has outlived the worker in slot `number`, as that worker's memo says.

        Return False if it cannot be: then its processes are still to be ended.
        """
        try:
            slot = self._slots.take_over(number, memo.get("notify"))
        except (LookupError, OSError):
            return False
        attempt = self._attempt(step, row, slot, bool(memo.get("ask_first")))
        points.at("adopting")
        self.running[step.id] = attempt
        try:
            attempt.adopt(memo, self._base, past.best, clock.monotonic())
        except (AgentError, OSError, LookupError, TypeError, ValueError) as exc:
            self._journal.warning(f"{step.id}: cannot be taken over ({exc}); ending it")
            attempt.abandon()
            self.dismiss(attempt)
            return False
        if not attempt.held:  # else all of that time is left uncharged once it is let go
            attempt.limits.excuse(max(0.0, clock.monotonic() - self._slots.unseen_since))
        attempt.save()
        points.at("adopted")
        self.started += 1
        return True

    def _attempt(self, step: Step, claim: Claim | Row, slot: Slot, ask_first: bool) -> Attempt:
        step = step.under(claim.key, self._places.run)
        may_go_on = functools.partial(self._ledger.surely_ours, step.id)
        common = self._places, self._journal, self._events, self._leaders, may_go_on
        attempt = Attempt(step, claim.number, slot, *common, ask_first)
        attempt.definition, attempt.claimed = claim.definition, claim.started
        return attempt

    def judge(self, attempt: Attempt, past: Progress, task: Task) -> Ended:
        """Judge an attempt that is over, by what the list says now; its output is durable then."""
        step, end = attempt.step, attempt.end()
        retry, redo = task.retry, task.redo
        verdict = decide.judge(end, past, retry, random.random(), redo)
        output, log = attempt.output, attempt.log
        path = self._places.output(step.id)
        if verdict.outcome == ledger.DONE and os.path.isdir(path):
            end = end._replace(why=f"it has made a folder where its result belongs: {path}")
            verdict = decide.judge(end, past, retry, random.random(), redo)
        done = verdict.outcome == ledger.DONE
        result = output.contents() if output.inline or not done else None
        attempt.save()  # since what it has written is given its names now
        points.at("attempt-over")
        digest = self._publish(path, output, result) if done else ""
        points.at("result-published")
        ending = decide.ending(step.id, attempt.number, verdict, end.status, clock.wall())._replace(
            took=end.took,
            progress=end.progress,
            spend=attempt.said.spend,
            detail=attempt.detail,
            output=result,
            output_size=output.size,
            digest=digest,
            log=log.contents(),
            log_size=log.size,
        )
        if not log.inline:
            self._disk.persist(log.path, lambda: log.keep(self._places.log(step.id, attempt.number)))
        return Ended(attempt, verdict, ending, end.found, past.unsure)

    def dismiss(self, attempt: Attempt, done: bool = False) -> None:
        """Forget an attempt that is over and was committed, or whose claim was lost; its slot is free then."""
        del self.running[attempt.step.id]
        attempt.slot.clear(attempt.step.id, done)
        self._slots.give(attempt.slot)

    def slots(self) -> set[int]:
        """Return the numbers of the slots in which attempts run."""
        return {attempt.slot.number for attempt in self.running.values()}

    def leave(self) -> None:
        """Let what runs go on without us, where it can outlive us; elsewhere kill it."""
        if not self._slots.live:
            self.close()
            return
        for attempt in self.running.values():
            attempt.save()

    def close(self) -> None:
        """Kill what still runs, and give everything back."""
        self.kill()
        self._slots.close()

    def kill(self) -> None:
        """Kill what still runs; no file is touched."""
        for attempt in self.running.values():
            attempt.kill()

    def _note(self, attempt: Attempt, past: Progress) -> str | None:
        """Write the note about the attempt before this one; return its path, None if there is none."""
        step, path = attempt.step, self._places.note(attempt.slot.number)
        row = self._persist(lambda: self._ledger.last_closed(step.id))
        if row is None:
            return None
        log, output = self._persist(lambda: (self._ledger.log(row.seq), self._ledger.output(row.seq) or b""))
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            notes.write(path, row, log, output, past, step.task.retry, self.budget_left())
        except OSError as exc:
            self._journal.warning(f"{path}: cannot be written ({exc.strerror}); {step.id} goes without")
            return None
        return path

    def _tidy(self, slot: Slot, step: Step) -> None:
        """Make what the step needs to find, whatever an earlier one has removed; a full disk is waited out."""
        if not all(os.path.isdir(path) for path in (self._places.out, self._places.work)):
            self._disk.persist(self._places.root, lambda: folder.make(self._places.root))
            self._results.restore(thorough=False)
        # What else is in the way of its own folder is the step's fault, and its attempt's end.
        with contextlib.suppress(StateError):
            self._disk.persist(self._places.state(step.id), lambda: slot.furnish(self._places.state(step.id)))
        if slot.shelter is not None:  # the next worker must not take what is in there for this step's
            self._disk.persist(self._places.out, slot.output.prepare)
            self._disk.persist(self._places.root, slot.log.prepare)

    def _leaders(self, pid: int) -> set[int]:
        """Return the leading processes of the steps that run, but for `pid`, and those that are no step's."""
        return {attempt.leader for attempt in self.running.values() if attempt.leader}.union(self.bystanders()) - {pid}

    def _publish(self, path: str, output: Spool, result: bytes | None) -> str:
        """Give a result its name in out/, before the commit, so that a committed step always has it; return its digest.

        A large one is durable then, and its digest is made as it goes to the disk; a small one, `result`, is made
        durable by the commit itself, and written again from the ledger if a power cut takes the file.
        """
        if result is not None:
            self._disk.persist(path, lambda: output.publish(path))
            return results.digest(result, path) if output.size else ""
        self._disk.persist(path, output.show)
        made = results.begin_digest(output.path)
        try:
            self._disk.persist(path, lambda: output.publish(path))
        finally:
            digest = made()
        return digest

    def _persist(self, action: Callable[[], T]) -> T:
        return self._disk.persist("the ledger" if self._ledger.shared else self._places.ledger, action)
