"""Where SQLite may keep a write-ahead log, and what becomes of a ledger where it may not (case S1)."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.plans import ENDED
from worker import folder, member, mounts, resume
from worker.errors import StateError
from worker.folder import Places
from worker.ledger import Claim, Holdings, Ledger
from worker.ledger.sqlite import SqliteLedger, database
from worker.ledger.sqlite.database import connect, log, strange_log

MOUNTS = """\
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:5 / /proc rw - proc proc rw
30 22 0:40 / /srv rw - nfs4 server:/srv rw,vers=4.2
31 30 0:41 / /srv/with\\040space rw - fuse.sshfs me@host: rw
32 22 0:42 / /srv2 rw master:2 shared:9 - virtiofs share rw
33 22 0:43 / /twice rw - nfs server:/x rw
34 33 0:44 / /twice rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "shares"),
    [
        ("/", "ext4", True),
        ("/var/lib/agent", "ext4", True),
        ("/srv", "nfs4", False),
        ("/srv/agent", "nfs4", False),
        ("/srv/with space/x", "fuse.sshfs", False),
        ("/srv2/x", "virtiofs", False),
        ("/srv3", "ext4", True),
        ("/twice/x", "tmpfs", True),
    ],
)
def test_the_file_system_is_the_one_that_lies_on_top(tmp_path: Path, path: str, kind: str, shares: bool) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    found = mounts.kind(path, str(tmp_path / "mountinfo"))
    assert (found, mounts.shares_memory(found)) == (kind, shares)


