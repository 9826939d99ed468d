"""Shelved runs: what other runs of a state folder have begun, and nobody knows whether it has happened.

A list with another name is another run, and the state of the one before is kept in runs/NAME/ (worker/shelf.py).
Nothing of it is begun any more, so what may have happened is named until a person settles it there.
"""

import contextlib
import os
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from worker.errors import AgentError
from worker.ledger import INTERRUPTED, LedgerCorrupt, StorageFull
from worker.ledger.sqlite import SqliteLedger

_RUNS, _STEPS = 20, 8  # so many runs are looked into, and so many steps of each are named


class Shelved(NamedTuple):
    """A step of a run that is not at work here now; `state`: the folder in which it can be settled."""

    run: str
    state: str
    step: str
    attempt: int
    outcome: str
    cause: str

    def line(self) -> str:
        """Return what is told of it, with the command that settles it."""
        end = f"attempt {self.attempt} {self.outcome}" + (f": {self.cause}" if self.cause else "")
        command = f"agentctl settle {shlex.quote(self.step)} --done --state {shlex.quote(self.state)}"
        return (
            f"run {self.run}, which is not at work now: nobody knows whether '{self.step}' has happened ({end}); "
            f"look, and say so: {command} (or --redo for --done)"
        )


def doubts(root: str) -> Iterator[Shelved]:
    """Yield the steps that may have happened of the runs which the state folder `root` keeps, the newest run first.

    What cannot be read is passed over: it is said when its run comes back.
    """
    folder = f"{root}/runs"
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = sorted(os.listdir(folder), key=lambda name: -_changed(f"{folder}/{name}/ledger.db"))
    for name in names[:_RUNS]:
        state = f"{folder}/{name}"
        with (
            contextlib.suppress(OSError, AgentError, LedgerCorrupt, StorageFull),
            contextlib.closing(SqliteLedger.open(f"{state}/ledger.db", read_only=True)) as store,
        ):
            for row in store.unsettled()[:_STEPS]:
                cause = row.cause or "its worker ended with it"
                yield Shelved(name, state, row.step, row.number, row.outcome or INTERRUPTED, cause)


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0
