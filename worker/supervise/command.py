"""A provider's command: run, heard, and ended with its whole session when its time is over.

While somebody waits for it `idle` is called at least once a second, so that systemd can be pinged; one that runs beside
everything else is heard whenever there is waiting.  A supervisor that was killed leaves its commands running; the next
one ends them before it does anything else, because two of them at work on the same machine could make two.
"""

import contextlib
import fcntl
import functools
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from worker import clock, files, process
from worker.events import Events
from worker.signs import printable

_SLICE = 1.0
_READ, _READS = 65536, 64
_OUTPUT_MAX = 256 * 1024  # of `state` and a look, the end of it; files travel by other ways
_SAID_MAX = 2000
_LINE_MAX = 200
_WARNING, _WARNINGS, _WARNING_MAX = "warning: ", 3, 400
# Written by the process itself before it becomes the command: there is no moment at which it runs unknown.
_NOTED = """\
{ read -r stat </proc/$$/stat && echo "$stat" >"$0"; } 2>/dev/null
[ -z "$1" ] || ulimit -f "$1" || exit 126
shift
exec "$@"
"""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_BLOCK = 512  # of sh's ulimit
_TOO_LARGE = (-signal.SIGXFSZ, 128 + signal.SIGXFSZ)
# In the words that command lines have for it: no fault of the machine that was asked for.
_REFUSED = re.compile(r"\b429\b|too many requests|rate.?limit|slow ?down|throttl", re.IGNORECASE)
_TRIES = 100  # 2 s
_NOT_RUN = 126


class Answer(NamedTuple):
    """How a command ended: its exit status, None if its time was over; what it printed, what it said on stderr."""

    status: int | None
    output: str
    said: str

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def refused(self) -> bool:
        """Whether the provider says that it was asked too often."""
        return not self.ok and bool(_REFUSED.search(self.said) or _REFUSED.search(self.output[-_SAID_MAX:]))

    def warnings(self) -> list[str]:
        """Return what it warns of on stderr, if it ended well."""
        lines = [line.strip() for line in self.said.splitlines()] if self.ok else []
        said = [line.removeprefix(_WARNING) for line in lines if line.startswith(_WARNING)]
        return [printable(line[:_WARNING_MAX]) for line in said[:_WARNINGS]]

    def fault(self) -> str:
        """Return what went wrong as one line."""
        if self.status in _TOO_LARGE:
            return "what comes is larger than it may be"
        last = next((line.strip() for line in reversed(self.said.splitlines()) if line.strip()), "")
        how = "did not end in time" if self.status is None else f"exited with status {self.status}"
        return f"{how}: {printable(last[:_LINE_MAX])}" if last else how


