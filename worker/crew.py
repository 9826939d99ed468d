"""The crew: the attempts that run now, from the claim to an ending that can be committed.

What is decided about them is decided elsewhere; here they get their places, notes and folders, and what they
leave is made durable.
"""

import contextlib
import os
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

from worker import clock, decide, folder, ledger
from worker import note as notes
from worker.attempt import Attempt
from worker.board import Progress
from worker.decide import Verdict
from worker.disk import Disk
from worker.errors import StateError
from worker.events import Events
from worker.folder import Places
from worker.journal import Journal
from worker.ledger import Claim, Ending, Ledger
from worker.output import Spool
from worker.plan import Step
from worker.results import Results
from worker.slot import Slot
from worker.task import Task

# Between claim and start: after so many seconds of waiting for the disk or a server, the claim is looked at again.
_SLOW = 1.0

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
        base: Mapping[str, str],
    ) -> None:
        """`base`: what every step finds in its environment."""
        self.running = running
        self.started = 0  # attempts since this worker began
        self._places = places
        self._journal = journal
        self._events = events
        self._disk = disk
        self._ledger = store
        self._results = results
        self._base = base
        self._slots: list[Slot] = []
        self._slot_count = 0

    def over(self) -> list[Attempt]:
        """Return the attempts that have ended and wait to be settled."""
        return [attempt for attempt in self.running.values() if attempt.over]

    def start(self, claim: Claim, step: Step, past: Progress) -> bool:
        """Start a claimed attempt, with a note about the one before it.

        Return False, nothing begun, if that had to wait and the claim is another worker's by now.
        """
        began = clock.monotonic()
        if not self._slots:
            self._slots.append(Slot(self._slot_count, self._places))
            self._slot_count += 1
        slot = self._slots.pop()
        ask_first = past.unsure and step.task.redo == "check"
        attempt = Attempt(step, claim.number, slot, self._places, self._journal, self._events, self._leaders, ask_first)
        attempt.definition = claim.definition
        note = self._note(attempt, past) if claim.number > 1 else None
        self._tidy(slot, step)
        slow = clock.monotonic() - began > _SLOW
        if self._ledger.shared and slow and self._persist(lambda: self._ledger.renew([step.id])):
            self._slots.append(slot)
            return False
        self.running[step.id] = attempt
        self.started += 1
        attempt.start(self._base, note, past.best, clock.now())
        return True

    def judge(self, attempt: Attempt, past: Progress, task: Task) -> Ended:
        """Judge an attempt that is over, by what the list says now; its output is durable then, and its slot free."""
        step, end = attempt.step, attempt.end()
        retry, redo = task.retry, task.redo
        verdict = decide.judge(end, past, retry, random.random(), redo)
        output, log = attempt.output, attempt.log
        path = self._places.output(step.id)
        if verdict.outcome == ledger.DONE and os.path.isdir(path):
            end = end._replace(why=f"it has made a folder where its result belongs: {path}")
            verdict = decide.judge(end, past, retry, random.random(), redo)
        done = verdict.outcome == ledger.DONE
        if done:
            self._publish(path, output)
        else:
            output.discard()
        ending = decide.ending(step.id, attempt.number, verdict, end.status, clock.wall())._replace(
            took=end.took,
            progress=end.progress,
            spend=attempt.spend,
            detail=attempt.detail,
            output=output.contents() if output.inline or not done else None,
            output_size=output.size,
            log=log.contents(),
            log_size=log.size,
        )
        self._disk.persist(log.path, log.retry)
        log.close()
        self._release(attempt)
        return Ended(attempt, verdict, ending, end.found, past.unsure)

    def dismiss(self, attempt: Attempt) -> None:
        """Forget an attempt that is over and whose claim was lost."""
        attempt.output.discard()
        attempt.log.close()
        self._release(attempt)

    def close(self) -> None:
        """Kill what still runs, and give everything back."""
        for attempt in self.running.values():
            attempt.kill()
        for slot in self._slots:
            slot.close()

    def _release(self, attempt: Attempt) -> None:
        del self.running[attempt.step.id]
        attempt.slot.clear(self._places.state(attempt.step.id))
        self._slots.append(attempt.slot)

    def _note(self, attempt: Attempt, past: Progress) -> str | None:
        """Write the note about the attempt before this one; return its path, None if there is none."""
        step, path = attempt.step, self._places.note(attempt.slot.number)
        row = self._persist(lambda: self._ledger.last_closed(step.id))
        if row is None:
            return None
        log, output = self._persist(lambda: (self._ledger.log(row.seq), self._ledger.output(row.seq) or b""))
        try:
            notes.write(path, row, log, output, past, step.task.retry)
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

    def _leaders(self, pid: int) -> set[int]:
        """Return the leading processes of the steps that run, but for `pid`."""
        return {attempt.pid for attempt in self.running.values() if attempt.pid} - {pid}

    def _publish(self, path: str, output: Spool) -> None:
        """Give a result its name in out/, before the commit, so that a committed step always has it.

        A large one is durable then; a small one is made durable by the commit itself, and written
        again from the ledger if a power cut takes the file.
        """
        self._disk.persist(path, lambda: output.publish(path))

    def _persist(self, action: Callable[[], T]) -> T:
        return self._disk.persist("the ledger" if self._ledger.shared else self._places.ledger, action)
