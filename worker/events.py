"""Events: what the worker waits for, one poll(2) over file descriptors and signals.

The worker has one thread.  Everything that can happen to it (output of a step, a sign of life, a
child's end, a signal, a question from `agentctl status`) arrives here and is handled by the
function that was named for it.  Handlers run one after the other and must not block.
"""

import os
import select
import signal
from collections.abc import Callable, Iterable

from worker import clock

_LONGEST = 24 * 3600.0  # poll(2) takes no more than 24 days; whoever waits looks again
_READ = select.POLLIN | select.POLLHUP | select.POLLERR


class Events:
    """The file descriptors that are watched, each with its handler."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}
        self.now = clock.monotonic()  # when the events being handled were seen

    def watch(self, fd: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `fd` is readable or its other end is closed."""
        self._handlers[fd] = handler
        self._poll.register(fd, _READ)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`; nothing happens if it is not watched.  Call before closing it."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def poll(self, seconds: float | None) -> list[int]:
        """Wait up to `seconds`, for ever if None; return the descriptors that have something for `handle`."""
        # Rounded up: a deadline that is 0.4 ms away must not become a busy loop.
        ready = self._poll.poll(None if seconds is None else int(min(seconds, _LONGEST) * 1000 + 0.999))
        self.now = clock.monotonic()
        return [fd for fd, _event in ready]

    def handle(self, ready: Iterable[int]) -> None:
        """Call the handlers of these descriptors."""
        for fd in ready:
            handler = self._handlers.get(fd)  # an earlier handler may have closed this one
            if handler is not None:
                handler()


class Signals:
    """Signals as events: each is noted when it comes and handed to `handler` from the loop.

    Of those that have come together the first of `numbers` is handed on first: the order in which the kernel delivers
    signals says nothing about the order in which they were sent.

    While it is open the process has no other handlers for these signals.
    """

    def __init__(self, events: Events, numbers: Iterable[int], handler: Callable[[int], None]) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._events = events
        self._handler = handler
        # A hangup that was ignored when we were started stays so: `nohup` means it.
        heard = [n for n in numbers if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, lambda *_: None) for number in heard}
        # A full pipe loses nothing that matters: one byte is enough to wake the loop, and SIGCHLD
        # and SIGTERM mean the same however often they came.
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        events.watch(self._read, self._on_signals)

    def close(self) -> None:
        """Put the former handlers back."""
        self._events.forget(self._read)
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _on_signals(self) -> None:
        come = set(os.read(self._read, 4096))
        for number in self._before:
            if number in come:
                self._handler(number)
