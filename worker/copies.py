"""Copies: what the run has achieved is taken off the machine, again and again, by a command of the user's.

At most once in `every`, after a change; a child process makes the snapshot and runs the command (worker/snapshot.py),
so no step waits for it.  One that fails is tried again, ever more rarely; how old the last good one is stands in
STATE/copy/record.json for the next worker and for `agentctl status`.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from worker import checkpoint, clock, files, process
from worker.checkpoint import CheckpointError
from worker.companions import Companion
from worker.config import Copy
from worker.errands import HURRY, Errands, Report
from worker.errors import ConfigError
from worker.folder import Places
from worker.journal import NOTICE, WARNING, Journal
from worker.task import arguments
from worker.timespan import show

_ERRAND = "copy"
# A copy that fails is tried again after `every`, then twice that, and so on up to this.
_RARELY = 3600.0
# A worker whose run ends badly waits so long for one more: somebody is told after that.
_SOON = 60.0


class Record(NamedTuple):
    """What became of the copies of a run so far: the last good one (wall clock, revision), and the failures since."""

    run: str
    last: float | None = None
    revision: int = 0
    tried: float = 0.0
    failures: int = 0
    error: str = ""


def folder(root: str) -> str:
    """Return where the snapshots of the state folder `root` lie."""
    return f"{root}/copy"


def read(root: str, run: str) -> Record | None:
    """Return what became of the copies of `run`, or None if there were none, or nobody knows."""
    try:
        found = Record(**files.read_json(f"{folder(root)}/record.json"))
    except (OSError, ValueError, TypeError):
        return None
    return found if found.run == run else None


def describe(record: Record | None, now: float) -> dict[str, Any] | None:
    """Return how the copies stand, for `agentctl status --json`; `now` is wall-clock time."""
    if record is None:
        return None
    last = record.last
    return {
        "last": None if last is None else clock.stamp(last),
        "age": None if last is None else round(max(0.0, now - last), 3),
        "revision": record.revision,
        "failures": record.failures,
        "error": record.error or None,
    }


def line(found: dict[str, Any]) -> str:
    """Return the same in words."""
    said = "never" if found["age"] is None else f"{show(found['age'])} ago"
    if found["failures"]:
        times = "" if found["failures"] == 1 else f", {found['failures']} times in a row"
        said += f"; the last one failed{times}: {found['error']}"
    return said


class Copies(Companion):
    """The copies of one run."""

    def __init__(
        self,
        wanted: Callable[[], Copy | None],
        places: Places,
        shared: bool,
        cwd: str,
        environ: Callable[[], dict[str, str]],
        errands: Errands,
        journal: Journal,
        hurried: Callable[[], bool],
    ) -> None:
        """`wanted`: what the list says of copies now; `cwd`, `environ()`: the command's; `hurried`: we are to stop."""
        self._wanted = wanted
        self._places = places
        self._shared = shared
        self._cwd = cwd
        self._environ = environ
        self._errands = errands
        self._journal = journal
        self._hurried = hurried
        self._record = read(places.root, places.run)
        self._stale = False
        self._ending = False
        self._not_before = -math.inf

    def begin(self) -> None:
        """Copy soon, whatever the last worker has copied: that may have been before its last change."""
        copy = self._wanted()
        self._ending = False
        if copy is not None and not self._stale:
            since = clock.wall() - (self._record.tried if self._record else 0.0)
            self._not_before = clock.monotonic() + min(copy.every, max(0.0, copy.every - since))
            self._stale = True

    def changed(self) -> None:
        self._stale = True

    def due_at(self) -> float:
        waits = not self._stale or self._wanted() is None or self._errands.busy(_ERRAND)
        return math.inf if waits else self._not_before

    def keep(self, now: float) -> None:
        if self._stale and now >= self.due_at():
            self._start(now)

    def conclude(self, finished: str) -> None:
        """Make one last copy of what has changed, unless the next worker will; wait as long as it may take."""
        copy = self._wanted()
        if copy is None or finished == "left":
            return
        if self._record is None or self._record.failures:
            self._stale = True
        self._ending = True
        patience = {"stopped": HURRY, "done": copy.timeout}.get(finished, min(_SOON, copy.timeout))
        until = clock.monotonic() + patience
        self._wait(until)
        if self._stale and not self._errands.busy(_ERRAND):
            self._start(clock.monotonic())
            self._wait(until)
        if self._errands.busy(_ERRAND):
            self._journal.event("copy", "the last copy was not finished; the next start makes one", priority=WARNING)

    def describe(self) -> dict[str, Any] | None:
        """Return how the copies stand; None if nobody wants any."""
        return None if self._wanted() is None else describe(self._record or Record(self._places.run), clock.wall())

    def _start(self, now: float) -> None:
        copy = self._wanted()
        assert copy is not None
        self._stale = False
        self._not_before = now + copy.every
        here = folder(self._places.root)
        names = {"checkpoint": f"{here}/checkpoint.json", "out": self._places.out}
        if not self._shared:
            names["ledger"] = f"{here}/ledger.db"
        source = self._places.checkpoint if self._shared else self._places.ledger
        argv = [*process.ours("snapshot"), here, self._places.run, source, *_command(copy, names)]
        try:
            env = self._environ() | {f"AGENT_{name.upper()}": path for name, path in names.items()}
            env["AGENT_RUN"] = self._places.run
            self._errands.start(_ERRAND, argv, env, self._cwd, copy.timeout, self._done)
        except (process.SpawnError, ConfigError, OSError) as exc:
            self._failed(str(exc))

    def _done(self, report: Report) -> None:
        fault = report.fault
        if not fault:
            try:
                self._copied(checkpoint.header(f"{folder(self._places.root)}/checkpoint.json").revision)
            except (CheckpointError, OSError) as exc:
                fault = f"its checkpoint cannot be read: {exc}"
        if fault:
            self._failed(fault)

    def _copied(self, revision: int) -> None:
        failures = self._record.failures if self._record else 0
        if failures:
            self._journal.event("copy", f"copied again, after {failures} that failed", priority=NOTICE)
        now = clock.wall()
        self._note(Record(self._places.run, now, revision, now))

    def _failed(self, fault: str) -> None:
        """Try again later; say why once, not each time."""
        before = self._record or Record(self._places.run)
        copy = self._wanted()
        every = copy.every if copy else _RARELY
        delay = max(every, min(_RARELY, every * 2.0 ** min(before.failures, 20)))
        self._stale = True
        self._not_before = clock.monotonic() + delay
        if fault != before.error:
            then = "the next start makes one" if self._ending else f"trying again in {show(delay)}, the run goes on"
            text = f"the copy failed: {fault}; {then}"
            self._journal.event("copy", text, priority=WARNING)
        self._note(before._replace(tried=clock.wall(), failures=before.failures + 1, error=fault))

    def _note(self, record: Record) -> None:
        self._record = record
        here = folder(self._places.root)
        with contextlib.suppress(OSError):  # a full disk: the next worker does not know, and copies
            os.makedirs(here, mode=0o750, exist_ok=True)
            files.publish(f"{here}/record.json", json.dumps(record._asdict()).encode())

    def _wait(self, until: float) -> None:
        """Wait for what is under way; not for long once we are to stop."""

        def say(left: float) -> None:
            text = f"waiting for the last copy, at most {show(left)}"
            self._journal.event("copy", text, priority=NOTICE)

        self._errands.wait_out(until, _ERRAND, say, self._hurried)


def _command(copy: Copy, names: Mapping[str, str]) -> list[str]:
    """Return the command with the paths filled in; into shell text nothing is."""
    filled = arguments(copy.command)
    if isinstance(copy.command, str):
        return filled
    for name, path in names.items():
        filled = [argument.replace(f"{{{name}}}", path) for argument in filled]
    return filled
