"""Resuming from the ledger, from the checkpoint, and from what is left of either."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plans import ENDED
from worker import checkpoint, folder, resume
from worker.errors import StateError, StateHeld
from worker.folder import Places
from worker.ledger import Claim, Ledger
from worker.ledger.sqlite import SqliteLedger

Damage = Callable[[bytes], bytes]
DAMAGES: dict[str, Damage] = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) * 2 // 3],
    "zeros": lambda data: bytes(len(data)),
    "random": lambda data: os.urandom(len(data)),
}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A state folder in which steps a (done), b (failed once) and c (cut off) were tried."""
    root = str(tmp_path / "state")
    places = Places("demo", root, folder.prepare(root, None))
    ledger = resume.open_ledger(places).ledger
    ledger.record([], [Claim(name, 1, "abc", 1000.0, "boot") for name in "abc"])
    ledger.record(
        [
            ENDED._replace(output="grün\n".encode(), output_size=6),
            ENDED._replace(
                step="b",
                outcome="failed",
                counted=True,
                cause="exited with status 3",
                status=3,
                delay=10.0,
                output=b"\xff",
                output_size=1,
                log=b"e",
                log_size=1,
            ),
        ],
        [],
    )
    checkpoint.write(places.checkpoint, "demo", ledger)
    ledger.close()
    return places


def facts(ledger: Ledger) -> list[tuple[str, int, str | None, bool]]:
    return [(row.step, row.number, row.outcome, bool(row.counted)) for row in ledger.rows()]


ALL = [("a", 1, "done", False), ("b", 1, "failed", True), ("c", 1, None, False)]


def set_aside(places: Places) -> list[str]:
    return sorted(name for name in os.listdir(places.root) if ".corrupt-" in name)


def test_the_checkpoint_alone_is_enough(places: Places) -> None:
    """
    The ledger is gone: the same attempts, the same small results, and a word about it.
    """
    os.unlink(places.ledger)
    resumed = resume.open_ledger(places)
    assert facts(resumed.ledger) == ALL
    assert resumed.ledger.output(1) == "grün\n".encode()
    assert "made anew from checkpoint.json" in resumed.notices[0]
    resumed.ledger.close()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_ledger_is_set_aside_for_the_checkpoint(places: Places, damage: Damage) -> None:
    """
    Case F10: the damaged bytes are kept under another name, nothing is lost.
    """
    data = damage(Path(places.ledger).read_bytes())
    Path(places.ledger).write_bytes(data)
    resumed = resume.open_ledger(places)
    assert facts(resumed.ledger) == ALL
    resumed.ledger.close()
    (aside,) = set_aside(places)
    assert Path(places.root, aside).read_bytes() == data
    assert any(aside in notice for notice in resumed.notices)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_for_the_ledger(places: Places, damage: Damage) -> None:
    """
    Case F10, the other way round.
    """
    Path(places.checkpoint).write_bytes(damage(Path(places.checkpoint).read_bytes()))
    resumed = resume.open_ledger(places)
    assert facts(resumed.ledger) == ALL
    resumed.ledger.close()
    assert len(set_aside(places)) == 1


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_with_nothing_sound_left_the_worker_does_not_start(places: Places, damage: Damage) -> None:
    """
    Case F10: exit 73 with what to do, nothing moved, and the same at the next try: never silently empty.
    """
    for path in (places.ledger, places.checkpoint):
        Path(path).write_bytes(damage(Path(path).read_bytes()))
    before = {name: Path(places.root, name).read_bytes() for name in ("ledger.db", "checkpoint.json")}
    for _ in range(2):
        with pytest.raises(StateError, match=r"mv .*ledger\.db") as caught:
            resume.open_ledger(places)
        assert caught.value.exit_status == 73
    assert {name: Path(places.root, name).read_bytes() for name in before} == before


def test_a_ledger_that_knows_less_than_the_checkpoint_is_completed(places: Places) -> None:
    """
    Somebody copied ledger.db without its -wal: what the checkpoint has as done stays done.
    """
    os.unlink(places.ledger)
    old = SqliteLedger.create(places.ledger)
    old.note({"run": "demo"})
    old.record([], [Claim("a", 1, "abc", 1000.0, "boot")])
    old.close()
    resumed = resume.open_ledger(places)
    assert sorted(facts(resumed.ledger)) == sorted(ALL)
    resumed.ledger.record([ENDED._replace(step="c")], [])  # and can be worked with
    resumed.ledger.close()


