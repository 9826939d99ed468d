"""What people read has one step and two steps, wherever something is counted."""

import re
from pathlib import Path

import pytest

from worker import plural

WORKER = Path(plural.__file__).parent
# A number that is put into a text right before what it counts.
COUNTED = re.compile(
    r"\{(len\([^{}]*\)|[^{}()]+)\} (\w+ )?(attempt|byte|key|line|machine|result|step|task|time|worker)s\b"
)
# These are never 1 there.
NEVER_ONE = {
    "value",
    "fruitless",
    "len(deaths)",
    "machine.restarts",
    "found['failures']",
    "ended.size",
    "most",
    "size",
    "size - 1",
    "whole",
}


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (1, ["step"], "1 step"),
        (0, ["step"], "0 steps"),
        (2, ["step"], "2 steps"),
        (1, ["step is", "steps are"], "1 step is"),
        (3, ["step is", "steps are"], "3 steps are"),
        (1.0, ["hour"], "1 hour"),
        (0.5, ["hour"], "0.5 hours"),
    ],
)
def test_one_is_one(number: float, words: list[str], said: str) -> None:
    assert plural.of(number, *words) == said


def test_no_text_counts_by_itself() -> None:
    """
    Else it says "1 steps" one day.
    """
    found = [
        f"{path.relative_to(WORKER)}: {match[0]}"
        for path in sorted(WORKER.rglob("*.py"))
        for match in COUNTED.finditer(path.read_text())
        if match[1] not in NEVER_ONE and not match[1].startswith("_")  # a constant
    ]
    assert found == []
