"""One attempt at a step, from spawn to outcome.

    RUNNING ──► (ENDING ──►) SWEEPING ──► over
       │            │            └ the first process has ended; what it left behind is ended too
       │            └ a limit was passed or the worker stops: SIGTERM, then SIGKILL
       └ output, beats and exit arrive as events

The attempt decides nothing about the step: it says how it ended (`end`), and the loop goes on from there.
"""

import functools
import math
import os
import signal
from collections.abc import Mapping

from worker import environment, process
from worker.clock import Now
from worker.decide import End
from worker.errors import AgentError
from worker.events import Events
from worker.folder import Places
from worker.journal import ERROR, INFO, NOTICE, WARNING, Journal, Ration
from worker.lines import Lines
from worker.output import Spool
from worker.plan import Step
from worker.signs import Limits
from worker.slot import Slot
from worker.timespan import show

RUNNING, ENDING, SWEEPING, OVER = range(4)

# Between SIGTERM and SIGKILL: for a step that passed a limit, and for what a step left behind.
LIMIT_GRACE = 10.0
LEFTOVER_GRACE = 1.0
# How long processes may take to vanish after SIGKILL before the worker no longer vouches for the step.
KILL_PATIENCE = 30.0
_CHUNK = 256 * 1024
# What is read at most from a pipe once the step has ended; more than any pipe holds (pipe(7)).
_DRAIN_MAX = 16 * 1024 * 1024
_RETRY_DISK = 1.0
# CPU time counts as a sign of life when it is more than an idle program's timers need.
_BUSY_SHARE = 0.005
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class _Stream:
    """One pipe of the step: its bytes go to the spool, its lines to the journal."""

    __slots__ = ("fd", "lines", "priority", "spool")

    def __init__(self, fd: int, spool: Spool, priority: int) -> None:
        self.fd = fd
        self.spool = spool
        self.lines = Lines()
        self.priority = priority


