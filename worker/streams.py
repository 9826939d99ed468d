"""A step's two pipes: every byte to its spool, lines to the journal, and a full disk waited out.

While the disk takes nothing the pipes are not read, so the step waits in its own write(2).
"""

import contextlib
import fcntl
import functools
import math
import os
from collections.abc import Callable
from typing import Any

from worker import plural
from worker.disk import FULL
from worker.events import Events
from worker.journal import ERROR, INFO, NOTICE, Journal, Ration
from worker.lines import Lines
from worker.output import CHUNK, Spool
from worker.process import Pipes

_PIPE_SMALL = 64 * 1024  # what a pipe holds unless told otherwise (pipe(7))
# What is read at most from a pipe once the step has ended; more than any pipe holds (pipe(7)).
_DRAIN_MAX = 16 * 1024 * 1024
_RETRY_DISK = 1.0
# Of a line that was begun when the worker died, the next one reads so much again.
_AGAIN_MAX = 1024 * 1024


class _Stream:
    """One pipe."""

    __slots__ = ("begun", "fd", "lines", "priority", "skipped", "spool")

    def __init__(self, fd: int, spool: Spool, priority: int) -> None:
        self.fd = fd
        self.begun = spool.size  # where in the spool the line begins that is not complete yet
        self.skipped = 0  # lines that the journal does not have
        self.spool = spool
        self.lines = Lines()
        self.priority = priority


