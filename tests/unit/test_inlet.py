"""A journald that hangs holds nobody up (case J5)."""

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from worker import inlet
from worker.inlet import Inlet


class Journald:
    """A socket like the journal's, which takes nothing once it is `full`."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._waiting = 0

    def hang(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.connect(self.path)
            with pytest.raises(BlockingIOError):
                while True:
                    sender.send(b"MESSAGE=x")
                    self._waiting += 1

    def go_on(self, most: int = 1000) -> None:
        for _ in range(min(most, self._waiting)):
            self._socket.recv(100)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def journald(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journald]:
    monkeypatch.setattr(inlet, "PATIENCE", 0.02)
    made = Journald(tmp_path / "socket")
    yield made
    made.close()


def test_events_come_later_and_lines_are_counted_while_it_hangs(journald: Journald) -> None:
    put: list[Sequence[str]] = []
    gate = Inlet(put.append, journald.path)
    gate.pass_on(["MESSAGE=started"], event=True)
    journald.hang()
    for number in range(3):
        gate.pass_on([f"MESSAGE={number}"], event=False)
    gate.pass_on(["MESSAGE=done"], event=True)
    assert put == [["MESSAGE=started"]]
    journald.go_on()
    gate.pass_on(["MESSAGE=next"], event=False)
    texts = [entry[0].removeprefix("MESSAGE=") for entry in put]
    missing = "the journal took nothing for a while; 3 lines of steps are missing here"
    assert texts == ["started", "done", missing, "next"]


@pytest.mark.parametrize("event", [True, False])
def test_one_that_takes_one_entry_more_is_given_no_second_one(journald: Journald, event: bool) -> None:
    """
    Neither after what was kept nor after the word about what is missing: whoever puts it would hang.
    """
    put: list[Sequence[str]] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.connect(journald.path)

        def send(entry: Sequence[str]) -> None:
            sender.send("\n".join(entry).encode())
            put.append(entry)

        gate = Inlet(send, journald.path)
        journald.hang()
        gate.pass_on(["MESSAGE=first"], event)
        journald.go_on(1)
        gate.pass_on(["MESSAGE=next"], event)
        assert len(put) == 1
        journald.go_on()
        gate.pass_on(["MESSAGE=last"], event)
    texts = [entry[0].removeprefix("MESSAGE=") for entry in put]
    missing = "the journal took nothing for a while; 1 line of steps is missing here"
    assert texts == (["first", "next", "last"] if event else [missing, missing, "last"])


def test_what_was_kept_is_put_at_the_end(journald: Journald) -> None:
    put: list[Sequence[str]] = []
    gate = Inlet(put.append, journald.path)
    journald.hang()
    gate.pass_on(["MESSAGE=done"], event=True)
    gate.close()
    assert put == []
    journald.go_on()
    gate.close()
    assert put == [["MESSAGE=done"]]


def test_where_there_is_nobody_to_ask_whoever_puts_will_see(tmp_path: Path) -> None:
    """
    No socket there, or one whose journald has gone: sending to it fails at once and does not wait.
    """
    put: list[Sequence[str]] = []
    Inlet(put.append, str(tmp_path / "none")).pass_on(["a"], event=False)
    gone = Journald(tmp_path / "socket")
    gate = Inlet(put.append, gone.path)
    gone.close()
    gate.pass_on(["b"], event=False)
    assert put == [["a"], ["b"]]
