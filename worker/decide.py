"""Decisions: which step next, and what follows from how an attempt ended.

Plain data in, plain data out; no clock, no disk, no process.
"""

import math
from typing import NamedTuple

from worker import board as states
from worker.board import Board
from worker.config import Retry
from worker.ledger import DONE, FAILED, INTERRUPTED, STALLED
from worker.plan import Step


class Next(NamedTuple):
    """What to do now: start these steps, look again at `wake_at` (monotonic clock), or end the run."""

    start: list[Step]
    wake_at: float = math.inf
    finished: str | None = None  # "done" or "failed": nothing is running and nothing is left to start


def next_steps(board: Board, slots: int, now: float, stop_on_failure: bool) -> Next:
    """Return what to do at the time `now` (monotonic clock) with `slots` places for steps.

    The order of the list decides.  A step that waits for its next attempt keeps its place: with one
    slot the list is a strict sequence, and a later step never overtakes one that has failed once.
    """
    halted = stop_on_failure and board.count(states.FAILED) > 0
    start: list[Step] = []
    wake_at, used = math.inf, 0
    for step in board.unfinished():
        if used == slots:
            break
        if board.state(step.id) == states.RUNNING:
            used += 1
        elif not halted:
            used += 1
            retry_at = board.progress(step.id).retry_at
            if retry_at <= now:
                start.append(step)
            else:
                wake_at = min(wake_at, retry_at)
    if used:
        return Next(start, wake_at)
    return Next([], finished=FAILED if board.count(states.FAILED) else DONE)


class End(NamedTuple):
    """How an attempt ended.

    `limit`: the limit it passed, if we ended it for that.  `status`: exit code, negative for a
    signal, None if nobody knows.  `why`: set where there is more to say than the status does.
    """

    status: int | None
    limit: str | None = None
    interrupted_by: str | None = None  # "stop", "reboot" or "worker"
    why: str = ""


class Verdict(NamedTuple):
    """What the end of an attempt means; `delay` is the time to the next one, in seconds."""

    outcome: str
    cause: str
    counted: bool
    final: bool
    delay: float


def judge(end: End, failures: int, retry: Retry) -> Verdict:
    """Return what follows from `end`, the step having failed `failures` times before."""
    if end.interrupted_by in ("stop", "reboot"):
        return Verdict(INTERRUPTED, _CAUSES[end.interrupted_by], False, False, 0.0)
    if end.interrupted_by is None and end.limit is None and end.status == 0 and not end.why:
        return Verdict(DONE, "", False, False, 0.0)
    final = failures + 1 >= retry.attempts
    delay = 0.0 if final or end.interrupted_by else retry.delay
    outcome = STALLED if end.limit else FAILED
    if end.interrupted_by and not final:
        outcome = INTERRUPTED
    return Verdict(outcome, describe(end), True, final, delay)


_CAUSES = {
    "stop": "the worker was stopped",
    "reboot": "the machine went down",
    "worker": "the worker died with it",
}


def describe(end: End) -> str:
    """Return the cause of a failure as a person would say it."""
    if end.why:
        return end.why
    if end.interrupted_by:
        return _CAUSES[end.interrupted_by]
    if end.status is None:
        return "ended, nobody knows how"
    if end.status < 0:
        import signal

        try:
            return f"killed by {signal.Signals(-end.status).name}"
        except ValueError:
            return f"killed by signal {-end.status}"
    return f"exited with status {end.status}"
