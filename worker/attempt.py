"""One attempt at a step, from spawn to outcome.

    RUNNING ──► (ENDING ──►) SWEEPING ──► the next program, or OVER
       │            │            └ the program has ended; what it left behind is ended too
       │            └ a limit was passed or the worker stops: SIGTERM, then SIGKILL
       └ output, beats and exit arrive as events

A task's `check` (where an earlier attempt was cut off), its `before`, its own program, the command of `expect`
and `after` run one after the other in the same attempt.  The attempt decides nothing about the step: it says how
it ended (`end`), and the loop goes on from there.
"""

import math
import os
import signal
from collections.abc import Callable, Collection, Mapping

from worker import environment, expectation, process
from worker.clock import Now
from worker.decide import End
from worker.disk import PATIENCE
from worker.errors import TEMPORARY, AgentError
from worker.events import Events
from worker.folder import Places
from worker.journal import NOTICE, WARNING, Journal
from worker.output import Spool
from worker.plan import Step
from worker.programs import CHECK, Program, Programs
from worker.signs import Limits, Sign
from worker.slot import Slot
from worker.streams import Streams
from worker.timespan import show

RUNNING, ENDING, SWEEPING, OVER = range(4)

# Between SIGTERM and SIGKILL: for a step that passed a limit, and for what a step left behind.
LIMIT_GRACE = 10.0
LEFTOVER_GRACE = 1.0
# How long processes may take to vanish after SIGKILL before the worker no longer vouches for the step.
KILL_PATIENCE = 30.0
# CPU time counts as a sign of life when it is more than an idle program's timers need.
_BUSY_SHARE = 0.005
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Attempt:
    """One try at one step.  While it is not over, `deadline` says when `tick` must be called again.

    `others` returns the leaders of the other running steps: their processes are not this one's.
    """

    def __init__(
        self,
        step: Step,
        number: int,
        slot: Slot,
        places: Places,
        journal: Journal,
        events: Events,
        others: Callable[[int], Collection[int]],
        ask_first: bool = False,
    ) -> None:
        """`ask_first`: an earlier attempt was cut off, so the step's check is asked whether it had happened."""
        self.step = step
        self.number = number
        self.slot = slot
        self.output = Spool(slot.part)
        self.log = Spool(places.log(step.id, number))
        self.status_text: str | None = None
        self.progress = 0.0
        self.progress_text = ""
        self.spend = 0.0
        self.definition = ""  # what the step was when it was claimed
        self.detail = ""  # what it was doing when it was ended for a limit
        self.unknown = ""  # the key of an effect inside it of which nobody can tell whether it happened
        self.lost = False  # the claim is another worker's by now: whatever comes of it is not recorded
        self.phase = RUNNING
        self.pid = 0
        self._places = places
        self._journal = journal
        self._events = events
        self._others = others
        self._marker = f"STATE_DIRECTORY={places.state(step.id)}".encode()
        self._programs = Programs(step, slot.part, ask_first)
        self._program = Program("", [])
        self._exit: int | None = None
        self._why = ""
        self._limit: str | None = None
        self._interrupted_by: str | None = None
        self._retry_after: float | None = None
        self._kill_at = self._vouched_until = math.inf
        self._cpu = 0
        self._cpu_at = self._cpu_look = math.inf

    def start(self, base: Mapping[str, str], note: str | None, best: float, moment: Now) -> None:
        """Spawn the first program; if that fails the attempt is over and `end` says why.

        `note` is the path of a file about the last attempt, `best` the furthest progress before this one.
        """
        now = moment.monotonic
        self.started, self.started_wall = now, moment.wall
        self._ended = now
        self._best = best
        self.limits = Limits(now, self.step.task)
        self.streams = Streams(self.step.id, self.number, self.output, self.log, self._events, self._journal)
        self._plan_cpu_look(now)
        try:
            folder = self._places.state(self.step.id)
            self.slot.furnish(folder)
            self._saved_before = _look_of(folder)
            secrets = self.slot.lay_out(self.step.task.secrets)
            self._env = environment.build(
                base, self.step, self.number, self._places, self.slot.socket.path, note, secrets
            )
        except (AgentError, OSError) as exc:
            self._why = str(exc)
            self._finish()
            return
        self._events.watch(self.slot.socket.fileno(), self._on_messages)
        self._spawn(now)

    @property
    def over(self) -> bool:
        return self.phase == OVER

    def end(self) -> End:
        """Return how the attempt ended; only once it is over."""
        asked = self._exit == TEMPORARY and not self._why  # for no other end does it matter what was saved
        saved = asked and _look_of(self._places.state(self.step.id)) != self._saved_before
        took = max(0.0, self._ended - self.started)
        return End(
            self._exit,
            self._limit,
            self._interrupted_by,
            self._why,
            took,
            self.progress,
            saved,
            self._retry_after,
            self._programs.effect,
            self._programs.found,
            self.unknown,
        )

    def deadline(self) -> float:
        """Return when to call `tick` next (monotonic clock); inf for never."""
        if self.phase == OVER:
            return math.inf
        if self.streams.held_since is not None:
            return self.streams.retry_at
        if self.phase != RUNNING:
            return self._kill_at
        self._hear()
        return min(self.limits.deadline(), self._cpu_look)

    @property
    def last_sign(self) -> float:
        """When the step last gave a sign of life (monotonic clock)."""
        return max(self.limits.last_sign, self.streams.last_data)

    def within_limits(self, now: float) -> bool:
        """Return whether the worker can vouch for this step: while it can, systemd's watchdog is pinged."""
        if self.phase == RUNNING:
            held_since = self.streams.held_since
            return self._broken(now) is None if held_since is None else now < held_since + PATIENCE
        return self.phase == OVER or now < self._vouched_until

    def excuse(self, seconds: float) -> None:
        """Charge no limit for `seconds` in which the worker itself did not run."""
        self.limits.excuse(seconds)
        self._kill_at += seconds
        self._vouched_until += seconds

    def park(self, parked: bool, now: float) -> None:
        """Note whether the step waits for another one, which has limits of its own."""
        self.limits.park(parked, now)

    def tick(self, now: float) -> None:
        """Do what time asks for: retry a full disk, end a step that passed a limit, kill what did not end."""
        held_since = self.streams.held_since
        if held_since is not None and now >= self.streams.retry_at and self.streams.retry(now):
            self.excuse(now - held_since)
        if self.phase == RUNNING and self.streams.held_since is None:
            if now >= self._cpu_look:
                self._look_at_cpu(now)
            limit = self._broken(now)
            if limit is not None:
                self._end_for(limit, now)
        elif self.phase in (ENDING, SWEEPING) and now >= self._kill_at:
            process.send(self._family(), signal.SIGKILL)
            self._kill_at = now + 1.0  # look again: a process may have been forked while we looked
            self._sweep(now)

    def interrupt(self, reason: str, grace: float, now: float) -> None:
        """End the step because the worker stops: SIGTERM now, SIGKILL after `grace` seconds.

        One whose last program has ended already, by itself, is let come to its end.
        """
        if self.phase in (RUNNING, ENDING):
            self._interrupted_by = reason
            self._ask_to_end(grace, now)
        elif self.phase == SWEEPING and self._programs.left:
            self._interrupted_by = reason

    def lose(self, grace: float, now: float) -> None:
        """End the step because its claim is another worker's by now."""
        self.lost = True
        self.interrupt("lease", grace, now)

    def on_exits(self, ended: Mapping[int, int], now: float) -> None:
        """Note which of our children have ended."""
        if self.phase in (RUNNING, ENDING) and self.pid in ended:
            self._exit = ended[self.pid]
            self.phase = SWEEPING
            self._begin_sweep(now)
        elif self.phase == SWEEPING:
            self._sweep(now)

    def kill(self) -> None:
        """Kill every process of the step at once, for a worker that cannot wait."""
        if self.pid and not self.over:
            process.send(self._family(), signal.SIGKILL)

    # -- its programs

    def _spawn(self, now: float) -> None:
        self._program = self._programs.next()
        try:
            cwd = self.step.task.cwd or self._places.work
            child = process.spawn(self._program.argv, self._env, cwd)
        except process.SpawnError as exc:
            self._exit = None
            self._fail(str(exc))
            self._finish()
            return
        self.pid = child.pid
        self.phase = RUNNING
        self._exit = None
        self._kill_at = self._vouched_until = math.inf
        self.limits.restart(now, self._program.own)
        self.streams.attach(child, self._program.gives_result)
        self._programs.started(self._program)
        if self._program.gives_result:
            self.output.prepare()

    def _fail(self, why: str) -> None:
        self._why = f"{self._program.name}: {why}" if self._program.name else why

    def _next(self, now: float) -> None:
        """Go on after a program has ended and nothing of it is left."""
        self.streams.drain()
        self._on_messages()  # what it said last, as its last output
        by_itself = not self._limit and not self._interrupted_by
        self._programs.ended(self._program, self._exit, by_itself)
        if self._program.name == CHECK and self._exit == 1 and by_itself:  # it had not happened
            self.output.restart()
            self._spawn(now)
            return
        if self._exit == 0 and by_itself:
            fault = None
            if self._program.gives_result and self.step.task.expect:
                fault = self._expected()
            if fault:
                self._why = f"exited with status 0, but {fault}"
            elif self._programs.left:
                self._spawn(now)
                return
        elif self._program.name and not self._limit and self._exit != 0:
            code = f"status {self._exit}" if (self._exit or 0) >= 0 else f"signal {-(self._exit or 0)}"
            self._fail(f"ended with {code}")
        self._finish()

    def _expected(self) -> str | None:
        """Return what is wrong with what the step's own program has left, as far as no program has to look."""
        expect = self.step.task.expect
        assert expect is not None
        if expect.matches is not None:
            try:
                self.output.show()
            except OSError as exc:
                return f"its output cannot be looked at: {exc.strerror}"
        if expect.file is None:
            return None
        return expectation.file_fault(expect.file, self.step.task.cwd or self._places.work)

    def _finish(self) -> None:
        self.phase = OVER
        self._ended = self._events.now
        self.streams.drain()
        self._events.forget(self.slot.socket.fileno())
        removed = "" if self.output.in_place() else f"its output was removed while it ran: {self.output.path}"
        self._why = self._why or self.streams.fault or removed
        self.streams.close(done=self._exit == 0 and not self._why)

    # -- limits

    def _broken(self, now: float) -> str | None:
        self._hear()
        return self.limits.broken(now)

    def _hear(self) -> None:
        """Let output count as a sign of life."""
        self.limits.sign(self.last_sign)

    def _end_for(self, limit: str, now: float) -> None:
        self._limit = limit
        span = show(getattr(self.step.task, limit) or 0)
        self._why = {
            "timeout": f"took longer than its timeout of {span}",
            "watchdog": f"sent no WATCHDOG=1 for {span}",
            "stall_after": f"gave no sign of life for {span}",
            "progress_every": f"made no progress for {span}",
        }[limit]
        self.detail = process.describe_all(self._family())
        self._say("step-ending", f"{self._why}; ending it ({process.describe(self.pid)})", WARNING)
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
        return process.family(self.pid, self._marker, self._others(self.pid))

    def _left(self) -> list[process.Found]:
        """Return what is left of the step; without a look at every process if we have no orphans."""
        others = self._others(self.pid)
        return process.family(self.pid, self._marker, others) if process.has_orphans(others) else []

    def _begin_sweep(self, now: float) -> None:
        left = self._left()
        if not left:
            self._next(now)
            return
        names = ", ".join(f"{found.name} ({found.pid})" for found in left[:8])
        self._say("leftovers", f"ended and left processes behind; ending them: {names}", NOTICE)
        self._kill_at = now + LEFTOVER_GRACE
        self._vouched_until = self._kill_at + KILL_PATIENCE
        process.terminate(left)

    def _sweep(self, now: float) -> None:
        if self.phase == SWEEPING and not self._left():
            self._next(now)

    def _say(self, event: str, text: str, priority: int) -> None:
        self._journal.event(event, f"{self.step.id}: {text}", step=self.step.id, attempt=self.number, priority=priority)

    # -- what the step says

    def _on_messages(self) -> None:
        for sign, pid in self.slot.socket.receive():
            if process.belongs(pid, self.pid, self._marker, self._others(self.pid)):
                self._take(sign, self._events.now)

    def _take(self, sign: Sign, now: float) -> None:
        if sign.beat:
            self.limits.beat(now)
        if sign.status is not None:
            self.limits.sign(now)
            self.status_text = sign.status
        if sign.progress is not None:
            self.progress_text = sign.progress_text
            if sign.progress > max(self.progress, self._best):
                self.limits.progress(now)
            self.progress = max(self.progress, sign.progress)
        if sign.spend is not None:
            self.spend += sign.spend
        if sign.retry_after is not None:
            self._retry_after = sign.retry_after
        if sign.extend is not None:
            self.limits.extend(now, sign.extend)


def _look_of(folder: str) -> list[tuple[str, int, int]]:
    """Return what changes when a step saves something in its own folder: names, sizes and times."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e.name, (s := e.stat(follow_symlinks=False)).st_size, s.st_mtime_ns) for e in entries)
    except OSError:
        return []
