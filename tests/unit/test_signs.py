"""Signs of life: the notify protocol of steps, and limits."""

import array
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.plans import task
from worker.limits import Limits
from worker.signs import NotifySocket, Sign, parse


@pytest.mark.parametrize(
    ("message", "sign"),
    [
        (b"WATCHDOG=1", Sign(True, None)),
        (b"STATUS=half way", Sign(False, "half way")),
        (b"WATCHDOG=1\nSTATUS=half way\n", Sign(True, "half way")),
        (b"MAINPID=1\nSTOPPING=1\nREADY=0\nEXIT_STATUS=3", Sign(False, None)),  # case W7
        (b"X_AGENT_PROGRESS=3/10", Sign(progress=3.0, progress_text="3/10")),
        (b"X_AGENT_PROGRESS=7", Sign(progress=7.0, progress_text="7")),
        (b"X_AGENT_PROGRESS=many", Sign()),
        (b"X_AGENT_SPEND=0.12\nX_AGENT_RETRY_AFTER=120", Sign(spend=0.12, retry_after=120.0)),
        (b"X_AGENT_SPEND=-1\nX_AGENT_RETRY_AFTER=soon", Sign()),
        (b"X_AGENT_SPEND=" + b"9" * 400, Sign()),  # infinity to a float: no budget could count with it
        (b"X_AGENT_PROGRESS=" + b"9" * 400, Sign()),
        (b"EXTEND_TIMEOUT_USEC=5000000", Sign(extend=5.0)),
        (b"WATCHDOG=0", Sign(False, None)),
        (b"WATCHDOG=trigger", Sign(False, None)),
        (b"STATUS=\x1b[2J\xff", Sign(False, "\\x1b[2J\ufffd")),
        (b"", Sign(False, None)),
        (b"\0\0\0", Sign(False, None)),
    ],
)
def test_messages_mean_what_they_mean_to_systemd(message: bytes, sign: Sign) -> None:
    """
    Beats and statuses are understood; everything else changes nothing.
    """
    assert parse(message) == sign


def test_descriptors_that_come_along_are_closed_once_what_was_said_is_settled(tmp_path: Path) -> None:
    """
    systemd-notify(1) waits until its BARRIER=1 pipe is closed.
    """
    path = str(tmp_path / "notify")
    listening = NotifySocket(path)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    read, write = os.pipe()
    sender.sendmsg([b"BARRIER=1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write]))], 0, path)
    os.close(write)
    assert list(listening.receive()) == []
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    listening.release()
    assert os.read(read, 1) == b"", "the descriptor that was sent is still open"
    os.close(read)
    sender.close()
    listening.close()
    assert not os.path.exists(path)


def test_a_step_that_never_stops_talking_is_heard_a_little_at_a_time(tmp_path: Path) -> None:
    """
    Else the worker would listen to it alone, and no limit of the other steps would hold.
    """
    path = str(tmp_path / "notify")
    listening = NotifySocket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(path)
        sender.send(b"WATCHDOG=1")
        for heard, _message in enumerate(listening.receive()):
            assert heard < 1000
            sender.send(b"WATCHDOG=1")  # there is always one more
    assert len(list(listening.receive())) == 1, "what has come is not lost"
    listening.close()


def test_a_socket_left_by_a_dead_worker_is_replaced(tmp_path: Path) -> None:
    """
    SIGKILL leaves the path behind.
    """
    path = str(tmp_path / "notify")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    dead.bind(path)
    dead.close()
    NotifySocket(path).close()


def limits_of(now: float, **limits: Any) -> Limits:
    return Limits(now, task("a")._replace(**limits))


def test_the_sender_is_named_by_the_kernel(tmp_path: Path) -> None:
    """
    Only a step's own processes are believed: each message comes with its sender's pid.
    """
    path = str(tmp_path / "notify")
    listening = NotifySocket(path)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.sendto(b"WATCHDOG=1", path)
    assert list(listening.receive()) == [(Sign(beat=True), os.getpid())]
    sender.close()
    listening.close()


def test_progress_must_be_new_and_only_the_steps_own_program_owes_it() -> None:
    """
    progress_every and watchdog do not hold for what runs before and after the step's own program.
    """
    limits = limits_of(100.0, progress_every=10, watchdog=5)
    limits.restart(100.0, own=False)
    assert limits.broken(1000.0) is None
    limits.restart(1000.0, own=True)
    limits.beat(1008.0)
    assert limits.broken(1010.0) == "progress_every"
    limits.progress(1009.0)
    assert limits.deadline() == 1013.0


def test_a_timeout_can_be_extended() -> None:
    """
    EXTEND_TIMEOUT_USEC= counts from now and never shortens, as in sd_notify(3).
    """
    limits = limits_of(100.0, timeout=60)
    limits.extend(110.0, 5.0)
    assert limits.deadline() == 160.0
    limits.extend(150.0, 30.0)
    assert limits.deadline() == 180.0


def test_each_limit_has_its_own_clock() -> None:
    """
    timeout counts from the start, watchdog from the last beat, stall_after from any sign of life.
    """
    limits = limits_of(100.0, timeout=60, stall_after=20, watchdog=10)
    assert limits.deadline() == 110.0
    limits.beat(109.0)
    assert limits.deadline() == 119.0
    limits.sign(118.0)  # output is a sign of life but no beat
    assert limits.broken(118.9) is None
    assert limits.broken(119.0) == "watchdog"
    limits.beat(150.0)
    assert limits.broken(160.0) == "timeout"


def test_no_limits_never_break() -> None:
    """
    A step without limits may take for ever.
    """
    limits = limits_of(0.0)
    assert limits.deadline() == math.inf
    assert limits.broken(1e12) is None


def test_time_without_the_worker_is_not_charged() -> None:
    """
    Case W1: after a pause every limit has as much left as before.
    """
    limits = limits_of(0.0, timeout=60, stall_after=20, watchdog=10)
    limits.beat(5.0)
    limits.excuse(1000.0)
    assert limits.broken(1014.9) is None
    assert limits.broken(1015.0) == "watchdog"
