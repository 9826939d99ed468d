"""The line to systemd: pings when asked for, silence otherwise, and never a delay."""

import os
import socket
import time
from pathlib import Path

import pytest

from worker.systemd import Notifier, watchdog_interval


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    path = str(tmp_path / "notify")
    receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiving.bind(path)
    receiving.settimeout(10)
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    return receiving


@pytest.mark.parametrize(
    ("variables", "interval", "warnings"),
    [
        ({}, None, 0),
        ({"WATCHDOG_USEC": "45000000"}, 15.0, 0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "42"}, 1.0, 0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "43"}, None, 1),  # case W5
        ({"WATCHDOG_USEC": "0"}, None, 1),  # case W6, and the following
        ({"WATCHDOG_USEC": "-5"}, None, 1),
        ({"WATCHDOG_USEC": ""}, None, 1),
        ({"WATCHDOG_USEC": "3s"}, None, 1),
        ({"WATCHDOG_USEC": "1e6"}, None, 1),
        ({"WATCHDOG_USEC": str(2**63)}, None, 1),
        ({"WATCHDOG_USEC": "\N{SUPERSCRIPT TWO}"}, None, 1),
    ],
)
def test_when_to_ping(variables: dict[str, str], interval: float | None, warnings: int) -> None:
    """
    Cases W5 and W6: another process's watchdog is not ours, nonsense is said once, nothing raises.
    """
    said: list[str] = []
    assert watchdog_interval(variables, 42, said.append) == interval
    assert len(said) == warnings


def test_messages_reach_systemd_as_utf8(listener: socket.socket) -> None:
    """
    systemd drops a status that is not UTF-8.
    """
    notifier = Notifier(os.environ, pytest.fail)
    notifier.ready("37/40 done · größe")
    assert listener.recv(4096).decode() == "READY=1\nSTATUS=37/40 done · größe"
    notifier.ping()
    assert listener.recv(4096) == b"WATCHDOG=1"
    notifier.stopping("stopping", 40)
    assert b"EXTEND_TIMEOUT_USEC=40000000" in listener.recv(4096)


def test_statuses_that_come_too_fast_wait_and_the_newest_wins(listener: socket.socket) -> None:
    """
    PID 1 serves every service of the machine.
    """
    notifier = Notifier(os.environ, pytest.fail)
    notifier.status("first", 100.0)
    notifier.status("second", 100.1)
    notifier.status("third", 100.2)
    assert listener.recv(4096) == b"STATUS=first"
    assert notifier.flush(100.3) == 100.5
    assert notifier.flush(100.5) is None
    assert listener.recv(4096) == b"STATUS=third"
    assert notifier.flush(200.0) is None
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(4096)


def test_a_full_socket_costs_little_and_one_warning(listener: socket.socket) -> None:
    """
    Case W11: a systemd that does not read must not hold up a step.
    """
    said: list[str] = []
    notifier = Notifier(os.environ, said.append)
    filler = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    filler.setblocking(False)
    filler.connect(os.environ["NOTIFY_SOCKET"])
    with pytest.raises(BlockingIOError):
        while True:
            filler.send(b"x")
    began = time.process_time()
    for _ in range(3):
        notifier.ping()
    assert time.process_time() - began < 0.05, "it spins instead of giving up"
    assert len(said) == 1
    filler.close()


@pytest.mark.parametrize("kind", ["missing", "stream", "empty"])
def test_a_socket_that_cannot_be_used_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """
    Case W11: one warning where there is something to warn of, no ping, no exception.
    """
    path = str(tmp_path / "notify")
    if kind == "stream":
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.bind(path)
        stream.listen()
    monkeypatch.setenv("NOTIFY_SOCKET", "" if kind == "empty" else path)
    said: list[str] = []
    notifier = Notifier(os.environ, said.append)
    notifier.ready("up")
    notifier.ping()
    assert len(said) == (0 if kind == "empty" else 1)
