"""A shelter: what lets the step in a slot outlive the worker.

Its cgroup; its pipes and its notify socket, of which systemd keeps a copy (the unit's fd store); its exit status, which
a few lines of sh (leader.sh) leave in the runtime folder; and a memo of what the worker knew of the attempt.
A killed worker takes none of them with it, and the next one goes on from there.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from worker import files, points, process
from worker.cgroup import Group, Tree
from worker.folder import Places
from worker.output import CHUNK
from worker.process import Pipes, SpawnError
from worker.systemd import Notifier

_FORMAT = 1
_PAGE = 4096
_LOW = 9  # descriptors up to this are given numbers of their own in a child
_LEADER = os.path.join(os.path.dirname(__file__), "leader.sh")
_REPORT = re.compile(r"pid (\d+)\n(.*?)(?:exit (\d+)\n)?", re.DOTALL)
_BY_SIGNAL = 128


class Report(NamedTuple):
    """What is known of a program: the leader's pid; its exit status (negative: signal), None while there is none."""

    pid: int
    status: int | None = None
    said: str = ""  # by the shell that is the leader


class Shelter:
    """The shelter of one slot."""

    def __init__(self, group: Group, notifier: Notifier, places: Places, slot: int, stdout: int, stderr: int) -> None:
        """Go on with pipes of which these are the ends to read from.  Raises OSError."""
        self.group = group
        self._notifier = notifier
        self._slot = slot
        self.pipes = Pipes(stdout, stderr, kept=True)
        self._places = places
        self._program = 0  # the name of its report
        self._memo = places.memo(slot)
        self._memo_fd = os.open(self._memo, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._memo_fd, 0, _PAGE)  # what comes later needs no space
        except OSError:
            os.close(self._memo_fd)
            raise
        self._saved: dict[str, Any] = {}

    @classmethod
    def make(cls, tree: Tree, notifier: Notifier, places: Places, slot: int, socket: int) -> "Shelter":
        """Make one, of which `socket` is the notify socket.  Raises OSError."""
        group, pipes = tree.make(slot), []
        try:
            pipes += [_new_pipe()]
            pipes += [_new_pipe()]
            shelter = cls(group, notifier, places, slot, *pipes)
        except OSError:
            for fd in pipes:
                os.close(fd)
            raise
        for name, fd in zip(names(slot), (*shelter.pipes[:2], socket), strict=True):
            notifier.replace(name, fd)
        return shelter

    def keep_socket(self, socket: int) -> None:
        """Let the slot's notify socket be this one from now on."""
        self._notifier.replace(names(self._slot)[2], socket)

    def announce(self, memo: Callable[[], Mapping[str, Any]]) -> None:
        """Let the next program have a report of its own, and the next worker know of it, before it is started."""
        before = self._report()
        self._program = time.monotonic_ns()
        self.save(memo())
        points.at("program-announced")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(before)

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, ruleset: int | None = None) -> int:
        """Start `argv` as process.spawn does, in the cgroup and with the pipes of the slot; return its leader's pid.

        Raises SpawnError.
        """
        program = process.find_program(argv[0], env.get("PATH", process.DEFAULT_PATH), cwd)
        if not os.access(program, os.X_OK):
            reason = "Permission denied" if os.path.exists(program) else "No such file or directory"
            raise SpawnError(process.cannot_start(program, cwd, reason))
        words = ["sh", _LEADER, program, *argv[1:]]
        # Opened anew, so that what one program makes of them (O_NONBLOCK) is nothing to the next.
        paths = [f"/proc/self/fd/{fd}" for fd in self.pipes[:2]]
        writes: list[int] = []
        gate, gatekeeper = os.pipe2(os.O_CLOEXEC)
        try:
            for path in paths:
                writes.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
            # Where the leader is confined it could not open these itself.
            writes.append(_high(_writable(self._report())))
            writes.append(_high(_writable(self.group.procs)))
            writes.append(_high(os.dup(gate)))
            return process.launch("/bin/sh", words, env, cwd, writes[0], writes[1], others=writes[2:], ruleset=ruleset)
        finally:
            for fd in (gate, gatekeeper, *writes):  # the program begins: no thread of ours is in its ruleset any more
                os.close(fd)

    def report(self) -> Report | None:
        """Return what the program's leader has left behind; None if it never began."""
        try:
            with open(self._report(), encoding="utf-8", errors="replace") as file:
                found = _REPORT.fullmatch(file.read())
        except OSError:
            return None
        if found is None:
            return None
        pid, said = int(found[1]), found[2]
        if found[3] is None:
            return Report(pid, said=said)
        number = int(found[3]) - _BY_SIGNAL
        # Of SIGINT and SIGPIPE no shell says anything; those who are asked to end by them exit like that, too.
        return Report(pid, -number if said and number in signal.valid_signals() else int(found[3]), said)

    def _report(self) -> str:
        return self._places.report(self._slot, self._program)

    # -- the memo

    def save(self, memo: Mapping[str, Any]) -> None:
        """Let the next worker know this; SIGKILL leaves the old memo or the new one."""
        known = {"format": _FORMAT, "program": self._program, **memo}
        if known == self._saved:  # as a rule: this is asked of every step whenever the worker wakes
            return
        self._saved = known
        data = json.dumps(known).encode() + b"\n"
        if len(data) <= _PAGE:
            os.pwrite(self._memo_fd, data, 0)  # what is left behind the newline of a longer one is not read
            return
        with contextlib.suppress(OSError):  # as on a full disk: the old one stays, without the newest signs of life
            self._replace(data)

    def _replace(self, data: bytes) -> None:
        fd = files.make(f"{self._memo}.new", 0o600, os.O_RDWR)
        files.write_all(fd, data)
        os.rename(f"{self._memo}.new", self._memo)
        os.close(self._memo_fd)
        self._memo_fd = fd

    def resume(self, memo: Mapping[str, Any]) -> None:
        """Let the program that runs be the one of an earlier worker's memo."""
        self._program = memo["program"]

    def forget(self) -> None:
        """Note that no attempt is here any more, and let nobody who was of it write to the next."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._report())
        self._saved = {}
        os.pwrite(self._memo_fd, b"\n", 0)
        for name, fd in zip(names(self._slot), self.pipes[:2], strict=False):
            if not _is_closed(fd):  # somebody who is no longer of the step can still write there
                new = _new_pipe()
                os.dup2(new, fd, inheritable=False)
                os.close(new)
                self._notifier.replace(name, fd)

    def close(self) -> None:
        """Close our ends; everything else stays as it is."""
        for fd in (*self.pipes[:2], self._memo_fd):
            os.close(fd)


def _writable(path: str) -> int:
    """Open a file as a shell's redirection does."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def _high(fd: int) -> int:
    """Return a descriptor for the same file that is above 9; the other one is closed."""
    if fd > _LOW:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOW + 1)
    finally:
        os.close(fd)


