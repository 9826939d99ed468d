"""Signs of life: what a running step says on its own notify socket.

A step speaks sd_notify(3) to the worker exactly as the worker does to systemd.  Understood are
`WATCHDOG=1`, `STATUS=`, `EXTEND_TIMEOUT_USEC=` and, as systemd asks of private fields, with an X_ in
front: `X_AGENT_PROGRESS=3/10`, `X_AGENT_SPEND=0.12`, `X_AGENT_RETRY_AFTER=120`.  Everything else
(`MAINPID=`, `STOPPING=`, `EXIT_STATUS=` ...) is ignored.

A message with an id, `X_AGENT_ID=`, and one end of a socketpair(2) is acknowledged there: `+` once it is kept whatever
becomes of this worker, `-` if it is not believed.  If the end is closed without an answer, the message was not counted,
or will not be counted again: it is to be sent again with its id.  `X_AGENT_REACHED=` is progress that may have been
told before.
"""

import array
import contextlib
import os
import re
import socket
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from worker import closing, points, sender
from worker.limits import Limits
from worker.sender import Sender

# Longer than any message a sane step sends; the rest of a longer datagram is dropped by the kernel.
_MESSAGE_MAX = 64 * 1024
_STATUS_MAX = 256
_INT = array.array("i").itemsize
# So many may wait for us at a time; a step that sends more of them need not be obliged.
_BARRIERS_MAX = 64
# Descriptors, who sent them, and a descriptor of that one.
_CONTROL_MAX = sum(socket.CMSG_SPACE(count * _INT) for count in (closing.RECEIVED_MAX, 3, 1))
_FLAGS = socket.MSG_CMSG_CLOEXEC
# Bounded, as is every sum of them: infinity less infinity would be no number, which no limit holds.
_AMOUNT = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_PROGRESS = re.compile(rf"({_AMOUNT})(?:/({_AMOUNT}))?")
_NUMBER = re.compile(_AMOUNT)
# A step that never stops talking is heard so much at a time; the others, and their limits, have their turn.
_AT_A_TIME = 64
# Of messages that an earlier worker has counted, the last so many are known again.
_INHERITED_MAX = 4 * _BARRIERS_MAX
TAKEN, REFUSED = b"+", b"-"
_ID = re.compile(r"[0-9A-Za-z]{1,32}")
_CONTROL = "../control"
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
    reached: float | None = None  # progress, if it is further than what is known
    id: str = ""  # of a message that is to be acknowledged


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
        self._asking: list[int] = []  # sockets on which messages are to be acknowledged
        self._inode = -1
        self._way: str | None = None
        if fd is not None:
            self._socket = socket.socket(fileno=fd)
            sender.ask_for(self._socket)
            with contextlib.suppress(OSError):  # the step may have removed it
                self._inode = os.stat(path).st_ino
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        folder, name = os.path.split(path)
        at = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sender.ask_for(self._socket)
            self._socket.bind(f"/proc/self/fd/{at}/{name}")  # /proc/net/unix shows it to all as it is said here
            self._inode = os.stat(path).st_ino
        except OSError:
            self._socket.close()
            raise
        finally:
            os.close(at)

    @classmethod
    def in_folder(cls, path: str) -> "NotifySocket":
        """Bind one in a folder of its own, from which a link leads to the control socket beside that (worker/once.py).

        The folder is made if it is not there.  Raises OSError.
        """
        folder = os.path.dirname(path)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        made = cls(path)
        made._way = f"{folder}/control"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made._way)
        os.symlink(_CONTROL, made._way)
        return made

    def fileno(self) -> int:
        return self._socket.fileno()

    def in_place(self) -> bool:
        """Return whether the path still leads to this socket, and whoever has it to the control socket."""
        try:
            there = os.stat(self.path).st_ino == self._inode
            return there and (self._way is None or os.readlink(self._way) == _CONTROL)
        except OSError:
            return False

    def receive(self, to_the_end: bool = False) -> Iterator[tuple[Sign, Sender]]:
        """Yield the messages that have come, oldest first, each with its sender; never blocks.

        It is some of them if there are many, unless nobody is left who could send more (`to_the_end`).

        The sender is the kernel's word (unix(7)), and can be asked until the next message is taken.  File descriptors
        that came with them are kept until `release`: whoever sent them waits for that (`BARRIER=1`,
        sd_notify_barrier(3)).  A message to be acknowledged for which there is no room is not yielded.
        """
        for _ in range(_TO_THE_END if to_the_end else _AT_A_TIME):
            try:
                data, control, _flags, _address = self._socket.recvmsg(_MESSAGE_MAX, _CONTROL_MAX, _FLAGS)
            except (BlockingIOError, InterruptedError):
                return
            points.at("message-received")
            who, descriptors = _take_control(control)
            try:
                sign = parse(data)
                if sign.id and descriptors:
                    answer_on = descriptors.pop()
                    _close(descriptors)
                    if len(self._asking) == _BARRIERS_MAX:
                        _close([answer_on])
                        continue
                    self._asking.append(answer_on)
                elif descriptors:
                    self._barriers += descriptors
                    if len(self._barriers) > _BARRIERS_MAX:
                        _close(self._barriers)
                if sign != NOTHING:
                    # Before the next message is taken: a sender that waits for its barrier is still alive.
                    yield sign, who
            finally:
                if who.pidfd >= 0:
                    os.close(who.pidfd)

    def refuse(self) -> None:
        """Tell the sender of the message with an id that was yielded last that it is not believed."""
        if self._asking:
            _answer(self._asking.pop(), REFUSED)

    def release(self) -> None:
        """Acknowledge what was sent, since it is kept now, and let those go on who wait for that."""
        while self._asking:
            _answer(self._asking.pop(), TAKEN)
        if self._barriers:
            _close(self._barriers)

    def drop(self) -> None:
        """Let those go on who wait, and acknowledge nothing."""
        if self._asking or self._barriers:
            _close(self._asking)
            _close(self._barriers)

    def close(self, unlink: bool = True) -> None:
        """Close the socket and remove its path."""
        self.drop()
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
        elif name == "X_AGENT_REACHED" and (found := _PROGRESS.fullmatch(value)):
            sign = sign._replace(reached=float(found[1]), progress_text=value)
        elif name == "X_AGENT_ID" and _ID.fullmatch(value):
            sign = sign._replace(id=value)
    return sign


