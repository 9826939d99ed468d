"""Waiting, as the supervisor does it: signals are heard, and systemd is pinged for as long as that is honest."""

import math
import signal

from worker import clock
from worker.events import Events, Signals
from worker.systemd import Notifier


class Stopped(Exception):
    """This process was told to end; the machines go on."""


class Clockwork:
    """Waiting: signals are heard, systemd is pinged."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._events = Events()
        self._signals = Signals(self._events, (signal.SIGTERM, signal.SIGINT), self._stop)
        self._stopping = False
        self._ping_at = -math.inf

    def close(self) -> None:
        self._signals.close()

    def idle(self) -> None:
        """Ping if it is time.  Raises Stopped once this process was told to end."""
        self._events.handle(self._events.poll(0))
        now = clock.monotonic()
        if self._notifier.interval and now >= self._ping_at:
            self._notifier.ping()
            self._ping_at = now + self._notifier.interval
        self._notifier.flush(now)
        if self._stopping:
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Return after so many seconds.  Raises Stopped."""
        until = clock.monotonic() + seconds
        self.idle()
        while (now := clock.monotonic()) < until:
            self._events.handle(self._events.poll(min(until - now, 1.0)))
            self.idle()

    def _stop(self, _number: int) -> None:
        self._stopping = True
