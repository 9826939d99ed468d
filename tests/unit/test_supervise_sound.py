"""What a machine that lies sends as a checkpoint: it is not taken, and costs nothing."""

import json
import os
from pathlib import Path

import pytest

from worker.supervise import copy, sound
from worker.supervise.command import Runner
from worker.supervise.sound import Sound

ATTEMPT = {"seq": 1, "step": "a", "number": 1, "definition": "d", "started": 1.0, "boot": "b", "outcome": "done"}
EFFECT = {"key": "k", "parameters": "", "state": "committed", "step": "a", "at": 1.0, "size": 0}
SAVED = {"step": "b", "name": "n", "size": 1, "at": 1.0, "output": "x"}


def made(
    revision: int = 9,
    facts: dict[str, str] | None = None,
    attempts: tuple[dict[str, object], ...] = (ATTEMPT,),
    effects: tuple[dict[str, object], ...] = (),
    saved: tuple[dict[str, object], ...] = (),
) -> bytes:
    head = {"format": 2, "run": "job", "revision": revision, "facts": facts or {}}
    lists = {"effects": effects, "saved": saved, "attempts": attempts}
    text = ",\n".join(
        f'"{name}": [' + "".join(f"\n{json.dumps(e)}," for e in rows) + "\n{}" for name, rows in lists.items()
    )
    return f"{json.dumps(head)[:-1]},\n{text.replace('{},', '{}],')}\n]}}\n".encode()


def judge(folder: Path, data: bytes) -> Sound | str:
    (folder / "come").write_bytes(data)
    return sound.judge(str(folder / "come"), Runner(str(folder / "command"), lambda: None))


@pytest.mark.parametrize(
    "lie",
    [
        made(revision=2**53 - 1),
        made(attempts=(ATTEMPT | {"seq": 2**53 - 1},)),
        made(attempts=(ATTEMPT | {"number": 2**31 - 1},)),
        made(attempts=(ATTEMPT | {"started": 1e308},)),
        made(attempts=(ATTEMPT | {"ended": -1e300},)),
        made(attempts=(ATTEMPT | {"spend": 1e308}, ATTEMPT | {"seq": 2, "step": "b", "spend": 1e308})),
        made(attempts=(ATTEMPT, ATTEMPT | {"step": "b"})),
        made(attempts=(ATTEMPT | {"cause": "\ud800"},)),
        made(effects=(EFFECT | {"at": 1e308},)),
        made(effects=(EFFECT | {"parameters": "\udfff"},)),
        made(saved=(SAVED, SAVED)),
        made(facts={"used_hours": "9e999"}),
        made(facts={"granted_spend": "9e999"}),
        made(facts={"state": "\ud800"}),
    ],
    ids=str,
)
def test_a_checkpoint_from_which_no_machine_could_go_on_is_not_taken(tmp_path: Path, lie: bytes) -> None:
    """
    S26: a number at which counting ends, a row that is there twice, a text that is none: the copy before stays.
    """
    assert isinstance(judge(tmp_path, made()), Sound)
    assert isinstance(judge(tmp_path, lie), str)


def test_a_copy_is_taken_after_one_with_the_largest_revision_that_is_believed(tmp_path: Path) -> None:
    """
    S26: a jump ahead poisons nothing.
    """

    def take(revision: int) -> str:
        def fetch(into: str) -> str:
            Path(into).write_bytes(made(revision=revision))
            return ""

        return copy.take(str(tmp_path), "job", fetch, sound.read)

    assert take(2**50 - 1) == ""
    assert "its revision is" in take(2**50)
    assert take(2**50 - 1) == ""


@pytest.mark.programs
@pytest.mark.parametrize("filler", ["[],", "{},", "1,", '"",'])
def test_what_swells_in_memory_is_read_elsewhere_and_costs_no_more_than_is_allowed(tmp_path: Path, filler: str) -> None:
    """
    S9: what came is not read into the supervisor's memory; what is too much for the one that reads it is refused.
    """
    size = 48 * 2**20
    swollen = b'{"format": 2, "run": "job", "x": [' + filler.encode() * (size // len(filler)) + b"0],\n"
    before = peak()
    found = judge(tmp_path, swollen + made()[1:])
    assert isinstance(found, str), found
    assert peak() - before < 20 * 2**20
    assert judge(tmp_path, made()) == Sound("job", 9, 1, 0.0)


@pytest.mark.programs
def test_a_large_sound_checkpoint_is_taken(tmp_path: Path) -> None:
    """
    By the other process.
    """
    rows = tuple(ATTEMPT | {"seq": n, "step": f"a{n}", "spend": 0.5} for n in range(1, 60_001))
    assert judge(tmp_path, made(attempts=rows)) == Sound("job", 9, 60_000, 30_000.0)
    assert os.listdir(tmp_path) == ["come"]


def peak() -> int:
    """Return how much memory this process had at most, in bytes, since it was last asked."""
    lines = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
