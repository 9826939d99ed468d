"""Who asks at the control socket: a person, or a program that the worker itself has started.

A grant of budget and a settlement are a person's word.  A step, often a language model with a shell, must not raise
its own limit.  The boundary is the unit's cgroup, or the worker's descendants where it has none of its own; within
one user it stops honest programs, and none that is out to break it.
"""

import os

from worker import process
from worker.cgroup import Tree


def is_ours(pid: int, tree: Tree | None) -> bool:
    """Return whether process `pid`, the peer of a connection, is below us, or can no longer be told from one that is.

    `tree`: the unit's cgroup.  0 stands for a process that cannot be seen from here, which is none of ours.
    """
    if pid == 0:
        return False
    try:
        watched = os.pidfd_open(pid)
    except OSError:
        return True  # it has ended: whose it was cannot be found out
    try:
        below = _descends(pid) if tree is None else tree.holds(pid)
        return below or process.has_ended(watched)
    finally:
        os.close(watched)


def _descends(pid: int) -> bool:
    me = os.getpid()
    while pid > 1:
        pid = process.parent_of(pid)
        if pid == me:
            return True
    return False