def test_a_checkpoint_of_another_run_is_never_mixed_in(places: Places, tmp_path: Path) -> None:
    """
    Beside a sound ledger it is set aside; alone it is put on the shelf for its own run.
    """
    other = Places("other", str(tmp_path / "other"), folder.prepare(str(tmp_path / "other"), None))
    ledger = resume.open_ledger(other).ledger
    ledger.record([], [Claim(name, 1, "abc", 1000.0, "boot") for name in "abcdefg"])
    ledger.record([ENDED._replace(step=name) for name in "abcdefg"], [])
    checkpoint.write(other.checkpoint, "other", ledger)
    ledger.close()
    os.replace(other.checkpoint, places.checkpoint)

    resumed = resume.open_ledger(places)

    assert facts(resumed.ledger) == ALL
    resumed.ledger.close()
    (aside,) = set_aside(places)
    assert "it is of the run 'other'" in resumed.notices[0]

    os.rename(f"{places.root}/{aside}", places.checkpoint)
    os.unlink(places.ledger)
    resumed = resume.open_ledger(places)
    assert facts(resumed.ledger) == []
    assert "checkpoint.json" in os.listdir(f"{places.root}/runs/other")
    resumed.ledger.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"seq": 1,', '"seq": ' + "9" * 40 + ","),
        lambda text: text.replace('"facts": {}', '"facts": {"counted_from": "x"}'),
        lambda text: text.replace('"facts": {}', '"facts": {"state": 3}'),
        lambda text: text.replace('"step": "b"', '"step": "a", "outcome": "done"').replace('"outcome": "failed", ', ""),
        lambda text: text.replace('"boot": "boot"', '"boot": ' + "[" * 100_000, 1),
    ],
    ids=["huge number", "counted_from", "facts", "done twice", "deep"],
)
def test_a_checkpoint_that_makes_no_sense_is_refused_whole(places: Places, damage: Callable[[str], str]) -> None:
    """
    Case F10: exit 73 with a reason, and no half-made ledger is left behind.
    """
    os.unlink(places.ledger)
    text = Path(places.checkpoint).read_text()
    assert damage(text) != text
    Path(places.checkpoint).write_text(damage(text))
    for _ in range(2):
        with pytest.raises(StateError):
            resume.open_ledger(places)
        assert not os.path.exists(places.ledger)


def rename_below_an_overlay(source: str, target: str, rename: Callable[[str, str], None] = os.rename) -> None:
    if os.path.isdir(source):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)
    rename(source, target)


def test_a_wal_without_its_ledger_does_not_meet_the_new_one(places: Places) -> None:
    """
    A stale write-ahead log must not be played into a ledger it does not belong to.
    """
    os.unlink(places.ledger)
    Path(places.ledger + "-wal").write_bytes(os.urandom(8192))
    resumed = resume.open_ledger(places)
    assert facts(resumed.ledger) == ALL
    resumed.ledger.close()


@pytest.mark.parametrize("image", [False, True])
def test_another_run_finds_an_empty_folder_and_the_first_one_comes_back(
    places: Places, monkeypatch: pytest.MonkeyPatch, image: bool
) -> None:
    """
    A list with another name is another run; the state of the one before is kept, whole, until its name returns.
    Also where it came with an image, whose folders an overlay does not rename.
    """
    if image:
        monkeypatch.setattr(os, "rename", rename_below_an_overlay)
    Path(places.output("a")).write_text("result")
    other = places._replace(run="other")
    resumed = resume.open_ledger(other)
    assert facts(resumed.ledger) == []
    assert "'demo' is kept in runs/demo" in resumed.notices[0]
    assert os.listdir(places.out) == []
    resumed.ledger.close()

    resumed = resume.open_ledger(places)
    assert facts(resumed.ledger) == ALL
    assert Path(places.output("a")).read_text() == "result"
    resumed.ledger.close()
    assert os.listdir(f"{places.root}/runs") == ["other"]


@pytest.mark.parametrize("moves", range(7))
def test_a_crash_while_runs_change_places_is_finished_by_the_next_start(
    places: Places, moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Cut off after any rename: the next start of either run finds everything of its own.
    """
    Path(places.output("a")).write_text("result")
    real, left = os.rename, [moves]

    def rename(source: str, target: str) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        real(source, target)

    for run in ("other", "demo"):  # put away, then taken out again
        left[0] = moves
        monkeypatch.setattr(os, "rename", rename)
        try:
            resume.open_ledger(places._replace(run=run)).ledger.close()
        except KeyboardInterrupt:
            folder.make(places.root)  # as every start does first
        monkeypatch.setattr(os, "rename", real)
        resumed = resume.open_ledger(places._replace(run=run))
        assert facts(resumed.ledger) == (ALL if run == "demo" else [])
        resumed.ledger.close()
    assert Path(places.output("a")).read_text() == "result"


def test_a_second_worker_is_refused_with_the_pid_of_the_first(places: Places) -> None:
    """
    Case R3: and asking who holds the folder never takes the lock.
    """
    code = (
        "import sys; from worker import folder\nfolder.lock(sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, places.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    assert folder.holder(places.root) == first.pid
    with pytest.raises(StateHeld, match=f"process {first.pid}") as caught:
        folder.lock(places.root)
    assert caught.value.exit_status == 77
    first.kill()
    first.communicate()
    assert folder.holder(places.root) is None  # SIGKILL leaves no lock behind
    held = folder.lock(places.root)
    assert not held.in_order
    folder.leave(held)
    os.close(held.fd)
    held = folder.lock(places.root)
    assert held.in_order, "a worker that ended in order is known as such"
    os.close(held.fd)
