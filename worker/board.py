"""The board: where every step of the plan stands, in memory.

Derived from the plan and the ledger's rows and kept up to date by the loop; the rows are the truth.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from worker import ledger
from worker.clock import Now
from worker.errors import TEMPORARY
from worker.ledger import Ending, Row
from worker.plan import Plan, Step

# ELSEWHERE: another worker of the run is at it.  From DONE on there is nothing left to do for a worker.
WAITING, RUNNING, ELSEWHERE, DONE, FAILED, UNKNOWN = range(6)
# Of a step that asks to be started afresh: what it said of "not now" before is forgotten after so many seconds of work.
FRESH_WORK = 60.0
NOT_BEGUN = "before: "  # causes begin so where what came before the step's own program has failed


class Progress(NamedTuple):
    """What is known of a step that is not done, from its attempts so far."""

    number: int = 0  # of the last attempt
    failures: int = 0  # that count against its attempts
    deferrals: int = 0  # "not now", one after the other
    waited: float = 0.0  # seconds spent on these, of the step's patience
    again: int = 0  # fresh starts without new progress
    best: float = 0.0  # the furthest progress it ever reported
    unsure: bool = False  # the last attempt was cut off, and its effect may have happened
    begun: bool = False  # its program has run, and how it ended is no proof that nothing has happened
    retry_at: float = -math.inf  # monotonic clock
    key: str | None = None  # if `unsure`, that of the last attempt; as in Claim


UNTRIED = Progress()


class _Block:
    """The steps of one task, which stand together in the plan."""

    __slots__ = ("again", "end", "fresh", "needs", "undone", "unfinished")

    def __init__(self, first: int, needs: tuple[str, ...]) -> None:
        self.fresh = first  # no step before this one is untried
        self.end = first
        self.needs = needs
        self.undone = 0
        self.unfinished = 0
        self.again: dict[str, None] = {}  # steps that were tried and wait, in the order in which they came back


class Board:
    """The state of each step of a plan, and how many there are of each."""

    def __init__(self, plan: Plan) -> None:
        self._steps = plan.steps
        self._by_id = plan.by_id
        self._states: dict[str, int] = {}  # those that are not waiting
        self._counts = [len(plan.steps), *[0] * UNKNOWN]
        self._progress: dict[str, Progress] = {}
        self._waits: dict[str, float] = {}  # when steps that were tried may go on (monotonic clock)
        self._blocks: dict[str, _Block] = {}
        for place, step in enumerate(plan.steps):
            block = self._blocks.get(step.task.id)
            if block is None:
                block = self._blocks[step.task.id] = _Block(place, step.task.needs)
            block.end = place + 1
            block.undone += 1
            block.unfinished += 1
        self._late = plan.late
        for name, task in plan.tasks.items():  # without a step: what needs it waits for nothing
            if name not in self._blocks:
                self._blocks[name] = _Block(0, task.needs)
        # Tasks with steps that are neither done nor failed, in order.
        self._open = {name: block for name, block in self._blocks.items() if block.unfinished}

    @property
    def steps(self) -> tuple[Step, ...]:
        return self._steps

    @property
    def total(self) -> int:
        return len(self._steps)

    def count(self, state: int) -> int:
        return self._counts[state]

    def state(self, step: str) -> int:
        return self._states.get(step, WAITING)

    def set(self, step: str, state: int) -> None:
        before = self.state(step)
        self._counts[before] -= 1
        self._counts[state] += 1
        self._states[step] = state
        task = self._by_id[step].task.id
        block = self._blocks[task]
        if state == WAITING:
            block.again[step] = None
        else:
            self._waits.pop(step, None)
            block.again.pop(step, None)
        block.unfinished += (state < DONE) - (before < DONE)
        if not block.unfinished:
            self._open.pop(task, None)
        elif task not in self._open:  # a person has settled a step of it
            self._open = {name: other for name, other in self._blocks.items() if other.unfinished}
        if state == DONE and before != DONE:
            block.undone -= 1
            self._progress.pop(step, None)

    def progress(self, step: str) -> Progress:
        return self._progress.get(step, UNTRIED)

    def set_progress(self, step: str, progress: Progress, ours: bool = True) -> None:
        """Note what is known of a step.  One that another worker has tried keeps no place of ours while it waits."""
        self._progress[step] = progress
        if ours:
            self._waits[step] = progress.retry_at
        else:
            self._waits.pop(step, None)

    def waits(self, now: float) -> list[float]:
        """Return when the steps that wait for their next attempt may go on, as far as that is after `now`."""
        return [retry_at for retry_at in self._waits.values() if retry_at > now]

    def due(self) -> list[str]:
        """Return the tasks whose items are to be read now, since what they need is done; see worker/late.py."""
        found = [name for name in self._late if self._blocks[name].unfinished or self._blocks[name].end == 0]
        found = [name for name in found if not any(self._blocks[need].undone for need in self._blocks[name].needs)]
        return [name for name in found if self.state(f"{name}@") == WAITING]

    def ready(self) -> Iterator[Step]:
        """Yield the steps that wait and need no undone one, in the order of the list.

        What is finished or running costs nothing here, wherever it stands.
        """
        for name, block in self._open.items():
            if name in self._late or any(self._blocks[need].undone for need in block.needs):
                continue
            for step in block.again:
                yield self._by_id[step]
            while block.fresh < block.end and self.state(self._steps[block.fresh].id) != WAITING:
                block.fresh += 1
            for place in range(block.fresh, block.end):
                step = self._steps[place].id
                if self.state(step) == WAITING and step not in block.again:
                    yield self._steps[place]


class Replay(NamedTuple):
    """What the ledger's rows say of a plan."""

    board: Board
    unclosed: list[Row]  # attempts that no worker closed
    changed: list[str]  # done steps whose definition is another one now
    gone: list[Row]  # of steps that are no longer in the list: done, or perhaps
    left: list[Row]  # the last of each step that is not in the plan, and not done


