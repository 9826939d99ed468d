"""The ledgers: durable, whole, and unable to record a step as done twice.

What both promise is tested with both; the rest of this file is about SQLite's.
"""

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import tracing
from tests.plans import ENDED
from worker.errors import StateError
from worker.ledger import Claim, Ending, Heard, Ledger, LedgerCorrupt, Recorded, Row, Saved, StorageFull
from worker.ledger.sqlite import SqliteLedger

Open = Callable[[], Ledger]
STEPS = [("a", "x"), ("b", "y"), ("c", "z")]


def claim(step: str, number: int = 1) -> Claim:
    return Claim(step, number, "abc", 1000.0, "boot")


def ending(step: str, outcome: str = "done", number: int = 1, output: bytes | None = b"result") -> Ending:
    size = len(output or b"")
    return ENDED._replace(
        step=step, number=number, outcome=outcome, output=output, output_size=size, log=b"log", log_size=3
    )


def closed(row: Row, **values: object) -> Row:
    """Return a row that is done with this, as a checkpoint may have it."""
    return row._replace(outcome="done", ended=1001.0, **values)  # type: ignore[arg-type]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.programs)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a ledger is, as a path or a URI; `open_at` opens it."""
    if request.param == "sqlite":
        path = str(tmp_path / "ledger.db")
        SqliteLedger.create(path).close()
        return path
    dsn: str = request.getfixturevalue("server").dsn()
    return dsn


def open_at(address: str, run: str) -> Ledger:
    """Open a ledger, on a server as the next life of its one worker."""
    if not address.startswith("postgresql:"):
        return SqliteLedger.open(address)
    from worker.ledger.postgres import Member, PostgresLedger

    me = Member("worker", os.urandom(4).hex(), "host", os.getpid(), "1")
    return PostgresLedger.join(address, run, me, 60.0, 5.0)


@pytest.fixture
def store(address: str, tmp_path: Path) -> Iterator[Ledger]:
    """A ledger that knows the steps a, b and c."""
    ledger = open_at(address, str(tmp_path))
    ledger.enlist(STEPS)
    yield ledger
    ledger.close()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[SqliteLedger]:
    ledger = SqliteLedger.create(str(tmp_path / "ledger.db"))
    yield ledger
    ledger.close()


# -- what every ledger promises


def test_ends_and_claims_are_one_transaction(store: Ledger) -> None:
    """
    The commit of one step and the claim of the next cost one flush.
    """
    store.record([], [claim("a")])
    recorded = store.record([ending("a")], [claim("b")])

    assert recorded == Recorded([claim("b")], [])
    first, second = store.rows()
    assert (first.step, first.outcome, second.step, second.outcome) == ("a", "done", "b", None)
    assert first.seq < second.seq
    assert store.output(first.seq) == b"result"
    assert store.log(first.seq) == b"log"
    assert store.output(second.seq) is None


def test_no_more_is_claimed_than_was_asked_for(store: Ledger) -> None:
    """
    Of the claims that are offered the first ones are taken.
    """
    recorded = store.record([], [claim("c"), claim("a"), claim("b")], 2)
    assert [claim.step for claim in recorded.claims] == ["c", "a"]
    assert store.record([], [claim("b")], 0).claims == []
    assert sorted(row.step for row in store.rows()) == ["a", "c"]


def test_a_step_may_end_and_begin_again_at_once(store: Ledger) -> None:
    """
    An attempt that failed and the claim of the next one go into the same call.
    """
    store.record([], [claim("a")])
    recorded = store.record([ending("a", "failed")], [claim("a", 2), claim("b")], 2)
    assert [(claim.step, claim.number) for claim in recorded.claims] == [("a", 2), ("b", 1)]
    assert store.record([ending("a", number=2)], []).lost == []
    last = store.last_closed("a")
    assert last is not None
    assert (last.number, last.outcome, last.key) == (2, "done", "")


