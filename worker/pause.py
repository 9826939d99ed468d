"""Pausing: a person holds the agent still for a while, and lets it go on.

    STATE/paused      who paused it, since when, and what becomes of the steps at work

While it is there no step begins.  The steps at work are held where they are, and no limit of theirs runs; or, told to
finish, they go on to their end.  The worker stays up, answers and pings.  The file outlives every worker: paused is
paused until a person says `agentctl resume`.
"""

import json
import os
import shlex
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from worker import clock, files
from worker.attempt import Attempt
from worker.errors import AgentError

if TYPE_CHECKING:
    from worker.installed import Installed

HOLD, FINISH = "hold", "finish"  # what becomes of the steps at work
RESUME = "'agentctl resume'"
_NAME = "paused"


class Paused(NamedTuple):
    """Who paused the agent, when (UTC text), and what the steps at work do: HOLD or FINISH."""

    who: str
    since: str
    at_work: str

    def __str__(self) -> str:
        how = "; the steps at work go on to their end" if self.at_work == FINISH else ""
        return f"paused by {self.who} since {self.since}{how}"


def read(root: str) -> Paused | None:
    """Return how the agent of the state folder `root` is paused; None where it is not.

    A file that cannot be read still pauses: it was a person's word.  A FIFO or a link is no such file.
    """
    path = f"{root}/{_NAME}"
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        found = files.read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        found = None
    known = found if isinstance(found, dict) else {}
    at_work = FINISH if known.get("at_work") == FINISH else HOLD
    return Paused(str(known.get("who", "a person")), str(known.get("since", "an unknown time")), at_work)


def pause(root: str, at_work: str, who: str) -> str:
    """Let no step begin; durable when this returns.  Return what was done, for people.

    Raises ValueError for another `at_work` than HOLD and FINISH, and OSError.
    """
    if at_work not in (HOLD, FINISH):
        raise ValueError(f"{at_work!r} is neither {HOLD} nor {FINISH}")
    before = read(root)
    now = Paused(who, clock.stamp(clock.wall()), at_work) if before is None else before._replace(at_work=at_work)
    files.replace(f"{root}/{_NAME}", [json.dumps(now._asdict()).encode() + b"\n"])
    how = "the steps at work are held still" if at_work == HOLD else "the steps at work go on to their end"
    return f"paused, as {who} says: no step begins, {how}"


def resume(root: str, who: str) -> str:
    """Let the agent go on; durable when this returns.  Return what was done, for people.

    Raises AgentError where it was not paused, and OSError.
    """
    try:
        os.unlink(f"{root}/{_NAME}")
    except FileNotFoundError:
        raise AgentError("it is not paused", "'agentctl status' says how it stands") from None
    files.sync_folder(root)
    return f"resumed, as {who} says"


def command(root: str, unit: "Installed | None") -> str:
    """Return the command that lets the agent go on, as a person types it."""
    if unit is None:
        return f"agentctl resume --state {shlex.quote(root)}"
    instance = unit.name.partition("@")[2]
    return f"sudo agentctl resume{f' --instance {instance}' if instance else ''}"


def from_outside(root: str, unit: "Installed | None", at_work: str | None, who: str) -> str:
    """Pause the agent of the state folder `root`, or let it go on (`at_work` None), as `who` says.

    By its worker if one lives, else here and now.  Return what was done.  Raises AgentError.
    """
    from worker import outside  # the daemon has no use for it

    again = "'agentctl status' says so; if not, say it again"
    if at_work is None:
        return outside.tell(root, unit, {"resume": "yes", "who": who}, None, lambda _store: resume(root, who), again)
    request = {"pause": at_work, "who": who}
    return outside.tell(root, unit, request, None, lambda _store: pause(root, at_work, who), again)


class Pause:
    """The worker's side: whether it is paused, and the steps at work that are held."""

    def __init__(self, root: str, running: Mapping[str, Attempt]) -> None:
        self._root = root
        self._running = running
        self.state = read(root)
        self._said: Paused | None = None

    def changed(self) -> bool:
        """Return whether it is another state than at the last call; at the first one, whether it is paused."""
        before, self._said = self._said, self.state
        return self._said != before

    def told(self, request: Mapping[str, str]) -> str:
        """Do what a person says, durably; `apply` makes it so.  Raises AgentError, KeyError, ValueError or OSError."""
        try:
            if "resume" in request:
                return resume(self._root, request["who"])
            return pause(self._root, request["pause"], request["who"])
        finally:
            self.state = read(self._root)

    def apply(self, now: float) -> None:
        """Hold the steps at work, or let them go on, as the agent is paused or is not (monotonic clock)."""
        hold = self.state is not None and self.state.at_work == HOLD
        for attempt in self._running.values():
            if hold:
                attempt.hold(now)
            else:
                attempt.let_go(now)

    @property
    def rests(self) -> bool:
        """Whether nothing is done at all: it is paused, and no step is at work."""
        return self.state is not None and all(attempt.held or attempt.over for attempt in self._running.values())

    def describe(self) -> dict[str, Any] | None:
        """Return it for `agentctl status --json`."""
        return None if self.state is None else self.state._asdict()
