"""The cgroups of the worker's steps: below the unit's own, which systemd has delegated (Delegate=, cgroups(7)).

One for each slot.  Whatever a step's processes fork, detach or rename, they stay in it: it tells who belongs to the
step, how much CPU time all of them have used, and ends them in one write.  It outlives the worker.
"""

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from worker import deeptree

ROOT = "/sys/fs/cgroup"
_PREFIX = "slot-"
# A look at what is below a cgroup ends after so many folders, each with so many in it: some ten milliseconds.
_LOOK_AT_MOST, _ENTRIES_MAX = 512, 1024
_MOST_BELOW = {"descendants": 256, "depth": 16}


class Memory(NamedTuple):
    """What a memory controller tells: how many processes were killed, the most that was in use in bytes."""

    kills: int
    peak: int | None


class Group(NamedTuple):
    """The cgroup of one slot."""

    path: str

    @property
    def procs(self) -> str:
        """The file into which a process writes 0 to enter."""
        return f"{self.path}/cgroup.procs"

    def pids(self) -> list[int]:
        """Return its living processes, those of cgroups that they have made below it too, as far as one looks."""
        found: list[int] = []
        for folder in _walk(self.path):
            with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs", encoding="ascii") as file:
                found += map(int, file.read().split())
        return found

    def populated(self) -> bool:
        """Return whether a process of it lives; a zombie does not."""
        try:
            with open(f"{self.path}/cgroup.events", encoding="ascii") as file:
                return "populated 1" in file.read()
        except OSError:
            return False

    def holds(self, pid: int) -> bool:
        """Return whether process `pid` is in it, or below."""
        found = _of(pid)
        # /proc hides it (ProtectProc=) where it keeps secrets, or was started by an earlier worker (PrivateUsers=).
        return f"{found}/".startswith(f"{self.path}/") if found else pid in self.pids()

    def is_plain(self) -> bool:
        """Return whether there is no cgroup below it."""
        try:
            return os.stat(self.path).st_nlink <= 2
        except OSError:
            return True  # it has gone

    def limit(self) -> None:
        """Let those inside make so many cgroups, and no more.  They may lift that: the files are their user's."""
        for what, most in _MOST_BELOW.items():
            with contextlib.suppress(OSError), open(f"{self.path}/cgroup.max.{what}", "w", encoding="ascii") as file:
                file.write(str(most))

    def tidy(self, until: float) -> bool:
        """Remove the cgroups below it, until a time (monotonic clock); return whether none is left."""
        self.limit()
        return deeptree.empty(self.path, until, folders_only=True)

    def remove(self) -> bool:
        """Remove it; return whether it is gone."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)
        return not os.path.exists(self.path)

    def ids(self) -> list[int]:
        """Return what the kernel calls it, and those below it that were found."""
        found = []
        for folder in _walk(self.path):
            with contextlib.suppress(OSError):
                found.append(os.stat(folder).st_ino)
        return found

    def kill(self) -> None:
        """Kill every process in it at once, those that are being forked too (cgroup.kill, Linux 5.14)."""
        with contextlib.suppress(OSError), open(f"{self.path}/cgroup.kill", "w", encoding="ascii") as file:
            file.write("1")

    def freeze(self, still: bool) -> None:
        """Let no process in it run, or let them run again (cgroup.freeze); SIGKILL ends them all the same."""
        with contextlib.suppress(OSError), open(f"{self.path}/cgroup.freeze", "w", encoding="ascii") as file:
            file.write("1" if still else "0")

    def cpu(self) -> float:
        """Return the seconds of CPU time that its processes have used, those that have ended too."""
        with contextlib.suppress(OSError), open(f"{self.path}/cpu.stat", encoding="ascii") as file:
            return int(file.readline().split()[1]) / 1e6  # usage_usec
        return 0.0

    def memory(self) -> Memory | None:
        """Return what memory.events and memory.peak say, of the whole unit where no step is accounted for by itself.

        None where there is no such controller.
        """
        for folder in (self.path, os.path.dirname(self.path)):
            try:
                with open(f"{folder}/memory.events", encoding="ascii") as file:
                    events = dict(line.split() for line in file)
            except OSError:
                continue
            peak = None
            with contextlib.suppress(OSError, ValueError), open(f"{folder}/memory.peak", encoding="ascii") as file:
                peak = int(file.read())
            return Memory(int(events.get("oom_kill", 0)), peak)
        return None


class Tree(NamedTuple):
    """The worker's own cgroup, in which it may make others."""

    path: str

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> "Tree | None":
        """Return it if this process is the main one of a service to which it was delegated, else None."""
        if environ.get("SYSTEMD_EXEC_PID") != str(os.getpid()) or not environ.get("NOTIFY_SOCKET"):
            return None
        path = _of(os.getpid())
        probe = f"{path}/{_PREFIX}0"
        try:
            if os.getxattr(path, "user.delegate") != b"1":  # so systemd marks them
                return None
            os.makedirs(probe, exist_ok=True)
        except OSError:
            return None
        return cls(path) if os.access(f"{probe}/cgroup.kill", os.W_OK) else None

    def pids(self) -> list[int]:
        """Return the processes in it that are in none of the others.  Raises OSError."""
        with open(f"{self.path}/cgroup.procs", encoding="ascii") as file:
            return list(map(int, file.read().split()))

    def holds(self, pid: int) -> bool:
        """Return whether process `pid` is in it or below; also if that would take too long to find out.

        Not by /proc/PID/cgroup alone, which ProtectProc= hides where the process is another user's.
        """
        if found := _of(pid):
            return f"{found}/".startswith(f"{self.path}/")
        seen = 0
        for folder in _walk(self.path):
            seen += 1
            with contextlib.suppress(OSError), open(f"{folder}/cgroup.procs", encoding="ascii") as file:
                if pid in map(int, file.read().split()):
                    return True
        return seen >= _LOOK_AT_MOST

    def make(self, slot: int) -> Group:
        """Return the cgroup of a slot, which is there then.  Raises OSError."""
        group = Group(f"{self.path}/{_PREFIX}{slot}")
        os.makedirs(group.path, exist_ok=True)
        group.limit()
        return group

    def others(self) -> Iterator[tuple[str, Group]]:
        """Yield the cgroups below it, by name; of very many only the first."""
        with os.scandir(self.path) as entries:
            names = [entry.name for entry in itertools.islice(entries, _ENTRIES_MAX) if entry.is_dir()]
        for name in names:
            yield name, Group(f"{self.path}/{name}")

    def groups(self) -> Iterator[tuple[int, Group]]:
        """Yield those that are there, by slot."""
        for name in os.listdir(self.path):
            number = name.removeprefix(_PREFIX)
            if number != name and number.isdecimal():
                yield int(number), Group(f"{self.path}/{name}")


def _walk(path: str) -> Iterator[str]:
    """Yield a cgroup's folder and those below it, the nearest first; of very many only the first.

    A step may make as many as it likes: the worker looks at some, and what is in the others is killed with them.
    """
    folders = deque([path])
    for _ in range(_LOOK_AT_MOST):
        if not folders:
            return
        folder = folders.popleft()
        yield folder
        try:
            if os.stat(folder).st_nlink == 2:  # it has none below it
                continue
            with os.scandir(folder) as entries:
                folders += [entry.path for entry in itertools.islice(entries, _ENTRIES_MAX) if entry.is_dir()]
        except OSError:
            continue  # it has just been removed


def _of(pid: int) -> str:
    """Return the folder of a process's cgroup in the unified hierarchy; empty if there is none."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            found = [line[3:].rstrip("\n") for line in file if line.startswith("0::")]
    except OSError:
        return ""
    return ROOT + found[0] if found else ""
