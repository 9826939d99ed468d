"""The sentinel: a process of the unit that ends the steps once nobody is going to look after them.

It waits for the end of a pipe of which only the worker and the unit's fd store hold the other end.  systemd keeps that
over every restart, and closes it when the service is stopped or is given up, also while no worker lives who could do
something.
"""

import contextlib
import os
import select

from worker import process
from worker.cgroup import Tree
from worker.systemd import Notifier

NAME = "sentinel"
_SCRIPT = os.path.join(os.path.dirname(__file__), "sentinel.sh")


def post(tree: Tree, notifier: Notifier, held: int | None) -> int:
    """Let there be a sentinel; return our end of its pipe, to be kept open for as long as we live.

    `held` is that of one that an earlier worker has posted.  Raises OSError.
    """
    if held is not None:
        if _has_reader(held):
            return held
        os.close(held)
        notifier.discard(NAME)
    group = f"{tree.path}/{NAME}"
    os.makedirs(group, exist_ok=True)
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        notifier.store(NAME, write)
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            process.launch(
                "/bin/sh", ["sh", _SCRIPT, group], {"PATH": process.DEFAULT_PATH}, "/", null, null, stdin=read
            )
        finally:
            os.close(null)
    except process.SpawnError as exc:
        raise OSError(str(exc)) from exc
    finally:
        os.close(read)
    return write


def _has_reader(write: int) -> bool:
    poll = select.poll()
    poll.register(write, 0)
    with contextlib.suppress(OSError):
        return not any(event & (select.POLLERR | select.POLLNVAL) for _fd, event in poll.poll(0))
    return False
