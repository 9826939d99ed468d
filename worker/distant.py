"""Paths on file systems that another program or another machine serves, and that may never answer.

A stat(2) there can wait without end, and so would the loop.  Such a path is looked at by a child first, with a limit.
"""

import contextlib
import errno
import os
import select
import signal
from collections.abc import Collection, Iterator

from worker import clock, mounts, process, textfile
from worker.errors import ConfigError, Mark, Problem

# What a slow server may take, while the loop waits.
WITHIN = 5.0
# One that does not answer is not asked again so soon.
_AGAIN = 30.0
_LINKS_MAX = 40  # as path_resolution(7)
_LOOK = '[ -e "$1" ]; :'
# So that nobody takes the child for a step's; see process.family.
_ENV = {"PATH": process.DEFAULT_PATH, os.fsdecode(process.ERRAND): "look"}
SILENT = "its file system does not answer"

_silent_until: dict[str, float] = {}  # by mount point; one for the process, as the mounts are


def answers(path: str) -> bool:
    """Return whether the file system of the whole `path` answers in time; one on a local disk is not asked."""
    mount = mount_on_the_way(path, set(_points()))
    if mount is None:
        return True
    if clock.monotonic() < _silent_until.get(mount, 0.0):
        return False
    if _look(path):
        return True
    _silent_until[mount] = clock.monotonic() + _AGAIN
    return False


def silent() -> frozenset[str]:
    """Return the mount points in `/` whose file systems do not answer in time."""
    return frozenset(point for point in _points() if point.count("/") == 1 and not answers(point))


def below(folder: str) -> list[str]:
    """Return the mount points below a folder whose file systems may never answer; nothing on them is touched."""
    inside = os.path.realpath(folder).rstrip("/") + "/"
    return [point for point in _points() if point.startswith(inside)]


def is_silence(exc: ConfigError) -> bool:
    """Return whether nothing is wrong but file systems that do not answer now."""
    return bool(exc.problems) and all(SILENT in problem.what for problem in exc.problems)


def ask(path: str) -> None:
    """Raise OSError if the file system of `path` does not answer in time."""
    if not answers(path):
        raise OSError(errno.ETIMEDOUT, SILENT)


def read(path: str, most: int, named_at: Mark | None) -> str:
    """Return what textfile.read does; raises ConfigError, too, if the file system does not answer in time."""
    if not answers(path):
        raise ConfigError([Problem(named_at or Mark(path), f"{path!r} cannot be read: {SILENT}", "mount it anew")])
    return textfile.read(path, most, named_at)


def _look(path: str) -> bool:
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        pid = process.launch("/bin/sh", ["sh", "-c", _LOOK, "sh", path], _ENV, "/", null, null)
    except process.SpawnError:
        return True  # nothing is known
    finally:
        os.close(null)
    fd = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        ended = bool(poll.poll(WITHIN * 1000))
        if not ended:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    finally:
        os.close(fd)
    with contextlib.suppress(ChildProcessError):  # one that cannot even be killed is collected by the loop
        os.waitpid(pid, 0 if ended else os.WNOHANG)
    return ended


def mount_on_the_way(path: str, points: Collection[str]) -> str | None:
    """Return the first of these mount points on the way along the whole `path`; nothing on it is touched."""
    if not points:
        return None
    here, left, links = "/", path.split("/"), 0
    while left:
        name, left = left[0], left[1:]
        if name in ("", "."):
            continue
        here = os.path.dirname(here) if name == ".." else os.path.join(here, name)
        if here in points:
            return here
        try:
            target = os.readlink(here)
        except OSError:
            continue
        links += 1
        if links > _LINKS_MAX:
            return None
        left = target.split("/") + left
        here = "/" if target.startswith("/") else os.path.dirname(here)
    return None


def _points() -> Iterator[str]:
    for point, kind in mounts.listed():
        if kind == "autofs" or not mounts.shares_memory(kind):
            yield point
