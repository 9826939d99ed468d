"""The warden: whoever is in the unit's cgroup, and in no running step's, is ended.

A step's processes stay in its cgroup unless one of them writes itself into another: the worker's, the sentinel's, that
of a slot which is free, one that it has made.  There it would outlive its step, and be taken for another's.
"""

import math
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping

from worker import clock, process, sentinel
from worker.attempt import Attempt
from worker.cgroup import Group, Tree
from worker.companions import Companion
from worker.journal import NOTICE, Journal
from worker.sender import lineage

# A look takes some hundred microseconds, and many steps may end within a second.
_EVERY = 0.5
# How long cgroups that a step has left are removed at a time, in seconds; there may be very many.
_TIDYING = 0.05
# systemd runs the unit's hooks there, as its own children.
_HOOKS = ".control"
_NAMED = 8


class Warden(Companion):
    """Looks once a step has ended, and until there was nobody to be ended."""

    def __init__(
        self,
        tree: Tree | None,
        sentinel_pid: int,
        bystanders: Collection[int],
        running: Mapping[str, Attempt],
        errands: Callable[[], Collection[int]],
        journal: Journal,
    ) -> None:
        """`tree`: the unit's cgroup, None where steps have none of their own.

        `bystanders` were in it before this worker had started anything; `errands` returns those that run for it.
        """
        self._tree = tree
        self._sentinel = sentinel_pid
        self._bystanders = bystanders
        self._running = running
        self._errands = errands
        self._journal = journal
        self._due = False
        self._look_at = -math.inf

    def begin(self) -> None:
        self._due = True  # those of an earlier worker's steps

    def changed(self) -> None:
        self._due = True

    def due_at(self) -> float:
        return self._look_at if self._due and self._tree is not None else math.inf

    def keep(self, now: float) -> None:
        if self._tree is not None and self._due and now >= self._look_at:
            self._due = self._look(self._tree)
            self._look_at = clock.monotonic() + _EVERY

    def conclude(self, finished: str) -> None:
        if self._tree is not None:
            self._look(self._tree)

    def _look(self, tree: Tree) -> bool:
        """End whom there is to be ended; return whether one should look again."""
        ended = [*self._beside_the_worker(tree), *self._beside_the_sentinel(tree)]
        left = False
        for name, group in tree.others():
            if name == sentinel.NAME:
                continue
            strays = self._strays_among_hooks(group) if name == _HOOKS else self._strays_in(name, group)
            ended += strays
            left = left or (name != _HOOKS and not self._is_running(name) and not _tidied(name, group))
        if ended:
            names = ", ".join(map(str, process.look_at(ended[:_NAMED])))
            process.send_all(ended, signal.SIGKILL)
            text = f"in no cgroup of a running step; ended: {names or 'processes that are gone'}"
            self._journal.event("leftovers", text, priority=NOTICE)
        return left or bool(ended)

    def _beside_the_worker(self, tree: Tree) -> Iterator[int]:
        """Yield those in the unit's own cgroup who are not ours; our leaders pass through there."""
        leaders = {attempt.leader for attempt in self._running.values()}
        known = {os.getpid(), self._sentinel, *leaders, *self._bystanders}
        ours = {*self._bystanders, *self._errands()}
        for pid in tree.pids():
            if pid not in known and ours.isdisjoint(lineage(pid)) and not self._is_errands(pid):
                yield pid

    def _is_errands(self, pid: int) -> bool:
        """Return whether one that has lost its parent may be of an errand that is under way, which ends it then."""
        entries = process.environment_of(pid) if self._errands() else ()
        return any(entry.startswith(process.ERRAND) for entry in entries)

    def _beside_the_sentinel(self, tree: Tree) -> list[int]:
        found = Group(f"{tree.path}/{sentinel.NAME}").pids() if self._sentinel else []
        return [pid for pid in found if pid != self._sentinel]

    def _strays_in(self, name: str, group: Group) -> list[int]:
        """Kill all that is in a cgroup which is no running step's; return what that was."""
        if self._is_running(name) or not group.populated():
            return []
        found = group.pids()
        group.kill()
        return found

    def _strays_among_hooks(self, group: Group) -> list[int]:
        """Return those who descend from the worker or a step; the unit's hooks are children of systemd."""
        ours = {os.getpid(), *(attempt.leader for attempt in self._running.values())}
        return [pid for pid in group.pids() if not ours.isdisjoint(lineage(pid))]

    def _is_running(self, name: str) -> bool:
        return name in {f"slot-{attempt.slot.number}" for attempt in self._running.values()}


def _tidied(name: str, group: Group) -> bool:
    """Remove cgroups below one that nobody is in, and itself if it is no slot's; return whether that is done."""
    if group.is_plain() and name.startswith("slot-"):
        return True
    if not group.tidy(clock.monotonic() + _TIDYING):
        return False
    return name.startswith("slot-") or group.remove()
