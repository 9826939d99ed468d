"""What the worker says and how it exits when it cannot go on.

Every exception here is a message for the user, never a bug: whoever catches one prints it and exits with its
`exit_status`.  One fault is one line, so that a journal keeps it whole and an editor can jump to it.
"""

from collections.abc import Iterable
from typing import NamedTuple

# The units name these numbers too: SuccessExitStatus=, RestartForceExitStatus= and their like.
OK = 0  # all done, or nothing to do
FAULT = 1  # a bug of ours; restarted
OUT_OF_BUDGET = 69
STEP_FAILED = 70
STATE_UNUSABLE = 73
TEMPORARY = 75  # a step's "not now" (EX_TEMPFAIL of sysexits.h)
WORK_LEFT = 75  # ended early, e.g. by a stray SIGTERM; restarted
STATE_HELD = 77
CONFIG = 78

SHOWN = 1000  # mistakes of one configuration


class Mark(NamedTuple):
    """A place in a file; lines and columns count from 1, and 0 means the whole file or the whole line."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        """Return FILE:LINE:COLUMN, without the parts that are not known."""
        numbers = (number for number in (self.line, self.column) if number)
        return ":".join((self.file, *map(str, numbers)))


class Problem(NamedTuple):
    """One mistake of the user: where it is, what it is, and what to do about it."""

    where: Mark | None
    what: str
    hint: str = ""

    def __str__(self) -> str:
        """Return one line: FILE:LINE:COLUMN: WHAT; HINT."""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}; {self.hint}" if self.hint else f"{place}{self.what}"


class AgentError(Exception):
    """The worker cannot go on, and says why in words for the user."""

    exit_status = FAULT

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}; {hint}" if hint else what)


class ConfigError(AgentError):
    """The configuration is wrong; `problems` holds everything that is, in the order of the files."""

    exit_status = CONFIG

    def __init__(self, problems: Iterable[Problem]) -> None:
        # What an alias brings in twice is said once.
        unique = dict.fromkeys(problems)
        self.problems = tuple(sorted(unique, key=lambda problem: problem.where or Mark("")))
        more = len(self.problems) - SHOWN
        said = [*map(str, self.problems[:SHOWN]), *([f"... and {more} more like these"] if more > 0 else [])]
        super().__init__("\n".join(said))


class StateError(AgentError):
    """The state folder cannot be used; what was in it has not been replaced."""

    exit_status = STATE_UNUSABLE


class StateHeld(AgentError):
    """Another worker holds the state folder."""

    exit_status = STATE_HELD


class Shortage(AgentError):
    """The machine is short of what the worker needs to begin, which another start may find."""

    exit_status = WORK_LEFT


def quote(text: str) -> str:
    """Return `text` for a message: in ticks, on one line, shortened when it is long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
