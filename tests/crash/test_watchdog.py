"""The watchdog as systemd would see it: a real worker, and a socket that listens in systemd's place."""

import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeWorker


class Listener:
    """Takes what the worker tells systemd, each message with the time it came."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._socket.bind(self.path)

    def environ(self, usec: int) -> dict[str, str]:
        return {"NOTIFY_SOCKET": self.path, "WATCHDOG_USEC": str(usec)}

    def drain(self) -> list[str]:
        """Return the messages that have come."""
        self._socket.setblocking(False)
        found = []
        while True:
            try:
                found.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return found

    def next(self) -> str:
        """Wait for one message."""
        self._socket.settimeout(30)
        return self._socket.recv(4096).decode()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "systemd")
    yield listener
    listener.close()


def test_pings_go_on_in_a_silent_step_and_in_a_back_off(worker: MakeWorker, systemd: Listener) -> None:
    """
    Case M1: from inside the step while it is within its limits, and from inside a declared wait.
    """
    w = worker(
        "tasks:\n  - {id: a, run: 'sleep 1; test $AGENT_ATTEMPT -gt 1', retry: {delay: 1s}}\n",
        environ=systemd.environ(300_000),
    )
    w.start().until("a: started")
    systemd.drain()
    w.until("a: attempt 1 exited with status 1; next in 1s")
    assert systemd.drain().count("WATCHDOG=1") >= 5
    w.until("a: started, attempt 2")
    assert systemd.drain().count("WATCHDOG=1") >= 5
    assert w.wait() == 0


def test_a_watchdog_of_another_process_is_not_ours(worker: MakeWorker, systemd: Listener) -> None:
    """
    Cases W5 and W6: no pings, one warning, and the work is done.
    """
    for extra in ({"WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}):
        w = worker(
            "tasks:\n  - {id: a, run: sleep 0.5}\n",
            folder=next(iter(extra)),
            environ={**systemd.environ(100_000), **extra},
        )
        assert w.run() == 0
        assert "WATCHDOG=1" not in systemd.drain()
        assert len(w.matching("sending no watchdog pings")) == 1


def test_after_a_pause_the_first_thing_is_a_ping_and_nobody_is_blamed(worker: MakeWorker, systemd: Listener) -> None:
    """
    Case W1: the worker is stopped for longer than the limits of its steps.  The one that beat meanwhile is heard,
    the silent one is not charged for the time, and systemd hears from us before anything else.
    """
    w = worker(
        f"""
concurrency: 2
tasks:
  - {{id: silent, run: 'echo up; sleep 5', timeout: 6s, stall_after: 6s}}
  - id: beats
    watchdog: 2s
    run:
      - {sys.executable}
      - -c
      - |
        import os, socket, time
        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(os.environ["NOTIFY_SOCKET"])
        for n in range(50):
            s.send(b"WATCHDOG=1"); time.sleep(0.1)
            if n == 3: print("up", flush=True)
""",
        environ=systemd.environ(3_000_000),
    )
    w.start().until("beats: up")
    w.process.send_signal(signal.SIGSTOP)
    time.sleep(4)  # the pause itself
    systemd.drain()
    w.process.send_signal(signal.SIGCONT)
    assert systemd.next() == "WATCHDOG=1"
    assert w.wait() == 0
    assert not w.matching("ending it")


def test_a_long_start_and_a_long_end_ask_for_time(worker: MakeWorker, systemd: Listener) -> None:
    """
    Case W13: EXTEND_TIMEOUT_USEC= before READY=1, and with STOPPING=1 for as long as a step may take to end.
    """
    w = worker(
        "tasks:\n  - {id: a, run: 'trap \"sleep 1; exit 0\" TERM; echo up; while :; do sleep 0.1; done'}\n",
        environ=systemd.environ(3_000_000),
    )
    w.start().until("a: up")
    before = systemd.drain()
    ready = next(n for n, message in enumerate(before) if message.startswith("READY=1"))
    assert all(message.startswith("EXTEND_TIMEOUT_USEC=120000000") for message in before[:ready])
    assert ready >= 1
    assert w.kill(signal.SIGTERM) == 75
    assert "STOPPING=1\nSTATUS=stopping: ending the steps\nEXTEND_TIMEOUT_USEC=40000000" in systemd.drain()


def test_on_sigabrt_the_worker_says_where_it_hangs(worker: MakeWorker) -> None:
    """
    Case W14: systemd's watchdog kills with SIGABRT; our own stack reaches the journal.
    """
    w = worker("tasks:\n  - {id: a, run: 'echo up; sleep 600'}\n")
    w.start().until("a: up")
    assert w.kill(signal.SIGABRT) == -signal.SIGABRT
    assert w.matching("Fatal Python error: Aborted")
    assert w.matching('File ".*run.py", line .* in work')


@pytest.mark.parametrize("kind", ["full", "missing", "stream"])
def test_a_systemd_that_does_not_listen_holds_nobody_up(worker: MakeWorker, tmp_path: Path, kind: str) -> None:
    """
    Case W11: the steps run as ever, and there is one warning.
    """
    path = tmp_path / "systemd"
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if kind == "stream" else socket.SOCK_DGRAM)
    if kind != "missing":
        made.bind(str(path))
    filler = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if kind == "full":
        filler.setblocking(False)
        filler.connect(str(path))
        with pytest.raises(BlockingIOError):
            while True:
                filler.send(b"x")
    w = worker(
        "tasks:\n  - {id: a, foreach: {range: 1-20}, run: 'true'}\n",
        environ={"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "300000"},
    )
    assert w.run() == 0
    assert len(w.done()) == 20
    assert len(w.matching("going on without$")) == 1
    filler.close()
    made.close()
