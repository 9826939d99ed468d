"""Recovery: what a new worker does about the attempts and results that a former one left unfinished."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping

from worker import clock, decide, process
from worker.board import WAITING, Board, doubtful
from worker.decide import End, Reason, Verdict
from worker.folder import Places
from worker.ledger import DONE, FAILED, INTERRUPTED, MOVED, UNKNOWN, Claim, Ending, Row
from worker.plan import Plan, Step
from worker.task import Retry


def end_leftovers(rows: Iterable[Row], places: Places, wait: Callable[[float], None]) -> list[str]:
    """Kill what is left of the processes of these attempts; none is alive when this returns.

    Those that had a cgroup of their own have been ended with it.  Returns what was found.
    """
    markers = [marker(places, row) for row in rows]
    names: list[str] = []
    while markers and (left := process.leftovers(markers)):
        names += [name for found in left if (name := str(found)) not in names]
        process.send(left, signal.SIGKILL)
        wait(clock.monotonic() + process.LOOK_AGAIN)
    return names


def marker(places: Places, row: Row) -> bytes:
    """Return what every process of the row's step has in its environment."""
    return os.fsencode(f"STATE_DIRECTORY={places.state(row.step)}")


def judge_unclosed(
    rows: Iterable[Row],
    plan: Plan,
    board: Board,
    boot: str,
    stopped: bool,
    worker: str,
    ended: str,
    reasons: Mapping[str, tuple[Reason, str]],
) -> list[tuple[Verdict, Ending]]:
    """Return how the attempts that no worker closed are to be closed.

    After a reboot, and after a stop that the disk was too full to record (`stopped`), that costs the step
    nothing; where the worker died it counts, so that a step which takes the worker down with it does not
    do so for ever.  `worker` is our name in the rows: the others were another one's, who has lost them.  `ended`
    says how the last worker ended, if that is known; `reasons` has, by step, what is known better than that.
    """
    found = []
    for row in rows:
        step = plan.by_id.get(row.step)
        mine = row.worker == worker
        reason: Reason = "reboot" if row.boot != boot else "stop" if stopped else "worker"
        why = f"the worker died with it ({ended})" if reason == "worker" and ended else ""
        if row.boot == MOVED:
            why = "it was at work when the copy was made"
        if not mine:
            reason, why = "lease", f"its worker {row.worker} was not heard of"
        elif row.step in reasons:
            reason, why = reasons[row.step]
        end = End(None, interrupted_by=reason, effect="open", why=why)
        retry, redo = (step.task.retry, step.task.redo) if step else (Retry(), "always")
        verdict = decide.judge(end, board.progress(row.step), retry, 0.0, redo)
        ending = decide.ending(row.step, row.number, verdict, None, clock.wall())
        # What it had spent by then is spent, and as far as it had got it got.
        found.append((verdict, ending._replace(spend=row.spend, progress=row.progress)))
    return found


def renamed(plan: Plan, board: Board, gone: Iterable[Row], run: str) -> Iterator[tuple[Row, Verdict, Claim, Ending]]:
    """Yield what is to be recorded of steps whose key is that of a done step which has left the list.

    The same work under the same key is done, whatever the step is called now.  Other work is a conflict: neither
    done nor skipped, and a person gives it another key.
    """
    known = {row.key or f"{run}:{row.step}": row for row in gone}
    for step in plan.steps if known else ():
        row = known.get(step.key(run)) if step.task.key is not None else None
        if row is None or board.state(step.id) != WAITING or (board.progress(step.id).number and doubtful(row)):
            continue
        verdict = _same_key(step, row, row.definition == plan.digest(step), run)
        if verdict is None:
            continue
        now = clock.wall()
        number, key = board.progress(step.id).number + 1, step.key(run)
        claim = Claim(step.id, number, plan.digest(step), now, row.boot, key, item=step.item)
        yield row, verdict, claim, decide.ending(step.id, claim.number, verdict, None, now)


def _same_key(step: Step, row: Row, same: bool, run: str) -> Verdict | None:
    """Return what an attempt of another step under its key means for `step`; None if nothing."""
    if not same:
        cause = f"its key '{step.key(run)}' stands for other work, tried as '{row.step}'; give it another key"
        return Verdict(FAILED, cause, counted=True, final=True, delay=0.0)
    if row.outcome == DONE:
        return Verdict(DONE, f"done as '{row.step}', which had the same key", False, False, 0.0)
    if step.task.redo == "always":
        return None
    outcome = UNKNOWN if step.task.redo == "never" else INTERRUPTED  # its check will be asked
    return Verdict(outcome, f"cut off as '{row.step}', which had the same key", False, False, 0.0, unsure=True)
