"""The file that keeps the machine awake: there, and fresh, while there is work left, waits included.

A sandbox that stops when nobody needs it looks at a file.  It is written anew from the loop that drives the steps and
from nowhere else, so that it grows old when the worker hangs; it is nobody's heartbeat.  It is gone when the run is
done or has failed, when the worker is told to stop, and when the unit is down for good; a worker that systemd
replaces leaves it to the next one.

STATE/keep-awake has its path, for whoever is to remove it when the worker cannot (units/hooks.sh, `agentctl alert`).
"""

import contextlib
import errno
import json
import math
import os
import pwd
import stat
from collections.abc import Callable

from worker import clock, distant, files
from worker.companions import Companion
from worker.errors import AgentError, Mark
from worker.folder import Places
from worker.journal import Journal

# Written so often; whoever looks may call it stale after the other.
EVERY, STALE = 15.0, 60.0
# What is longer was written by somebody else, for something else.
_LONGEST = 4096
_RECORD = "keep-awake"

Wanted = tuple[str, Mark] | None


def home(user: str | None = None) -> str:
    """Return the home folder of a user, by default ours, as the user database has it, which a unit's HOME= does not
    change; where it does not know us, it is what the environment says.
    """
    try:
        return (pwd.getpwnam(user) if user else pwd.getpwuid(os.geteuid())).pw_dir
    except KeyError:
        return os.environ.get("HOME", "/")


def resolve(path: str, user: str | None = None) -> str:
    """Return the path that `keep_awake:` stands for if the worker runs as `user`."""
    return home(user) + path[1:] if path.startswith("~/") else path


def remove(root: str) -> None:
    """Remove the file that the state folder `root` says is there, if it is.  Raises AgentError if it cannot be."""
    path = _recorded(root)
    if path is not None:
        _unlink(path)
        with contextlib.suppress(OSError):
            os.unlink(f"{root}/{_RECORD}")


class Awake(Companion):
    """A companion of the run; `wanted` returns the path in force, and where it is asked for."""

    def __init__(self, wanted: Callable[[], Wanted], places: Places, journal: Journal) -> None:
        self.wanted = wanted
        self._places = places
        self._journal = journal
        self._path = _recorded(places.root)  # where it is
        self._due_at = -math.inf
        self._fails = False

    def begin(self) -> None:
        """Let the file be there from now on."""
        self._due_at = -math.inf
        self.keep(clock.monotonic())

    def due_at(self) -> float:
        return self._due_at if self.wanted() or self._path else math.inf

    def keep(self, now: float) -> None:
        """Write it if that is due.  Whoever has to wait before it is known whether there is work calls this as well."""
        if now < self.due_at():
            return
        wanted = self.wanted()
        path = resolve(wanted[0]) if wanted else None
        if self._path not in (None, path):
            self._remove()
        if path is not None:
            self._write(path)
        self._due_at = clock.monotonic() + EVERY

    def conclude(self, finished: str) -> None:
        if finished != "left":
            self.close()

    def close(self) -> None:
        """Let it be gone, also if a worker before us has left it; only `begin` brings it back."""
        self._remove()
        self._due_at = math.inf

    def _write(self, path: str) -> None:
        try:
            distant.ask(os.path.dirname(path))
            if self._path is None:
                _refuse_others(path)
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            self._record(path)
            until = clock.stamp(clock.wall() + STALE)
            data = json.dumps({"run": self._places.run, "pid": os.getpid(), "until": until})
            try:
                files.publish(path, f"{data}\n".encode(), mode=0o644)
            except OSError:
                _touch(path)
        except OSError as exc:
            if not self._fails:
                what = f"keep_awake: '{path}' cannot be written: {exc.strerror}"
                self._journal.warning(f"{what}; going on without; {hint(os.path.dirname(path))}")
            self._fails = True
        else:
            self._path = path
            self._fails = False

    def _record(self, path: str) -> None:
        """Say where it is, before it is there.  On a full disk it is said later."""
        if _recorded(self._places.root) != path:
            with contextlib.suppress(OSError):
                files.publish(f"{self._places.root}/{_RECORD}", f"{path}\n".encode(errors="surrogateescape"))

    def _remove(self) -> None:
        path, self._path = self._path, None
        try:
            if path is not None:
                _unlink(path)
            remove(self._places.root)
        except AgentError as exc:
            self._journal.warning(str(exc))


_PATH_MAX = 4096  # limits.h


def _recorded(root: str) -> str | None:
    try:
        with open(files.open_plain(f"{root}/{_RECORD}"), encoding="utf-8", errors="surrogateescape") as file:
            return file.readline(_PATH_MAX).rstrip("\n") or None
    except OSError:
        return None


def _unlink(path: str) -> None:
    if not os.path.lexists(path):
        return  # a read-only file system would say something else of it
    try:
        os.unlink(path)
    except OSError as exc:
        raise AgentError(f"keep_awake: '{path}' cannot be removed: {exc.strerror}", "remove it") from exc


def _refuse_others(path: str) -> None:
    """Raise OSError if what is there is no such file: one that is, is ours from now on, whoever has made it."""
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LONGEST:
            raise OSError(errno.EEXIST, "something else is there")


def _touch(path: str) -> None:
    """Let it be there and fresh; a full disk has a place for that, or has kept it.  Raises OSError."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))
    os.utime(path)


def nearest(path: str) -> str:
    """Return the folder that has to be written for a file at `path` to be made."""
    folder = os.path.dirname(path)
    while distant.answers(folder) and not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def hint(folder: str) -> str:
    """Return what to do about a folder that the worker may not write."""
    if "INVOCATION_ID" not in os.environ:  # in no unit: nothing to open there
        return "use a path that this user may write"
    return f"make the folder for the user that the agent runs as, then: sudo make install USER=name WORKDIR={folder}"
