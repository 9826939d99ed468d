"""Signs of life: the notify protocol of steps, and limits."""

import array
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gifts import LINGERS, enclosed, lingering
from tests.plans import task
from worker.limits import Limits
from worker.signs import NotifySocket, Said, Sign, parse


@pytest.mark.parametrize(
    ("message", "sign"),
    [
        (b"WATCHDOG=1", Sign(True, None)),
        (b"STATUS=half way", Sign(False, "half way")),
        (b"WATCHDOG=1\nSTATUS=half way\n", Sign(True, "half way")),
        (b"MAINPID=1\nSTOPPING=1\nREADY=0\nEXIT_STATUS=3", Sign(False, None)),  # case W7
        (b"X_AGENT_PROGRESS=3/10", Sign(progress=3.0, progress_text="3/10")),
        (b"X_AGENT_PROGRESS=7", Sign(progress=7.0, progress_text="7")),
        (b"X_AGENT_PROGRESS=many", Sign()),
        (b"X_AGENT_SPEND=0.12\nX_AGENT_RETRY_AFTER=120", Sign(spend=0.12, retry_after=120.0)),
        (b"X_AGENT_SPEND=-1\nX_AGENT_RETRY_AFTER=soon", Sign()),
        (b"X_AGENT_SPEND=" + b"9" * 400, Sign()),  # infinity to a float: no budget could count with it
        (b"X_AGENT_PROGRESS=" + b"9" * 400, Sign()),
        (b"EXTEND_TIMEOUT_USEC=5000000", Sign(extend=5.0)),
        (b"WATCHDOG=0", Sign(False, None)),
        (b"WATCHDOG=trigger", Sign(False, None)),
        (b"STATUS=\x1b[2J\xff", Sign(False, "\\x1b[2J\ufffd")),
        (b"", Sign(False, None)),
        (b"\0\0\0", Sign(False, None)),
    ],
)
def test_messages_mean_what_they_mean_to_systemd(message: bytes, sign: Sign) -> None:
    """
    Beats and statuses are understood; everything else changes nothing.
    """
    assert parse(message) == sign


