"""The confinement of a step: which files it may read and write, whatever else the unit's user may (landlock.py).

Written: the folder in which it works with the checkout around that, its own folder, its home, scratch space, and what
the list opens.  Neither read nor written: the run's own files (ledger, checkpoint, sockets, what the next worker is to
know), credentials, the files of other agents.  All else can be read and run, though the folders that lead to what is
closed cannot be listed.
"""

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from worker import distant, gitfolders, mounts, process
from worker.errors import Problem
from worker.folder import Places
from worker.task import Task, commands

if TYPE_CHECKING:
    from worker.landlock import Ruleset

UNIT = "AGENT_UNIT"  # in the environment of a worker that is our unit's
_CREDENTIALS = "/run/credentials"
_SCRATCH = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue")
_DEVICES = ("/dev", "/proc")  # what is there may be written; what of it, the kernel knows
# Where systemd has the folders of a unit, and what those of an agent's are called there.
_UNITS = ("/var/lib", "/var/cache", "/run")
_AGENTS = re.compile(r"agent(@.*|-alert|-machines|-supervise.*)?")
# What is in the state folder for steps to read; hidden files are those that people have put there.
_READABLE = ("out", "log", "steps", "work")
_OURS = re.compile(r"\.(restore|writable|.*\.new)")
_KEPT = 128  # rulesets
_TOUCHES = "holds the agent's own files, or lies among them"
_HINT = "use another folder, or 'confine: no' for this task"
# Programs that build a sandbox with mounts of their own, which Landlock refuses to everybody inside.
_MOUNTS = re.compile(r"\b(bwrap|podman|buildah|flatpak|firejail|nsjail|unshare|fuse-overlayfs|rootlesskit)\b")


class Own(NamedTuple):
    """What belongs to one step alone: folders to write in, and folders that hold what it was given to read."""

    written: tuple[str, ...]
    given: tuple[str, ...]


