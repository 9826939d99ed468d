"""Recovery: what a new worker does about the attempts and results that a former one left unfinished."""

import functools
import os
import signal
from collections.abc import Callable, Iterable, Iterator

from worker import clock, decide, files, process
from worker.board import Board
from worker.decide import End, Verdict
from worker.disk import Disk
from worker.folder import Places
from worker.journal import ERROR, NOTICE, Journal
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


def judge_unclosed(
    rows: Iterable[Row], plan: Plan, board: Board, boot: str, stopped: bool
) -> list[tuple[Verdict, Ending]]:
    """Return how the attempts that no worker closed are to be closed.

    After a reboot, and after a stop that the disk was too full to record (`stopped`), that costs the step
    nothing; where the worker died it counts, so that a step which takes the worker down with it does not
    do so for ever.
    """
    found = []
    for row in rows:
        step = plan.by_id.get(row.step)
        reason = "reboot" if row.boot != boot else "stop" if stopped else "worker"
        end = End(None, interrupted_by=reason)
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
        )
        found.append((verdict, ending))
    return found


def restore_outputs(ledger: Ledger, places: Places, disk: Disk, journal: Journal, thorough: bool) -> None:
    """Write small results again that are missing in out/, and name large ones that are lost.

    `thorough`: after a power cut a file may also be there and hold something else.
    """
    restored = 0
    for step, output in lost_outputs(ledger, places, thorough):
        path = places.output(step)
        if output is None:
            text = f"{path}: the result is gone; the step stays done (it was too large for the ledger)"
            journal.event("state", text, step=step, priority=ERROR)
            continue
        disk.persist(path, functools.partial(files.publish, path, output))
        restored += 1
    if restored:
        text = f"{places.out}: {restored} results written again from the ledger"
        journal.event("state", text, priority=NOTICE)


def lost_outputs(ledger: Ledger, places: Places, thorough: bool) -> Iterator[tuple[str, bytes | None]]:
    """Yield the done steps whose results are missing in out/, with their bytes as far as the ledger has them.

    `thorough`: small results are compared byte for byte, since a power cut may have cut them short.
    """
    there = set(os.listdir(places.out))
    for row in ledger.rows():
        if row.outcome != DONE or (row.step in there and not thorough):
            continue
        output = ledger.output(row.seq)
        if row.step in there and (output is None or _holds(places.output(row.step), output)):
            continue
        yield row.step, output


def _holds(path: str, content: bytes) -> bool:
    try:
        return files.read(path) == content
    except OSError:
        return False
