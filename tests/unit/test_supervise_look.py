"""What a machine says of its worker, as it is read here: it may say anything."""

import json

import pytest

from worker.supervise import judge, remote

UNIT = "ActiveState=failed\nExecMainStatus=78\n"


def look(words: str) -> judge.Look:
    return remote.read(f"{UNIT}LastWords={words}\nso far, so good\n")


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
    assert remote.read(f"{UNIT}Checkpoint=there\n").checkpoint
    assert not remote.read(UNIT).checkpoint
    assert not remote.read("").checkpoint


@pytest.mark.parametrize("steps", [{"total": 3}, {"done": 3}, {"total": 3, "done": "1"}, {"total": 3, "done": -1}, 3])
def test_counts_of_steps_are_all_there_or_none_is(steps: object) -> None:
    """
    Everybody who reads them, also out of the record, finds what is done where there is a total.
    """
    assert remote.read(json.dumps({"steps": steps}, indent=1)).steps == {}
    assert remote.read(json.dumps({"steps": {"total": 3, "done": 1}}, indent=1)).steps == {"total": 3, "done": 1}