def test_where_nothing_is_told_of_mounts_there_is_a_log(tmp_path: Path) -> None:
    assert mounts.kind("/", str(tmp_path / "missing")) == ""
    assert mounts.shares_memory("")
    assert mounts.kind("/proc") == "proc"


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let every folder lie on another machine, or not."""

    def become(remote: bool) -> None:
        monkeypatch.setattr(mounts, "kind", lambda _path: "nfs4" if remote else "ext4")

    become(True)
    return become


def write(ledger: Ledger, *steps: str) -> None:
    ledger.record([], [Claim(step, 1, "abc", 1000.0, "boot") for step in steps])
    ledger.record([ENDED._replace(step=step) for step in steps], [])


def done(path: Path, read_only: bool = True) -> list[str]:
    ledger = SqliteLedger.open(str(path), read_only=read_only)
    try:
        return [row.step for row in ledger.rows() if row.outcome == "done"]
    finally:
        ledger.close()


def test_s1_on_another_machines_disk_there_is_no_log_and_it_is_said(
    tmp_path: Path, network: Callable[[bool], None]
) -> None:
    """
    A rollback journal, one line about it, and readers see the ledger while the worker has it open.
    """
    places = Places("demo", str(tmp_path), folder.prepare(str(tmp_path), None))
    resumed = resume.open_ledger(places)
    write(resumed.ledger, "a")
    assert done(tmp_path / "ledger.db") == ["a"]
    write(resumed.ledger, "b")
    resumed.ledger.close()
    assert sorted(path.name for path in tmp_path.glob("ledger.db*")) == [
        "ledger.db",
        "ledger.db-journal",
        "ledger.db.mark",
    ]
    (said,) = [text for text in resumed.notices if "journal" in text]
    assert said == f"{tmp_path}: is on nfs4, where SQLite cannot keep a write-ahead log; using a rollback journal, " \
        "which is slower"  # fmt: skip
    assert done(tmp_path / "ledger.db") == ["a", "b"]


def test_nothing_is_said_of_journals_where_the_ledger_is_on_a_server(
    tmp_path: Path, network: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places("demo", str(tmp_path), folder.prepare(str(tmp_path), None))
    monkeypatch.setattr(member, "join", lambda *_: (None, None))
    unused: Any = None
    assert resume.join(unused, unused, places).notices == []


def test_a_ledger_that_moves_there_and_back_loses_nothing(tmp_path: Path, network: Callable[[bool], None]) -> None:
    """
    What stands in its log only is brought in, without the memory that its users share at home; there it gets a log
    again.
    """
    network(False)
    here, there = tmp_path / "here.db", tmp_path / "there.db"
    ledger = SqliteLedger.create(str(here))
    write(ledger, "a")
    for ending in ("", "-wal"):
        Path(f"{there}{ending}").write_bytes(Path(f"{here}{ending}").read_bytes())
    ledger.close()

    network(True)
    index = Path(f"{there}-shm")
    index.mkdir()  # where it would be mapped, and cannot be
    moved = SqliteLedger.open(str(there))
    write(moved, "b")
    assert not Path(f"{there}-wal").exists()
    moved.close()
    index.rmdir()

    network(False)
    assert done(there, read_only=False) == ["a", "b"]
    assert there.read_bytes()[18:20] == b"\2\2"


SPILL = """
import os, signal, sys
from worker.ledger.sqlite.database import connect
db = connect(sys.argv[1], "rw")
db.execute("PRAGMA cache_size = 1")  # so that pages are written before the commit
db.execute("BEGIN IMMEDIATE")
db.execute("UPDATE attempts SET outcome = 'failed'")
db.executemany("INSERT INTO facts VALUES (?, ?)", [(str(n), "x" * 1000) for n in range(200)])
os.kill(os.getpid(), signal.SIGKILL)
"""
# The file may not grow: it dies at its first new page, when it has written over the old ones.
COMMIT = """
import os, resource, signal, sys
from worker.ledger.sqlite.database import connect
db = connect(sys.argv[1], "rw")
size = os.path.getsize(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
db.execute("INSERT INTO facts VALUES ('more', ?)", ("x" * 9000,))
"""


def cut_off(path: Path, program: str = SPILL) -> None:
    """Leave a transaction that has been written in part, by a process that died in the middle of it."""
    dead = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert dead.returncode in (-signal.SIGKILL, -signal.SIGXFSZ)
    assert Path(f"{path}-journal").stat().st_size


@pytest.mark.parametrize("program", [SPILL, COMMIT], ids=["before the commit", "in the commit"])
def test_a_commit_that_was_cut_off_is_taken_back_by_the_next_worker_alone(
    tmp_path: Path, network: Callable[[bool], None], program: str
) -> None:
    """
    S2: a journal may name any file for SQLite to delete, so that who only looks plays back none.
    """
    path = tmp_path / "ledger.db"
    ledger = SqliteLedger.create(str(path))
    write(ledger, "a", "b")
    ledger.close()
    cut_off(path, program)
    assert log(str(path)) == "-journal"
    with pytest.raises(StateError, match=r"a commit was cut off.*start the agent"):
        done(path)
    assert log(str(path)) == "-journal"
    assert done(path, read_only=False) == ["a", "b"]
    assert log(str(path)) == ""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_somebody_who_may_not_write_is_not_shown_half_a_commit(tmp_path: Path, network: Callable[[bool], None]) -> None:
    path = tmp_path / "ledger.db"
    SqliteLedger.create(str(path)).close()
    cut_off(path)
    for folder_ in (tmp_path, *tmp_path.parents[:2]):
        os.chmod(folder_, 0o755)
    for file in tmp_path.iterdir():
        os.chmod(file, 0o644)
    os.seteuid(65534)
    try:
        with pytest.raises(StateError, match=r"a commit was cut off.*start the agent"):
            done(path)
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("program", [SPILL, COMMIT], ids=["before the commit", "in the commit"])
def test_a_ledger_put_beside_the_journal_of_another_one_is_not_changed_by_it(
    tmp_path: Path, network: Callable[[bool], None], program: str
) -> None:
    """
    SQLite would play the pages of the old database into the new one; the journal is set aside instead.
    """
    root = tmp_path / "state"
    places = Places("demo", str(root), folder.prepare(str(root), None))
    old = resume.open_ledger(places).ledger
    write(old, "a")
    old.close()
    cut_off(root / "ledger.db", program)
    other = SqliteLedger.create(str(tmp_path / "other.db"), Holdings(facts={"run": "demo"}))
    write(other, "a", "b", "c")
    for number in range(9):
        other.note({"more": str(number) * 9000})
    other.close()
    (root / "ledger.db").write_bytes((tmp_path / "other.db").read_bytes())
    assert strange_log(str(root / "ledger.db")) == "-journal"
    assert done(root / "ledger.db") == ["a", "b", "c"]

    resumed = resume.open_ledger(places)
    assert [row.step for row in resumed.ledger.rows()] == ["a", "b", "c"]
    resumed.ledger.close()
    assert any("beside the -journal of another one" in text for text in resumed.notices)
    assert len(list(root.glob("ledger.db-journal.corrupt-*"))) == 1


@pytest.mark.parametrize("program", [SPILL, COMMIT], ids=["before the commit", "in the commit"])
def test_a_commit_between_two_looks_does_not_make_the_journal_of_a_worker_another_ones(
    tmp_path: Path, network: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """
    Its ledger would be read without its journal and without a lock, in the middle of what is being written.
    """
    path = tmp_path / "ledger.db"
    SqliteLedger.create(str(path)).close()
    look, looks = database._head, []

    def look_and_be_late(name: str) -> bytes:
        found = look(name)
        looks.append(name)
        if len(looks) == 1:
            ledger = SqliteLedger.open(str(path))
            write(ledger, "a")
            ledger.close()
            cut_off(path, program)
        return found

    monkeypatch.setattr(database, "_head", look_and_be_late)
    assert strange_log(str(path)) == ""
    assert len(looks) > 1
    assert done(path, read_only=False) == ["a"]


def test_a_claim_is_durable_where_a_power_cut_could_break_the_file(
    tmp_path: Path, network: Callable[[bool], None]
) -> None:
    """
    With a rollback journal synchronous=NORMAL is not only less durable: no transaction uses it.
    """
    ledger = SqliteLedger.create(str(tmp_path / "ledger.db"))
    said: list[str] = []
    ledger._db.set_trace_callback(said.append)
    ledger.record([], [Claim("a", 1, "abc", 1000.0, "boot", "key", harmless=True)])
    ledger.close()
    assert [text for text in said if "INSERT" in text] and not [text for text in said if "NORMAL" in text]
    assert connect(str(tmp_path / "ledger.db"), "ro").execute("PRAGMA journal_mode").fetchone() == ("delete",)
