"""The control socket under clients that do not keep to the language, say nothing, or do not listen."""

import array
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gifts import enclosed, lingering
from tests.keeper import Keeper, Raw
from worker import control, wire
from worker.events import Events
from worker.ledger.effects import RESULT_MAX


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    """One for all tests: it survives every one of them."""
    made = Keeper(tmp_path_factory.mktemp("keeper"))
    yield made.start()
    made.close()


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Keeper]:
    """One that was not started."""
    made = Keeper(tmp_path)
    yield made
    made.close()


def descriptors(keeper: Keeper) -> list[str]:
    """Return what the worker has open, but for connections."""
    folder = f"/proc/{keeper.pid}/fd"
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed just now
            found.append(os.readlink(f"{folder}/{name}"))
    return sorted(name for name in found if not name.startswith("socket"))


RUBBISH = {
    "binary": bytes(range(256)) * 10 + b"\n",
    "nonsense": b"hello\n",
    "an empty line": b"\n",
    "JSON": b'{"once": "claim", "key": 3}\n',
    "an unknown request": b"once=more\tkey=k\n",
    "a claim of nothing": b"once=claim\n",
    "a claim without a key": wire.encode(
        {"once": "claim", "key": "", "parameters": "p", "step": "a", "lease": 60, "take_over": False}
    ),
    "a key of two lines": b"once=claim\tkey=a\x0bb\tparameters=p\tstep=a\tlease=60\n",
    "a lease of never": b"once=claim\tkey=k\tparameters=p\tstep=a\tlease=nan\n",
    "parameters that are no digest": b"once=claim\tkey=k\tparameters=\0\tstep=a\tlease=60\n",
    "a step that does not run": b"once=claim\tkey=k\tparameters=p\tstep=dead\tlease=60\n",
    "a token that no database can hold": b"once=release\tkey=k\ttoken=" + b"9" * 30 + b"\n",
    "a commit of an outcome that there is not": b"once=commit\tkey=k\ttoken=1\tstep=a\toutcome=fun\tsize=0\tkept=yes\n",
    "a commit whose result is missing": b"once=commit\tkey=k\ttoken=1\tstep=a\toutcome=found\tsize=9\tkept=yes\n",
}


@pytest.mark.parametrize("data", RUBBISH.values(), ids=RUBBISH.keys())
def test_rubbish_is_refused_or_dropped_and_harms_nobody(keeper: Keeper, data: bytes) -> None:
    """
    The one who sent it is told that it is wrong, or just cut off; the worker goes on and has claimed nothing.
    """
    with keeper.effects() as effects:
        before = list(effects.all())
    raw = Raw(keeper)
    try:
        raw.socket.sendall(data)
        assert set(raw.hear()) <= {"error"}
    except ConnectionError:
        pass  # dropped before it had said all
    raw.close()
    assert keeper.answers()
    with keeper.effects() as effects:
        assert list(effects.all()) == before


@pytest.mark.parametrize("data", [b"x" * 10_000_000, b"once=begin\n" * 100_000], ids=["one line", "many lines"])
def test_a_client_that_does_not_stop_talking_is_cut_off(keeper: Keeper, data: bytes) -> None:
    """
    The worker does not keep what it was not asked to keep.
    """
    raw = Raw(keeper)
    with pytest.raises(ConnectionError):
        raw.socket.sendall(data)
    raw.close()
    assert keeper.answers()


def test_half_a_line_and_silence_hold_nobody_up(keeper: Keeper) -> None:
    """
    They may take as long as they like; others are answered meanwhile, and the rest of the line is understood.
    """
    silent, half = Raw(keeper), Raw(keeper)
    half.socket.sendall(b"ask=st")
    assert keeper.answers()
    half.socket.sendall(b"atus\n")
    assert half.socket.recv(100).startswith(b"{")
    silent.close()
    half.close()
    assert keeper.answers()


def test_those_who_have_nothing_to_do_here_make_room(other: Keeper) -> None:
    """
    When there are too many connections the oldest idle one goes; who has a claim or waits for one stays.
    """
    other.start(connections=4)
    holder, waiter = Raw(other), Raw(other)
    token = holder.claim("k")["token"]
    assert waiter.claim("k")["verdict"] == wire.WAITING
    idle = [Raw(other) for _ in range(20)]
    assert other.answers()
    assert idle[0].hear() == {}
    holder.say(once="release", key="k", token=token)
    assert holder.hear()["verdict"] == wire.RELEASED
    assert waiter.hear()["verdict"] == wire.GRANTED
    for raw in (holder, waiter, *idle):
        raw.close()


def test_when_all_have_claims_others_wait_outside_until_one_goes(other: Keeper) -> None:
    """
    Nobody is refused for good.
    """
    other.start(connections=3)
    holders = [Raw(other) for _ in range(3)]
    for number, raw in enumerate(holders):
        assert raw.claim(f"k{number}")["verdict"] == wire.GRANTED
    late = Raw(other).say(ask="status")
    holders[0].close()
    assert late.socket.recv(100).startswith(b"{")
    for raw in [*holders, late]:
        raw.close()


