"""Waiting, as the supervisor does it: signals and what runs beside it are heard, and systemd is pinged.

Pinged from waits that have an end, and while a command that is waited for is within its time: never because something
that runs beside has been heard.
"""

import math
import os
import signal

from worker import clock
from worker.events import Events, Signals
from worker.systemd import Notifier


class Stopped(Exception):
    """This process was told to end; the machines go on."""


class Clockwork:
    """Waiting: signals are heard, systemd is pinged.  What is watched in `events` is heard meanwhile."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self.events = Events()
        self.reload = False  # the files are to be read again
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        self._signals = Signals(self.events, numbers, self._hear)
        self._terminal = _on_terminal()
        self._stopping = False
        self._woken = False
        self._ping_at = -math.inf

    def close(self) -> None:
        self._signals.close()

    def wake(self) -> None:
        """Let the wait that is on, or the next one, end at once."""
        self._woken = True

    def idle(self) -> None:
        """Hear what there is, ping if it is time.  Raises Stopped once this process was told to end."""
        self.events.handle(self.events.poll(0))
        now = clock.monotonic()
        if self._notifier.interval and now >= self._ping_at:
            self._notifier.ping()
            self._ping_at = now + self._notifier.interval
        self._notifier.flush(now)
        if self._stopping:
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Return after so many seconds, or when woken.  Raises Stopped."""
        until = clock.monotonic() + seconds
        self.idle()
        while not self._woken and (now := clock.monotonic()) < until:
            self.events.handle(self.events.poll(min(until - now, 1.0)))
            self.idle()
        self._woken = False

    def _hear(self, number: int) -> None:
        """Take a signal.  SIGHUP is `systemctl reload`, or else a terminal that is gone."""
        if number != signal.SIGHUP or (self._terminal and not _on_terminal()):
            self._stopping = True
        else:
            self.reload = True
            self.wake()


def _on_terminal() -> bool:
    return any(os.isatty(fd) for fd in range(3))