class Streams:
    """The pipes of an attempt's programs, one program after the other."""

    def __init__(
        self,
        step: str,
        number: int,
        output: Spool,
        log: Spool,
        events: Events,
        journal: Journal,
        most: int | None = None,
    ) -> None:
        """`most`: how many bytes are kept of each stream; what writes more is not read any further."""
        self.output = output
        self.log = log
        self.last_data = events.now
        self.held_since: float | None = None  # the disk is full since then
        self.fault = ""  # why a stream could not be kept, if no waiting mends it
        self.over = False  # there is more than the most of a stream
        self._most = math.inf if most is None else most
        self._skipped = {id(output): 0, id(log): 0}
        self._retry_at = 0.0
        self._step = step
        self._number = number
        self._events = events
        self._journal = journal
        self._ration = Ration(events.now)
        self._open: list[_Stream] = []
        self._kept = False

    def attach(self, pipes: Pipes, result: bool) -> None:
        """Read from `pipes`; the first of them is the step's result if `result`, else part of the log."""
        spool, priority = (self.output, INFO) if result else (self.log, NOTICE)
        self._open = [_Stream(pipes.stdout, spool, priority), _Stream(pipes.stderr, self.log, NOTICE)]
        self._kept = pipes.kept
        self.over = False
        for stream in self._open:
            self._watch(stream)

    def drain(self, at_once: bool = True) -> bool:
        """Take what is still in the pipes, then let go of them.

        On a full disk what comes from a pipe that is kept is left there unless `at_once`, so that it outlives the
        worker; return False then, and hold until `retry`.
        """
        for stream in self._open:
            for _ in range(_DRAIN_MAX // CHUNK):
                if self.over and stream.fd >= 0:  # a pipe that is kept is the next program's, too
                    _empty(stream.fd)
                if stream.fd < 0 or self.over or not self._drain(stream, at_once or not self._kept):
                    break
            if self.held_since is not None and not at_once:
                return False
            if stream.fd >= 0:
                self._close(stream)
            self._skipped[id(stream.spool)] += stream.skipped
        self._open = []
        self.held_since = None
        return True

    def _drain(self, stream: _Stream, at_once: bool) -> bool:
        try:
            return self._take(stream, stream.spool.take)
        except OSError as exc:
            if at_once:
                return self._take(stream, stream.spool.absorb)
            self._hold(exc, stream)
            return False

    # -- a worker's end

    def memo(self) -> dict[str, Any]:
        """Return what the next worker needs to go on: where the journal has got to."""
        skipped = self._skipped[id(self.output)], self._skipped[id(self.log)]
        open_ones = [(stream.begun, stream.skipped) for stream in self._open]
        return {"skipped": skipped, "open": open_ones, "fault": self.fault}

    def resume(self, memo: dict[str, Any]) -> None:
        """Go on, after `attach`, from what an earlier worker's `memo` says; its spools are resumed."""
        self.fault = memo["fault"]
        self._skipped[id(self.output)], self._skipped[id(self.log)] = memo["skipped"]
        shared = len({id(stream.spool) for stream in self._open}) == 1  # both in one file
        for stream, (begun, skipped) in zip(self._open, memo["open"], strict=False):
            stream.skipped = skipped
            if shared:
                begun = stream.spool.size if stream is self._open[1] else max(place for place, _ in memo["open"])
            stream.begun = place = min(max(begun, stream.spool.size - _AGAIN_MAX), stream.spool.size)
            while data := stream.spool.read(place, CHUNK):
                self._pass_on(stream, data, place)
                place += len(data)

    def close(self, done: bool) -> None:
        """Say how many lines the journal does not have, and where they are."""
        kept = f"all of them are in out/{self._step}" if done else "the last of them are in 'agentctl log'"
        for spool, where in ((self.output, kept), (self.log, "see 'agentctl log'")):
            if skipped := self._skipped[id(spool)]:
                text = f"[{plural.of(skipped, 'line')} left out here; {where}]"
                self._journal.output(self._step, self._number, text, NOTICE)

    # -- a full disk

    @property
    def retry_at(self) -> float:
        """When `retry` is due, if `held_since` is set."""
        return self._retry_at

    def retry(self, now: float) -> bool:
        """Try to write what the disk did not take; return whether everything is written now."""
        self._retry_at = now + _RETRY_DISK
        try:
            for stream in self._open:
                if stream.fd >= 0:
                    self._take(stream, stream.spool.take)
        except OSError:
            return False
        self.held_since = None
        for stream in self._open:
            if stream.fd >= 0:
                self._watch(stream)
        self._say("the disk takes its output again", NOTICE)
        return True

    def _hold(self, exc: OSError, stream: _Stream) -> None:
        self._events.forget(stream.fd)
        if self.held_since is None:
            self.held_since = self._events.now
            self._retry_at = self._events.now + _RETRY_DISK
            reason = f"{exc.strerror}: {stream.spool.path}"
            self._say(f"its output cannot be written ({reason}); the step waits until there is space", ERROR)

    def _say(self, text: str, priority: int) -> None:
        self._journal.event(
            "waiting", f"{self._step}: {text}", step=self._step, attempt=self._number, priority=priority
        )

    # -- the pipes

    def _watch(self, stream: _Stream) -> None:
        self._events.watch(stream.fd, functools.partial(self._read, stream))

    def _read(self, stream: _Stream) -> bool:
        try:
            return self._take(stream, stream.spool.take)
        except OSError as exc:
            self._hold(exc, stream)
            return False

    def _take(self, stream: _Stream, take: Callable[[int, int], bytes | None]) -> bool:
        """Take one chunk, so that a step which prints without end leaves the loop its turn.

        Return whether there may be more.  Raises OSError if the disk is full.
        """
        place = stream.spool.size
        room = self._most - place
        if room <= 0:
            return self._look_beyond(stream)
        most = int(min(CHUNK, room))
        try:
            data = take(stream.fd, most)
        except OSError as exc:
            if exc.errno in FULL:
                raise
            stream.spool.abandon()
            self.fault = f"its output could not be kept: {exc.strerror}: {stream.spool.path}"
            data = stream.spool.absorb(stream.fd, most)
        if data is None:
            return False
        if not data:
            self._close(stream)
            return False
        self.last_data = self._events.now
        if len(data) == _PIPE_SMALL:  # it was full: a step that prints this much gets a larger one
            with contextlib.suppress(OSError):
                fcntl.fcntl(stream.fd, fcntl.F_SETPIPE_SZ, CHUNK)
        self._pass_on(stream, data, place)
        return True

    def _look_beyond(self, stream: _Stream) -> bool:
        """See whether there is more than may be kept: not a byte more is taken then, and nothing is read any more."""
        try:
            more = os.read(stream.fd, 1)
        except BlockingIOError:
            return False
        if more:
            self.over = True
            for other in self._open:
                if other.fd >= 0:
                    self._events.forget(other.fd)
        else:
            self._close(stream)
        return False

    def _pass_on(self, stream: _Stream, data: bytes, place: int) -> None:
        """Let the journal have the lines of `data`, which begins at `place` in the spool."""
        lines, skipped = stream.lines.feed(data, self._ration.left(self._events.now))
        stream.skipped += skipped
        self._print(stream, lines)
        if lines or skipped:
            stream.begun = place + data.rindex(b"\n") + 1

    def _print(self, stream: _Stream, lines: list[str]) -> None:
        self._ration.take(len(lines))
        for line in lines:
            self._journal.output(self._step, self._number, line, stream.priority)

    def _close(self, stream: _Stream) -> None:
        self._events.forget(stream.fd)
        if not self._kept:
            os.close(stream.fd)
        stream.fd = -1
        self._print(stream, stream.lines.end())


def _empty(pipe: int) -> None:
    """Throw away what a pipe holds, or so much as any holds."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(_DRAIN_MAX // CHUNK):
            if not os.read(pipe, CHUNK):
                return
