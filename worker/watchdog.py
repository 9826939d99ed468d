"""Waiting under the watchdog: the one place where the worker waits, and the one place where it pings.

systemd is pinged from the code that drives the steps, while every running step is within its limits;
no thread and no timer pings by itself.  A pause of the worker (a frozen machine, SIGSTOP) is noticed
here: the first thing afterwards is a ping, and no step is charged for the time.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from worker import clock
from worker.attempt import Attempt
from worker.events import Events
from worker.systemd import Notifier

# Waking this much later than asked means that the worker did not run; a busy machine is not that slow.
_PAUSE = 0.5
# A pause is noticed to within this share of the shortest limit in force, and at least this often.
_SLICES = 8
_SLICE_MIN, _SLICE_MAX = 0.25, 10.0


class Watchdog:
    """Waits for events and keeps systemd's watchdog fed for as long as that is honest."""

    def __init__(
        self,
        events: Events,
        notifier: Notifier,
        running: Mapping[str, Attempt],
        looked: Callable[[float], None] = lambda _now: None,
    ) -> None:
        """`looked` is told each time the loop has looked around."""
        self._looked = looked
        self._events = events
        self._notifier = notifier
        self._running = running
        self._ping_at = -math.inf
        self._seen = math.inf  # when the loop last looked around

    def wait(self, until: float) -> None:
        """Handle events until something has happened or `until` (monotonic clock) has come.

        Limits of running steps are enforced meanwhile.  Returns early rather than late: the caller
        looks at the state of things again.
        """
        now = clock.monotonic()
        self._excuse(now - self._seen)
        wake_at = min(until, self._notifier.flush(now) or math.inf, now + self._slice())
        wake_at = min(wake_at, self._ping_at if self._notifier.interval else math.inf)
        wake_at = min(wake_at, *(attempt.deadline() for attempt in self._running.values()), math.inf)
        ready = self._events.poll(None if wake_at == math.inf else max(0.0, wake_at - now))
        self._excuse(self._events.now - max(now, wake_at))
        self._events.handle(ready)
        self._seen = now = clock.monotonic()
        if self._excuse(now - self._events.now):
            return  # stopped while handling: what came meanwhile is heard before anybody is judged
        for attempt in list(self._running.values()):
            if now >= attempt.deadline():
                attempt.tick(now)
            attempt.save()
        self._looked(now)
        self.ping(now)

    def ping(self, now: float) -> None:
        """Ping if it is time and every running step is within its limits."""
        if not self._notifier.interval or now < self._ping_at:
            return
        if _all_well(self._running.values(), now):
            self._notifier.ping()
            self._ping_at = now + self._notifier.interval
        else:
            self._ping_at = now + _SLICE_MIN  # look again, but not all the time

    def _excuse(self, seconds: float) -> bool:
        """Ping, and charge no step, if the worker did not run for so long; return whether that is so."""
        if seconds <= _PAUSE:
            return False
        self._notifier.ping()
        for attempt in self._running.values():
            attempt.excuse(seconds)
        return True

    def _slice(self) -> float:
        shortest = min((a.limits.shortest() for a in self._running.values()), default=math.inf)
        return math.inf if shortest == math.inf else min(max(shortest / _SLICES, _SLICE_MIN), _SLICE_MAX)


def _all_well(attempts: Iterable[Attempt], now: float) -> bool:
    return all(attempt.within_limits(now) for attempt in attempts)
