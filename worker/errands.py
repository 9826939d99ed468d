"""Errands: commands of the worker's own, beside the steps: a copy, an alert, a ping.

They run while the loop goes on, and nothing waits for them but what must.  One that takes too long is ended with all
that it has started; so are all of them when the worker ends.  What a worker that died has left of them is ended when
the next one begins, or sends out its first, unless its cgroup has been emptied by then.
"""

import contextlib
import math
import os
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from worker import clock, process
from worker.companions import Companion
from worker.events import Events
from worker.signs import printable

# The end of what it prints is kept, for people.
_TAIL = 4 * 1024
_READ, _READS = 64 * 1024, 16  # a pipe holds no more
# What it has left behind may close its pipe so much later.
_GRACE = 1.0
# From then on people are told what the worker waits for at its end.
PATIENT = 2.0
# A worker that is stopped waits at most so long.
HURRY = 5.0
# In the environment of each: of which worker it is, and its name.
_NAME = os.fsdecode(process.ERRAND)
_OWNER = f"{_NAME}_OF"


class Report(NamedTuple):
    """How an errand ended: `status` as for a step, None if nobody knows; the end of its output; seconds."""

    status: int | None
    output: bytes
    took: float
    timed_out: bool

    @property
    def fault(self) -> str:
        """What went wrong, in words with its last line; empty if nothing did."""
        if self.status == 0 and not self.timed_out:
            return ""
        if self.timed_out:
            how = f"took longer than {self.took:.0f}s"
        elif self.status is None or self.status >= 0:
            how = f"exited with status {self.status}"
        else:
            how = f"was killed by signal {-self.status}"
        last = self.output.decode(errors="replace").strip().rpartition("\n")[2]
        return f"{how}: {printable(last[:200])}" if last else how


def owner(root: str) -> str:
    """Return the entry of its environment that tells of which worker, by its state folder, an errand is."""
    return f"{_OWNER}={root}"


