"""The family of a step: its processes, whatever they have forked, and how they are ended.

Two ways to know them: by the cgroup that systemd lets us make for a slot, or else by descent, session and environment.
"""

import math
import os
import signal
from collections.abc import Callable, Collection
from typing import Protocol

from worker import process
from worker.cgroup import Group
from worker.process import Found

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_BUSY_SHARE = 0.005


class Family(Protocol):
    """The processes of one attempt; `leader` is the first one of the program that runs."""

    leader: int

    def members(self) -> list[Found]:
        """Return those that live."""

    def left(self) -> list[Found]:
        """Return those that live now that the leader has ended."""

    def holds(self, pid: int) -> bool:
        """Return whether the sender of a message is one of them.

        One that has ended already cannot be asked; it knew the path of the step's socket, which is closed
        to other users, and is believed.
        """

    def kill(self) -> None:
        """Kill them all."""

    def cpu(self) -> float:
        """Return the seconds of CPU time that they have used, as far as is known."""

    def memory_kills(self) -> int:
        """Return how often the kernel has killed for memory here, in all; 0 if it does not tell."""

    def memory_peak(self) -> str:
        """Return the most memory that was in use, for people; empty if the kernel does not tell."""


class Descent:
    """A family known by its parents: see process.family."""

    def __init__(self, marker: bytes, others: Callable[[int], Collection[int]]) -> None:
        """`marker` is an entry of their environment; `others` returns the leaders of other steps than a given one."""
        self.leader = 0
        self._marker = marker
        self._others = others

    def members(self) -> list[Found]:
        return process.family(self.leader, self._marker, self._others(self.leader))

    def left(self) -> list[Found]:
        others = self._others(self.leader)
        # Without a look at every process if we have no orphans.
        return process.family(self.leader, self._marker, others) if process.has_orphans(others) else []

    def holds(self, pid: int) -> bool:
        return process.belongs(pid, self.leader, self._marker, self._others(self.leader))

    def kill(self) -> None:
        process.send(self.members(), signal.SIGKILL)

    def cpu(self) -> float:
        if not self.leader:
            return 0.0
        return sum(found.ticks for found in self.members()) / _TICKS_PER_SECOND

    def memory_kills(self) -> int:
        return 0

    def memory_peak(self) -> str:
        return ""


class Cohort:
    """A family known by its cgroup."""

    def __init__(self, group: Group) -> None:
        self.leader = 0
        self._group = group

    def members(self) -> list[Found]:
        return process.look_at(self._group.pids())

    def left(self) -> list[Found]:
        return self.members() if self._group.populated() else []

    def holds(self, pid: int) -> bool:
        return self._group.holds(pid) or not process.lives(pid)

    def kill(self) -> None:
        self._group.kill()

    def cpu(self) -> float:
        return self._group.cpu()

    def memory_kills(self) -> int:
        memory = self._group.memory()
        return 0 if memory is None else memory.kills

    def memory_peak(self) -> str:
        memory = self._group.memory()
        return f"{memory.peak / 2**20:.0f} MiB" if memory is not None and memory.peak is not None else ""


class Effort:
    """The CPU time that a family uses, looked at now and then."""

    def __init__(self, family: Family, every: float, now: float) -> None:
        """Look every so many seconds; inf for never."""
        self._family = family
        self._every = every
        self._used = family.cpu() if every < math.inf else 0.0
        self._looked_at = now
        self.look_at = now + every

    def seen(self, now: float) -> bool:
        """Look if it is time; return whether they have used more than idle programs' timers need."""
        if now < self.look_at:
            return False
        used = self._family.cpu()
        busy = used - self._used > _BUSY_SHARE * (now - self._looked_at)
        self._used, self._looked_at, self.look_at = used, now, now + self._every
        return busy
