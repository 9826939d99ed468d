"""Decisions: which step next, and what follows from how an attempt ended.

Plain data in, plain data out; no clock, no disk, no process, no dice.
"""

import math
from typing import NamedTuple

from worker import board as states
from worker.board import Board, Progress
from worker.errors import TEMPORARY
from worker.ledger import AGAIN, DEFERRED, DONE, FAILED, INTERRUPTED, STALLED
from worker.plan import Step
from worker.task import Retry
from worker.timespan import show

# The most that a server's Retry-After is obeyed for; some say 10^9.
_RETRY_AFTER_MAX = 3600.0
# A fresh start for saved state alone: always after so many seconds of work, else so many times in a row.
_WORTH_IT, _AT_ONCE = 1.0, 20


class Next(NamedTuple):
    """What to do now: start these steps, look again at `wake_at` (monotonic clock), or end the run."""

    start: list[Step]
    wake_at: float = math.inf
    finished: str | None = None  # "done" or "failed": nothing is running and nothing is left to start


def next_steps(board: Board, slots: int, now: float, stop_on_failure: bool) -> Next:
    """Return what to do at the time `now` (monotonic clock) with `slots` places for steps.

    The order of the list decides who starts first, `needs` who must wait.  A step that waits for its
    next attempt keeps its place: with one slot the list is a strict sequence, and a later step never
    overtakes one that has failed once.
    """
    running = board.count(states.RUNNING)
    if stop_on_failure and board.count(states.FAILED) > 0:
        return Next([], finished=None if running else FAILED)
    waits = board.waits(now)
    free = slots - running - len(waits)
    start: list[Step] = []
    for step in board.ready():
        if len(start) >= free:
            break
        if board.progress(step.id).retry_at <= now:
            start.append(step)
    if start or running or waits:
        return Next(start, min(waits, default=math.inf))
    return Next([], finished=FAILED if board.count(states.FAILED) else DONE)


class End(NamedTuple):
    """How an attempt ended.

    `limit`: the limit it passed, if we ended it for that.  `status`: exit code, negative for a
    signal, None if nobody knows.  `why`: set where there is more to say than the status does.
    `took` in seconds.  `progress`: the furthest it got.  `saved`: its own folder has changed.
    `retry_after`: seconds it was told to wait.
    """

    status: int | None
    limit: str | None = None
    interrupted_by: str | None = None  # "stop", "reboot" or "worker"
    why: str = ""
    took: float = 0.0
    progress: float = 0.0
    saved: bool = False
    retry_after: float | None = None


class Verdict(NamedTuple):
    """What the end of an attempt means; `delay` is the time to the next one, in seconds."""

    outcome: str
    cause: str
    counted: bool
    final: bool
    delay: float


def judge(end: End, past: Progress, retry: Retry, chance: float) -> Verdict:
    """Return what follows from `end`, given what is known of the step; `chance` is from [0, 1)."""
    if end.interrupted_by in ("stop", "reboot"):
        return Verdict(INTERRUPTED, _CAUSES[end.interrupted_by], False, False, 0.0)
    if end.interrupted_by is None and end.limit is None:
        if end.status == 0 and not end.why:
            return Verdict(DONE, "", False, False, 0.0)
        if end.status == TEMPORARY:
            return _not_now(end, past, retry, chance)
    return _failed(end, past, retry)


def _not_now(end: End, past: Progress, retry: Retry, chance: float) -> Verdict:
    """Exit 75: again at once if it got further or saved something, else later, while patience lasts.

    The wait is drawn from zero to a bound that doubles ("full jitter"), so that many who were turned
    away together do not come back together.
    """
    # A log or a time stamp is saved state too: whoever is back at once again and again, and reports no
    # progress, is asked as seldom as any other in the end.
    worth_it = end.took >= _WORTH_IT or past.again < _AT_ONCE
    if end.progress > past.best or (end.saved and worth_it):
        return Verdict(AGAIN, "asked to be started afresh", False, False, 0.0)
    left = retry.patience - past.waited - end.took
    if left <= 0:
        cause = f"said 'not now' for {show(past.waited + end.took)}, longer than its patience"
        return Verdict(FAILED, cause, True, True, 0.0)
    delay = chance * _bound(retry, past.deferrals)
    if end.retry_after is not None:
        delay = max(delay, min(end.retry_after, _RETRY_AFTER_MAX))
    return Verdict(DEFERRED, end.why or "said 'not now' (exit 75)", False, False, min(delay, left))


def _bound(retry: Retry, times: int) -> float:
    """Return the longest wait after so many in a row: `delay`, doubled each time up to `max_delay`."""
    return min(max(retry.max_delay, retry.delay), retry.delay * 2.0 ** min(times, 60))


def _failed(end: End, past: Progress, retry: Retry) -> Verdict:
    """Counted: after the last of its attempts the step has failed for good."""
    never = end.limit is None and end.status in retry.never  # an exit that we forced says nothing
    final = never or past.failures + 1 >= retry.attempts
    delay = 0.0 if final or end.interrupted_by else _bound(retry, past.failures)
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