def _new_pipe() -> int:
    """Return the end to read from of a pipe that nobody writes to yet; the other one can be opened in /proc/self/fd."""
    read, write = os.pipe2(os.O_CLOEXEC)
    os.close(write)
    os.set_blocking(read, False)
    with contextlib.suppress(OSError):  # room for what is written while no worker reads
        fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, CHUNK)
    return read


def _is_closed(read: int) -> bool:
    """Return whether a pipe is empty, and nobody can write to it."""
    poll = select.poll()
    poll.register(read, select.POLLIN)
    return poll.poll(0) == [(read, select.POLLHUP)]


def names(slot: int) -> tuple[str, str, str]:
    """Return under which names the fd store has a slot's pipes and its notify socket."""
    return f"slot-{slot}.out", f"slot-{slot}.err", f"slot-{slot}.notify"


def traces(places: Places) -> Iterator[tuple[str, int, str]]:
    """Yield the files of the runtime folder that tell of an attempt: "memo" or "report", its slot, the path."""
    for name in os.listdir(places.runtime):
        kind, _, rest = name.partition(".")
        slot = rest.partition(".")[0]
        if kind in ("memo", "report") and slot.isdecimal():
            yield kind, int(slot), f"{places.runtime}/{name}"


def memos(places: Places) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the slots with an attempt that an earlier worker has left, each with its memo, None if that is unusable."""
    for _kind, slot, path in traces(places):
        if path != places.memo(slot):
            continue
        with open(path, "rb") as file:
            line = file.readline()
        if not line.strip(b"\0\n"):
            continue
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        yield slot, found if isinstance(found, dict) and found.get("format") == _FORMAT else None
