"""The SQLite ledger: durable, whole, and unable to record a step as done twice."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plans import ENDED
from worker.errors import StateError
from worker.ledger import Claim, Ending, LedgerCorrupt, StorageFull
from worker.ledger.sqlite import SqliteLedger


def claim(step: str, number: int = 1) -> Claim:
    return Claim(step, number, "abc", 1000.0, "boot")


def ending(step: str, outcome: str = "done", number: int = 1, output: bytes | None = b"result") -> Ending:
    size = len(output or b"")
    return ENDED._replace(
        step=step, number=number, outcome=outcome, output=output, output_size=size, log=b"log", log_size=3
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteLedger]:
    ledger = SqliteLedger.create(str(tmp_path / "ledger.db"))
    yield ledger
    ledger.close()


def test_ends_and_claims_are_one_transaction(store: SqliteLedger) -> None:
    """
    The commit of one step and the claim of the next cost one flush.
    """
    store.record([], [claim("a")])
    store.record([ending("a")], [claim("b")])

    first, second = store.rows()
    assert (first.step, first.outcome, second.step, second.outcome) == ("a", "done", "b", None)
    assert store.output(first.seq) == b"result"
    assert store.log(first.seq) == b"log"
    assert store.revision() == 3


def test_a_step_is_done_once(store: SqliteLedger) -> None:
    """
    Promise 1, kept by the database itself: a second "done" is refused and nothing of it stays.
    """
    store.record([], [claim("a")])
    store.record([ending("a")], [claim("a", number=2)])
    with pytest.raises(ValueError, match="refuses"):
        store.record([ending("a", number=2)], [claim("b")])
    assert [row.outcome for row in store.rows()] == ["done", None]


def test_an_ending_without_its_claim_is_refused(store: SqliteLedger) -> None:
    """
    What was never claimed, or is closed already, cannot be closed.
    """
    store.record([], [claim("a")])
    store.record([ending("a")], [])
    with pytest.raises((ValueError, KeyError)):
        store.record([ending("a")], [])


@pytest.mark.parametrize(("point", "survives"), [("ledger-written", False), ("ledger-committed", True)])
def test_sigkill_around_the_commit(tmp_path: Path, point: str, survives: bool) -> None:
    """
    Before the commit the attempt is open; after it, it is done.  Never in between.
    """
    path = str(tmp_path / "ledger.db")
    ledger = SqliteLedger.create(path)
    ledger.record([], [claim("a")])
    ledger.close()
    code = (
        "import os, signal, sys; from worker import points; from worker.ledger.sqlite import SqliteLedger\n"
        "from tests.unit.test_ledger import claim, ending\n"
        "ledger = SqliteLedger.open(sys.argv[1])\n"
        "points.at = lambda p: p == sys.argv[2] and os.kill(os.getpid(), signal.SIGKILL)\n"
        "ledger.record([ending('a')], [claim('b')])"
    )
    child = subprocess.run([sys.executable, "-c", code, path, point], check=False)
    assert child.returncode == -signal.SIGKILL

    again = SqliteLedger.open(path)
    found = [(row.step, row.outcome) for row in again.rows()]
    again.close()
    assert found == ([("a", "done"), ("b", None)] if survives else [("a", None)])


def test_a_full_disk_changes_nothing_and_the_same_call_works_later(store: SqliteLedger) -> None:
    """
    Case S6: SQLITE_FULL is no end.  The database is really full: it may not grow by a page.
    """
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
    strace = (
        subprocess.run(["strace", "-V"], capture_output=True, check=False)
        if os.path.exists("/usr/bin/strace")
        else None
    )
    if strace is None or strace.returncode:
        pytest.skip("needs strace")
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
