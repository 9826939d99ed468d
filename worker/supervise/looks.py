"""What a machine has said of its worker, read: it may say anything, and as much as it likes."""

import contextlib
import json
import re
from typing import Any

from worker.signs import printable
from worker.supervise.judge import Look

_SIZE_MAX = 256 * 1024  # of a status; more is nonsense
# What a machine says is larger than that is nonsense.
_TOO_MUCH, _DIGITS, _WORD = 1e18, 9, re.compile("[a-z-]{1,40}")
_RUN_MAX = 255
_STATES_MAX = 30  # of steps
_WHY_MAX = 300
_FACTS = ("ActiveState", "ExecMainStatus", "Checkpoint", "LastWords")


def read(output: str) -> Look:
    """Return the look that a script has printed."""
    facts, found = _parts(output)
    code = facts.get("ExecMainStatus", "")
    status = int(code) if code.isdecimal() and len(code) <= _DIGITS else 0
    run = _in(found, "run")
    return Look(
        worker=_word(_in(found, "worker", "state")),
        status=_word(_in(found, "status")),
        sign_age=_number(_in(found, "last_sign_age")),
        unit=_word(facts.get("ActiveState")),
        exit=status,
        why=_why(facts.get("LastWords", ""), status),
        checkpoint="Checkpoint" in facts,
        steps=_counts(_in(found, "steps")),
        spend=_number(_in(found, "budget", "spend", "used")),
        run=printable(run) if isinstance(run, str) and len(run) <= _RUN_MAX else "",
    )


def _parts(output: str) -> tuple[dict[str, str], Any]:
    """Return what stands in lines NAME=VALUE, and what the last lines from '{' to '}' say in JSON; others are not ours.

    One pass: its time grows with the size alone.
    """
    facts: dict[str, str] = {}
    block: list[str] = []
    shown = ""
    for line in output.split("\n"):
        line = line.removesuffix("\r")
        name, is_fact, value = line.partition("=")
        if is_fact and name in _FACTS:
            facts.setdefault(name, value)
        elif line == "{":
            block = [line]
        elif line == "}" and block:
            shown, block = "\n".join([*block, line]), []
        elif block:
            block.append(line)
    found: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(shown) if len(shown) <= _SIZE_MAX else None
    return facts, found


def _why(said: str, status: int) -> str:
    """Return the reason that a worker has left word of (worker/alert.py), if it ended with this exit status."""
    words: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        words = json.loads(said)
    if not isinstance(words, list) or len(words) < len(("status", "kind", "cause")):
        return ""
    code, _kind, cause = words[:3]
    if type(code) is not int or code != status or not isinstance(cause, str):
        return ""
    why = " ".join(cause[: 2 * _WHY_MAX].split())
    return printable(why if len(why) <= _WHY_MAX else f"{why[:_WHY_MAX]} ...")


def _in(found: Any, *names: str) -> Any:
    """Return what stands there under these names, or None: a machine may say anything."""
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _word(value: Any) -> str:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else ""


def _number(value: Any) -> float | None:
    number = type(value) in (int, float) and 0 <= value < _TOO_MUCH  # NaN is not
    return value if number else None


def _counts(value: Any) -> dict[str, int]:
    found = value.items() if isinstance(value, dict) else ()
    sound = ((name, count) for name, count in found if type(count) is int and 0 <= count < _TOO_MUCH)
    counts = {name: count for name, count in sound if _word(name)}
    return (
        counts if len(counts) <= _STATES_MAX and {"total", "done"} <= counts.keys() else {}
    )  # one without the other says nothing