class Confinement:
    """Makes rulesets, and keeps them for the next program that needs the same."""

    def __init__(self, places: Places, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
        self._places = places
        self._default = UNIT in environ
        self._warn = warn
        self._made: dict[object, int] = {}
        self._closed: frozenset[str] = frozenset()
        self._around: list[str] = []  # the folders that lead to what is closed, and when they were last changed
        self._looked: tuple[int, ...] = ()
        self._mounts = mounts.Changes()
        self._absent: bool | None = None

    def ruleset(self, task: Task, cwd: str, env: Mapping[str, str], own: Own) -> int | None:
        """Return the descriptor of the ruleset for a program of `task`; None for one that is not confined.

        Raises process.SpawnError for a folder that cannot be opened to a confined step, and OSError.
        """
        if not wanted(task, self._default) or self._is_absent():
            return None
        written = tuple(_grants(task, cwd, env, own))
        self._look()
        opened = tuple((_identity(path), needed) for path, needed in written)
        key = self._looked, opened, tuple(map(_identity, own.given))  # not the paths: a slot's folder is used again
        known = self._made.pop(key, None)
        if known is None:
            if len(self._made) >= _KEPT:
                os.close(self._made.pop(next(iter(self._made))))
            known = self._make(written, own)
        self._made[key] = known  # the last to be given up
        return known

    def _is_absent(self) -> bool:
        if self._absent is None:
            from worker import landlock  # ctypes: not before the worker is ready

            self._absent = landlock.version() == 0
            if self._absent:
                self._warn("this kernel has no Landlock, or refuses it: steps are not confined against one another")
        return self._absent

    def _look(self) -> None:
        """See what is closed, if anything around it has changed since."""
        mounted = self._mounts.changed()
        if mounted or not self._closed or self._looked[1:] != tuple(map(_changed, self._around)):
            self._closed = _closed(self._places)
            self._around = sorted({folder for path in self._closed for folder in _above(path)})
            self._looked = (self._mounts.changes, *map(_changed, self._around))

    def _make(self, written: Collection[tuple[str, bool]], own: Own) -> int:
        from worker import landlock

        rules, closed, root = landlock.Ruleset(), self._closed, os.path.realpath(self._places.root)
        try:
            silent = distant.silent()
            for path in (*_around("/", closed), *_of_state(root), *own.given):
                if path not in silent:
                    _allow(rules, path, landlock.READ)
            for path in _DEVICES:
                _allow(rules, path, landlock.REWRITE)
            for path in (found for folder in _SCRATCH for found in _open(folder, closed)):
                _allow(rules, path, landlock.ALL)
            for path, needed in written:
                with _opened(path) as fd:
                    if fd < 0:
                        continue
                    if path in own.written or not _touches(os.readlink(f"/proc/self/fd/{fd}"), closed, root):
                        rules.allow(fd, landlock.ALL)
                    elif needed:
                        raise process.SpawnError(f"cannot be confined: '{path}' {_TOUCHES}; {_HINT}")
        except BaseException:
            rules.close()
            raise
        return rules.fd

    def close(self) -> None:
        """Close what is kept."""
        self._mounts.close()
        for fd in self._made.values():
            os.close(fd)
        self._made.clear()


def wanted(task: Task, default: bool) -> bool:
    """Return whether the list has a task confined; `default`: whether one is of which it says nothing."""
    return default if task.confine is None else task.confine.on


def problems(tasks: Iterable[Task], places: Places, default: bool) -> list[Problem]:
    """Return a problem for each folder that no confined step can be given to write, since the run's files are there."""
    closed, root = _closed(places), os.path.realpath(places.root)
    found = []
    for task in tasks:
        if not wanted(task, default):
            continue
        named = [("cwd", path) for path in (task.cwd,) if path is not None]
        named += [("confine: write", path) for path in (task.confine.write if task.confine is not None else ())]
        for key, path in named:
            if distant.answers(path) and _touches(os.path.realpath(path), closed, root):
                mark = task.cwd_mark if key == "cwd" and task.cwd_mark else task.mark
                found.append(Problem(mark, f"{key}: '{path}' {_TOUCHES}", _HINT))
    if found:
        from worker import landlock

        return found if landlock.version() else []
    return found


def describe(tasks: Collection[Task], default: bool) -> list[str]:
    """Return what a person should know of the confinement of these tasks here; nothing where none is asked for."""
    confined = [task for task in tasks if wanted(task, default)]
    if not confined and not default:
        return []
    from worker import landlock

    abi = landlock.version()
    if abi == 0:
        return ["confine: this kernel has no Landlock, or refuses it: no step is confined"]
    free = [task.id for task in tasks if not wanted(task, default)]
    said = [f"confine: by Landlock, version {abi}; not confined: {', '.join(free) if free else 'none'}"]
    if open_still := landlock.gaps(abi):
        said.append(f"confine: under this kernel a confined step can still {' and '.join(open_still)} of others'")
    for task in confined:
        texts = (text for command in commands(task) for text in command)
        if found := next((match[0] for text in texts if (match := _MOUNTS.search(text))), None):
            what = f"confine: task '{task.id}' runs {found}, which mounts, and no confined step can"
            said.append(f"{what}; if it needs that, add 'confine: no' to the task")
    return said


def _grants(task: Task, cwd: str, env: Mapping[str, str], own: Own) -> Iterator[tuple[str, bool]]:
    """Yield what a step may write, and whether it cannot do without."""
    for path in own.written:
        yield path, True
    real = os.path.realpath(cwd)
    yield real, True
    for path in gitfolders.of(real):
        yield path, False
    more = [path for name in ("HOME", "TMPDIR") if (path := env.get(name, "")).startswith("/")]
    if task.expect is not None and task.expect.file and os.path.isabs(task.expect.file):
        more.append(os.path.dirname(task.expect.file))
    for path in more:
        if path not in own.written and distant.answers(path):
            yield path, False
    for path in task.confine.write if task.confine is not None else ():
        if not distant.answers(path):
            raise process.SpawnError(f"cannot open '{path}' to it: {distant.SILENT}")
        yield path, True


def _closed(places: Places) -> frozenset[str]:
    """Return the folders of which nothing is open to a step but what is its own."""
    closed = {os.path.realpath(path) for path in (places.root, places.runtime)} | {_CREDENTIALS}
    if places.secrets:
        closed.add(os.path.realpath(places.secrets))
    for folder in _UNITS:
        with contextlib.suppress(OSError):
            closed.update(f"{folder}/{name}" for name in os.listdir(folder) if _AGENTS.fullmatch(name))
    return frozenset(closed)


def _above(path: str) -> Iterator[str]:
    while path != "/":
        path = os.path.dirname(path)
        yield path


def _around(folder: str, closed: Collection[str]) -> Iterator[str]:
    """Yield paths in `folder` that have between them all that is below it, but for what is closed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.path in closed or entry.is_symlink():
                continue
            if any(path.startswith(f"{entry.path}/") for path in closed):
                yield from _around(entry.path, closed)
            else:
                yield entry.path


def _open(folder: str, closed: Collection[str]) -> Iterator[str]:
    """Yield the folder itself, or what is in it if there is something closed among that."""
    if any(path.startswith(f"{folder}/") for path in closed):
        yield from _around(folder, closed)
    else:
        yield folder


def _of_state(root: str) -> Iterator[str]:
    """Yield what in the state folder may be read."""
    with contextlib.suppress(OSError):
        for name in os.listdir(root):
            if name in _READABLE or (name.startswith(".") and not _OURS.fullmatch(name)):
                yield f"{root}/{name}"


def _touches(path: str, closed: Collection[str], root: str) -> bool:
    """Return whether to write below `path` were to write into something closed."""
    if path == f"{root}/work" or path.startswith(f"{root}/work/"):
        return False
    above, below = f"{path.rstrip('/')}/", f"{path}/"
    return any(below.startswith(f"{other}/") or other.startswith(above) for other in closed)


def _allow(rules: "Ruleset", path: str, accesses: int) -> None:
    with _opened(path) as fd:
        if fd >= 0:
            rules.allow(fd, accesses)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a path for a rule; -1 for what is not there."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError, NotADirectoryError):
        fd = -1
    try:
        yield fd
    finally:
        if fd >= 0:
            os.close(fd)


def _identity(path: str) -> tuple[int, int] | str:
    # A ruleset holds its inodes, so none of them has the number of another one meanwhile.
    try:
        found = os.stat(path)
    except OSError:
        return path
    return found.st_dev, found.st_ino


def _changed(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
