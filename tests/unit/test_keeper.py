"""The keeper: the checkpoint follows the ledger, and the loop is not held up by a long one."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop import Loop
from tests.unit.test_checkpoint import ledger_with
from worker import checkpoint, clock, errands, files, keeper, process
from worker.journal import Journal
from worker.keeper import Keeper
from worker.ledger import Claim


def test_bursts_share_a_write_and_a_lone_step_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop
) -> None:
    """
    The first change is due at once; the next at the earliest a second later.
    """
    now = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    store = ledger_with(tmp_path, 1)
    keeper = Keeper(str(tmp_path / "checkpoint.json"), "demo", store, loop.errands, Journal("demo", lambda *_: None))
    assert keeper.due_at() == float("inf")
    keeper.changed()
    assert keeper.due_at() <= now[0]
    keeper.keep(now[0])
    assert keeper.due_at() == float("inf")
    keeper.changed()
    assert keeper.due_at() == 101.0
    store.close()


class Kept:
    """A run that is long enough for a child, its keeper, what that says, and what the loop asks the ledger."""

    def __init__(self, folder: Path, loop: Loop) -> None:
        self.ledger = ledger_with(folder, keeper._LARGE // 2)
        self.path = str(folder / "checkpoint.json")
        self.said: list[str] = []
        self.asked: list[str] = []
        self.ledger._db.set_trace_callback(self.asked.append)
        journal = Journal("demo", lambda text, *_: self.said.append(text))
        self.keeper = Keeper(self.path, "demo", self.ledger, loop.errands, journal)
        self._loop = loop

    def change(self) -> None:
        self.ledger.record([], [Claim(f"more-{self.ledger.revision()}", 1, "abc", 1000.0, "boot")])
        self.keeper.changed()

    def write(self) -> None:
        """Let the keeper do what is due, and what it has sent out come to its end."""
        assert self.keeper.due_at() < math.inf
        self.keeper.keep(self.keeper.due_at())
        assert self.keeper.due_at() == math.inf
        assert self._loop.errands.wait(clock.monotonic() + 60.0, "checkpoint")

    def revision(self) -> int:
        return checkpoint.header(self.path).revision

    def leftovers(self) -> list[str]:
        return [entry.name for entry in Path(self.path).parent.glob(".checkpoint*")]


@pytest.fixture
def kept(tmp_path: Path, loop: Loop) -> Iterator[Kept]:
    made = Kept(tmp_path, loop)
    yield made
    made.ledger.close()


def test_of_a_long_run_the_loop_reads_no_attempt(kept: Kept) -> None:
    """
    Counted in SQLite: a child reads them, and what it writes is the checkpoint, whole.
    """
    kept.change()
    kept.write()
    assert not [query for query in kept.asked if "SELECT" in query and "attempts" in query]
    head, attempts, *_others = checkpoint.load(kept.path)
    assert (head.run, head.revision) == ("demo", kept.ledger.revision())
    assert [row for row, _ in attempts] == list(kept.ledger.rows())
    assert attempts[7][1] == b"step-7"
    assert (kept.keeper.due_at(), kept.leftovers(), kept.said) == (math.inf, [], [])


def test_of_a_short_run_no_child_is_made(kept: Kept, monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    monkeypatch.setattr(keeper, "_LARGE", kept.ledger.revision() + 2)
    kept.change()
    kept.keeper.keep(kept.keeper.due_at())
    assert not loop.errands.pids()
    assert kept.revision() == kept.ledger.revision()


def test_what_changes_while_a_child_writes_is_for_the_next_one(kept: Kept, loop: Loop) -> None:
    kept.change()
    kept.keeper.keep(kept.keeper.due_at())
    kept.change()
    assert kept.keeper.due_at() == math.inf
    kept.keeper.keep(math.inf)
    assert len(loop.errands.pids()) == 1
    assert loop.errands.wait(clock.monotonic() + 60.0, "checkpoint")
    assert clock.monotonic() < kept.keeper.due_at() < math.inf
    kept.write()
    assert kept.revision() == kept.ledger.revision()


def test_f12_an_older_one_takes_no_newer_ones_place(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Case F12: what lies where the child was to write is not what was asked for; the old one stays, whole.
    """
    files.prepare(kept.path, checkpoint.chunks("demo", kept.ledger))
    old = Path(files.prepared(kept.path)).read_bytes()
    kept.change()
    kept.write()
    good = Path(kept.path).read_bytes()
    Path(kept.path).with_name("old").write_bytes(old)
    kept.change()
    with monkeypatch.context() as patch:
        patch.setattr(process, "ours", lambda _: ("/bin/sh", "-c", 'cd "${0%/*}" && cp old .checkpoint.json.next'))
        kept.write()
    assert Path(kept.path).read_bytes() == good
    assert "the new one is older than the run" in kept.said[-1]
    assert kept.leftovers() == []
    kept.write()
    assert kept.revision() == kept.ledger.revision()


