"""A provider's command: run, heard, and ended with its whole session when its time is over.

While it runs `idle` is called at least once a second, so that whoever waits for it can ping.  A supervisor that was
killed leaves its command running; the next one ends it before it does anything else, because two of them at work on
the same machine could make two.
"""

import contextlib
import os
import select
import selectors
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from worker import clock, files, process
from worker.signs import printable

_SLICE = 1.0
_READ = 65536
_OUTPUT_MAX = 4 * 2**20  # of `state` and a look; files travel by other ways
_SAID_MAX = 2000
_LINE_MAX = 200
# Written by the process itself before it becomes the command: there is no moment at which it runs unknown.
_NOTED = '{ read -r stat </proc/$$/stat && echo "$stat" >"$0"; } 2>/dev/null; exec "$@"'
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

    def fault(self) -> str:
        """Return what went wrong as one line."""
        last = next((line.strip() for line in reversed(self.said.splitlines()) if line.strip()), "")
        how = "did not end in time" if self.status is None else f"exited with status {self.status}"
        return f"{how}: {printable(last[:_LINE_MAX])}" if last else how


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
        pid = left.partition(b" ")[0]
        if pid.isdigit() and _stat(int(pid)) in (_started(left), b""):
            _end_session(int(pid))
        with contextlib.suppress(OSError):
            os.unlink(self._note)

    def run(self, argv: Sequence[str], env: Mapping[str, str], limit: float, given: str = "") -> Answer:
        """Return how `argv` ended, with `given` as its standard input; never later than `limit` seconds from now.

        When its time is over, or `idle` raises, its session is killed.  What it left behind in order is left alone.
        """
        with os.fdopen(os.memfd_create("given"), "w+b", buffering=0) as stdin:
            files.write_all(stdin.fileno(), given.encode())
            stdin.seek(0)
            try:
                started = subprocess.Popen(
                    ["/bin/sh", "-c", _NOTED, self._note, *argv],
                    env={"PATH": process.DEFAULT_PATH, **env},
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except (OSError, ValueError) as exc:  # no process to be had, or no words for one
                return Answer(_NOT_RUN, "", f"cannot be run: {exc.strerror if isinstance(exc, OSError) else exc}")
        assert started.stdout is not None and started.stderr is not None
        with started.stdout, started.stderr:
            over = False
            heard: dict[int, bytearray] = {}
            try:
                over = self._hear(started, heard, clock.monotonic() + limit)
            finally:
                if not over:
                    _end_session(started.pid)
                    started.poll()
                with contextlib.suppress(OSError):
                    os.unlink(self._note)
            output, said = (heard[pipe.fileno()].decode(errors="replace") for pipe in (started.stdout, started.stderr))
        return Answer(started.wait() if over else None, output, said)

    def _hear(self, started: subprocess.Popen[bytes], heard: dict[int, bytearray], until: float) -> bool:
        """Collect what it prints until it has ended, or its time is over; return whether it has ended."""
        assert started.stdout is not None and started.stderr is not None
        most = {started.stdout.fileno(): _OUTPUT_MAX, started.stderr.fileno(): _SAID_MAX}
        ended = os.pidfd_open(started.pid)
        with os.fdopen(ended), selectors.DefaultSelector() as selector:
            selector.register(ended, selectors.EVENT_READ)
            for fd in most:
                heard[fd] = bytearray()
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ)
            while (left := until - clock.monotonic()) > 0:
                ready = [key.fd for key, _mask in selector.select(min(_SLICE, left))]
                over = ended in ready  # what it has written by now is read before we believe it
                for fd in [fd for fd in most if fd in ready or over]:
                    if not _drain(fd, heard[fd], most[fd]) and fd in selector.get_map():
                        selector.unregister(fd)
                if over:
                    return True
                self._idle()
        return False


def _drain(fd: int, into: bytearray, most: int) -> bool:
    """Read what is there, keeping the end of it; return False at the end of the file."""
    for _ in range(_OUTPUT_MAX // _READ):  # one that never stops printing does not keep us here
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return True
        if not data:
            return False
        into += data
        del into[: max(0, len(into) - most)]
    return True


def _end_session(leader: int) -> None:
    """Kill every process of the session; one that the kernel holds on to is left after a while."""
    for _ in range(_TRIES):
        members = [found for found in process.processes() if leader in (found.pid, found.session)]
        if not members:
            return
        process.send(members, signal.SIGKILL)
        select.select([], [], [], process.LOOK_AGAIN)


def _stat(pid: int) -> bytes:
    """Return when process `pid` was started, in the kernel's ticks, or nothing if there is none."""
    try:
        return _started(files.read(f"/proc/{pid}/stat"))
    except OSError:
        return b""


def _started(stat: bytes) -> bytes:
    """Return the 22nd field of proc(5)'s stat; the second may hold spaces."""
    return (stat.rpartition(b")")[2].split() + [b""] * 20)[19]
