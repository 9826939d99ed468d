"""The line to systemd: pings when asked for, silence otherwise, and never a delay."""

import contextlib
import os
import socket
import threading
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


def fill(path: str) -> int:
    """Fill the queue of a socket that nobody reads; return how many messages are in it."""
    total, before = 0, -1
    while total > before:  # one socket may have no room for all
        before = total
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler, contextlib.suppress(BlockingIOError):
            filler.setblocking(False)
            filler.connect(path)
            while True:
                filler.send(b"x")
                total += 1
    return total


def received(listener: socket.socket) -> tuple[str, str | None]:
    """Return the next message, and what is read from the descriptor beside it."""
    text, fds, _flags, _address = socket.recv_fds(listener, 4096, 4)
    if not fds:
        return text.decode(), None
    with os.fdopen(fds[0], "rb") as file:
        return text.decode(), file.read().decode()


def readable(text: str) -> int:
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    return read


def test_s34_what_systemd_does_not_take_at_once_is_offered_again(listener: socket.socket) -> None:
    """
    S34: on a busy machine a step loses nothing: the newest of each name, whole, in order, although the giver has
    closed it, and without a delay for those that come behind.
    """
    said: list[str] = []
    notifier = Notifier(os.environ, said.append)
    count = fill(os.environ["NOTIFY_SOCKET"])
    began = time.monotonic()
    for name, text in (("slot-0.out", "old"), ("slot-0.err", "err"), ("slot-0.out", "new")):
        fd = readable(text)
        notifier.replace(name, fd)
        os.close(fd)
    notifier.discard("slot-1.out")
    assert time.monotonic() - began < 5, "each of them waits"
    assert notifier.flush(began) == pytest.approx(began + 0.1)
    for _ in range(count):
        assert listener.recv(10) == b"x"
    assert notifier.flush(began + 0.1) is None
    assert [received(listener) for _ in range(5)] == [
        ("FDSTOREREMOVE=1\nFDNAME=slot-0.err", None),
        ("FDSTORE=1\nFDNAME=slot-0.err\nFDPOLL=0", "err"),
        ("FDSTOREREMOVE=1\nFDNAME=slot-0.out", None),
        ("FDSTORE=1\nFDNAME=slot-0.out\nFDPOLL=0", "new"),
        ("FDSTOREREMOVE=1\nFDNAME=slot-1.out", None),
    ]
    assert said == []
    notifier.store("slot-2.out", readable("more"))
    assert received(listener) == ("FDSTORE=1\nFDNAME=slot-2.out\nFDPOLL=0", "more")


def test_s34_a_systemd_that_takes_nothing_is_said_once(listener: socket.socket) -> None:
    said: list[str] = []
    notifier = Notifier(os.environ, said.append)
    fill(os.environ["NOTIFY_SOCKET"])
    notifier.store("slot-0.out", readable(""))
    now = time.monotonic()
    for later in (1, 6, 7):
        assert notifier.flush(now + later) == pytest.approx(now + later + 0.1)
    assert said == ["systemd takes no messages; until it does, a step that begins does not outlive its worker"]


def test_s34_that_a_worker_is_up_is_not_lost(listener: socket.socket) -> None:
    """
    S34: systemd would end a start, or a reload, of which it never hears; of several such the newest counts.
    """
    notifier = Notifier(os.environ, pytest.fail)
    count = fill(os.environ["NOTIFY_SOCKET"])
    notifier.reloading()
    notifier.ready("größe")
    for _ in range(count):
        listener.recv(10)
    assert notifier.flush(1.0) is None
    assert listener.recv(4096).decode() == "READY=1\nSTATUS=größe"
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(4096)


def test_s34_the_end_waits_for_what_is_owed(listener: socket.socket) -> None:
    """
    S34: the next worker has the descriptors of the steps that it takes over.
    """
    notifier = Notifier(os.environ, pytest.fail)
    count = fill(os.environ["NOTIFY_SOCKET"])
    notifier.store("slot-0.out", readable("out"))
    reader = threading.Timer(0.3, lambda: [listener.recv(10) for _ in range(count)])
    reader.start()
    notifier.stopping("another worker takes over", 1)
    reader.join()
    assert received(listener) == ("FDSTORE=1\nFDNAME=slot-0.out\nFDPOLL=0", "out")
    assert received(listener)[0].startswith("STOPPING=1\nSTATUS=another worker")


def test_a_systemd_that_is_gone_is_not_waited_for(listener: socket.socket) -> None:
    said: list[str] = []
    notifier = Notifier(os.environ, said.append)
    listener.close()
    began = time.monotonic()
    notifier.store("slot-0.out", readable(""))
    notifier.stopping("ending", 1)
    assert time.monotonic() - began < 4
    assert len(said) == 1


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
