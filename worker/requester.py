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
        below = _descends(pid) if tree is None else _is_below(pid, tree)
        return below or process.has_ended(watched)
    finally:
        os.close(watched)


def _is_below(pid: int, tree: Tree) -> bool:
    """Return whether the process is in the unit's cgroup or one below it.

    Not by /proc/PID/cgroup, which ProtectProc= hides where the process is another user's.
    """
    for folder, _folders, _files in os.walk(tree.path):
        try:
            with open(f"{folder}/cgroup.procs", encoding="ascii") as file:
                if pid in map(int, file.read().split()):
                    return True
        except OSError:
            continue  # it has just been removed
    return False


def _descends(pid: int) -> bool:
    me = os.getpid()
    while pid > 1:
        pid = process.parent_of(pid)
        if pid == me:
            return True
    return False
