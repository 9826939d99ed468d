"""Signs of life: what a running step says on its own notify socket.

A step speaks sd_notify(3) to the worker exactly as the worker does to systemd.  Understood are
`WATCHDOG=1`, `STATUS=`, `EXTEND_TIMEOUT_USEC=` and, as systemd asks of private fields, with an X_ in
front: `X_AGENT_PROGRESS=3/10`, `X_AGENT_SPEND=0.12`, `X_AGENT_RETRY_AFTER=120`.  Everything else
(`MAINPID=`, `STOPPING=`, `EXIT_STATUS=` ...) is ignored.
"""

import array
import contextlib
import os
import re
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from worker.limits import Limits

# Longer than any message a sane step sends; the rest of a longer datagram is dropped by the kernel.
_MESSAGE_MAX = 64 * 1024
_STATUS_MAX = 256
_INT = array.array("i").itemsize
# So many may wait for us at a time; a step that sends more of them need not be obliged.
_BARRIERS_MAX = 64
_FDS_MAX = 253  # SCM_MAX_FD of the kernel
_CONTROL_MAX = socket.CMSG_SPACE(_FDS_MAX * _INT) + socket.CMSG_SPACE(3 * _INT)
_FLAGS = socket.MSG_CMSG_CLOEXEC
# Bounded, as is every sum of them: infinity less infinity would be no number, which no limit holds.
_AMOUNT = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_PROGRESS = re.compile(rf"({_AMOUNT})(?:/({_AMOUNT}))?")
_NUMBER = re.compile(_AMOUNT)
# A step that never stops talking is heard so much at a time; the others, and their limits, have their turn.
_AT_A_TIME = 64
# More than wait in any queue (net.unix.max_dgram_qlen) of a step that has ended.
_TO_THE_END = 8192


class Sign(NamedTuple):
    """One message of a step; None where it says nothing of that kind.  Times in seconds."""

    beat: bool = False
    status: str | None = None
    progress: float | None = None
    progress_text: str = ""
    spend: float | None = None
    retry_after: float | None = None
    extend: float | None = None


NOTHING = Sign()


class NotifySocket:
    """The datagram socket whose path a step finds in NOTIFY_SOCKET.

    Each attempt has one of its own, so a message belongs to the step that knows the path.
    """

    def __init__(self, path: str, fd: int | None = None) -> None:
        """Bind the socket at `path`, replacing what a dead worker left there.  Raises OSError.

        With `fd` it is that socket, which an earlier worker has bound there.
        """
        self.path = path
        self._barriers: list[int] = []
        self._inode = -1
        if fd is not None:
            self._socket = socket.socket(fileno=fd)
            with contextlib.suppress(OSError):  # the step may have removed it
                self._inode = os.stat(path).st_ino
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(path)
            self._inode = os.stat(path).st_ino
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def in_place(self) -> bool:
        """Return whether the path still leads to this socket."""
        try:
            return os.stat(self.path).st_ino == self._inode
        except OSError:
            return False

    def receive(self, to_the_end: bool = False) -> Iterator[tuple[Sign, int]]:
        """Yield the messages that have come, oldest first, each with its sender's pid; never blocks.

        It is some of them if there are many, unless nobody is left who could send more (`to_the_end`).

        The pid is the kernel's word (SCM_CREDENTIALS, unix(7)); 0 if it could not tell.  File descriptors
        that came with them are kept until `release`: whoever sent them waits for that (`BARRIER=1`,
        sd_notify_barrier(3)).
        """
        for _ in range(_TO_THE_END if to_the_end else _AT_A_TIME):
            try:
                data, control, _flags, _address = self._socket.recvmsg(_MESSAGE_MAX, _CONTROL_MAX, _FLAGS)
            except (BlockingIOError, InterruptedError):
                return
            pid, barriers = _take_control(control)
            self._barriers += barriers
            if len(self._barriers) > _BARRIERS_MAX:
                self.release()
            sign = parse(data)
            if sign != NOTHING:
                # Before the next message is taken: a sender that waits for its barrier is still alive.
                yield sign, pid

    def release(self) -> None:
        """Let those go on who wait until what they have sent was heard."""
        for fd in self._barriers:
            os.close(fd)
        self._barriers.clear()

    def close(self, unlink: bool = True) -> None:
        """Close the socket and remove its path."""
        self.release()
        self._socket.close()
        if unlink:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def parse(message: bytes) -> Sign:
    """Return what one datagram of the sd_notify(3) protocol means to the worker; nonsense means nothing."""
    sign = NOTHING
    for line in message.decode(errors="replace").split("\n"):
        name, _, value = line.partition("=")
        if line == "WATCHDOG=1":
            sign = sign._replace(beat=True)
        elif name == "STATUS":
            sign = sign._replace(status=printable(value)[:_STATUS_MAX])
        elif name == "X_AGENT_PROGRESS" and (found := _PROGRESS.fullmatch(value)):
            sign = sign._replace(progress=float(found[1]), progress_text=value)
        elif name == "X_AGENT_SPEND" and _NUMBER.fullmatch(value):
            sign = sign._replace(spend=float(value))
        elif name == "X_AGENT_RETRY_AFTER" and _NUMBER.fullmatch(value):
            sign = sign._replace(retry_after=float(value))
        elif name == "EXTEND_TIMEOUT_USEC" and value.isascii() and value.isdigit():
            sign = sign._replace(extend=int(value[:20]) / 1e6)
    return sign


def printable(text: str) -> str:
    """Return `text` with everything that could move a terminal's cursor escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _take_control(control: list[tuple[int, int, bytes]]) -> tuple[int, list[int]]:
    """Return the sender's pid, or 0, and the descriptors that came along."""
    pid = 0
    descriptors: list[int] = []
    for level, kind, data in control:
        if level != socket.SOL_SOCKET:
            continue
        numbers = array.array("i")
        numbers.frombytes(data[: len(data) - len(data) % _INT])
        if kind == socket.SCM_RIGHTS:
            descriptors += numbers
        elif kind == socket.SCM_CREDENTIALS:
            pid = numbers[0]
    return pid, descriptors


class Said:
    """What a step has said of itself so far."""

    def __init__(self) -> None:
        self.status_text: str | None = None
        self.progress = 0.0
        self.progress_text = ""
        self.spend = 0.0
        self.retry_after: float | None = None

    def take(self, sign: Sign, limits: Limits, best: float, now: float) -> None:
        """Note one message, also as a sign of life; `best`: the furthest progress of earlier attempts."""
        if sign.beat:
            limits.beat(now)
        if sign.status is not None:
            limits.sign(now)
            self.status_text = sign.status
        if sign.progress is not None:
            self.progress_text = sign.progress_text
            if sign.progress > max(self.progress, best):
                limits.progress(now)
            self.progress = max(self.progress, sign.progress)
        if sign.spend is not None:
            self.spend += sign.spend
        if sign.retry_after is not None:
            self.retry_after = sign.retry_after
        if sign.extend is not None:
            limits.extend(now, sign.extend)

    def memo(self) -> list[Any]:
        """Return what `resume` needs."""
        return [self.status_text, self.progress, self.progress_text, self.spend, self.retry_after]

    def resume(self, memo: list[Any]) -> None:
        """Be what another worker's `memo` says."""
        self.status_text, self.progress, self.progress_text, self.spend, self.retry_after = memo
