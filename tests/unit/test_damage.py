"""Damage: a byte that has changed anywhere in what the state folder holds is noticed, said and survived."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.plans import ENDED
from tests.support import Worker
from tests.unit.test_fromcopy import agentctl
from worker import checkpoint, folder, fromcopy, resume
from worker.errors import StateError
from worker.folder import Places
from worker.ledger import DONE, Claim, LedgerCorrupt
from worker.ledger.sqlite import SqliteLedger

STEPS = [f"s@{n:02}" for n in range(30)]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A state folder in which thirty steps and an effect are done."""
    root = str(tmp_path / "state")
    found = Places("demo", root, folder.prepare(root, None))
    with contextlib.closing(resume.open_ledger(found).ledger) as ledger:
        for step in STEPS:
            ledger.record([], [Claim(step, 1, "abc", 1000.0, "boot")])
            ledger.record([ENDED._replace(step=step, output=b"result", output_size=6, log=b"words", log_size=5)], [])
        token = ledger.effects.claim("k", "p", "s@01", 60.0, False).effect.token
        ledger.effects.commit("k", token, b"result", 6)
        checkpoint.write(found.checkpoint, "demo", ledger)
    return found


def ledger_files(places: Places) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(places.root).glob("ledger.db*") if path.is_file()}


def done(places: Places) -> list[str]:
    """Start as a worker does, and return what is done; nothing but a StateError may be raised."""
    with contextlib.closing(resume.open_ledger(places).ledger) as ledger:
        list(ledger.effects.all())
        return sorted(row.step for row in ledger.rows() if row.outcome == DONE)


def flips(data: bytes, seed: int, how_many: int) -> Iterator[bytes]:
    """Yield the data with one bit flipped, at places drawn from `seed`, most of them where there is something."""
    draw = random.Random(seed)
    used = [place for place, byte in enumerate(data) if byte] or [0]
    for turn in range(how_many):
        place = draw.choice(used) if turn % 4 else draw.randrange(len(data))
        yield data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]


@pytest.mark.parametrize("seed", range(4))
def test_a_bit_in_the_ledger_takes_no_step_back(places: Places, seed: int) -> None:
    """
    Findings C4 and S31: with a checkpoint beside it, what was done is done, whichever bit of the ledger has changed.
    """
    whole, portable = Path(places.ledger).read_bytes(), Path(places.checkpoint).read_bytes()
    for damaged in flips(whole, seed, 60):
        shutil.rmtree(places.root)
        folder.prepare(places.root, None)
        Path(places.ledger).write_bytes(damaged)
        Path(places.checkpoint).write_bytes(portable)
        assert done(places) == STEPS, [n for n, (a, b) in enumerate(zip(whole, damaged, strict=True)) if a != b]


def test_a_bit_in_the_checkpoint_takes_no_step_back(places: Places) -> None:
    """
    Finding B6: it is set aside, and made anew from the ledger.
    """
    portable = Path(places.checkpoint).read_bytes()
    for damaged in flips(portable, 1, 60):
        Path(places.checkpoint).write_bytes(damaged)
        assert done(places) == STEPS


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_nothing_is_changed_where_nothing_sound_is_left(places: Places, damage: str) -> None:
    """
    Finding C5: exit 73 says so, and every file of the database is what it was, byte for byte; so is what is set aside.
    """
    with contextlib.closing(resume.open_ledger(places).ledger) as ledger:
        ledger.record([], [Claim("t", 1, "abc", 1000.0, "boot")])
        kept = ledger_files(places)  # with its log, as a `kill -9` leaves it
    for name, data in kept.items():
        (Path(places.root) / name).write_bytes(data)
    assert kept["ledger.db-wal"]
    changed = bytearray(kept["ledger.db"])
    if damage == "cut":
        del changed[20937:]
        Path(places.ledger + "-wal").unlink()
    else:
        changed[20000:20400] = bytes(400)
        changed[4096:4200] = bytes(104)
    Path(places.ledger).write_bytes(changed)
    aside = Path(places.checkpoint).rename(Path(places.root) / "elsewhere")
    before = ledger_files(places)
    for _ in range(2):
        with pytest.raises(StateError, match="nothing was changed"):
            resume.open_ledger(places)
        assert ledger_files(places) == before
        with pytest.raises(LedgerCorrupt):
            SqliteLedger.open(places.ledger)
        assert ledger_files(places) == before

    aside.rename(places.checkpoint)
    assert done(places) == STEPS
    kept_aside = {
        name.partition(".corrupt-")[2][16:]: data for name, data in ledger_files(places).items() if ".corrupt-" in name
    }
    assert kept_aside == {name.removeprefix("ledger.db"): data for name, data in before.items() if "mark" not in name}


def cut_log(places: Path) -> None:
    """Flip a byte in the middle of the log of a ledger that was left by a `kill -9`."""
    log = places / "ledger.db-wal"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)


LIST = """
tasks:
  - {id: s, foreach: {range: 1-6}, run: 'echo $AGENT_ITEM'}
  - {id: pay, run: 'echo paid >> ../world', redo: check, check: 'cat ../world'}
  - {id: z, run: sleep 600}
"""