@pytest.mark.parametrize(
    "program",
    [
        ("/nowhere/python",),
        ("/bin/sh", "-c", "exit 3"),
        ("/bin/sh", "-c", 'echo half >"${0%/*}/.checkpoint.json.next"'),
    ],
    ids=["absent", "fails", "half"],
)
def test_a_child_that_fails_is_told_once_and_tried_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, program: tuple[str, ...]
) -> None:
    """
    Nothing is lost meanwhile, and when it works again that is told, too.
    """
    kept.change()
    with monkeypatch.context() as patch:
        patch.setattr(process, "ours", lambda _: program)
        for _ in range(3):
            kept.keeper.keep(kept.keeper.due_at())
            kept.keeper._errands.wait(clock.monotonic() + 60.0, "checkpoint")
            assert clock.monotonic() < kept.keeper.due_at() < math.inf
    assert len(kept.said) == 1
    assert "trying again, the ledger is current" in kept.said[0]
    kept.write()
    assert "written again" in kept.said[-1]
    assert (kept.revision(), kept.leftovers()) == (kept.ledger.revision(), [])


@pytest.mark.parametrize("finished", ["done", "failed", "out-of-budget", "stopped"])
def test_at_the_end_the_file_is_up_to_date(kept: Kept, finished: str) -> None:
    """
    Also what has changed while a child was writing, however soon that was.
    """
    kept.change()
    kept.keeper.keep(kept.keeper.due_at())
    kept.change()
    kept.keeper.conclude(finished)
    assert (kept.revision(), kept.leftovers()) == (kept.ledger.revision(), [])
    assert not [query for query in kept.asked if "SELECT" in query and "attempts" in query]


def test_at_the_end_the_loop_writes_what_no_child_can(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ours", lambda _: ("/bin/false",))
    kept.change()
    kept.keeper.conclude("done")
    assert kept.revision() == kept.ledger.revision()


def test_a_wait_at_the_end_is_told(kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    """
    The child ends only when that has been said.
    """
    os.mkfifo(tmp_path / "go")
    go = os.open(tmp_path / "go", os.O_RDWR)
    monkeypatch.setattr(errands, "PATIENT", 0.01)
    monkeypatch.setattr(process, "ours", lambda _: ("/bin/sh", "-c", 'read word <"${0%/*}/go"'))
    said: list[str] = []

    def tell(text: str, *_: object) -> None:
        said.append(text)
        os.write(go, b"go\n")

    waits = Keeper(kept.path, "demo", kept.ledger, loop.errands, Journal("demo", tell))
    waits.changed()
    waits.conclude("done")
    os.close(go)
    assert "waiting until it is written" in said[0]
    assert kept.revision() == kept.ledger.revision()


def test_a_worker_that_leaves_waits_for_nothing_and_the_next_one_knows(kept: Kept, loop: Loop) -> None:
    """
    What it would have written is written by the next one when that begins, before anything changes.
    """
    kept.keeper.begin()
    kept.write()
    old = kept.revision()
    kept.change()
    kept.keeper.conclude("left")
    assert (loop.errands.pids(), kept.revision()) == (set(), old)
    heir = Keeper(kept.path, "demo", kept.ledger, loop.errands, Journal("demo", lambda *_: None))
    heir.begin()
    assert heir.due_at() < math.inf
    heir.conclude("stopped")
    assert kept.revision() == kept.ledger.revision()
    heir.begin()
    assert heir.due_at() == math.inf