def printable(text: str) -> str:
    """Return `text` with everything that could move a terminal's cursor escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _answer(fd: int, word: bytes) -> None:
    """Send the answer and close the socket; never waits.  What is no socket is closed."""
    try:
        asking = socket.socket(fileno=fd)
    except OSError:
        pass
    else:
        with contextlib.suppress(OSError):
            asking.send(word, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        asking.detach()
    _close([fd])


def _close(descriptors: list[int]) -> None:
    if descriptors:
        closing.close(descriptors)
        descriptors.clear()


def _take_control(control: list[tuple[int, int, bytes]]) -> tuple[Sender, list[int]]:
    """Return the sender, and the descriptors that came along."""
    pid, pidfd = 0, -1
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
        elif kind == sender.SCM_PIDFD:
            pidfd = numbers[0]  # an error's number for one that has gone, before Linux 6.16
    return Sender(pid, pidfd), descriptors


class Said:
    """What a step has said of itself so far."""

    def __init__(self) -> None:
        self.status_text: str | None = None
        self.progress = 0.0
        self.progress_text = ""
        self.spend = 0.0
        self.retry_after: float | None = None
        self._counted: dict[str, None] = {}
        self._inherited: dict[str, None] = {}  # counted by earlier workers

    def take(self, sign: Sign, limits: Limits, best: float, now: float) -> None:
        """Note one message, also as a sign of life; `best`: the furthest progress of earlier attempts.

        What a message spends is counted once, however often it comes with the same id before it is acknowledged.
        """
        if sign.beat:
            limits.beat(now)
        if sign.status is not None:
            limits.sign(now)
            self.status_text = sign.status
        reached = sign.progress
        if reached is None and sign.reached is not None and sign.reached > self.progress:
            reached = sign.reached
        if reached is not None:
            self.progress_text = sign.progress_text
            if reached > max(self.progress, best):
                limits.progress(now)
            self.progress = max(self.progress, reached)
        if sign.spend is not None and not self._is_counted(sign.id):
            self.spend += sign.spend
        if sign.retry_after is not None:
            self.retry_after = sign.retry_after
        if sign.extend is not None:
            limits.extend(now, sign.extend)

    def acknowledged(self) -> None:
        """Note that the messages of this worker's time were acknowledged: none of them will come again."""
        self._counted.clear()

    def _is_counted(self, message: str) -> bool:
        if message in self._counted:
            return True
        if message:
            self._counted[message] = None
        return self._inherited.pop(message, "") is None

    def memo(self) -> list[Any]:
        """Return what `resume` needs."""
        return [self.status_text, self.progress, self.progress_text, self.spend, self.retry_after]

    def counted(self) -> list[str]:
        """Return the ids of messages whose spending is counted, and whose senders may not know."""
        return [*self._inherited, *self._counted][-_INHERITED_MAX:]

    def resume(self, memo: list[Any], counted: Sequence[str]) -> None:
        """Be what another worker's `memo` says, and what it had `counted`."""
        self.status_text, self.progress, self.progress_text, self.spend, self.retry_after = memo
        self._inherited = dict.fromkeys(counted)
