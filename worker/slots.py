"""The slots: one for each step at a time; those in which steps have outlived the last worker are taken over.

Where systemd has delegated the unit's cgroup each slot has a shelter, and a sentinel is posted; elsewhere what is left
of a dead worker's steps is ended by the next one.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from worker import clock, deeptree, errands, process, requester, sentinel, shelter
from worker.cgroup import Tree
from worker.folder import Places
from worker.shelter import Shelter
from worker.signs import NotifySocket
from worker.slot import Means, Slot
from worker.systemd import Notifier


class Slots:
    """Those that are free, and what the last worker has left in others.

    `continuous`: that worker kept memos here, and none is unreadable, so an attempt without one never began.
    `unseen_since`: when it last looked around (monotonic clock).
    """

    def __init__(
        self,
        places: Places,
        notifier: Notifier,
        tree: Tree | None,
        stored: Mapping[str, int],
        same_place: bool,
        means: Means | None = None,
    ) -> None:
        """`stored`: what systemd has kept for us; `same_place`: the last worker's runtime folder was ours.

        Raises OSError.
        """
        self.live = tree is not None
        self._inherited = process.inherited()
        self.continuous = False
        self.unseen_since = clock.monotonic()
        self._places = places
        self._notifier = notifier
        self.tree = tree
        self.sentinel = 0  # its pid
        self.bystanders: Collection[int] = ()  # who is in the unit's own cgroup, and was before we started anything
        self._stored = dict(stored)
        self._means = means or Means.of(places, {}, lambda _text: None)
        self._used: set[int] = set()
        self._met: set[str] = set()  # what their sockets are in the runtime folder
        self._free: list[Slot] = []
        self._seen = -1
        if tree is not None:
            _kill_latecomers(tree, places)
            self.bystanders = frozenset(tree.pids()) - {os.getpid()}
            posted = sentinel.post(tree, notifier, self._stored.pop(sentinel.NAME, None))
            self._sentinel, self.sentinel = posted
            self._look_back(same_place, tree)
        else:
            with contextlib.suppress(OSError):
                os.unlink(places.seen)  # we keep no memos

    def is_ours(self, pid: int) -> bool:
        """Return whether the process that asks for something is a step's, or another program of ours."""
        return requester.is_ours(pid, self.tree)

    def _look_back(self, same_place: bool, tree: Tree) -> None:
        with contextlib.suppress(OSError, ValueError), open(self._places.seen, encoding="utf-8") as file:
            self.unseen_since = min(float(file.readline()), clock.monotonic())
            self.continuous = same_place and file.read() == self._places.run and self._is_whole(tree)
        self._seen = os.open(self._places.seen, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        said = b"%20.6f\n%s" % (clock.monotonic(), self._places.run.encode())
        os.ftruncate(self._seen, os.pwrite(self._seen, said, 0))

    def _is_whole(self, tree: Tree) -> bool:
        """Return whether each slot with a trace of an attempt has a memo of it that can be read."""
        memos = dict(shelter.memos(self._places))
        slots = {number for number, group in tree.groups() if group.pids()}
        slots |= {slot for kind, slot, _path in shelter.traces(self._places) if kind == "report"}
        return None not in memos.values() and slots <= memos.keys()

    def looked(self, now: float) -> None:
        """Note that the worker has looked around, for the next one."""
        if self._seen >= 0:
            os.pwrite(self._seen, b"%20.6f" % now, 0)

    def take(self) -> Slot:
        """Return a slot that is free.  Raises OSError."""
        for slot in reversed(self._free):
            if slot.shelter is None or not slot.shelter.group.populated():
                self._free.remove(slot)
                return slot
            slot.shelter.group.kill()  # somebody has put himself there
        number = next(n for n in range(len(self._used) + 1) if n not in self._used)
        socket = NotifySocket.in_folder(self._places.notify(number, os.urandom(8).hex()))
        home = None
        if self.tree is not None:
            try:
                home = Shelter.make(self.tree, self._notifier, self._places, number, socket.fileno())
            except OSError:
                socket.close()
                raise
        self._used.add(number)
        self._met.add(_entry(socket, self._places))
        return Slot(number, self._places, socket, self._means, home, self._inherited)

    def give(self, slot: Slot) -> None:
        """Take a slot back."""
        self._free.append(slot)

    # -- what the last worker has left

    def left(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the slots with an attempt of the last worker, each with its memo."""
        for number, memo in shelter.memos(self._places) if self.live else ():
            if memo is not None:
                yield number, memo

    def take_over(self, number: int, notify_path: str | None) -> Slot:
        """Return a slot in which a step has outlived the last worker.

        `notify_path`: where its notify socket is, as that worker's memo says; None if it was one of an earlier version.
        Raises LookupError if systemd has not kept all of its descriptors, and OSError.
        """
        assert self.tree is not None
        names = shelter.names(number)
        stdout, stderr, notify = (self._stored[name] for name in names)
        home = Shelter(self.tree.make(number), self._notifier, self._places, number, stdout, stderr)
        for name in names:
            del self._stored[name]
        self._used.add(number)
        socket = NotifySocket(notify_path or self._places.notify(number), notify)
        self._met.add(_entry(socket, self._places))
        return Slot(number, self._places, socket, self._means, home)

    def end_others(self, going_on: Collection[int], wait: Callable[[float], None]) -> list[str]:
        """End every step that is not in one of the slots `going_on`; return the names of its processes."""
        names: list[str] = []
        for name, fd in self._stored.items():
            os.close(fd)
            self._notifier.discard(name)
        self._stored.clear()
        for number, group in self.tree.groups() if self.tree is not None else ():
            if number in going_on:
                continue
            names += map(str, process.look_at(group.pids()))
            while group.populated():
                group.kill()
                wait(clock.monotonic() + process.LOOK_AGAIN)
        for _kind, number, path in shelter.traces(self._places) if self.live else ():
            if number not in self._used:  # those of ours are open
                os.unlink(path)
        with contextlib.suppress(OSError):
            for name in os.listdir(self._places.runtime):
                if name.startswith("notify.") and name not in self._met:
                    deeptree.remove(f"{self._places.runtime}/{name}")
            self._means.vault.clear_others(self._used)
        return names

    # -- the end

    def close(self) -> None:
        """Remove what the free slots have."""
        for slot in self._free:
            slot.close()
        self._free.clear()
        if self._seen >= 0:
            os.close(self._seen)
            self._seen = -1


def _entry(socket: NotifySocket, places: Places) -> str:
    """Return the name of what is in the runtime folder for a notify socket: its folder, or itself."""
    return os.path.relpath(socket.path, places.runtime).split("/")[0]


def _kill_latecomers(tree: Tree, places: Places) -> None:
    """Kill a leader that the last worker has just started and that has not come to its cgroup yet, and its commands.

    What else is in the unit's own cgroup (a shell that called exec has left it, or ExecStartPre=) is no step's.
    """
    steps, owner = os.fsencode(f"STATE_DIRECTORY={places.states}/"), os.fsencode(errands.owner(places.root))
    us = process.command_line(os.getpid())
    for pid in tree.pids():
        if pid == os.getpid():
            continue
        marked = any(entry.startswith(steps) or entry == owner for entry in process.environment_of(pid))
        # One that was forked and has not come to execve(2) yet looks like the worker itself.
        if marked or process.command_line(pid) == us:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
