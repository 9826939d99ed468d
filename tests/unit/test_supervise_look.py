"""What a machine says of its worker, as it is read here: it may say anything."""

import json
import time
from pathlib import Path

import pytest

from tests.supervision import World
from worker.errors import OUT_OF_BUDGET
from worker.supervise import judge, looks

UNIT = "ActiveState=failed\nExecMainStatus=78\n"


def look(words: str) -> judge.Look:
    return looks.read(f"{UNIT}LastWords={words}\nso far, so good\n")


def test_the_workers_last_words_are_why_it_ended() -> None:
    """
    On one line, printable, and cut where nobody would read on.
    """
    assert look(json.dumps([78, "gave-up", "/c.yaml:3:5: what", "", "its log"])).why == "/c.yaml:3:5: what"
    assert look(json.dumps([78, "gave-up", "a\x1b[31m\nb"])).why == "a\\x1b[31m b"
    long = look(json.dumps([78, "gave-up", "x" * 1_000_000])).why
    assert long == "x" * 300 + " ..."


@pytest.mark.parametrize(
    "words",
    [
        "",
        "[",
        "[" * 100_000,
        "{}",
        "78",
        "[78]",
        '[78, "gave-up", 1]',
        '["78", "gave-up", "why"]',
        '[70, "failed", "of an earlier end"]',
        '[true, "failed", "why"]',
    ],
)
def test_words_that_are_none_or_of_another_end_are_left_out(words: str) -> None:
    """
    The exit status is told all the same.
    """
    found = look(words)
    assert (found.unit, found.exit, found.why) == ("failed", 78, "")


def test_a_checkpoint_is_there_when_the_machine_says_so() -> None:
    """
    Whatever else it says; one that is not there yet is not copied.
    """
    assert looks.read(f"{UNIT}Checkpoint=there\n").checkpoint
    assert not looks.read(UNIT).checkpoint
    assert not looks.read("").checkpoint


@pytest.mark.parametrize("steps", [{"total": 3}, {"done": 3}, {"total": 3, "done": "1"}, {"total": 3, "done": -1}, 3])
def test_counts_of_steps_are_all_there_or_none_is(steps: object) -> None:
    """
    Everybody who reads them, also out of the record, finds what is done where there is a total.
    """
    assert looks.read(json.dumps({"steps": steps}, indent=1)).steps == {}
    assert looks.read(json.dumps({"steps": {"total": 3, "done": 1}}, indent=1)).steps == {"total": 3, "done": 1}


def test_what_a_machine_says_takes_no_longer_to_read_than_it_is_long() -> None:
    """
    S22: lines that could be the beginning of a status must not each be the beginning of a search.
    """
    many = "{\n" * 2_000_000
    begun = time.process_time()
    assert looks.read(many + UNIT).unit == "failed"
    assert time.process_time() - begun < 10
    assert looks.read(f'{{\n"run": "job", "x": "{"y" * 300_000}"\n}}\n').run == ""


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_status_is_found_between_what_others_say(end: str) -> None:
    """
    B3, A1: a greeting before it, an advertisement after it, a terminal's line ends; and the run that it is about.
    """
    said = ["{ Welcome }", "{", *UNIT.split(), "{", '  "run": "job",', '  "status": "done"', "}", "}", "a new release!"]
    found = looks.read(end.join(said))
    assert (found.run, found.status, found.unit, found.exit) == ("job", "done", "failed", 78)


def test_what_a_machine_names_moves_no_cursor_and_fills_no_record() -> None:
    """
    Its run, and the states of its steps, go into the journal, the record and `--status`.
    """
    steps = {"total": 3, "done": 1, "\x1b[2J": 1, "x" * 1000: 1, "running": 1}
    seen = looks.read(f"{json.dumps({'run': 'a' + chr(0x9B) + '2Jb', 'steps': steps}, indent=1)}\n")
    assert seen.run == "a\\x9b2Jb"
    assert seen.steps == {"total": 3, "done": 1, "running": 1}
    many = {"total": 1, "done": 1} | {f"{'a' * n}": 1 for n in range(1, 40)}
    assert looks.read(f"{json.dumps({'steps': many}, indent=1)}\n").steps == {}


@pytest.mark.programs
def test_a_machine_that_speaks_of_another_run_with_escapes_is_quoted(tmp_path: Path) -> None:
    """
    In the journal, in the record, and by `--status`.
    """
    world = World(tmp_path / "w", "run='\\u001b[2J' worker=active\n", "budget: {machines: 1}\n")
    assert world.supervise() == OUT_OF_BUDGET, world.said
    shown = world.own("--status", "--state", f"{world.root}/state")
    for text in (world.said, shown.stdout, (world.root / "state/machines.json").read_text()):
        assert "\x1b" not in text, text
    assert "its worker is at work on the run '\\x1b[2J'" in shown.stdout
