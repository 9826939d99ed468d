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
from worker.process import Found, Inherited
from worker.sender import Sender, lineage

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_BUSY_SHARE = 0.005
_ACQUAINTED_MAX = 256


class Family(Protocol):
    """The processes of one attempt; `leader` is the first one of the program that runs."""

    leader: int

    def members(self) -> list[Found]:
        """Return those that live."""

    def left(self) -> list[Found]:
        """Return those that live now that the leader has ended."""

    def holds(self, sender: Sender) -> bool | None:
        """Return whether the sender of a message is one of them; None if nobody can tell any more.

        One that has ended is one of them if no other step runs, or if it was seen to be while it lived.
        """

    def kill(self) -> None:
        """Kill them all, also while they are frozen."""

    def freeze(self) -> None:
        """Let none of them run until `thaw`."""

    def thaw(self) -> None:
        """Let them run again."""

    def cpu(self) -> float:
        """Return the seconds of CPU time that they have used, as far as is known."""

    def memory_kills(self) -> int:
        """Return how often the kernel has killed for memory here, in all; 0 if it does not tell."""

    def memory_fault(self, before: int, status: int) -> str:
        """Return how an end with this exit status came about, if there were `before` such kills before; else ""."""


class Descent:
    """A family known by its parents: see process.family."""

    def __init__(self, marker: bytes, others: Callable[[int], Collection[int]], before: Inherited) -> None:
        """`marker` is an entry of their environment; `others` returns the leaders of other steps than a given one.

        `before`: what is no step's.
        """
        self.leader = 0
        self._marker = marker
        self._others = others
        self._before = before
        self._acquainted = _Acquainted()

    def members(self) -> list[Found]:
        return process.family(self.leader, self._marker, self._others(self.leader), self._before)

    def left(self) -> list[Found]:
        others = self._others(self.leader)
        # Without a look at every process if we have no orphans.
        if not process.has_orphans({*others, *self._before.began}):
            return []
        return process.family(self.leader, self._marker, others, self._before)

    def holds(self, sender: Sender) -> bool | None:
        others = self._others(self.leader)
        if sender.lives():
            mine = process.belongs(sender.pid, self.leader, self._marker, others, self._before)
            if sender.lives():  # or its pid may have been another's by now
                return self._acquainted.with_one(sender, mine)
        return True if not others or sender.pid == self.leader or sender in self._acquainted else None

    def kill(self) -> None:
        process.send(self.members(), signal.SIGKILL)

    def freeze(self) -> None:
        stopped: set[int] = set()
        while found := [member for member in self.members() if member.pid not in stopped]:  # forked meanwhile
            process.send(found, signal.SIGSTOP)
            stopped.update(member.pid for member in found)

    def thaw(self) -> None:
        process.send(self.members(), signal.SIGCONT)

    def cpu(self) -> float:
        if not self.leader:
            return 0.0
        return sum(found.ticks for found in self.members()) / _TICKS_PER_SECOND

    def memory_kills(self) -> int:
        return 0

    def memory_fault(self, before: int, status: int) -> str:
        return ""


class Cohort:
    """A family known by its cgroup; a process that has put itself there is none of it."""

    def __init__(self, group: Group, marker: bytes, others: Callable[[int], Collection[int]]) -> None:
        """As for Descent."""
        self.leader = 0
        self._group = group
        self._marker = marker
        self._others = others
        self._acquainted = _Acquainted()

    def members(self) -> list[Found]:
        return process.look_at(self._group.pids())

    def left(self) -> list[Found]:
        return self.members() if self._group.populated() else []

    def holds(self, sender: Sender) -> bool | None:
        others = self._others(self.leader)
        if sender.lives():
            where = sender.group()
            inside = self._group.holds(sender.pid) if where is None else where in self._group.ids()
            mine = inside and (not others or sender in self._acquainted or self._has_begun(sender.pid, others))
            if sender.lives():
                return self._acquainted.with_one(sender, mine)
        if not others or sender in self._acquainted:
            return True
        where = sender.group()
        return None if where is None or where in self._group.ids() else False

    def _has_begun(self, pid: int, others: Collection[int]) -> bool:
        """Return whether a process that is in the cgroup comes from there, by its parents or its environment."""
        for at in lineage(pid):
            if at == self.leader:
                return True
            if at in others:
                return False
        entries = process.environment_of(pid)  # it is an orphan
        # What an earlier worker has started may be hidden from us (PrivateUsers=), all of it.
        return self._marker in entries if entries else not process.is_seen(self.leader)

    def kill(self) -> None:
        self._group.kill()

    def freeze(self) -> None:
        self._group.freeze(True)

    def thaw(self) -> None:
        self._group.freeze(False)

    def cpu(self) -> float:
        return self._group.cpu()

    def memory_kills(self) -> int:
        memory = self._group.memory()
        return 0 if memory is None else memory.kills

    def memory_fault(self, before: int, status: int) -> str:
        memory = self._group.memory()
        if memory is None or memory.kills <= before or status not in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return ""  # others may have been killed
        how = "killed for memory"
        if status != -signal.SIGKILL:  # one below it was, and it has made its own of that
            how = f"exited with status {status}, and a process was {how}"
        return how if memory.peak is None else f"{how}; at most {memory.peak / 2**20:.0f} MiB were in use"


def of(group: Group | None, marker: bytes, others: Callable[[int], Collection[int]], before: Inherited) -> Family:
    """Return the family of a slot that has this cgroup, or none; otherwise as for Descent."""
    return Descent(marker, others, before) if group is None else Cohort(group, marker, others)


class _Acquainted:
    """The processes of a family that have spoken while they lived; what they said last may be heard after their end."""

    def __init__(self) -> None:
        self._pids: dict[int, None] = {}

    def __contains__(self, sender: Sender) -> bool:
        return sender.pid in self._pids

    def with_one(self, sender: Sender, mine: bool) -> bool:
        """Remember a living sender if it is one of them; return whether it is."""
        if mine:
            self._pids[sender.pid] = None
            if len(self._pids) > _ACQUAINTED_MAX:
                del self._pids[next(iter(self._pids))]
        else:
            self._pids.pop(sender.pid, None)  # the pid is another's by now
        return mine


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
