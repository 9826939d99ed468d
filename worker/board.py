"""The board: where every step of the plan stands, in memory.

Derived from the plan and the ledger's rows and kept up to date by the loop; the rows are the truth.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from worker import ledger
from worker.clock import Now
from worker.ledger import Row
from worker.plan import Plan, Step

WAITING, RUNNING, DONE, FAILED = range(4)


class Progress(NamedTuple):
    """What is known of a step that is not done: its last attempt, failures that count, when to go on."""

    number: int = 0
    failures: int = 0
    retry_at: float = -math.inf  # monotonic clock


_UNTRIED = Progress()


class Board:
    """The state of each step of a plan, and how many there are of each."""

    def __init__(self, plan: Plan) -> None:
        self._steps = plan.steps
        self._states: dict[str, int] = {}  # those that are not waiting
        self._counts = [len(plan.steps), 0, 0, 0]
        self._progress: dict[str, Progress] = {}
        self._finished = 0  # so many steps at the front of the list are done or failed

    @property
    def total(self) -> int:
        return len(self._steps)

    def count(self, state: int) -> int:
        return self._counts[state]

    def state(self, step: str) -> int:
        return self._states.get(step, WAITING)

    def set(self, step: str, state: int) -> None:
        self._counts[self.state(step)] -= 1
        self._counts[state] += 1
        self._states[step] = state
        if state == DONE:
            self._progress.pop(step, None)

    def progress(self, step: str) -> Progress:
        return self._progress.get(step, _UNTRIED)

    def set_progress(self, step: str, progress: Progress) -> None:
        self._progress[step] = progress

    def unfinished(self) -> Iterator[Step]:
        """Yield the steps that are neither done nor failed, in the order of the list.

        Those that are finished at the front are passed over once and for all.
        """
        steps = self._steps
        while self._finished < len(steps) and self.state(steps[self._finished].id) >= DONE:
            self._finished += 1
        for place in range(self._finished, len(steps)):
            if self.state(steps[place].id) < DONE:
                yield steps[place]


class Replay(NamedTuple):
    """What the ledger's rows say of a plan."""

    board: Board
    unclosed: list[Row]  # attempts that no worker closed
    changed: list[str]  # done steps whose definition is another one now
    gone: int  # done steps that are no longer in the list


def replay(plan: Plan, rows: Iterable[Row], counted_from: int, now: Now) -> Replay:
    """Derive the board from the ledger's rows, oldest first.

    Steps are matched by id.  A done step stays done even if its definition has changed: it is
    reported, not done again.  Failures count while they are newer than the row `counted_from` and
    the definition is the same: who mends a step gets all its attempts anew.  A wait for the next
    attempt goes on where it was, and is never longer than the step's own delay, whatever the wall
    clock did meanwhile.
    """
    board = Board(plan)
    unclosed, changed, gone = [], [], 0
    for row in rows:
        step = plan.by_id.get(row.step)
        done = row.outcome == ledger.DONE
        if row.outcome is None:
            unclosed.append(row)
        if step is None:
            gone += done
            continue
        same = row.definition == plan.digest(step)
        if done:
            board.set(row.step, DONE)
            if not same:
                changed.append(row.step)
            continue
        counts = same and row.seq > counted_from
        failures = board.progress(row.step).failures + (counts and row.counted)
        wait = min(row.retry_at - now.wall, step.task.retry.delay) if counts and row.retry_at else 0.0
        board.set_progress(row.step, Progress(row.number, failures, now.monotonic + wait))
        board.set(row.step, FAILED if counts and row.final else WAITING)
    return Replay(board, unclosed, changed, gone)
