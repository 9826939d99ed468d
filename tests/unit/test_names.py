"""Names that come from outside, in a checkpoint, a ledger or a server's row, are never taken for paths (S4)."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.plans import sealed
from worker import checkpoint, resume, verify
from worker.errors import STATE_UNUSABLE, StateError
from worker.folder import Places
from worker.ledger import Claim, Ending, Holdings, LedgerCorrupt, Saved
from worker.ledger.sqlite import SqliteLedger
from worker.restore import restore

PATHS = ["../../evil", "/etc/evil", "a/b", "..", ".", "", ".hidden", "nul\0", "x" * 300]


def made(root: Path) -> SqliteLedger:
    """Return a ledger in `root` with one step that is done and keeps a file."""
    root.mkdir(exist_ok=True)
    ledger = SqliteLedger.create(str(root / "ledger.db"), Holdings(facts={"run": "r"}))
    ledger.record([], [Claim("honest", 1, "abc", 1000.0, "boot")])
    ledger.save_files("honest", [Saved("honest", "state", b"kept", 4, 1000.0)])
    ledger.record([Ending("honest", 1, "done", False, False, "", 0, 1001.0, output=b"r", output_size=1)], [])
    ledger.record([], [Claim("other", 1, "abc", 1000.0, "boot")])
    ledger.save_files("other", [Saved("other", "state", b"kept", 4, 1000.0)])
    return ledger


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.mark.parametrize("name", PATHS)
def test_no_path_of_a_run_is_made_from_a_path(tmp_path: Path, name: str) -> None:
    places = Places("r", str(tmp_path), str(tmp_path))
    for make in (places.output, places.state, lambda step: places.log(step, 1)):
        with pytest.raises(StateError, match="which the agent gives to none"):
            make(name)


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("field", ['"step": "honest"', '"name": "state"'])
def test_a_checkpoint_whose_names_are_paths_is_none(tmp_path: Path, name: str, field: str) -> None:
    """
    Neither restored nor called sound; nothing is written anywhere.
    """
    ledger = made(tmp_path / "there")
    text = b"".join(checkpoint.chunks("r", ledger)).decode()
    ledger.close()
    key = field.partition(":")[0]
    import json

    assert field in text
    copy = tmp_path / "run.json"
    copy.write_text(sealed(text.replace(field, f"{key}: {json.dumps(name)}")))
    (tmp_path / "here").mkdir()
    before = everything(tmp_path)
    with pytest.raises(StateError, match="is no name of a file"):
        restore(str(copy), str(tmp_path / "here"), None, force=False)
    assert everything(tmp_path) - before <= {"here/lock"}
    assert verify.verify([str(copy)], str(tmp_path / "here"), None) == STATE_UNUSABLE


@pytest.mark.parametrize("name", [name for name in PATHS if "\0" not in name])
@pytest.mark.parametrize("place", ["attempts.step", "saved.step", "saved.name"])
def test_a_ledger_whose_names_are_paths_is_none(tmp_path: Path, name: str, place: str) -> None:
    """
    Copied in by hand it is set aside; given to restore it is refused.
    """
    root = tmp_path / "there"
    made(root).close()
    table, column = place.split(".")
    with sqlite3.connect(root / "ledger.db") as db:
        db.execute(f"UPDATE {table} SET {column} = ? WHERE step = 'other'", (name,))
    db.close()
    with pytest.raises(LedgerCorrupt, match="is no name of a file"):
        SqliteLedger.open(str(root / "ledger.db"))
    with pytest.raises(StateError, match="is no name of a file"):
        restore(str(root / "ledger.db"), str(tmp_path / "here"), None, force=False)


def test_a_ledger_whose_run_is_a_path_moves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "state"
    made(root).close()
    with sqlite3.connect(root / "ledger.db") as db:
        db.execute("UPDATE facts SET value = '../../elsewhere' WHERE name = 'run'")
    db.close()
    with pytest.raises(StateError, match="is no name of a run"):
        resume.open_ledger(Places("r", str(root), str(root)))
    assert not (tmp_path / "elsewhere").exists()
    assert (root / "ledger.db").exists()


def test_a_folder_that_looks_like_a_restore_moves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "state"
    made(root).close()
    (root / "restoring-20260101T000000Z...").mkdir()
    with pytest.raises(StateError, match="is no restore that the agent has made"):
        resume.open_ledger(Places("r", str(root), str(root)))
