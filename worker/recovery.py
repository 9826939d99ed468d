"""Recovery: what a new worker does about the attempts and results that a former one left unfinished."""

import contextlib
import signal
from collections.abc import Callable, Iterable

from worker import clock, decide, files, process
from worker.board import Board
from worker.decide import End, Verdict
from worker.folder import Places
from worker.ledger import DONE, Ending, Ledger, Row
from worker.plan import Plan
from worker.task import Retry

# Time for killed processes to vanish before they are looked for again.
_LOOK_AGAIN = 0.02


def end_leftovers(rows: Iterable[Row], places: Places, wait: Callable[[float], None]) -> list[str]:
    """Kill what is left of the processes of these attempts; none is alive when this returns.

    Under systemd nothing is left, since the unit's processes ended together.  Returns what was found.
    """
    markers = [f"STATE_DIRECTORY={places.state(row.step)}".encode() for row in rows]
    names: list[str] = []
    while markers and (left := process.strays(markers)):
        names += [name for found in left if (name := f"{found.name} ({found.pid})") not in names]
        process.send(left, signal.SIGKILL)
        wait(clock.monotonic() + _LOOK_AGAIN)
    return names


def judge_unclosed(rows: Iterable[Row], plan: Plan, board: Board, boot: str) -> list[tuple[Verdict, Ending]]:
    """Return how the attempts that no worker closed are to be closed.

    After a reboot that costs the step nothing; where only the worker died it counts, so that a step
    which takes the worker down with it does not do so for ever.
    """
    found = []
    for row in rows:
        step = plan.by_id.get(row.step)
        end = End(None, interrupted_by="worker" if row.boot == boot else "reboot")
        verdict = decide.judge(end, board.progress(row.step), step.task.retry if step else Retry(), 0.0)
        ending = Ending(
            step=row.step,
            number=row.number,
            outcome=verdict.outcome,
            counted=verdict.counted,
            final=verdict.final,
            cause=verdict.cause,
            status=None,
            ended=clock.wall(),
            took=0.0,
            delay=0.0,
            progress=0.0,
            spend=0.0,
            detail="",
            output=None,
            output_size=0,
            log=b"",
            log_size=0,
        )
        found.append((verdict, ending))
    return found


def lost_outputs(ledger: Ledger, places: Places) -> Iterable[tuple[str, bytes]]:
    """Yield the small results whose files in out/ a power cut has taken or cut short, and their bytes."""
    for row in ledger.rows():
        output = ledger.output(row.seq) if row.outcome == DONE else None
        if output is None:
            continue
        with contextlib.suppress(OSError):
            if files.read(places.output(row.step)) == output:
                continue
        yield row.step, output
