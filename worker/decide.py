"""Decisions: which step next, and what follows from how an attempt ended.

Plain data in, plain data out; no clock, no disk, no process, no dice.
"""

import math
from collections.abc import Collection
from typing import Literal, NamedTuple

from worker import board as states
from worker.board import FRESH_WORK, Board, Progress, charged
from worker.errors import TEMPORARY
from worker.ledger import AGAIN, DEFERRED, DONE, FAILED, INTERRUPTED, STALLED, UNKNOWN, Ending
from worker.plan import Step
from worker.task import Redo, Retry
from worker.timespan import show

# The most that a server's Retry-After is obeyed for; some say 10^9.
_RETRY_AFTER_MAX = 3600.0
# Fresh starts for saved state alone, so many in a row: after little work, and after FRESH_WORK seconds of it.
_AT_ONCE, _AFTER_WORK = 10, 100
# How long a name is asked for that does not exist, where there is a network.
_NO_HOST_PATIENCE = 600.0


class Next(NamedTuple):
    """What to do now: start these steps, look again at `wake_at` (monotonic clock), or end the run.

    Of the steps to start the first `most` are meant; the others stand in for those that another worker has taken.
    """

    start: list[Step]
    most: int = 0
    wake_at: float = math.inf
    finished: str | None = None  # "done" or "failed": nothing is running and nothing is left to start


def next_steps(
    board: Board, slots: int, now: float, stop_for: Collection[int], spare: int = 0, in_turn: bool = True
) -> Next:
    """Return what to do at the time `now` (monotonic clock) with `slots` places for steps.

    A step in one of the states `stop_for` lets no other one start.  `spare`: how many more steps to name.

    The order of the list decides who starts first, `needs` who must wait.  With `in_turn`, for lists of one step at a
    time, the list is a strict sequence: a step that waits for its next attempt keeps its place, and a later step never
    overtakes one that has failed once.  Without, a step that waits is in nobody's way.
    """
    running = board.count(states.RUNNING)
    if any(board.count(state) for state in stop_for):
        return Next([], finished=None if running else FAILED)
    waits = board.waits(now)
    free = max(0, slots - running - (len(waits) if in_turn else 0))
    start: list[Step] = []
    for step in board.ready() if free else ():
        if len(start) >= free + spare:
            break
        retry_at = board.progress(step.id).retry_at
        if retry_at <= now:
            start.append(step)
        else:
            waits.append(retry_at)  # one that another worker has tried
    if board.due():
        return Next(start, free, now)  # the plan grows first
    if start or running or waits or board.count(states.ELSEWHERE):
        return Next(start, free, min(waits, default=math.inf))
    stuck = board.count(states.FAILED) + board.count(states.UNKNOWN)
    return Next([], finished=FAILED if stuck else DONE)


# Of a step's own program: it was not begun; it said that nothing has happened; that it failed; anything else.
Effect = Literal["none", "refused", "failed", "open"]
Reason = Literal["stop", "budget", "reboot", "worker", "lease"]


class End(NamedTuple):
    """How an attempt ended.

    `limit`: the limit it passed, if we ended it for that.  `status`: exit code, negative for a
    signal, None if nobody knows.  `why`: set where there is more to say than the status does.
    `took` in seconds.  `progress`: the furthest it got.  `saved`: its own folder has changed.
    `retry_after`: seconds it was told to wait.  `effect`: what is known of the step's own program in this
    attempt.  `found`: its check said that it had happened before.  `unknown`: the key of an effect inside it of
    which nobody can tell whether it happened.  `accepted`: the exit status other than 0 that the list takes for done.
    `reason`: what a program of ours says of its failure.  `hopeless`: it makes little sense to wait for long.
    `short`: the machine was short of what a start needs.  `fatal`: no other attempt can mend it.
    """

    status: int | None
    limit: str | None = None
    interrupted_by: Reason | None = None
    why: str = ""
    took: float = 0.0
    progress: float = 0.0
    saved: bool = False
    retry_after: float | None = None
    effect: Effect = "none"
    found: bool = False
    unknown: str = ""
    accepted: int = 0
    reason: str = ""
    hopeless: bool = False
    short: bool = False
    fatal: bool = False

    @property
    def well(self) -> bool:
        """Whether the step has done by itself what it was to do."""
        return self.status == 0 and not self.why and self.interrupted_by is None and self.limit is None


class Verdict(NamedTuple):
    """What the end of an attempt means; `delay` is the time to the next one, in seconds.

    `unsure`: it was cut off while its effect may have happened.  `effect`: the key of the effect inside it that
    is unknown.
    """

    outcome: str
    cause: str
    counted: bool
    final: bool
    delay: float
    unsure: bool = False
    effect: str = ""


