"""The journal's inlet: what is done while journald, or whoever reads standard error, takes nothing.

Sending to it waits for as long as it hangs, and so would the worker, until systemd killed it in journald's stead.
What is not taken within PATIENCE is kept if it is an event, and is sent later; a step's lines are left out, and
counted: they are in its output file.
"""

import collections
import contextlib
import select
import socket
from collections.abc import Callable, Sequence

from worker import plural

PATIENCE = 1.0
_KEPT_MAX = 1000  # of events, the newest
_SOCKET = "/run/systemd/journal/socket"


class Inlet:
    """Passes entries on, in order, to a `put` that may wait; never waits itself for longer than PATIENCE."""

    def __init__(
        self,
        put: Callable[[Sequence[str]], object],
        path: str = _SOCKET,
        takes: Callable[[float], bool] | None = None,
        name: str = "the journal",
    ) -> None:
        """`put` returns False for what it has not taken.  `takes` says whether it would take something.

        Without `takes` the socket at `path` is asked, before each entry: such a `put` may wait.
        """
        self._waits = takes is None
        self._put = put
        self._name = name
        self._kept: collections.deque[Sequence[str]] = collections.deque(maxlen=_KEPT_MAX)
        self._left_out = 0
        self._lost = 0  # events
        self._ready: select.poll | None = None
        self._takes = takes or self._asked
        if takes is not None:
            return
        self._probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):  # there is none to ask: whoever puts will see
            self._probe.connect(path)
            self._ready = select.poll()
            # unix(7): a connected datagram socket can be written to when the other's queue has room.
            self._ready.register(self._probe, select.POLLOUT)

    def pass_on(self, entry: Sequence[str], event: bool) -> None:
        """Put `entry`, or deal with it as the module says."""
        behind = bool(self._kept or self._left_out)
        if not behind and not self._waits and self._put(entry) is not False:
            return
        if self._takes(0.0 if behind else PATIENCE) and self._catch_up() and self._put(entry) is not False:
            return
        if event:
            self._lost += len(self._kept) == _KEPT_MAX
            self._kept.append(entry)
        else:
            self._left_out += 1

    def close(self) -> None:
        """Put what was kept, as long as some of it is taken within PATIENCE."""
        while (left := len(self._kept) + bool(self._left_out)) and self._takes(PATIENCE):
            self._catch_up()
            if len(self._kept) + bool(self._left_out) == left:
                return

    def _catch_up(self) -> bool:
        """Put what could not be put before; return whether all of it was, and more can be."""
        while self._kept:
            if self._put(self._kept[0]) is False:
                return False
            self._kept.popleft()
            if not self._takes(0.0):
                return False
        if self._left_out or self._lost:
            missing = plural.of(self._left_out, "line of steps is", "lines of steps are")
            if self._lost:
                missing = f"{plural.of(self._lost, 'event')} and {missing}"
            text = f"{self._name} took nothing for a while; {missing} missing here"
            if self._put((f"MESSAGE={text}", "PRIORITY=4", "SYSLOG_IDENTIFIER=agent")) is False:
                return False
            self._left_out = self._lost = 0
            return self._takes(0.0)
        return True

    def _asked(self, patience: float) -> bool:
        return self._ready is None or bool(self._ready.poll(patience * 1000))