def test_the_revision_grows_with_every_claim_and_every_ending(store: Ledger) -> None:
    """
    A checkpoint that knows less than the ledger has a lower number.
    """
    seen = [store.revision()]
    for endings, claims in (([], [claim("a")]), ([ending("a")], []), ([], [claim("b")]), ([ending("b")], [claim("c")])):
        store.record(endings, claims)
        seen.append(store.revision())
    assert seen == sorted(set(seen))


def test_facts_are_kept(store: Ledger) -> None:
    """
    The newest value of each, whatever it consists of.
    """
    store.note({"state": "running", "boot": "this"})
    store.note({"state": "done ✓"})
    assert (store.fact("state"), store.fact("boot"), store.fact("none")) == ("done ✓", "this", None)


def test_what_open_and_closed_attempts_have_spent_is_counted_once(store: Ledger) -> None:
    """
    What was noted of an attempt while it ran is part of what its ending says, not more; an attempt begins with nothing.
    """
    store.enlist(STEPS)
    store.record([], [claim("a"), claim("b")])
    store.heard({("a", 1): Heard(0.0, 1.5), ("b", 1): Heard(0.0, 0.25), ("c", 1): Heard(0.0, 99.0)})
    store.heard({("a", 1): Heard(0.0, 2.5)})
    assert store.usage([])[1] == 2.75
    assert [row.spend for row in store.rows()] == [2.5, 0.25]
    store.record([ending("a", "failed")._replace(spend=3.0)], [claim("a", 2)])
    assert store.usage([])[1] == 3.25
    assert [(row.step, row.number, row.spend) for row in store.rows()] == [("a", 1, 3.0), ("b", 1, 0.25), ("a", 2, 0.0)]


def test_what_an_open_attempt_has_said_is_kept(store: Ledger) -> None:
    """
    Finding F4: how far it got is known while it runs, after its end only what that says; its item stays with it.
    """
    store.record([], [claim("a")._replace(item="an item ✓"), claim("b")])
    store.heard({("a", 1): Heard(40.0, 1.5), ("c", 1): Heard(9.0, 9.0)})
    found = [(row.step, row.progress, row.spend, row.item, row.digest) for row in store.rows()]
    assert found == [("a", 40.0, 1.5, "an item ✓", ""), ("b", 0.0, 0.0, None, "")]
    store.record([ending("a", "failed")._replace(progress=50.0, digest="of it")], [claim("a", 2)])
    found = [(row.step, row.progress, row.spend, row.item, row.digest) for row in store.rows()]
    assert found == [("a", 50.0, 0.0, "an item ✓", "of it"), ("b", 0.0, 0.0, None, ""), ("a", 0.0, 0.0, None, "")]


def test_the_files_of_a_step_are_kept_until_it_is_done(store: Ledger) -> None:
    """
    Finding F3: what a step has saved is what it saved last, byte for byte; each time the revision grows.
    """
    a = [Saved("a", "sub/state", b"\0\xff", 2, 5.0), Saved("a", "too large", None, 10**7, 6.5)]
    b = [Saved("b", "state", b"", 0, 7.0)]
    store.record([], [claim("a"), claim("b")])
    before = store.revision()
    store.save_files("a", [Saved("a", "old", b"x", 1, 1.0)])
    store.save_files("a", a)
    store.save_files("b", b)
    assert store.revision() > before
    assert list(store.saved()) == a + b
    assert list(store.saved("b")) == b
    store.record([ending("a", "failed")], [])
    assert list(store.saved("a")) == a
    store.record([ending("b")], [claim("a", 2)])
    assert list(store.saved()) == a
    other = [
        Saved("a", "state", b"older", 5, 1.0),
        Saved("b", "state", b"b", 1, 1.0),
        Saved("c", "state", b"c", 1, 1.0),
    ]
    assert store.restore_saved(other) == 1
    assert list(store.saved()) == [*a, other[2]]


def test_items_are_added_once_and_stay_in_order(store: Ledger) -> None:
    """
    A list that is said again after an answer was lost, or that has grown, adds what is new at its end.
    """
    assert store.items() == {}
    before = store.revision()
    store.add_items("t", ["b", "a", "b"])
    store.add_items("u", ["a"])
    store.add_items("t", ["a", "c"])
    store.add_items("v", [])
    assert store.items() == {"t": ["b", "a", "c"], "u": ["a"]}
    assert store.revision() > before


