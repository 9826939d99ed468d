"""The sentinel: a process of the unit that ends the steps once nobody is going to look after them.

It waits for the end of a pipe of which only the worker and the unit's fd store hold the other end.  systemd keeps that
over every restart, and closes it when the service is stopped or is given up, also while no worker lives who could do
something.
"""

import contextlib
import os
import select
import time
from collections.abc import Sequence
from typing import NamedTuple

from worker import process, scarcity
from worker.cgroup import Group, Tree
from worker.systemd import Notifier

NAME = "sentinel"
_PATIENCE = 20.0  # seconds; a start of the unit may take longer
_SCRIPT = os.path.join(os.path.dirname(__file__), "sentinel.sh")


class Posted(NamedTuple):
    """A sentinel: our end of its pipe, to be kept open for as long as we live, and its pid, 0 if nobody knows it."""

    pipe: int
    pid: int


def post(tree: Tree, notifier: Notifier, held: int | None) -> Posted:
    """Let there be a sentinel, alone in its cgroup.

    `held` is the end of a pipe of one that an earlier worker has posted.  Raises OSError.
    """
    group = Group(f"{tree.path}/{NAME}")
    if held is not None:
        found = group.pids()
        if len(found) <= 1 and _has_reader(held):
            return Posted(held, found[0] if found else 0)  # it may be on its way to its cgroup
        group.kill()  # one of them, if it lives, must not see the end of its pipe
        os.close(held)
        notifier.discard(NAME)
    os.makedirs(group.path, exist_ok=True)
    group.kill()
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        notifier.store(NAME, write)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            pid = _launch(["sh", _SCRIPT, group.path], null, read)
        finally:
            os.close(null)
    except process.SpawnError as exc:
        raise OSError(scarcity.code(exc), str(exc)) from exc
    finally:
        os.close(read)
    return Posted(write, pid)


def _launch(argv: Sequence[str], null: int, read: int) -> int:
    """Start it and return its pid; what the machine is short of is waited for, not for as long as a start may take."""
    gives_up = time.monotonic() + _PATIENCE
    while True:
        try:
            return process.launch("/bin/sh", argv, {"PATH": process.DEFAULT_PATH}, "/", null, null, stdin=read)
        except process.SpawnError as exc:
            if not scarcity.is_scarce(exc) or time.monotonic() >= gives_up:
                raise
            time.sleep(scarcity.RETRY)


def _has_reader(write: int) -> bool:
    poll = select.poll()
    poll.register(write, 0)
    with contextlib.suppress(OSError):
        return not any(event & (select.POLLERR | select.POLLNVAL) for _fd, event in poll.poll(0))
    return False
