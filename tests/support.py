"""A real worker in the foreground, as a child process of the test."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker import ledger

ROOT = Path(__file__).parent.parent
# Not how long a test takes, but when it is given up.
PATIENCE = 60.0


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Return whether the process ends, or has: one that was sent SIGKILL is still there for a moment."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], PATIENCE)[0])
    finally:
        os.close(fd)


def end_all(folder: Path) -> None:
    """Kill the processes whose environment names the folder: steps outlive a worker that was killed."""
    name = os.fsencode(f"={folder}/")
    for found in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(found.name) != os.getpid() and name in (found / "environ").read_bytes():
                os.kill(int(found.name), signal.SIGKILL)


def hear(fifo: Path, process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> str:
    """Return what is written to a FIFO, to the end; open() would wait for ever if `process` ended without a writer."""
    heard, gives_up = b"", time.monotonic() + PATIENCE
    fd, ends = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), os.pidfd_open(process.pid)
    try:
        while True:
            ready, _, _ = select.select([fd, ends], [], [], max(0.0, gives_up - time.monotonic()))
            if fd in ready:
                data = os.read(fd, 65536)
                if not data:
                    return heard.decode()
                heard += data
            elif ready:
                raise AssertionError(f"{process.args!r} ended before it was heard of: status {process.wait()}")
            else:
                raise AssertionError(f"nothing from {process.args!r} in {PATIENCE:.0f} s")
    finally:
        os.close(fd)
        os.close(ends)


class Worker:
    """One state folder and one task list; `start` may be called again after the worker has ended."""

    def __init__(self, folder: Path, tasks: str, environ: Mapping[str, str] | None = None) -> None:
        self.config = folder / "list.yaml"
        self.config.write_text(tasks)
        self.state = folder / "state"
        self.lines: list[str] = []
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            **(environ or {}),
        }
        for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LC_CTYPE"):  # the last one Python gave us
            if name not in (environ or {}):
                self.environ.pop(name, None)
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the worker was never started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def start(self, *prefix: str, **popen: object) -> "Worker":
        """Start the worker; `prefix` is put before its command line (strace, say)."""
        command = [
            *prefix,
            sys.executable,
            "-m",
            "worker",
            "run",
            str(self.config),
            "--state",
            str(self.state),
        ]
        self._rest = b""
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "cwd": "/",
            **popen,
        }
        self._process = subprocess.Popen(command, env=self.environ, **options)
        return self

    def until(self, pattern: str) -> str:
        """Read the worker's lines until one matches; return that one."""
        gives_up = time.monotonic() + PATIENCE
        while (line := self._next(gives_up)) is not None:
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line like '{pattern}':\n" + "\n".join(self.lines[-40:]))

    def wait(self) -> int:
        """Read to the end; return the exit status."""
        gives_up = time.monotonic() + PATIENCE
        while self._next(gives_up) is not None:
            pass
        return self.process.wait(PATIENCE)

    def run(self) -> int:
        """Start the worker and wait for its end; return the exit status."""
        return self.start().wait()

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; return the exit status."""
        self.process.send_signal(number)
        return self.wait()

    def close(self) -> None:
        """End the worker, if it lives; `end_all` ends the steps of one that was killed."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
        if self._process is not None and self._process.stderr:
            self._process.stderr.close()

    def matching(self, pattern: str) -> list[str]:
        """Return the lines so far, of all starts, that match."""
        return [line for line in self.lines if re.search(pattern, line)]

    def rows(self) -> list[ledger.Row]:
        """Return the ledger's rows."""
        from worker import report  # also processes without packages import this file

        store = report.open_ledger(str(self.state), None)
        try:
            return list(store.rows())
        finally:
            store.close()

    def done(self) -> list[str]:
        """Return the steps that the ledger has as done, in the order in which they were."""
        return [row.step for row in self.rows() if row.outcome == ledger.DONE]

    def output(self, step: str) -> bytes:
        return (self.state / "out" / step).read_bytes()

    def _next(self, gives_up: float) -> str | None:
        stream = self.process.stderr
        assert stream is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([stream], [], [], max(0.0, gives_up - time.monotonic()))
            if not ready:
                raise AssertionError(f"nothing in {PATIENCE:.0f} s:\n" + "\n".join(self.lines[-40:]))
            data = os.read(stream.fileno(), 65536)
            if not data:
                return None
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        self.lines.append(line.decode(errors="replace"))
        return self.lines[-1]