def run(argv: Sequence[str], env: Mapping[str, str], cwd: str, timeout: float, keep_output: bool) -> Report:
    """Run one where there is no loop, whose output is ours unless it is kept; its session ends with its time.

    Raises process.SpawnError.
    """
    import subprocess  # not needed while all is well

    pipe = subprocess.PIPE if keep_output else None
    began = clock.monotonic()
    try:
        started = subprocess.Popen(
            argv, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe and subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise process.SpawnError(f"cannot be started: {reason}") from exc
    timed_out, output = False, None
    try:
        output, _ = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        if started.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()
        if started.stdout is not None:
            started.stdout.close()
    return Report(started.returncode, (output or b"")[-_TAIL:], clock.monotonic() - began, timed_out)


class Errand:
    """One that is under way."""

    def __init__(self, name: str, pid: int, pipe: int, gives_up: float, done: Callable[[Report], None]) -> None:
        self.name = name
        self.pid = pid
        self.pipe = pipe
        self.began = clock.monotonic()
        self.gives_up = gives_up
        self.done = done
        self.output = b""
        self.timed_out = False


class Errands(Companion):
    """Those under way, by the pid of their first process."""

    def __init__(self, events: Events, wait: Callable[[float], None], owner: str, leftovers: bool) -> None:
        """`wait` handles the loop's events until a time; `owner`, the state folder, tells ours from others'.

        `leftovers`: the worker before may have left some.
        """
        self._events = events
        self._wait = wait
        self._owner = owner
        self.meanwhile: Callable[[], None] = lambda: None  # what is done while somebody waits for them
        self._leftovers = leftovers
        self._under_way: dict[int, Errand] = {}

    def start(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        timeout: float,
        done: Callable[[Report], None],
    ) -> Errand:
        """Start `argv` in `cwd` with just `env`; `done` is called from the loop once it has ended.

        Raises process.SpawnError.
        """
        self._end_leftovers()
        program = process.find_program(argv[0], env.get("PATH", process.DEFAULT_PATH), cwd)
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(read, False)
        try:
            pid = process.launch(
                program, argv, {**env, _OWNER: self._owner, _NAME: self._mark(name)}, cwd, write, write
            )
        except process.SpawnError:
            os.close(read)
            raise
        finally:
            os.close(write)
        errand = Errand(name, pid, read, clock.monotonic() + timeout, done)
        self._under_way[pid] = errand
        self._events.watch(read, lambda: self._read(errand))
        return errand

    def pids(self) -> Collection[int]:
        """Return the first process of each."""
        return self._under_way.keys()

    def busy(self, name: str) -> bool:
        """Return whether one of that name is under way."""
        return any(errand.name == name for errand in self._under_way.values())

    def on_exits(self, ended: Mapping[int, int]) -> None:
        """Note which of our children have ended; what such an errand has started ends with it."""
        for pid in [pid for pid in self._under_way if pid in ended]:
            errand = self._under_way[pid]
            self._kill(errand)
            self._close(errand, ended[pid])

    def begin(self) -> None:
        self._end_leftovers()

    def due_at(self) -> float:
        """Return when `keep` is to be called (monotonic clock)."""
        return min((errand.gives_up for errand in self._under_way.values()), default=math.inf)

    def keep(self, now: float) -> None:
        """End those whose time is over."""
        for errand in list(self._under_way.values()):
            if now >= errand.gives_up:
                errand.timed_out = True
                errand.gives_up = now + _GRACE  # a process may have been forked while we looked
                self._kill(errand)

    def wait(self, until: float, name: str) -> bool:
        """Wait for those of that name, at most until a time on the monotonic clock; return whether none is left."""
        while self.busy(name) and clock.monotonic() < until:
            self._wait(min(until, self.due_at()))
            self.keep(clock.monotonic())
            self.meanwhile()
        return not self.busy(name)

    def wait_out(
        self, until: float, name: str, say: Callable[[float], None], hurried: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait as above; `say`, with the seconds that are left, if it takes long, and not for long once `hurried`."""
        told = False
        while not self.wait(min(until, clock.monotonic() + PATIENT), name):
            now = clock.monotonic()
            if now >= until:
                return
            if hurried():
                until = min(until, now + HURRY)
            if not told:
                say(until - now)
            told = True

    def close(self) -> None:
        """End all that are under way; nobody is told."""
        for errand in list(self._under_way.values()):
            self._kill(errand)
            self._forget(errand)

    def _read(self, errand: Errand) -> None:
        """Take what an errand prints."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(errand.pipe, _READ)
            errand.output = (errand.output + data)[-_TAIL:]
            if not data:
                self._events.forget(errand.pipe)

    def _close(self, errand: Errand, status: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for _ in range(_READS):  # what is in the pipe; whoever goes on writing is not waited for
                errand.output = (errand.output + os.read(errand.pipe, _READ))[-_TAIL:]
        self._forget(errand)
        errand.done(Report(status, errand.output, clock.monotonic() - errand.began, errand.timed_out))

    def _forget(self, errand: Errand) -> None:
        del self._under_way[errand.pid]
        self._events.forget(errand.pipe)
        os.close(errand.pipe)

    def _kill(self, errand: Errand) -> None:
        # While their parent lives they can be told by it.  -1: never alone, or any child of ours might be one of them.
        others = [-1, *(pid for pid in self._under_way if pid != errand.pid)]
        marker = os.fsencode(f"{_NAME}={self._mark(errand.name)}")
        process.send(process.family(errand.pid, marker, others), signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(errand.pid, signal.SIGKILL)  # it leads a session

    def _mark(self, name: str) -> str:
        return f"{name} of {self._owner}"

    def _end_leftovers(self) -> None:
        if self._leftovers:  # looking for them is looking at every process of the machine
            process.send(process.leftovers([os.fsencode(owner(self._owner))]), signal.SIGKILL)
        self._leftovers = False