@pytest.mark.parametrize("portable", ["with a checkpoint", "without"])
def test_a_log_that_was_cut_short_is_noticed(worker: MakeWorker, portable: str) -> None:
    """
    Finding C3: SQLite drops what comes after the damage in silence; it is said, and what has a look-up is asked.
    """
    w = killed(worker)
    cut_log(w.state)
    damaged = (w.state / "ledger.db-wal").read_bytes()
    (w.state / "checkpoint.json").unlink()
    if portable == "without":
        (w.state / "out/pay").unlink()
    w.start()
    w.until("z: started")
    w.kill(signal.SIGTERM)
    assert w.matching(r"ledger\.db: has lost [0-9]+ changes? .*kept as")
    assert w.matching("are asked before they begin|a copy made at")
    assert (w.state / "world").read_text() == "paid\n"
    (kept,) = w.state.glob("ledger.db.damaged-*-wal")
    assert kept.read_bytes() == damaged


def killed(worker: MakeWorker) -> Worker:
    w = worker(LIST)
    w.start()
    w.until("z: started")
    w.kill()
    assert (w.state / "ledger.db-wal").stat().st_size
    return w


def test_a_ledger_that_was_put_here_is_a_copy(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Finding C1: a bare ledger that is copied to another machine, and one that is put back where a newer one was.
    """
    w = worker(LIST.replace("sleep 600", "true"))
    w.config.write_text(w.config.read_text().partition("  - {id: pay")[0])
    assert w.run() == 0
    copy = tmp_path / "copy.db"
    assert agentctl("export", copy, "--state", w.state).returncode == 0
    w.config.write_text(LIST.replace("sleep 600", "true"))
    assert w.run() == 0
    for other in ("back", "new"):
        state = tmp_path / other
        if other == "back":
            shutil.copytree(w.state, state)
            (state / "checkpoint.json").unlink()
        else:
            state.mkdir()
            (state / "world").write_text("paid\n")
        for file in state.glob("ledger.db-*"):
            file.unlink()
        shutil.copyfile(copy, state / "ledger.db")
        done = agentctl("run", w.config, "--state", state)
        assert done.returncode == 0, done.stderr
        assert (state / "world").read_text() == "paid\n"
        assert "asked before they begin" in done.stderr


def test_a_folder_that_was_copied_is_a_copy(places: Places, tmp_path: Path) -> None:
    """
    Finding C1: the whole state folder, as a backup has it, with the mark in it; the folder itself may be renamed.
    """
    copy, moved = tmp_path / "copy", tmp_path / "moved"
    shutil.copytree(places.root, copy)
    os.rename(places.root, moved)
    for root, doubts in ((copy, True), (moved, False)):
        with contextlib.closing(resume.open_ledger(places._replace(root=str(root))).ledger) as ledger:
            assert (fromcopy.read(ledger) is not None) == doubts


def test_an_index_that_lies_is_found_by_ourselves(places: Places) -> None:
    """
    From SQLite 3.46 on, integrity_check says nothing of a partial index that does; whether a step is done hangs on it.
    """
    with contextlib.closing(sqlite3.connect(places.ledger)) as db:
        db.execute("PRAGMA writable_schema = ON")
        (sql,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = 'done'").fetchone()
        db.execute("UPDATE sqlite_schema SET sql = replace(sql, '''done''', '''failed''') WHERE name = 'done'")
        db.execute("PRAGMA writable_schema = RESET")
        db.execute("UPDATE attempts SET outcome = 'failed' WHERE step = 's@05'")
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = ? WHERE name = 'done'", (sql,))
        db.commit()
    with pytest.raises(LedgerCorrupt, match="index done"):
        SqliteLedger.open(places.ledger)
    assert done(places) == STEPS


@pytest.mark.parametrize(
    "kept", [("ledger.db.mark",), ("ledger.db-wal", "ledger.db-shm"), ("out/a",)], ids=lambda k: k[0]
)
def test_a_folder_in_which_a_run_was_is_not_taken_for_an_empty_one(worker: MakeWorker, kept: tuple[str, ...]) -> None:
    """
    Kind of C3: ledger and checkpoint are gone, and anything else says that there was a run.  Nothing is done again in
    silence: 73, with a command that begins anew as it is printed.
    """
    w = worker("tasks: [{id: a, redo: never, run: 'echo x >>../../effects; echo r'}]")
    assert w.run() == 0
    there = {"ledger.db.mark", "ledger.db-wal", "ledger.db-shm", "out/a"}
    (w.state / "ledger.db-wal").touch()
    (w.state / "ledger.db-shm").touch()
    for name in ["ledger.db", "checkpoint.json", *(there - set(kept))]:
        (w.state / name).unlink()
    assert w.run() == 73
    assert (w.state.parent / "effects").read_text() == "x\n"
    (line,) = w.matching("begin anew with: ")
    assert f"but {w.state}/{kept[0]} is there" in line
    command = line.partition("begin anew with: ")[2].replace("/var/tmp/", str(w.state.parent))
    subprocess.run(command, shell=True, check=True)
    assert w.run() == 0
    assert (w.state.parent / "effects").read_text() == "x\nx\n"
