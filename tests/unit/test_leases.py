"""The broker's own time: when it renews leases, looks again, and how much it does at a call."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from worker import clock, wire
from worker.broker import Broker
from worker.control import Connection
from worker.ledger.effects import CLAIMED
from worker.ledger.sqlite import SqliteLedger
from worker.ledger.sqlite.effects import SqliteEffects

T = TypeVar("T")
LEASE = 60.0


class Desk:
    """A broker over a real ledger, called by the test as by the loop."""

    def __init__(self, path: Path) -> None:
        self._ledger = SqliteLedger.create(str(path / "ledger.db"))
        self.effects: SqliteEffects = self._ledger.effects
        self.alive = {"a", "b"}
        self.told: list[tuple[str, str, str]] = []
        self.renewed: list[str] = []
        self.lost = False
        self.trouble: list[Exception] = []
        self.ends: list[socket.socket] = []
        self._renew = self.effects.renew
        self.effects.renew = self.renew  # type: ignore[method-assign]
        self.broker = Broker(
            self.effects, self.persist, self.alive.__contains__, lambda *words: self.told.append(words)
        )

    def renew(self, key: str, token: int, lease: float) -> bool:
        self.renewed.append(key)
        return not self.lost and self._renew(key, token, lease)

    def persist(self, action: Callable[[], T]) -> T:
        if self.trouble:
            raise self.trouble.pop()
        return action()

    def client(self) -> tuple[Connection, socket.socket]:
        """Return a connection, and the client's end of it."""
        ours, theirs = socket.socketpair()
        theirs.settimeout(5)
        self.ends.append(theirs)

        def drop(connection: Connection) -> None:
            if not connection.closed:
                connection.close()
                self.broker.gone(connection)

        connection = Connection(ours, drop)
        self.ends.append(ours)
        return connection, theirs

    def ask(self, client: Connection, **fields: object) -> None:
        client.unanswered += 1
        self.broker.take(client, wire.decode(wire.encode(fields).rstrip()), None)

    def claim(self, client: Connection, key: str, step: str = "a") -> None:
        self.ask(client, once="claim", key=key, parameters="p", step=step, lease=LEASE, take_over=False)

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self._ledger.close()


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.close()


def heard(end: socket.socket) -> list[str]:
    return [wire.decode(line)["verdict"] for line in end.recv(65536).split(b"\n")[:-1]]


def test_requests_are_done_when_the_loop_calls_and_not_before(desk: Desk) -> None:
    """
    They come in while the loop may be in the middle of another call of the ledger.
    """
    client, end = desk.client()
    assert desk.broker.due_at() == float("inf")
    desk.claim(client, "k")
    assert list(desk.effects.all()) == []
    assert desk.broker.due_at() <= clock.monotonic()
    desk.broker.work(clock.monotonic())
    assert heard(end) == [wire.GRANTED]
    assert [effect.state for effect in desk.effects.all()] == [CLAIMED]


def test_a_lease_is_renewed_while_its_step_is_within_its_limits(desk: Desk) -> None:
    """
    At a third of it each time; a step that hangs loses it in the end.
    """
    client, _end = desk.client()
    desk.claim(client, "k")
    now = clock.monotonic()
    desk.broker.work(now)
    due = desk.broker.due_at()
    assert now + LEASE / 3 <= due < now + LEASE / 2
    desk.broker.work(due - 0.01)
    assert desk.renewed == []
    desk.broker.work(due)
    assert desk.renewed == ["k"]
    assert desk.broker.due_at() == due + LEASE / 3
    desk.alive.clear()
    desk.broker.work(due + LEASE)
    assert desk.renewed == ["k"]
    desk.alive.add("a")
    desk.broker.work(due + 2 * LEASE)
    assert desk.renewed == ["k", "k"]


def test_who_waits_for_himself_or_in_a_circle_has_limits(desk: Desk) -> None:
    """
    A wait without an end is none that is excused: the step's own limits end it.
    """
    ends = [desk.client() for _ in range(4)]
    desk.claim(ends[0][0], "k", step="a")
    desk.claim(ends[1][0], "l", step="b")
    desk.claim(ends[2][0], "l", step="a")
    desk.broker.work(clock.monotonic())
    assert desk.broker.waiting() == {"a"}
    desk.claim(ends[3][0], "k", step="b")
    desk.broker.work(clock.monotonic())
    assert desk.broker.waiting() == set()


def test_when_a_lease_is_lost_the_others_ask_anew(desk: Desk) -> None:
    """
    Who waited here for a claim that is another machine's by now waits for that one.
    """
    first, _ = desk.client()
    second, end = desk.client()
    desk.claim(first, "k")
    desk.claim(second, "k", step="b")
    now = clock.monotonic()
    desk.broker.work(now)
    assert heard(end) == [wire.WAITING]
    assert desk.broker.waiting() == {"b"}
    desk.lost = True
    desk.broker.work(now + LEASE / 2)
    assert desk.broker.waiting() == {"b"}, "another machine is at it"
    assert desk.broker.due_at() == now + LEASE / 2 + 0.5
    desk.broker.look_again()
    assert desk.broker.due_at() == 0.0


def test_a_commit_that_was_sent_before_the_end_counts(desk: Desk) -> None:
    """
    A caller killed while it waited for the answer has said that it happened.
    """
    client, end = desk.client()
    desk.claim(client, "k")
    desk.broker.work(clock.monotonic())
    token = wire.decode(end.recv(1000).rstrip())["token"]
    desk.ask(client, once="begin", key="k", token=token)
    desk.ask(client, once="commit", key="k", token=token, step="a", outcome="executed", size=0, kept=True)
    client.close()
    desk.broker.gone(client)
    desk.broker.work(clock.monotonic())
    assert desk.told == [("a", "k", "executed")]
    assert desk.broker.due_at() == float("inf")


def test_who_leaves_before_its_turn_gets_no_claim(desk: Desk) -> None:
    """
    Nothing has to be given up then, and the next one is served.
    """
    first, _ = desk.client()
    second, end = desk.client()
    desk.claim(first, "k")
    first.close()
    desk.broker.gone(first)
    desk.claim(second, "k")
    desk.broker.work(clock.monotonic())
    assert heard(end) == [wire.GRANTED]


def test_a_worker_that_stops_in_the_middle_has_answered_nothing(desk: Desk) -> None:
    """
    What could not be written is not said to be; the caller asks the next worker.
    """
    client, end = desk.client()
    desk.claim(client, "k")
    desk.trouble.append(RuntimeError("stopped"))
    with pytest.raises(RuntimeError):
        desk.broker.work(clock.monotonic())
    client.close()
    assert end.recv(1000) == b""


def test_one_call_does_not_go_on_for_ever(desk: Desk) -> None:
    """
    The loop has other things to do: what is left is done at the next call, at once.
    """
    slow = desk.effects.claim

    def claim(*words: object) -> object:
        until = clock.monotonic() + 0.06
        while clock.monotonic() < until:
            pass
        return slow(*words)  # type: ignore[arg-type]

    desk.effects.claim = claim  # type: ignore[method-assign, assignment]
    ends = []
    for number in range(8):
        client, end = desk.client()
        ends.append(end)
        desk.claim(client, f"k{number}")
    desk.broker.work(clock.monotonic())
    assert desk.broker.due_at() == 0.0
    assert 0 < len(list(desk.effects.all())) < 8
    while desk.broker.due_at() == 0.0:
        desk.broker.work(clock.monotonic())
    assert [heard(end) for end in ends] == [[wire.GRANTED]] * 8
