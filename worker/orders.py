"""Orders: what the worker has been told while it works, by signals or by its own budget.

SIGHUP: read the list again.  SIGTERM, SIGINT: end the steps, then yourself; a second time: at once.  SIGUSR1: another
worker takes over, so leave the steps alone.
"""

import signal
from collections.abc import Mapping

from worker import process
from worker.attempt import Attempt
from worker.decide import Reason
from worker.errands import Errands
from worker.events import Events
from worker.systemd import Notifier

# A step asked to end because the worker stops has this long; the unit's TimeoutStopSec= is longer.
STOP_GRACE = 30.0
EXIT_GRACE = 10.0  # and the worker so long for its own last writes
STOPPED, LEFT, OUT_OF_BUDGET = "stopped", "left", "out-of-budget"


class Orders:
    """`ending`: why the steps are being ended and no other one is started, "stopped" or "out-of-budget"; else None.

    `leaving`: the next worker is about to start, and goes on with what runs.  `reload`: the list is to be read again.
    """

    SIGNALS = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGINT)

    def __init__(
        self,
        running: Mapping[str, Attempt],
        errands: Errands,
        events: Events,
        notifier: Notifier,
        outlives: bool,
        hangup_stops: bool,
    ) -> None:
        """`outlives`: steps can outlive this worker; `hangup_stops`: SIGHUP is a closed terminal."""
        self.ending: str | None = None
        self.leaving = False
        self.reload = False
        self._running = running
        self._errands = errands
        self._events = events
        self._notifier = notifier
        self._outlives = outlives
        self._hangup_stops = hangup_stops

    @property
    def done(self) -> bool:
        """Whether nothing new is to be begun."""
        return self.ending is not None or self.leaving

    def hear(self, number: int) -> None:
        """Take a signal."""
        if number == signal.SIGCHLD:
            ended = process.reap()
            for attempt in self._running.values():
                attempt.on_exits(ended, self._events.now)
            self._errands.on_exits(ended)
        elif number == signal.SIGHUP and not self._hangup_stops:
            self.reload = True
        elif number == signal.SIGUSR1:
            if self._outlives and self.ending is None:
                self.leaving = True
                self._notifier.stopping("another worker takes over", EXIT_GRACE)
        elif self.leaving:
            pass  # the SIGTERM that comes with it
        elif self.ending == STOPPED:
            for attempt in self._running.values():
                attempt.kill()
        else:
            self._notifier.stopping("stopping: ending the steps", STOP_GRACE + EXIT_GRACE)
            self.end(STOPPED)

    def end(self, ending: str) -> None:
        """Ask every step to end, and let no other one begin."""
        self.ending = ending
        for attempt in self._running.values():
            self.interrupt(attempt)

    def interrupt(self, attempt: Attempt) -> None:
        """Ask one step to end, since the worker is about to."""
        reason: Reason = "budget" if self.ending == OUT_OF_BUDGET else "stop"
        attempt.interrupt(reason, STOP_GRACE, self._events.now)
