"""The leader: the first process of the program that runs.

It is our child, or has outlived the worker that started it; then its end is heard of through a pidfd (pidfd_open(2)),
and its exit status is what it has left in its slot's shelter.
"""

import os
from collections.abc import Callable, Mapping, Sequence

from worker import process, scarcity
from worker.events import Events
from worker.family import Family
from worker.process import Pipes
from worker.sender import Sender
from worker.shelter import Shelter


class Leader:
    """Starts or finds one after the other; `on_exit` is called with the exit status of each, None if nobody knows it.

    A negative status is the signal that has ended it.
    """

    def __init__(
        self, family: Family, shelter: Shelter | None, events: Events, on_exit: Callable[[int | None], None]
    ) -> None:
        self._family = family
        self._shelter = shelter
        self._events = events
        self._on_exit = on_exit
        self._pidfd: int | None = None
        self.trouble = ""  # why the last program was not begun, although its leader was

    @property
    def pid(self) -> int:
        """Its pid; 0 before there was one."""
        return self._family.leader

    def start(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, ruleset: int | None) -> Pipes | None:
        """Start a program; return its pipes, None where its slot has pipes.  Raises SpawnError."""
        if self._shelter is not None:
            self._family.leader = self._shelter.spawn(argv, env, cwd, ruleset)
            return None
        child = process.spawn(argv, env, cwd, ruleset)
        self._family.leader = child.pid
        return child.pipes

    def find(self) -> bool:
        """Find the one that an earlier worker has started here; return False if it never began."""
        assert self._shelter is not None
        report, living = self._shelter.report(), self._shelter.group.pids()
        if report is None and not living:
            return False
        self._family.leader = living[0] if report is None else report.pid
        return True

    def watch(self) -> None:
        """Hear of the end of one that was found; one that has ended is so at once."""
        if self._family.holds(Sender(self.pid)):
            try:
                self._pidfd = os.pidfd_open(self.pid)
            except OSError:
                pass  # it has just ended
            else:
                self._events.watch(self._pidfd, lambda: self._end(None))
                return
        self._end(None)

    def reaped(self, ended: Mapping[int, int]) -> None:
        """Note which of our children have ended, with their exit statuses."""
        if self.pid in ended:
            self._end(ended[self.pid])

    def forget(self) -> None:
        """Listen no more."""
        if self._pidfd is not None:
            self._events.forget(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _end(self, status: int | None) -> None:
        self.forget()
        report = self._shelter.report() if self._shelter is not None else None
        known = report.status if report is not None else None
        status = status if known is None else known
        if self._shelter is not None:
            self.trouble = scarcity.of_leader(None if report is None else report.said, status)
        self._on_exit(status)
