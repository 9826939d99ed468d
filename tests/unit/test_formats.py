"""State of older formats is converted, with a copy of it beside; that of newer ones is refused."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from worker import checkpoint
from worker.errors import StateError
from worker.folder import Places
from worker.ledger import Heard, Holdings, Saved
from worker.ledger.effects import GRANTED
from worker.ledger.sqlite import VERSION, SqliteLedger
from worker.resume import open_ledger

# What the first format was, word for word.
FORMAT_1 = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE attempts (
    seq INTEGER PRIMARY KEY, step TEXT NOT NULL, number INTEGER NOT NULL, definition TEXT NOT NULL,
    started REAL NOT NULL, boot TEXT NOT NULL, outcome TEXT, counted INTEGER NOT NULL DEFAULT 0,
    final INTEGER NOT NULL DEFAULT 0, cause TEXT NOT NULL DEFAULT '', status INTEGER, ended REAL,
    took REAL NOT NULL DEFAULT 0, delay REAL NOT NULL DEFAULT 0, progress REAL NOT NULL DEFAULT 0,
    spend REAL NOT NULL DEFAULT 0, detail TEXT NOT NULL DEFAULT '', output_size INTEGER NOT NULL DEFAULT 0,
    log_size INTEGER NOT NULL DEFAULT 0, output BLOB, log BLOB
);
CREATE UNIQUE INDEX done ON attempts (step) WHERE outcome = 'done';
INSERT INTO facts VALUES ('run', 'demo'), ('state', 'running');
INSERT INTO attempts (seq, step, number, definition, started, boot, outcome, ended, output, output_size)
    VALUES (1, 'a', 1, 'd', 1.0, 'b', 'done', 2.0, x'6869', 2);
INSERT INTO attempts (seq, step, number, definition, started, boot) VALUES (2, 'b', 1, 'd', 3.0, 'b');
PRAGMA user_version = 1;
"""


# What the second one had more.
FORMAT_2 = """
ALTER TABLE attempts ADD COLUMN unsure INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN key TEXT NOT NULL DEFAULT '';
ALTER TABLE attempts ADD COLUMN worker TEXT NOT NULL DEFAULT '';
CREATE TABLE effects (
    key TEXT PRIMARY KEY, parameters TEXT NOT NULL, state TEXT NOT NULL, step TEXT NOT NULL, token INTEGER NOT NULL,
    worker TEXT NOT NULL, at REAL NOT NULL, result BLOB, size INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE effect_counts (token INTEGER NOT NULL, changes INTEGER NOT NULL);
INSERT INTO effect_counts VALUES (0, 0);
INSERT INTO effects VALUES ('demo:k', 'p', 'committed', 'a', 1, '', 2.0, x'6b', 1);
PRAGMA user_version = 2;
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    db = sqlite3.connect(path)
    db.executescript(FORMAT_1)
    db.close()
    return path


def test_a_ledger_of_the_first_format_goes_on(old: Path) -> None:
    """
    What was done stays done, what was open is open, effects can be claimed; the copy is the ledger as it was.
    """
    before = old.read_bytes()
    ledger = SqliteLedger.open(str(old))
    rows = list(ledger.rows())
    assert [(row.step, row.outcome, row.unsure, row.key) for row in rows] == [("a", "done", 0, ""), ("b", None, 0, "")]
    assert ledger.output(1) == b"hi"
    assert ledger.effects.claim("k", "p", "b", 60.0, False).verdict == GRANTED
    ledger.close()
    with sqlite3.connect(f"{old}.format-1") as copy:
        assert copy.execute("PRAGMA user_version").fetchone() == (1,)
        assert copy.execute("SELECT count(*) FROM attempts").fetchone() == (2,)
    with sqlite3.connect(old) as converted:
        assert converted.execute("PRAGMA user_version").fetchone() == (VERSION,)
        assert converted.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert before[:16] == b"SQLite format 3\0"


def test_a_ledger_of_the_second_format_goes_on(old: Path) -> None:
    """
    Steps and effects are what they were; what the third format has more can be kept.
    """
    with contextlib.closing(sqlite3.connect(old)) as db:
        db.executescript(FORMAT_2)
    ledger = SqliteLedger.open(str(old))
    assert [(row.step, row.outcome, row.item, row.digest) for row in ledger.rows()] == [
        ("a", "done", None, ""),
        ("b", None, None, ""),
    ]
    assert [(effect.key, effect.result) for effect in ledger.effects.all()] == [("demo:k", b"k")]
    kept = [Saved("b", "state", b"half", 4, 1.0)]
    ledger.save_files("b", kept)
    ledger.add_items("t", ["x"])
    ledger.heard({("b", 1): Heard(3.0, 0.5)})
    ledger.close()
    again = SqliteLedger.open(str(old))
    assert (list(again.saved()), again.items(), list(again.rows())[1].progress) == (kept, {"t": ["x"]}, 3.0)
    again.close()
    with contextlib.closing(sqlite3.connect(f"{old}.format-2")) as copy:
        assert copy.execute("PRAGMA user_version").fetchone() == (2,)
    assert not Path(f"{old}.format-1").exists()


def test_whoever_only_looks_converts_nothing(old: Path) -> None:
    """
    `agentctl status` of a new version, before the agent was started: one line that says so.
    """
    before = old.read_bytes()
    with pytest.raises(StateError, match="of an older version of the agent; start the agent, which converts it"):
        SqliteLedger.open(str(old), read_only=True)
    assert old.read_bytes() == before


def test_a_checkpoint_of_the_first_format_is_enough(tmp_path: Path) -> None:
    """
    It had no effects; its steps are done all the same.
    """
    entry = {"seq": 1, "step": "a", "number": 1, "definition": "d", "started": 1.0, "boot": "b", "outcome": "done"}
    head = {"format": 1, "run": "demo", "revision": 2, "written": "", "version": "0.1.0", "facts": {}}
    text = json.dumps(head)[:-1] + ',\n"attempts": [\n' + json.dumps(entry | {"ended": 2.0}) + ",\n{}\n]}\n"
    (tmp_path / "checkpoint.json").write_text(text)
    (tmp_path / "run").mkdir()
    ledger = open_ledger(Places("demo", str(tmp_path), str(tmp_path / "run"))).ledger
    assert [(row.step, row.outcome) for row in ledger.rows()] == [("a", "done")]
    checkpoint.write(str(tmp_path / "checkpoint.json"), "demo", ledger)
    assert checkpoint.load(str(tmp_path / "checkpoint.json")).effects == []
    ledger.close()


def test_effects_travel_in_the_checkpoint(tmp_path: Path) -> None:
    """
    On another machine they are skipped as they were here; one that was going on is nobody's there.
    """
    ledger = SqliteLedger.create(str(tmp_path / "one.db"))
    for key, result in (("text", b"a result\n"), ("bytes", b"\xff\x00"), ("open", None)):
        token = ledger.effects.claim(key, "p", "s", 60.0, False).effect.token
        if result is not None:
            ledger.effects.commit(key, token, result, len(result))
    checkpoint.write(str(tmp_path / "checkpoint.json"), "demo", ledger)
    ledger.close()
    found = checkpoint.load(str(tmp_path / "checkpoint.json"))
    other = SqliteLedger.create(str(tmp_path / "two.db"), Holdings(found.attempts, {}, found.effects))
    assert other.effects.claim("text", "p", "s", 60.0, False).effect.result == b"a result\n"
    assert other.effects.claim("bytes", "p", "s", 60.0, False).effect.result == b"\xff\x00"
    assert other.effects.claim("open", "p", "s", 60.0, False).verdict == "unknown"
    other.close()
