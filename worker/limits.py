"""Limits: how long an attempt may take, and how long it may be silent."""

import math
from collections.abc import Iterator
from typing import Any

from worker import files
from worker.task import Task
from worker.timespan import show

# A step knows better than the list how long it takes, but the list has the last word.
EXTENDED_MOST = 10


class Limits:
    """How long one attempt may take and how long it may be silent, on the monotonic clock.

    `timeout` counts from the start, `watchdog` from the last beat, `stall_after` from the last
    sign of life of any kind, `progress_every` from the last progress.  All in seconds; None means no
    such limit.
    """

    __slots__ = (
        "_beat",
        "_latest",
        "_progress",
        "_sign",
        "_timeout_at",
        "own",
        "parked",
        "progress_every",
        "stall_after",
        "timeout",
        "watchdog",
    )

    def __init__(self, now: float, task: Task) -> None:
        self.timeout = _or_never(task.timeout)
        self.watchdog = _or_never(task.watchdog)
        self.stall_after = _or_never(task.stall_after)
        self.progress_every = _or_never(task.progress_every)
        # What the step promised holds for its own program, not for what runs before and after it.
        self.own = True
        self.parked = False  # it waits for another step, and only its timeout holds
        self._timeout_at = now + self.timeout
        self._latest = now + self.timeout * EXTENDED_MOST
        self._sign = self._beat = self._progress = now

    def restart(self, now: float, own: bool) -> None:
        """Begin a new program of the same attempt; the timeout goes on."""
        self.own = own
        self._sign = self._beat = self._progress = now

    def memo(self) -> list[Any]:
        """Return what `resume` needs, times on the monotonic clock; inf, which JSON has no number for, as null."""
        timeout_at = None if self._timeout_at == math.inf else self._timeout_at
        return [timeout_at, self._sign, self._beat, self._progress, self.own]

    def resume(self, memo: list[Any]) -> None:
        """Go on from another worker's `memo` of the same boot."""
        timeout_at, self._sign, self._beat, self._progress, self.own = memo
        self._timeout_at = math.inf if timeout_at is None else timeout_at
        self._latest = max(self._latest, self._timeout_at)  # time that was left uncharged counts for both

    def park(self, parked: bool, now: float) -> None:
        """Suspend the limits on silence, or begin them anew."""
        if self.parked and not parked:
            self._sign = self._beat = self._progress = now
        self.parked = parked

    def sign(self, now: float) -> None:
        """Note output, a status or CPU time used."""
        self._sign = now

    def beat(self, now: float) -> None:
        """Note a WATCHDOG=1."""
        self._sign = self._beat = now

    def progress(self, now: float) -> None:
        """Note that the step got further than ever before."""
        self._sign = self._progress = now

    def extend(self, now: float, seconds: float) -> None:
        """Let the timeout be no nearer than `seconds` from now (EXTEND_TIMEOUT_USEC=, sd_notify(3)).

        However often it is asked for, an attempt takes EXTENDED_MOST times its `timeout` at most.
        """
        self._timeout_at = max(self._timeout_at, min(now + seconds, self._latest))

    def excuse(self, seconds: float) -> None:
        """Leave `seconds` uncharged: time in which the worker itself did not run or read."""
        self._timeout_at += seconds
        self._latest += seconds
        self._sign += seconds
        self._beat += seconds
        self._progress += seconds

    @property
    def last_sign(self) -> float:
        return self._sign

    def deadline(self) -> float:
        """Return when the first limit is reached if nothing more is heard; inf if there is none."""
        return min(at for _, at in self._ends())

    def broken(self, now: float) -> str | None:
        """Return the name of the limit that has been passed, or None."""
        return next((name for name, at in self._ends() if now >= at), None)

    def shortest(self) -> float:
        """Return the smallest limit in seconds; inf if there is none."""
        return min(self.timeout, self.watchdog, self.stall_after, self.progress_every)

    def _ends(self) -> Iterator[tuple[str, float]]:
        yield "timeout", self._timeout_at
        if self.parked:
            return
        yield "stall_after", self._sign + self.stall_after
        if self.own:
            yield "watchdog", self._beat + self.watchdog
            yield "progress_every", self._progress + self.progress_every


def complaint(limit: str, task: Task) -> str:
    """Return what is said of a step of `task` that has passed this limit."""
    if limit == "max_output":
        most = files.shown_size(task.max_output or 0)
        return f"wrote more than its max_output of {most}; let it write less, or give it a larger one"
    span = show(getattr(task, limit) or 0)
    return {
        "timeout": f"took longer than its timeout of {span}",
        "watchdog": f"sent no WATCHDOG=1 for {span}",
        "stall_after": f"gave no sign of life for {span}",
        "progress_every": f"made no progress for {span}",
    }[limit]


def _or_never(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