def test_a_reader_that_is_too_slow_is_dropped(other: Keeper) -> None:
    """
    The worker does not wait for it, and does not keep for it what it does not take.
    """
    other.start(padding=20_000_000)
    slow = Raw(other).say(ask="status")
    quick = Raw(other)
    assert quick.claim("k")["verdict"] == wire.GRANTED
    got = 0
    while data := slow.socket.recv(1 << 20):
        got += len(data)
    assert got < 20_000_000
    slow.close()
    quick.close()


def _pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def _memfd(size: int) -> int:
    fd = os.memfd_create("test")
    os.truncate(fd, size)
    return fd


GIFTS: dict[str, Callable[[], list[int]]] = {
    "a pipe": lambda: [_pipe()],
    "a folder": lambda: [os.open("/", os.O_RDONLY)],
    "two results": lambda: [_memfd(1), _memfd(1)],
    "more than are taken": lambda: [_memfd(1) for _ in range(100)],
    "a result that is too large": lambda: [_memfd(RESULT_MAX + 1)],
    "one that nobody asked for": lambda: [_memfd(1)],
}


@pytest.mark.parametrize("gift", GIFTS.values(), ids=GIFTS.keys())
def test_descriptors_of_clients_are_closed_whatever_they_are(keeper: Keeper, gift: Callable[[], list[int]]) -> None:
    """
    A client cannot fill up the worker's table, nor have it wait for a pipe.
    """
    before = descriptors(keeper)
    for line in (b"ask", b"ask=status\n", b"once=release\tkey=k\ttoken=1\n"):
        raw = Raw(keeper)
        fds = gift()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        raw.socket.sendmsg([line], rights)
        for fd in fds:
            os.close(fd)
        assert keeper.answers()
        while descriptors(keeper) != before:  # what is no memory is closed a little later
            assert keeper.answers()
        raw.close()


@pytest.mark.parametrize("count", [1, 5, 253])
@pytest.mark.parametrize("kind", ["lingering", "enclosed"])
def test_s24_a_descriptor_whose_close_waits_holds_nobody_up(tmp_path: Path, kind: str, count: int) -> None:
    """
    S24: neither a socket that lingers, beside however many others, nor one inside another that is sent.
    """
    keeper, kept = Keeper(tmp_path), list[socket.socket]()
    keeper.start()
    raw = Raw(keeper)
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count - 1)]
    slow = lingering(kept)
    fds.append(enclosed([slow]) if kind == "enclosed" else slow)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    raw.socket.sendmsg([b"once=release\tkey=k\ttoken=1\n"], rights)
    for fd in fds:
        os.close(fd)
    assert raw.hear() == {}
    assert keeper.answers()
    for one in kept:
        one.close()
    raw.close()
    keeper.close()


def test_a_result_in_anything_but_memory_is_refused(keeper: Keeper) -> None:
    """
    To read a file could take for ever, where it lies on a server that is away.
    """
    raw = Raw(keeper)
    with open("/proc/self/status", "rb") as file:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()]))]
        raw.socket.sendmsg([b"once=release\tkey=k\ttoken=1\n"], rights)
    assert raw.hear() == {}
    raw.close()


@pytest.mark.parametrize("result", [b"pr-17\n", b"", None])
def test_a_person_settles_what_is_unknown_through_the_worker(keeper: Keeper, result: bytes | None) -> None:
    """
    The ledger is the worker's, so it writes down what the person says, or says what is wrong with it.
    """
    key = f"settled: {result!r}"
    with keeper.effects() as effects:
        effects.abandon(key, effects.claim(key, "p", "a", 60.0, False).effect.token)
        effects.claim(key, "p", "a", 60.0, False)
    words = {"settle": key, "who": "ann", "kept": result is not None}
    assert control.request(keeper.socket, words, result) == {"told": f"{key}: settled by ann"}
    assert control.request(keeper.socket, words, result) == {"error": f"'{key}' is not unknown"}
    with keeper.effects() as effects:
        assert [effect.result for effect in effects.all() if effect.key == key] == ([] if result is None else [result])


@pytest.mark.parametrize("client", ["reads nothing", "is gone"])
def test_a_result_for_one_who_does_not_take_it_leaves_nothing_open(keeper: Keeper, client: str) -> None:
    """
    The descriptor that it travels in is closed.
    """
    with keeper.effects() as effects:
        effects.commit("done", effects.claim("done", "p", "a", 60.0, False).effect.token, b"done", 4)
    before = descriptors(keeper)
    raw = Raw(keeper).say(once="claim", key="done", parameters="p", step="a", lease=60)
    if client == "is gone":
        raw.close()
    keeper.until("skipped a done")
    assert keeper.answers()
    assert descriptors(keeper) == before
    raw.close()


def test_without_a_broker_the_status_is_answered_and_effects_are_refused(tmp_path: Path) -> None:
    """
    A worker that keeps no effects says so.
    """
    events, path = Events(), str(tmp_path / "control")
    server = control.Server(path, events, lambda: {"run": "r"})
    answers = []
    for fields in ({"once": "claim"}, {"ask": "status"}):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(path)
            client.sendall(wire.encode(fields))
            for _ in range(2):
                events.handle(events.poll(1))
            answers.append(client.recv(1000))
    server.close()
    assert answers == [b"error=this worker keeps no effects\n", b'{"run": "r"}']
    assert not (tmp_path / "control").exists()