def ending(step: str, number: int, verdict: Verdict, status: int | None, ended: float) -> Ending:
    """Return what is to be recorded of attempt `number` of `step`; times in wall-clock seconds."""
    return Ending(
        step=step,
        number=number,
        outcome=verdict.outcome,
        counted=verdict.counted,
        final=verdict.final,
        # It may name a file, whose name need not be UTF-8 as the ledger's texts are.
        cause=verdict.cause.encode(errors="backslashreplace").decode(),
        status=status,
        ended=ended,
        delay=verdict.delay,
        unsure=verdict.unsure,
    )


def judge(end: End, past: Progress, retry: Retry, chance: float, redo: Redo = "always") -> Verdict:
    """Return what follows from `end`, given what is known of the step; `chance` is from [0, 1).

    Where nobody can tell whether the effect happened, and `redo` does not say that this is harmless, the step
    is UNKNOWN: at once, or with "check" once no attempt is left in which its check could be asked.
    """
    verdict = _outcome(end, past, retry, chance)
    if verdict.outcome == DONE:
        return verdict
    unsure = end.effect == "open" or (end.effect == "none" and past.unsure)
    if end.unknown:
        cause = f"{verdict.cause}; {doubt(end.unknown)}"
    elif unsure and (redo == "never" or (redo == "check" and verdict.final)):
        cause = f"{verdict.cause}; nobody knows whether it has happened"
    else:
        return verdict._replace(unsure=unsure)
    return Verdict(UNKNOWN, cause, counted=False, final=False, delay=0.0, unsure=unsure, effect=end.unknown)


def doubt(effect: str) -> str:
    """Return what the cause of an attempt says when an effect inside the step is unknown."""
    return f"nobody knows whether its effect '{effect}' has happened"


def _outcome(end: End, past: Progress, retry: Retry, chance: float) -> Verdict:
    if end.interrupted_by in ("stop", "budget", "reboot"):
        # What was said of an exit that we forced says nothing.
        cause = describe(end) if end.status is None else _CAUSES[end.interrupted_by]
        return Verdict(INTERRUPTED, cause, False, False, 0.0)
    if end.well:
        return Verdict(DONE, _remark(end), False, False, 0.0)
    if end.interrupted_by is None and end.limit is None and (end.status == TEMPORARY or end.short):
        return _not_now(end, past, retry, chance)
    return _failed(end, past, retry)


def _remark(end: End) -> str:
    if end.accepted:
        return f"exited with status {end.accepted}, which the list takes for done"
    return "its check found that it had happened" if end.found else ""


def _not_now(end: End, past: Progress, retry: Retry, chance: float) -> Verdict:
    """Exit 75: later, while patience lasts; at once if it got further or saved something, and names no time to wait.

    The wait is drawn from zero to a bound that doubles ("full jitter"), so that many who were turned
    away together do not come back together.
    """
    wish = end.retry_after if end.retry_after is not None and end.retry_after > 0 else 0.0
    # A time stamp is saved state too: a step that is back again and again, and reports no progress, waits in the end.
    worth_it = past.again < (_AFTER_WORK if end.took >= FRESH_WORK else _AT_ONCE)
    if not wish and (end.progress > past.best or (end.saved and worth_it)):
        return Verdict(AGAIN, "asked to be started afresh", False, False, 0.0)
    patience = min(retry.patience, _NO_HOST_PATIENCE) if end.hopeless else retry.patience
    took = charged(past, end.took)
    left = patience - past.waited - took
    if left <= 0:
        cause = f"said 'not now' for {show(past.waited + took)}, longer than its patience"
        if end.hopeless and patience < retry.patience:
            cause += f" of {show(patience)} with a name that does not exist"
        last = end.why or end.reason
        return Verdict(FAILED, f"{cause}; at last: {last}" if last else cause, True, True, 0.0)
    delay = max(chance * _bound(retry, past.deferrals), min(wish, _RETRY_AFTER_MAX))
    cause = end.why or (f"not now: {end.reason}" if end.reason else "said 'not now' (exit 75)")
    return Verdict(DEFERRED, cause, False, False, min(delay, left))


def _bound(retry: Retry, times: int) -> float:
    """Return the longest wait after so many in a row: `delay`, doubled each time up to `max_delay`."""
    return min(max(retry.max_delay, retry.delay), retry.delay * 2.0 ** min(times, 60))


def _failed(end: End, past: Progress, retry: Retry) -> Verdict:
    """Counted: after the last of its attempts the step has failed for good."""
    never = end.limit is None and end.status in retry.never  # an exit that we forced says nothing
    final = never or end.fatal or past.failures + 1 >= retry.attempts
    delay = 0.0 if final or end.interrupted_by else _bound(retry, past.failures)
    outcome = STALLED if end.limit else FAILED
    if end.interrupted_by and not final:
        outcome = INTERRUPTED
    return Verdict(outcome, describe(end), True, final, delay)


_CAUSES = {
    "stop": "the worker was stopped",
    "budget": "the run's budget was spent",
    "reboot": "the machine went down",
    "worker": "the worker died with it",
    "lease": "the worker that held it was not heard of for too long",
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
    said = f"exited with status {end.status}"
    return f"{said}: {end.reason}" if end.reason else said