def test_amounts_add_up_and_facts_beside_them_are_replaced(store: Ledger) -> None:
    store.add({"used_hours": 0.5, "used_restarts": 1}, {"worked_until": "1"})
    store.add({"used_hours": 0.25}, {"worked_until": "2"})
    assert float(store.fact("used_hours") or 0) == 0.75
    assert float(store.fact("used_restarts") or 0) == 1
    assert store.fact("worked_until") == "2"


def test_amounts_with_a_mark_are_added_once(store: Ledger) -> None:
    """
    Said again, as after an answer that was lost, they are known by it; another value of the mark is another time.
    """
    for value in ("1", "1", "2", "2"):
        store.add({"used_hours": 0.5}, {"state": value}, ("counted", value))
    assert float(store.fact("used_hours") or 0) == 1.0
    store.add({"used_hours": 0.5}, {"state": "not this"}, ("counted", "2"))
    assert (store.fact("state"), store.fact("counted")) == ("2", "2")


def test_whatever_a_step_says_can_be_stored(store: Ledger) -> None:
    """
    NUL and numbers beyond all measure: the ending is recorded, and the rest of it intact.
    """
    store.record([], [claim("a")])
    odd = ending("a", "failed", output=bytes(range(256)))
    odd = odd._replace(cause="said 'a\0b' ✓", progress=1e308, spend=float("inf"), status=-9)
    assert store.record([odd], []).lost == []
    (row,) = store.rows()
    assert (row.outcome, row.progress, row.spend, row.status) == ("failed", 1e308, float("inf"), -9)
    assert "✓" in row.cause
    assert store.output(row.seq) == bytes(range(256))


@pytest.mark.parametrize(("point", "survives"), [("ledger-written", False), ("ledger-committed", True)])
def test_sigkill_around_the_commit(address: str, tmp_path: Path, point: str, survives: bool) -> None:
    """
    Case S9: before the commit the attempt is open; after it, it is done.  Never in between.
    """
    ledger = open_at(address, str(tmp_path))
    ledger.enlist(STEPS)
    ledger.close()
    code = (
        "import os, signal, sys; from worker import points\n"
        "from tests.unit.test_ledger import claim, ending, open_at\n"
        "ledger = open_at(*sys.argv[1:3])\n"
        "ledger.record([], [claim('a')])\n"
        "points.at = lambda p: p == sys.argv[3] and os.kill(os.getpid(), signal.SIGKILL)\n"
        "ledger.record([ending('a')], [claim('b')])"
    )
    child = subprocess.run([sys.executable, "-c", code, address, str(tmp_path), point], check=False)
    assert child.returncode == -signal.SIGKILL

    again = open_at(address, str(tmp_path))
    found = [(row.step, row.outcome) for row in again.rows()]
    again.close()
    assert found == ([("a", "done"), ("b", None)] if survives else [("a", None)])


def test_a_checkpoint_gives_back_what_the_ledger_lacks(store: Ledger) -> None:
    """
    Attempts that are unknown are added, and a step that was done is done, also where its commit was lost.
    """
    store.record([], [claim("a"), claim("b")])
    store.record([ending("b", "failed")], [])
    a, b = store.rows()
    known: list[tuple[Row, bytes | None]] = [(a, None), (b, None)]
    news = [(closed(a), b"of a"), (closed(b, number=2), None), (b._replace(step="c"), b"kept")]

    assert store.restore(known) == 0
    assert store.restore(news + known) == 3
    assert store.restore(news) == 0

    found = {(row.step, row.number): row for row in store.rows()}
    assert {key: row.outcome for key, row in found.items()} == {
        ("a", 1): "done",
        ("b", 1): "failed",
        ("b", 2): "done",
        ("c", 1): "failed",
    }
    assert store.output(found["a", 1].seq) == b"of a"
    assert [claim.number for claim in store.record([], [claim("c", 2)]).claims] == [2]


# -- SQLite