class Attempt:
    """One try at one step.  While it is not over, `deadline` says when `tick` must be called again."""

    def __init__(
        self, step: Step, number: int, slot: Slot, places: Places, journal: Journal, events: Events
    ) -> None:
        self.step = step
        self.number = number
        self.slot = slot
        self.status_text: str | None = None
        self.phase = RUNNING
        self.pid = 0
        self._journal = journal
        self._events = events
        self._marker = f"STATE_DIRECTORY={places.state(step.id)}".encode()
        self.output = Spool(slot.part)
        self.log = Spool(places.log(step.id, number))
        self._streams: list[_Stream] = []
        self._exit: int | None = None
        self._why = ""
        self._limit: str | None = None
        self._interrupted_by: str | None = None
        self._kill_at = math.inf
        self._vouched_until = math.inf
        self._disk_full_since: float | None = None
        self._held_at = 0.0
        self._cpu = 0
        self._cpu_at = self._cpu_look = math.inf

    def start(self, base: Mapping[str, str], places: Places, moment: Now) -> None:
        """Spawn the step's process; if that fails the attempt is over and `end` says why."""
        task, now = self.step.task, moment.monotonic
        self.started, self.started_wall = now, moment.wall
        self.limits = Limits(now, task.timeout, task.stall_after, task.watchdog)
        self._ration = Ration(now)
        self._plan_cpu_look(now)
        try:
            self.slot.furnish(places.state(self.step.id))
            env = environment.build(base, self.step, self.number, places, self.slot.socket.path)
            child = process.spawn(self.step.argv(), env, task.cwd or places.work)
        except (process.SpawnError, AgentError, OSError) as exc:
            self._why = str(exc)
            self._finish()
            return
        self.pid = child.pid
        self._streams = [
            _Stream(child.stdout, self.output, INFO),
            _Stream(child.stderr, self.log, NOTICE),
        ]
        for stream in self._streams:
            self._watch(stream)
        self._events.watch(self.slot.socket.fileno(), self._on_message)
        self.output.prepare()

    @property
    def over(self) -> bool:
        return self.phase == OVER

    def end(self) -> End:
        """Return how the attempt ended; only once it is over."""
        return End(self._exit, self._limit, self._interrupted_by, self._why)

    def deadline(self) -> float:
        """Return when to call `tick` next (monotonic clock); inf for never."""
        if self.phase == OVER:
            return math.inf
        if self._disk_full_since is not None:
            return self._disk_full_since + _RETRY_DISK
        return min(self.limits.deadline(), self._cpu_look) if self.phase == RUNNING else self._kill_at

    def within_limits(self, now: float) -> bool:
        """Return whether the worker can vouch for this step: while it can, systemd's watchdog is pinged."""
        if self.phase == RUNNING:
            return self._disk_full_since is not None or self.limits.broken(now) is None
        return now < self._vouched_until

    def excuse(self, seconds: float) -> None:
        """Charge no limit for `seconds` in which the worker itself did not run."""
        self.limits.excuse(seconds)
        self._kill_at += seconds
        self._vouched_until += seconds

    def tick(self, now: float) -> None:
        """Do what time asks for: retry a full disk, end a step that passed a limit, kill what did not end."""
        if self._disk_full_since is not None and now >= self._disk_full_since + _RETRY_DISK:
            self._retry_disk(now)
        if self.phase == RUNNING and self._disk_full_since is None:
            if now >= self._cpu_look:
                self._look_at_cpu(now)
            limit = self.limits.broken(now)
            if limit is not None:
                self._end_for(limit, now)
        elif self.phase in (ENDING, SWEEPING) and now >= self._kill_at:
            process.send(self._family(), signal.SIGKILL)
            self._kill_at = now + 1.0  # look again: a process may have been forked while we looked
            self._sweep(now)

    def interrupt(self, reason: str, grace: float, now: float) -> None:
        """End the step because the worker stops: SIGTERM now, SIGKILL after `grace` seconds."""
        if self.phase in (RUNNING, ENDING):
            self._interrupted_by = self._interrupted_by or reason
            self._ask_to_end(grace, now)

    def on_exits(self, ended: Mapping[int, int], now: float) -> None:
        """Note which of our children have ended."""
        if self.phase in (RUNNING, ENDING) and self.pid in ended:
            self._exit = ended[self.pid]
            self.phase = SWEEPING
            self._drain()
            self._begin_sweep(now)
        elif self.phase == SWEEPING:
            self._sweep(now)

    def kill(self) -> None:
        """Kill every process of the step at once, for a worker that cannot wait."""
        if self.pid and not self.over:
            process.send(self._family(), signal.SIGKILL)

    # -- limits

    def _end_for(self, limit: str, now: float) -> None:
        self._limit = limit
        span = show(getattr(self.step.task, limit) or 0)
        self._why = {
            "timeout": f"took longer than its timeout of {span}",
            "watchdog": f"sent no WATCHDOG=1 for {span}",
            "stall_after": f"gave no sign of life for {span}",
        }[limit]
        self._journal.event(
            "step-ending",
            f"{self.step.id}: {self._why}; ending it ({process.describe(self.pid)})",
            step=self.step.id,
            attempt=self.number,
            priority=WARNING,
        )
        self._ask_to_end(LIMIT_GRACE, now)

    def _ask_to_end(self, grace: float, now: float) -> None:
        self.phase = ENDING
        self._kill_at = min(self._kill_at, now + grace)
        self._vouched_until = self._kill_at + KILL_PATIENCE
        process.terminate(self._family())

    def _look_at_cpu(self, now: float) -> None:
        """Count CPU time used by the step's processes as a sign of life, if it has stall_after."""
        ticks = sum(found.ticks for found in self._family())
        if ticks - self._cpu > _BUSY_SHARE * (now - self._cpu_at) * _TICKS_PER_SECOND:
            self.limits.sign(now)
        self._cpu = ticks
        self._plan_cpu_look(now)

    def _plan_cpu_look(self, now: float) -> None:
        self._cpu_at = now
        self._cpu_look = now + self.limits.stall_after / 4

    # -- the end

    def _family(self) -> list[process.Found]:
        return process.family(self.pid, self._marker)

    def _begin_sweep(self, now: float) -> None:
        left = self._family() if process.has_children() else []
        if not left:
            self._finish()
            return
        names = ", ".join(f"{found.name} ({found.pid})" for found in left[:8])
        self._journal.event(
            "leftovers",
            f"{self.step.id}: ended and left processes behind; ending them: {names}",
            step=self.step.id,
            attempt=self.number,
            priority=NOTICE,
        )
        self._kill_at = now + LEFTOVER_GRACE
        self._vouched_until = self._kill_at + KILL_PATIENCE
        process.terminate(left)

    def _sweep(self, now: float) -> None:
        if self.phase == SWEEPING and not (process.has_children() and self._family()):
            self._drain()
            self._finish()

    def _finish(self) -> None:
        self.phase = OVER
        for stream in self._streams:
            if stream.fd >= 0:
                self._close(stream)
        self._events.forget(self.slot.socket.fileno())
        if self._streams and self._ration.skipped:
            where = f"all of them are in out/{self.step.id}" if self._exit == 0 else "see 'agentctl log'"
            self._journal.output(
                self.step.id, self.number, f"[{self._ration.skipped} lines left out here; {where}]", NOTICE
            )

    # -- what the step says

    def _watch(self, stream: _Stream) -> None:
        self._events.watch(stream.fd, functools.partial(self._on_output, stream))

    def _on_output(self, stream: _Stream) -> bool:
        """Take one chunk, so that a step which prints without end leaves the loop its turn.

        Return whether there may be more.
        """
        try:
            data = os.read(stream.fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._take(stream, data)
        else:
            self._close(stream)
        return bool(data)

    def _take(self, stream: _Stream, data: bytes) -> None:
        now = self._events.now
        self.limits.sign(now)
        self._print(stream, stream.lines.feed(data), now)
        try:
            stream.spool.write(data)
        except OSError as exc:
            self._hold(exc, stream)

    def _print(self, stream: _Stream, lines: list[str], now: float) -> None:
        for line in lines[: self._ration.take(len(lines), now)]:
            self._journal.output(self.step.id, self.number, line, stream.priority)

    def _hold(self, exc: OSError, stream: _Stream) -> None:
        """Stop reading: the step waits in its write(2) until the disk takes bytes again, uncharged."""
        self._events.forget(stream.fd)
        if self._disk_full_since is None:
            self._disk_full_since = self._held_at = self._events.now
            self._journal.event(
                "waiting",
                f"{self.step.id}: its output cannot be written ({exc.strerror}: {stream.spool.path}); "
                "the step waits until there is space",
                step=self.step.id,
                attempt=self.number,
                priority=ERROR,
            )

    def _retry_disk(self, now: float) -> None:
        self._disk_full_since = now
        for stream in self._streams:
            try:
                stream.spool.retry()
            except OSError:
                return
            if stream.fd >= 0:
                self._watch(stream)
        self._disk_full_since = None
        self.excuse(now - self._held_at)
        self._journal.event(
            "waiting",
            f"{self.step.id}: the disk takes its output again",
            step=self.step.id,
            attempt=self.number,
            priority=NOTICE,
        )

    def _drain(self) -> None:
        """Take what is still in the pipes, a full disk or not: it is little."""
        for stream in self._streams:
            for _ in range(_DRAIN_MAX // _CHUNK):
                if stream.fd < 0 or not self._on_output(stream):
                    break

    def _close(self, stream: _Stream) -> None:
        self._events.forget(stream.fd)
        os.close(stream.fd)
        stream.fd = -1
        self._print(stream, stream.lines.end(), self._events.now)

    def _on_message(self) -> None:
        now = self._events.now
        for sign in self.slot.socket.receive():
            if sign.beat:
                self.limits.beat(now)
            if sign.status is not None:
                self.limits.sign(now)
                self.status_text = sign.status