def replay(plan: Plan, rows: Iterable[Row], counted_from: int, now: Now, worker: str = "") -> Replay:
    """Derive the board from the ledger's rows, oldest first; `worker` is our name in them.

    Steps are matched by id.  A done step stays done even if its definition has changed: it is
    reported, not done again.  Failures count while they are newer than the row `counted_from` and
    the definition is the same: who mends a step gets all its attempts anew.  A wait for the next
    attempt goes on where it was, and is never longer than it was meant to be, whatever the wall
    clock did meanwhile.
    """
    board = Board(plan)
    unclosed, changed = [], []
    gone: dict[str, Row] = {}
    for row in rows:
        step = plan.by_id.get(row.step)
        if row.outcome is None and row.worker == worker:
            unclosed.append(row)
        if step is not None:
            take(board, step, row, plan.digest(step), counted_from, now, worker)
        if step is None:
            if row.step not in gone or gone[row.step].outcome != ledger.DONE:
                gone[row.step] = row
        elif row.outcome == ledger.DONE and row.definition != plan.digest(step):
            changed.append(row.step)
    known = [row for row in gone.values() if row.outcome == ledger.DONE or doubtful(row)]
    left = [row for row in gone.values() if row.outcome != ledger.DONE]
    return Replay(board, unclosed, changed, known, left)


def doubtful(row: Row) -> bool:
    """Return whether what was cut off in this attempt may have happened, as far as the last row of a step says."""
    if row.outcome is None or row.outcome == ledger.UNKNOWN:
        return True
    return row.unsure and row.outcome not in (ledger.DONE, ledger.REDO)


def take(board: Board, step: Step, row: Row, definition: str, counted_from: int, now: Now, worker: str) -> None:
    """Bring the board up to date with one more row about `step`, which stands for `definition` now."""
    if row.outcome == ledger.DONE:
        board.set(step.id, DONE)
        return
    counts = row.definition == definition and row.seq > counted_from
    board.set_progress(step.id, _after(board.progress(step.id), row, counts, now), row.worker == worker)
    if row.outcome is None and row.worker != worker:
        board.set(step.id, ELSEWHERE)
    elif row.outcome == ledger.UNKNOWN or (row.unsure and step.task.redo == "never"):
        board.set(step.id, UNKNOWN)  # whatever the list says by now: it may have happened
    else:
        board.set(step.id, FAILED if counts and row.final else WAITING)


def _after(before: Progress, row: Row, counts: bool, now: Now) -> Progress:
    """Return what is known after one more attempt; one that does not count leaves its number."""
    if row.outcome == ledger.REDO:
        return Progress(number=row.number)
    if not counts or row.outcome is None:  # one that is open is judged when it is closed
        unsure = before.unsure if row.outcome is None else row.unsure
        begun = before.begun or has_begun(row)
        key = row.key if unsure or row.outcome is None else None
        return before._replace(number=row.number, retry_at=now.monotonic, unsure=unsure, begun=begun, key=key)
    wait = max(0.0, min(row.ended + row.delay - now.wall, row.delay)) if row.ended is not None else 0.0
    known = advance(before, row.outcome, row.counted, charged(before, row.took) + row.delay, row.progress)
    begun = before.begun or has_begun(row)
    retry_at, key = now.monotonic + wait, row.key if row.unsure else None
    return known._replace(number=row.number, retry_at=retry_at, unsure=row.unsure, begun=begun, key=key)


def has_begun(end: Row | Ending) -> bool:
    """Return whether the program of an attempt that has ended was begun, and did not say that nothing has happened."""
    failed = end.outcome in (ledger.FAILED, ledger.STALLED) and end.status not in (None, 0, TEMPORARY)
    return end.unsure or (failed and not end.cause.startswith(NOT_BEGUN))


def charged(before: Progress, took: float) -> float:
    """Return how much of an attempt's time is a step's "not now": the first one said so only at the end of its work."""
    return 0.0 if not before.deferrals and took >= FRESH_WORK else took


def advance(before: Progress, outcome: str, counted: bool, spent: float, progress: float) -> Progress:
    """Return the counts after an attempt with this outcome, which with its wait took `spent` seconds."""
    best = max(before.best, progress)
    if outcome == ledger.DEFERRED:
        return before._replace(deferrals=before.deferrals + 1, waited=before.waited + spent, best=best)
    if outcome == ledger.INTERRUPTED and not counted:
        return before._replace(best=best)
    again = before.again + 1 if outcome == ledger.AGAIN and best == before.best else 0
    if again and spent < FRESH_WORK:
        return before._replace(again=again, best=best)  # its patience goes on
    failures = before.failures + counted
    return before._replace(failures=failures, deferrals=0, waited=0.0, again=again, best=best)