def test_a_step_is_done_once(sqlite_store: SqliteLedger) -> None:
    """
    Promise 1, kept by the database itself: a second "done" is refused and nothing of it stays.
    """
    store = sqlite_store
    store.record([], [claim("a")])
    store.record([ending("a")], [claim("a", number=2)])
    with pytest.raises(ValueError, match="refuses"):
        store.record([ending("a", number=2)], [claim("b")])
    assert [row.outcome for row in store.rows()] == ["done", None]


def test_an_ending_without_its_claim_is_refused(sqlite_store: SqliteLedger) -> None:
    """
    What was never claimed, or is closed already, cannot be closed.
    """
    sqlite_store.record([], [claim("a")])
    sqlite_store.record([ending("a")], [])
    with pytest.raises((ValueError, KeyError)):
        sqlite_store.record([ending("a")], [])


def test_a_full_disk_changes_nothing_and_the_same_call_works_later(sqlite_store: SqliteLedger) -> None:
    """
    Case S6: SQLITE_FULL is no end.  The database is really full: it may not grow by a page.
    """
    store = sqlite_store
    store.record([], [claim("a")])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    big = ending("a", output=b"x" * 60_000)
    with pytest.raises(StorageFull):
        store.record([big], [claim("b")])
    assert [row.outcome for row in store.rows()] == [None]
    store._db.execute(f"PRAGMA max_page_count = {pages + 1000}")
    store.record([big], [claim("b")])
    assert [row.outcome for row in store.rows()] == ["done", None]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: bytes(len(data)),
        lambda data: os.urandom(len(data)),
        lambda data: data[:4096] + os.urandom(len(data) - 4096),
    ],
    ids=["empty", "truncated", "zeros", "random", "random pages"],
)
def test_damage_is_noticed_when_the_ledger_is_opened(tmp_path: Path, damage: object) -> None:
    """
    Case F10: no damaged file passes for a ledger, an empty one least of all.
    """
    path = tmp_path / "ledger.db"
    ledger = SqliteLedger.create(str(path))
    for n in range(100):
        ledger.record([], [claim(f"step-{n}")])
    ledger.close()
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(LedgerCorrupt):
        SqliteLedger.open(str(path))


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """
    State that is newer than the program is not touched.
    """
    path = str(tmp_path / "ledger.db")
    SqliteLedger.create(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StateError, match="newer version"):
        SqliteLedger.open(path)


def test_one_flush_for_each_durable_step(tmp_path: Path) -> None:
    """
    Counted in the kernel: fsync and fdatasync of 50 chained commits.
    """
    tracing.require()
    path = str(tmp_path / "ledger.db")
    SqliteLedger.create(path).close()
    code = (
        "import sys; from worker.ledger.sqlite import SqliteLedger\n"
        "from tests.unit.test_ledger import claim, ending\n"
        "ledger = SqliteLedger.open(sys.argv[1]); ledger.record([], [claim('0')])\n"
        "open('/dev/null').close()\n"
        "for n in range(50): ledger.record([ending(str(n))], [claim(str(n + 1))])\n"
        "open('/dev/null').close()\n"
    )
    trace = tmp_path / "trace"
    subprocess.run(
        [
            "strace",
            "-f",
            "-o",
            str(trace),
            "-e",
            "trace=openat,fsync,fdatasync",
            sys.executable,
            "-c",
            code,
            path,
        ],
        check=True,
    )
    _before, during, _after = trace.read_text().split('"/dev/null"')[:3]
    assert during.count("sync(") == 50


def test_a_count_of_changes_that_is_no_number_is_a_damaged_ledger(tmp_path: Path) -> None:
    """
    S31: as where two pages of the file have changed places.
    """
    SqliteLedger.create(str(tmp_path / "ledger.db")).close()
    for broken in ("UPDATE effect_counts SET changes = 'done'", "DELETE FROM effect_counts"):
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as db, db:
            db.execute(broken)
        with (
            contextlib.closing(SqliteLedger.open(str(tmp_path / "ledger.db"), read_only=True)) as store,
            pytest.raises(LedgerCorrupt, match="effect_counts"),
        ):
            store.revision()
