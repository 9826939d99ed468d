"""Signs of life: what a running step says on its own notify socket, and how long it may be silent.

A step speaks sd_notify(3) to the worker exactly as the worker does to systemd.  `WATCHDOG=1` and
`STATUS=` are understood; everything else (`MAINPID=`, `STOPPING=`, `EXIT_STATUS=` ...) is ignored.
"""

import array
import contextlib
import math
import os
import socket
from typing import NamedTuple

# Longer than any message a sane step sends; the rest of a longer datagram is dropped by the kernel.
_MESSAGE_MAX = 64 * 1024
_STATUS_MAX = 256
_FDS_MAX = 253  # SCM_MAX_FD of the kernel


class Sign(NamedTuple):
    """One message of a step."""

    beat: bool
    status: str | None


class NotifySocket:
    """The datagram socket whose path a step finds in NOTIFY_SOCKET.

    Each attempt has one of its own, so a message belongs to the step that knows the path.
    """

    def __init__(self, path: str) -> None:
        """Bind the socket at `path`, replacing what a dead worker left there.  Raises OSError."""
        self.path = path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(path)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[Sign]:
        """Return the messages that have come, oldest first; never blocks.

        File descriptors that came with them are closed: systemd-notify(1) waits for that
        (`BARRIER=1`, sd_notify_barrier(3)).
        """
        signs: list[Sign] = []
        while True:
            try:
                data, control, _flags, _address = self._socket.recvmsg(
                    _MESSAGE_MAX, socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize)
                )
            except (BlockingIOError, InterruptedError):
                return signs
            _close_received(control)
            sign = parse(data)
            if sign.beat or sign.status is not None:
                signs.append(sign)

    def close(self) -> None:
        """Close the socket and remove its path."""
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def parse(message: bytes) -> Sign:
    """Return what one datagram of the sd_notify(3) protocol means to the worker."""
    beat = False
    status: str | None = None
    for line in message.split(b"\n"):
        if line == b"WATCHDOG=1":
            beat = True
        elif line.startswith(b"STATUS="):
            status = printable(line[len(b"STATUS=") :].decode(errors="replace"))[:_STATUS_MAX]
    return Sign(beat, status)


def printable(text: str) -> str:
    """Return `text` with everything that could move a terminal's cursor escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _close_received(control: list[tuple[int, int, bytes]]) -> None:
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i")
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            for fd in fds:
                os.close(fd)


class Limits:
    """How long one attempt may take and how long it may be silent, on the monotonic clock.

    `timeout` counts from the start, `watchdog` from the last beat, `stall_after` from the last
    sign of life of any kind.  All in seconds; None means no such limit.
    """

    __slots__ = ("_beat", "_sign", "_started", "stall_after", "timeout", "watchdog")

    def __init__(
        self, now: float, timeout: float | None, stall_after: float | None, watchdog: float | None
    ) -> None:
        self.timeout = math.inf if timeout is None else timeout
        self.stall_after = math.inf if stall_after is None else stall_after
        self.watchdog = math.inf if watchdog is None else watchdog
        self._started = self._sign = self._beat = now

    def sign(self, now: float) -> None:
        """Note output, a status or CPU time used."""
        self._sign = now

    def beat(self, now: float) -> None:
        """Note a WATCHDOG=1."""
        self._sign = self._beat = now

    def excuse(self, seconds: float) -> None:
        """Leave `seconds` uncharged: time in which the worker itself did not run or read."""
        self._started += seconds
        self._sign += seconds
        self._beat += seconds

    @property
    def last_sign(self) -> float:
        return self._sign

    def deadline(self) -> float:
        """Return when the first limit is reached if nothing more is heard; inf if there is none."""
        return min(self._started + self.timeout, self._beat + self.watchdog, self._sign + self.stall_after)

    def broken(self, now: float) -> str | None:
        """Return the name of the limit that has been passed, or None."""
        if now >= self._started + self.timeout:
            return "timeout"
        if now >= self._beat + self.watchdog:
            return "watchdog"
        if now >= self._sign + self.stall_after:
            return "stall_after"
        return None

    def shortest(self) -> float:
        """Return the smallest limit in seconds; inf if there is none."""
        return min(self.timeout, self.watchdog, self.stall_after)
