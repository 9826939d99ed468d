"""Whether a checkpoint that came from a machine is one from which a run can go on: the machine may have made it up.

A large one is read by a process of its own, which has so much memory and time: what is an object of JSON in three bytes
takes seventy in memory.
"""

import json
import os
from collections.abc import Iterator
from typing import NamedTuple

from worker import checkpoint, process
from worker.checkpoint import Checkpoint, CheckpointError
from worker.ledger import DONE
from worker.ledger.sqlite import SqliteLedger
from worker.supervise.command import Runner

_SMALL = 2**22  # bytes; read here
_MEMORY, _TIMES = 2**29, 16  # bytes, and so many for each byte of the file
_SECONDS, _RATE = 30.0, 2_000_000.0  # and one second more for so many bytes
# The run goes on counting from what is in it; where the counter ends no later checkpoint could be read.
_COUNT_MAX, _NUMBER_MAX = 2**50, 2**30
_AMOUNT_MAX = 1e15  # seconds, or what is spent
_AMOUNTS = ("started", "ended", "took", "delay", "progress", "spend")
_HEAD_MAX = 2**20  # bytes


class Sound(NamedTuple):
    """What a sound checkpoint says."""

    run: str
    revision: int
    done: int  # steps
    spend: float  # of its attempts


def judge(path: str, runner: Runner) -> Sound | str:
    """Return what the checkpoint at `path` says, or why it is none.  Raises FileNotFoundError."""
    size = os.stat(path).st_size
    if size <= _SMALL:
        return read(path)
    words = [*process.ours("supervise.sound"), path, str(_MEMORY + _TIMES * size)]
    answer = runner.run(words, {}, _SECONDS + size / _RATE)
    said = json.loads(answer.output) if answer.ok else f"it cannot be read: {answer.fault()}"
    return said if isinstance(said, str) else Sound._make(said)


def main(argv: list[str]) -> None:
    import resource
    import sys

    path, memory = argv
    resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    try:
        print(json.dumps(read(path)))
    except MemoryError:
        sys.exit("it takes more memory than any checkpoint of its size")


def read(path: str) -> Sound | str:
    """Return what the checkpoint at `path` says, or why it is none.  Raises FileNotFoundError."""
    try:
        found = checkpoint.load(path)
        fault = next(_faults(path, found), "")
        if fault:
            raise CheckpointError(fault)
        checkpoint.header(path)  # its end, too
        SqliteLedger.rehearse(found.holdings(found.header.run))
    except FileNotFoundError:
        raise
    except (CheckpointError, ValueError) as exc:
        return str(exc)
    except OSError as exc:
        return f"it cannot be read: {exc.strerror}"
    done = sum(row.outcome == DONE for row, _output in found.attempts)
    return Sound(found.header.run, found.header.revision, done, sum(row.spend for row, _output in found.attempts))


def _faults(path: str, found: Checkpoint) -> Iterator[str]:
    """Yield what no run comes to, though each value may be stored."""
    with open(path, "rb") as file:
        if not file.readline(_HEAD_MAX).endswith(b"\n"):
            yield "its first line is not a checkpoint's"
    if found.header.revision >= _COUNT_MAX:
        yield f"its revision is {found.header.revision}"
    for name, value in found.header.facts.items():
        if name in checkpoint.AMOUNTS and not float(value) < _AMOUNT_MAX:
            yield f"its '{name}' is {value}"
    for row, _output in found.attempts:
        if abs(row.seq) >= _COUNT_MAX or abs(row.number) >= _NUMBER_MAX:
            yield f"an attempt's number is {row.seq}, {row.number}"
        for name in _AMOUNTS:
            if not abs(getattr(row, name) or 0.0) < _AMOUNT_MAX:
                yield f"'{name}' is {getattr(row, name)}"
    times = [*(effect.at for effect in found.effects), *(saved.at for saved in found.saved)]
    if not all(abs(at) < _AMOUNT_MAX for at in times):
        yield "a time in it is none"
