"""The pings: honest, or none."""

import os
import socket
from pathlib import Path
from typing import cast

import pytest

from worker.attempt import Attempt
from worker.events import Events
from worker.systemd import Notifier
from worker.watchdog import Watchdog


class Running:
    """An attempt as far as the watchdog asks it."""

    def __init__(self) -> None:
        self.well = True

    def within_limits(self, now: float) -> bool:
        return self.well


def test_no_ping_while_one_step_cannot_be_vouched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Promise 3: the worker stops pinging when a running step is past its limits and will not end.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(tmp_path / "systemd"))
    listening.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "systemd"))
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    good, bad = Running(), Running()
    running = cast(dict[str, Attempt], {"good": good, "bad": bad})
    watchdog = Watchdog(Events(), Notifier(os.environ, pytest.fail), running)

    watchdog.ping(100.0)
    assert listening.recv(100) == b"WATCHDOG=1"
    watchdog.ping(100.5)  # not due yet
    bad.well = False
    watchdog.ping(102.0)
    with pytest.raises(BlockingIOError):
        listening.recv(100)
    bad.well = True
    watchdog.ping(103.0)
    assert listening.recv(100) == b"WATCHDOG=1"
    listening.close()
