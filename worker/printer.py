"""Standard error for a worker: lines, whole and in order, and never a wait for whoever should read them.

What cannot be written is dropped; the one who prints counts it.
"""

import os
import select
import socket
import stat
from collections.abc import Callable

# A pipe that can be written to takes so much at once (PIPE_BUF of pipe(7)).
_AT_ONCE = 4096
_OPEN = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Printer:
    """Writes lines to a descriptor that is another program's, too: nothing about it is changed."""

    def __init__(self, fd: int) -> None:
        self._rest = b""  # of a line that was begun
        self._write, polled, self._asks_first = _writer(fd)
        self._ready = select.poll()
        self._ready.register(polled, select.POLLOUT)

    def takes(self, patience: float) -> bool:
        """Return whether a line can be written, now or within `patience` seconds."""
        if not self._ready.poll(patience * 1000):
            return False
        try:
            return self._flush()
        except OSError:
            self._rest = b""
            return True

    def put(self, line: bytes) -> bool:
        """Write a line, or its beginning, and the rest before the next one; return False if it is dropped."""
        try:
            if not self._flush():
                return False
            self._rest = line
            if not self._flush() and len(self._rest) == len(line):  # it takes nothing now
                self._rest = b""
                return False
        except OSError:
            self._rest = b""
            return False
        return True

    def _flush(self) -> bool:
        while self._rest:
            if self._asks_first and not self._ready.poll(0):
                return False
            try:
                self._rest = self._rest[self._write(self._rest) :]
            except BlockingIOError:
                return False
        return True


def _writer(fd: int) -> tuple[Callable[[bytes], int], int, bool]:
    """Return how to write to `fd` without a wait, what to poll, and whether it has to be polled before each write."""
    kind = os.fstat(fd).st_mode
    if stat.S_ISSOCK(kind):
        flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
        channel = socket.socket(fileno=os.dup(fd))
        return lambda data: channel.send(data, flags), fd, False
    if not stat.S_ISFIFO(kind) and not stat.S_ISCHR(kind):
        return lambda data: os.write(fd, data), fd, False
    try:
        # O_NONBLOCK belongs to what open(2) returns: those who share `fd` with us go on as before.
        own = os.open(f"/proc/self/fd/{fd}", _OPEN)
    except OSError:  # it is another user's, as after `su`
        return lambda data: os.write(fd, data[:_AT_ONCE]), fd, True
    return lambda data: os.write(own, data), own, False
