"""Companions: what accompanies a run beside its steps, such as the checkpoint, copies of it, and the file that keeps
a sandbox awake.

Each is told when the ledger has changed and called from the loop when it is due.  None of them may hold it up.
"""

import math
from collections.abc import Sequence


class Companion:
    """One of them; it says only what it has to do.  Times are on the monotonic clock."""

    def begin(self) -> None:
        """The worker has taken up what the one before it has left, and there is work to do."""

    def changed(self) -> None:
        """Note that the ledger knows more than before."""

    def due_at(self) -> float:
        """Return when to call `keep`; inf if only a change makes it needed."""
        return math.inf

    def keep(self, now: float) -> None:
        """Do what is due at `now`, if anything is."""

    def conclude(self, finished: str) -> None:
        """The worker ends, and the run is "done", "failed" or "out-of-budget", or has work left: "stopped", or "left"
        to the next worker.  After all but "left" it may go on, if work is dropped in at the last moment.
        """


class Companions(Companion):
    """All of them, in order; it is one itself."""

    def __init__(self, members: Sequence[Companion]) -> None:
        self._members = tuple(members)

    def begin(self) -> None:
        for member in self._members:
            member.begin()

    def changed(self) -> None:
        for member in self._members:
            member.changed()

    def due_at(self) -> float:
        return min((member.due_at() for member in self._members), default=math.inf)

    def keep(self, now: float) -> None:
        for member in self._members:
            member.keep(now)

    def conclude(self, finished: str) -> None:
        for member in self._members:
            member.conclude(finished)