def test_descriptors_that_come_along_are_closed_once_what_was_said_is_settled(tmp_path: Path) -> None:
    """
    systemd-notify(1) waits until its BARRIER=1 pipe is closed.
    """
    path = str(tmp_path / "notify")
    listening = NotifySocket(path)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    read, write = os.pipe()
    sender.sendmsg([b"BARRIER=1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write]))], 0, path)
    os.close(write)
    assert list(listening.receive()) == []
    os.set_blocking(read, False)
    with pytest.raises(BlockingIOError):
        os.read(read, 1)
    listening.release()
    assert os.read(read, 1) == b"", "the descriptor that was sent is still open"
    os.close(read)
    sender.close()
    listening.close()
    assert not os.path.exists(path)


class Asker:
    """A sender of messages that are to be acknowledged; `answer` returns what has come, None for nothing yet."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._ours = self._sender

    def send(self, message: bytes) -> None:
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        fds = array.array("i", [theirs.fileno()])
        self._sender.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)], 0, self._path)
        theirs.close()

    def answer(self) -> bytes | None:
        try:
            return self._ours.recv(1)
        except BlockingIOError:
            return None


def test_a_message_with_an_id_is_acknowledged_once_it_is_kept(tmp_path: Path) -> None:
    """
    Not by a descriptor that is closed, as a worker that is killed closes it, too.
    """
    listening = NotifySocket(str(tmp_path / "notify"))
    asker = Asker(listening.path)
    asker.send(b"X_AGENT_SPEND=1\nX_AGENT_ID=a")
    assert [sign for sign, _pid in listening.receive()] == [Sign(spend=1.0, id="a")]
    assert asker.answer() is None
    listening.release()
    assert (asker.answer(), asker.answer()) == (b"+", b"")
    asker.send(b"X_AGENT_SPEND=1\nX_AGENT_ID=b")
    for _message in listening.receive():
        listening.refuse()
    assert (asker.answer(), asker.answer()) == (b"-", b"")
    asker.send(b"X_AGENT_SPEND=1\nX_AGENT_ID=c")
    assert len(list(listening.receive())) == 1
    listening.drop()
    assert asker.answer() == b""
    listening.close()


def test_more_than_can_be_acknowledged_is_not_taken(tmp_path: Path) -> None:
    """
    Those who asked are told nothing, and ask again.
    """
    listening = NotifySocket(str(tmp_path / "notify"))
    askers = [Asker(listening.path) for _ in range(70)]
    taken = 0
    for asker in askers:
        asker.send(b"X_AGENT_SPEND=1\nX_AGENT_ID=a")
        taken += len(list(listening.receive()))
    listening.release()
    answers = [asker.answer() for asker in askers]
    assert taken == 64 and answers == [b"+"] * 64 + [b""] * 6
    listening.close()


def test_what_is_no_socket_is_closed_and_nothing_is_written_to_it(tmp_path: Path) -> None:
    """
    A full pipe would hold the worker up.
    """
    listening = NotifySocket(str(tmp_path / "notify"))
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [write, write]))]
        sender.sendmsg([b"X_AGENT_SPEND=1\nX_AGENT_ID=a"], rights, 0, listening.path)
    os.close(write)
    assert len(list(listening.receive())) == 1
    listening.release()
    assert os.read(read, 1) == b""
    os.close(read)
    listening.close()


def test_a_message_counts_once_for_all_workers_that_hear_it() -> None:
    """
    Said again to the worker that has it, and to the next one; a message without an id counts each time.
    """
    limits = limits_of(100.0)
    first, second = Said(), Said()
    spent = Sign(spend=1.0, id="a")
    for sign in (spent, spent, Sign(spend=1.0), Sign(spend=1.0)):
        first.take(sign, limits, 0.0, 101.0)
    assert first.spend == 3.0
    second.resume(first.memo(), first.counted())
    for sign in (spent, spent, spent._replace(id="b")):
        second.take(sign, limits, 0.0, 102.0)
    assert second.spend == 4.0 and second.counted() == ["a", "b"]
    second.acknowledged()
    assert second.counted() == []
    third = Said()
    third.resume(second.memo(), ())  # the memo of an older version has none
    assert third.spend == 4.0


def test_what_was_reached_before_is_no_progress() -> None:
    """
    A process says at its end how far it was; others have got further meanwhile.
    """
    said, limits = Said(), limits_of(100.0, progress_every=10)
    said.take(parse(b"X_AGENT_PROGRESS=5/10"), limits, 0.0, 101.0)
    said.take(parse(b"X_AGENT_REACHED=3/10"), limits, 0.0, 105.0)
    assert (said.progress, said.progress_text, limits.deadline()) == (5.0, "5/10", 111.0)
    said.take(parse(b"X_AGENT_REACHED=6/10"), limits, 0.0, 106.0)
    assert (said.progress, said.progress_text, limits.deadline()) == (6.0, "6/10", 116.0)


def test_a_step_that_never_stops_talking_is_heard_a_little_at_a_time(tmp_path: Path) -> None:
    """
    Else the worker would listen to it alone, and no limit of the other steps would hold.
    """
    path = str(tmp_path / "notify")
    listening = NotifySocket(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect(path)
        sender.send(b"WATCHDOG=1")
        for heard, _message in enumerate(listening.receive()):
            assert heard < 1000
            sender.send(b"WATCHDOG=1")  # there is always one more
    assert len(list(listening.receive())) == 1, "what has come is not lost"
    listening.close()


def test_a_socket_left_by_a_dead_worker_is_replaced(tmp_path: Path) -> None:
    """
    SIGKILL leaves the path behind.
    """
    path = str(tmp_path / "notify")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    dead.bind(path)
    dead.close()
    NotifySocket(path).close()


def limits_of(now: float, **limits: Any) -> Limits:
    return Limits(now, task("a")._replace(**limits))


def test_the_sender_is_named_by_the_kernel(tmp_path: Path) -> None:
    """
    Only a step's own processes are believed: each message comes with its sender's pid.
    """
    path = str(tmp_path / "notify")
    listening = NotifySocket(path)
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.sendto(b"WATCHDOG=1", path)
    ((sign, who),) = listening.receive()
    assert (sign, who.pid) == (Sign(beat=True), os.getpid())
    sender.close()
    listening.close()


@pytest.mark.parametrize("kind", ["lingering", "enclosed"])
def test_s24_a_descriptor_whose_close_waits_is_closed_aside(tmp_path: Path, kind: str) -> None:
    """
    S24: as on the control socket; the loop is not held up by what comes with a message.
    """
    path, kept = str(tmp_path / "notify"), list[socket.socket]()
    listening = NotifySocket(path)
    slow = lingering(kept)
    fd = enclosed([slow]) if kind == "enclosed" else slow
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sender.sendmsg([b"BARRIER=1"], rights, 0, path)
    os.close(fd)
    began = time.monotonic()
    assert list(listening.receive()) == []
    listening.release()
    assert time.monotonic() - began < LINGERS / 2
    for one in kept:
        one.close()
    listening.close()


def test_s13_the_kernels_word_for_a_sender_cannot_come_to_mean_another(tmp_path: Path) -> None:
    """
    S13: of one that has gone nothing is asked by its number, which another process may have by now.
    """
    path = str(tmp_path / "notify")
    listening = NotifySocket(path)
    said = f"import socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'STATUS=x', {path!r})"
    gone = subprocess.Popen([sys.executable, "-c", said])
    assert gone.wait() == 0
    for sign, who in listening.receive():
        assert (sign.status, who.pid) == ("x", gone.pid)
        assert not who.lives()
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for _ in range(3):
            sender.sendto(b"STATUS=y", path)
            assert [who.lives() for _sign, who in listening.receive()] == [True]
    assert len(os.listdir("/proc/self/fd")) == before, "the descriptor of a sender is still open"
    listening.close()


def test_progress_must_be_new_and_only_the_steps_own_program_owes_it() -> None:
    """
    progress_every and watchdog do not hold for what runs before and after the step's own program.
    """
    limits = limits_of(100.0, progress_every=10, watchdog=5)
    limits.restart(100.0, own=False)
    assert limits.broken(1000.0) is None
    limits.restart(1000.0, own=True)
    limits.beat(1008.0)
    assert limits.broken(1010.0) == "progress_every"
    limits.progress(1009.0)
    assert limits.deadline() == 1013.0


def test_a_timeout_can_be_extended() -> None:
    """
    EXTEND_TIMEOUT_USEC= counts from now and never shortens, as in sd_notify(3).
    """
    limits = limits_of(100.0, timeout=60)
    limits.extend(110.0, 5.0)
    assert limits.deadline() == 160.0
    limits.extend(150.0, 30.0)
    assert limits.deadline() == 180.0


def test_s29_no_extension_lifts_a_timeout_for_good() -> None:
    """
    S29: an attempt takes ten times its timeout at most; time that is charged to nobody is not counted there either.
    """
    limits = limits_of(100.0, timeout=3)
    limits.extend(101.0, 1e14)
    assert limits.deadline() == 130.0
    limits.excuse(50.0)
    limits.extend(175.0, 1e14)
    assert limits.deadline() == 180.0
    assert limits.broken(180.0) == "timeout"
    after = limits_of(100.0, timeout=3)
    after.resume(limits.memo())
    after.extend(179.0, 1e14)
    assert after.deadline() == 180.0
    unlimited = limits_of(100.0)
    unlimited.extend(101.0, 5.0)
    assert unlimited.deadline() == math.inf


def test_each_limit_has_its_own_clock() -> None:
    """
    timeout counts from the start, watchdog from the last beat, stall_after from any sign of life.
    """
    limits = limits_of(100.0, timeout=60, stall_after=20, watchdog=10)
    assert limits.deadline() == 110.0
    limits.beat(109.0)
    assert limits.deadline() == 119.0
    limits.sign(118.0)  # output is a sign of life but no beat
    assert limits.broken(118.9) is None
    assert limits.broken(119.0) == "watchdog"
    limits.beat(150.0)
    assert limits.broken(160.0) == "timeout"


def test_no_limits_never_break() -> None:
    """
    A step without limits may take for ever.
    """
    limits = limits_of(0.0)
    assert limits.deadline() == math.inf
    assert limits.broken(1e12) is None


def test_time_without_the_worker_is_not_charged() -> None:
    """
    Case W1: after a pause every limit has as much left as before.
    """
    limits = limits_of(0.0, timeout=60, stall_after=20, watchdog=10)
    limits.beat(5.0)
    limits.excuse(1000.0)
    assert limits.broken(1014.9) is None
    assert limits.broken(1015.0) == "watchdog"