class Running:
    """A command at work in a session of its own, heard through `events`; ended when its time is over."""

    def __init__(self, note: str, events: Events, limit: float, then: Callable[[], object]) -> None:
        """`then` is called when it has ended by itself."""
        self.until = clock.monotonic() + limit
        self._note = note
        self._events = events
        self._then = then
        self._started: subprocess.Popen[bytes] | None = None
        self._ended = -1
        self._heard: dict[int, bytearray] = {}
        self._answer: Answer | None = None

    def start(self, argv: Sequence[str], env: Mapping[str, str], given: str, most: int | None = None) -> None:
        """Start it with `given` as its standard input; no file that it writes becomes larger than `most` bytes."""
        blocks = "" if most is None else str(-(-most // _BLOCK))
        with os.fdopen(os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b", buffering=0) as stdin:
            files.write_all(stdin.fileno(), given.encode())
            stdin.seek(0)
            fcntl.fcntl(stdin, fcntl.F_ADD_SEALS, _SEALS)  # a program of a machine may get it, and open it again
            try:
                self._started = started = subprocess.Popen(
                    ["/bin/sh", "-c", _NOTED, self._note, blocks, *argv],
                    env={"PATH": process.DEFAULT_PATH, **env},
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except (OSError, ValueError) as exc:  # no process to be had, or no words for one
                said = f"cannot be run: {exc.strerror if isinstance(exc, OSError) else exc}"
                self._answer = Answer(_NOT_RUN, "", said)
                self._then()
                return
        assert started.stdout is not None and started.stderr is not None
        self._ended = os.pidfd_open(started.pid)
        self._events.watch(self._ended, self._on_end)
        for fd in (started.stdout.fileno(), started.stderr.fileno()):
            self._heard[fd] = bytearray()
            os.set_blocking(fd, False)
            self._events.watch(fd, functools.partial(self._on_output, fd))

    def answer(self) -> Answer | None:
        """Return how it ended; None while it runs and has time left.

        What has come to its end has an answer, whether anybody has waited for that or not.
        """
        if self._answer is None and select.select([self._ended], [], [], 0)[0]:
            self._on_end()
        if self._answer is None and clock.monotonic() >= self.until:
            self.end()
        return self._answer

    def end(self) -> None:
        """Kill its session if it runs.  What it left behind in order is left alone."""
        if self._answer is None and self._started is not None:
            _end_session(self._started.pid)
            self._started.poll()
            self._finish(None)

    def _on_output(self, fd: int) -> None:
        if not self._drain(fd):
            self._events.forget(fd)

    def _on_end(self) -> None:
        assert self._started is not None
        self._finish(self._started.wait())
        self._then()

    def _finish(self, status: int | None) -> None:
        """Read what it has written by now, and be done with it."""
        assert self._started is not None and self._started.stdout is not None and self._started.stderr is not None
        output, said = self._started.stdout, self._started.stderr
        for pipe in (output, said):
            self._drain(pipe.fileno())
            self._events.forget(pipe.fileno())
        self._events.forget(self._ended)
        os.close(self._ended)
        texts = [self._heard[pipe.fileno()].decode(errors="replace") for pipe in (output, said)]
        output.close()
        said.close()
        with contextlib.suppress(OSError):
            os.unlink(self._note)
        self._answer = Answer(status, *texts)

    def _drain(self, fd: int) -> bool:
        """Read what is there, keeping the end of it; return False at the end of the file."""
        assert self._started is not None and self._started.stderr is not None
        most = _SAID_MAX if fd == self._started.stderr.fileno() else _OUTPUT_MAX
        into = self._heard[fd]
        for _ in range(_READS):  # one that never stops printing does not keep us here
            try:
                data = os.read(fd, _READ)
            except BlockingIOError:
                return True
            if not data:
                return False
            into += data
            del into[: max(0, len(into) - most)]
        return True


class Runner:
    """Runs one command at a time."""

    def __init__(self, note: str, idle: Callable[[], None]) -> None:
        """`note`: a file that tells the next supervisor what runs.  `idle` may raise, which ends the command."""
        self._note = note
        self._idle = idle

    def end_left(self) -> None:
        """End the command that a dead supervisor left running, if there is one."""
        try:
            left = files.read(self._note)
        except OSError:
            return
        pid, began = process.noted(left)
        if pid and process.began(pid) in (began, 0):
            _end_session(pid)
        with contextlib.suppress(OSError):
            os.unlink(self._note)

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        limit: float,
        given: str,
        events: Events,
        then: Callable[[], object] = lambda: None,
        most: int | None = None,
    ) -> Running:
        """Let `argv` run for `limit` seconds at most; the wait that is on hears it.  `given`, `most`: Running.start."""
        running = Running(self._note, events, limit, then)
        running.start(argv, env, given, most)
        return running

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], limit: float, given: str = "", most: int | None = None
    ) -> Answer:
        """Return how `argv` ended; never later than `limit` seconds from now.

        When its time is over, or `idle` raises, its session is killed.
        """
        events = Events()
        running = self.start(argv, env, limit, given, events, most=most)
        try:
            while (answer := running.answer()) is None:
                events.handle(events.poll(max(0.0, min(_SLICE, running.until - clock.monotonic()))))
                if running.answer() is None:
                    self._idle()
        finally:
            running.end()
        return answer


def _end_session(leader: int) -> None:
    """Kill every process of the session; one that the kernel holds on to is left after a while."""
    for _ in range(_TRIES):
        members = [found for found in process.processes() if leader in (found.pid, found.session)]
        if not members:
            return
        process.send(members, signal.SIGKILL)
        select.select([], [], [], process.LOOK_AGAIN)
