"""One attempt at a step, from spawn to outcome.

    RUNNING ──► (ENDING ──►) SWEEPING ──► the next program, or OVER
       │            │            └ the program has ended; what it left behind is ended too
       │            └ a limit was passed or the worker stops: SIGTERM, then SIGKILL
       └ output, beats and exit arrive as events

A task's `check` (where an earlier attempt was cut off), its `before`, its own program, the command of `expect`
and `after` run one after the other in the same attempt.  The attempt decides nothing about the step: it says how
it ended (`end`), and the loop goes on from there.
"""

import contextlib
import math
import signal
from collections.abc import Callable, Collection, Mapping
from typing import Any

from worker import environment, expectation, points, process
from worker.clock import Now
from worker.decide import End, Reason
from worker.disk import PATIENCE
from worker.errors import TEMPORARY, AgentError
from worker.events import Events
from worker.family import Cohort, Descent, Effort, Family
from worker.folder import Places
from worker.journal import NOTICE, WARNING, Journal
from worker.leader import Leader
from worker.limits import Limits, complaint
from worker.output import missing
from worker.plan import Step
from worker.programs import CHECK, Program, Programs
from worker.signs import Said
from worker.slot import Slot, saved
from worker.streams import Streams

RUNNING, ENDING, SWEEPING, OVER = range(4)

# Between SIGTERM and SIGKILL: for a step that passed a limit, and for what a step left behind.
LIMIT_GRACE = 10.0
LEFTOVER_GRACE = 1.0
# How long processes may take to vanish after SIGKILL before the worker no longer vouches for the step.
KILL_PATIENCE = 30.0


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
        self.output = slot.output
        self.log = slot.log
        self.said = Said()
        self.definition = ""  # what the step was when it was claimed
        self.detail = ""  # what it was doing when it was ended for a limit
        self.claimed = 0.0  # when, as the ledger has it
        self.deaths: list[float] = []  # when workers that were not well have died while it ran (monotonic clock)
        self._note: str | None = None
        self._owes = False  # the ledger does not know yet what it has spent
        self.unknown = ""  # the key of an effect inside it of which nobody can tell whether it happened
        self.lost = False  # the claim is another worker's by now: whatever comes of it is not recorded
        self.phase = RUNNING
        self._places = places
        self._journal = journal
        self._events = events
        self._family: Family = (
            Descent(f"STATE_DIRECTORY={places.state(step.id)}".encode(), others)
            if slot.shelter is None
            else Cohort(slot.shelter.group)
        )
        self._ask_first = ask_first
        self._programs = Programs(step, slot.output.path, ask_first)
        self._program = Program("", [])
        self._leader = Leader(self._family, slot.shelter, events, self._on_exit)
        self._exit: int | None = None
        self._why = ""
        self._limit: str | None = None
        self._interrupted_by: Reason | None = None
        self._kill_at = self._vouched_until = math.inf
        self._saved_before = ""
        self._kills_before = 0

    def start(self, base: Mapping[str, str], note: str | None, best: float, moment: Now) -> None:
        """Spawn the first program; if that fails the attempt is over and `end` says why.

        `note` is the path of a file about the last attempt, `best` the furthest progress before this one.
        """
        self._begin(moment.monotonic, moment.wall, best)
        try:
            folder = self._places.state(self.step.id)
            self.slot.furnish(folder)
            self._saved_before = saved(folder)
            self._kills_before = self._family.memory_kills()
            self._prepare(base, note)
        except (AgentError, OSError) as exc:
            self._why = str(exc)
            self._finish()
            return
        self._events.watch(self.slot.socket.fileno(), self._on_messages)
        self._spawn(moment.monotonic)

    def _begin(self, started: float, started_wall: float, best: float) -> None:
        self.started, self.started_wall = started, started_wall
        self._ended = started
        self._best = best
        self.limits = Limits(started, self.step.task)
        self._effort = Effort(self._family, self.limits.stall_after / 4, self._events.now)
        self.streams = Streams(self.step.id, self.number, self.output, self.log, self._events, self._journal)

    def _prepare(self, base: Mapping[str, str], note: str | None) -> None:
        self._note = note
        secrets = self.slot.lay_out(self.step.task.secrets)
        notify = self.slot.socket.path
        self._env = environment.build(base, self.step, self.number, self._places, notify, note, secrets)

    @property
    def leader(self) -> int:
        """The pid of the first process of the program that runs; 0 before there is one."""
        return self._leader.pid

    @property
    def pid(self) -> int:
        """The pid of the program itself, which a few lines of sh wait for if it is to outlive the worker."""
        below = process.children(self.leader) if self.slot.shelter is not None else []
        return below[0] if below else self.leader

    @property
    def over(self) -> bool:
        return self.phase == OVER

    def end(self) -> End:
        """Return how the attempt ended; only once it is over."""
        asked = self._exit == TEMPORARY and not self._why  # for no other end does it matter what was saved
        fresh = asked and saved(self._places.state(self.step.id)) != self._saved_before
        took = max(0.0, self._ended - self.started)
        return End(
            self._exit,
            self._limit,
            self._interrupted_by,
            self._why,
            took,
            self.said.progress,
            fresh,
            self.said.retry_after,
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
        return min(self.limits.deadline(), self._effort.look_at)

    @property
    def last_sign(self) -> float:
        """When the step last gave a sign of life (monotonic clock)."""
        return max(self.limits.last_sign, self.streams.last_data)

    def within_limits(self, now: float) -> bool:
        """Return whether the worker can vouch for this step: while it can, systemd's watchdog is pinged."""
        if self.phase == OVER:
            return True
        held_since = self.streams.held_since
        if held_since is not None and self.phase != ENDING:
            return now < held_since + PATIENCE
        return self._broken(now) is None if self.phase == RUNNING else now < self._vouched_until

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
            if self.phase == SWEEPING:
                self._sweep(now)
        if self.phase == RUNNING and self.streams.held_since is None:
            if self._effort.seen(now):  # CPU time is a sign of life, too
                self.limits.sign(now)
            limit = self._broken(now)
            if limit is not None:
                self._end_for(limit, now)
        elif self.phase in (ENDING, SWEEPING) and now >= self._kill_at:
            self._family.kill()
            self._kill_at = now + 1.0  # look again: a process may have been forked while we looked
            self._sweep(now)

    def interrupt(self, reason: Reason, grace: float, now: float) -> None:
        """End the step because the worker stops: SIGTERM now, SIGKILL after `grace` seconds.

        One whose last program has ended already, by itself, is let come to its end.
        """
        if self.phase in (RUNNING, ENDING):
            self._interrupted_by = reason
            self._ask_to_end(grace, now)
        elif self.phase == SWEEPING and self.streams.held_since is not None:
            self._interrupted_by = reason  # its result could be kept nowhere
            self._next(now)
        elif self.phase == SWEEPING and self._programs.left:
            self._interrupted_by = reason

    def lose(self, grace: float, now: float) -> None:
        """End the step because its claim is another worker's by now."""
        self.lost = True
        self.interrupt("lease", grace, now)

    def on_exits(self, ended: Mapping[int, int], now: float) -> None:
        """Note which of our children have ended."""
        if self.phase in (RUNNING, ENDING):
            self._leader.reaped(ended)
        elif self.phase == SWEEPING:
            self._sweep(now)

    def kill(self) -> None:
        """Kill every process of the step at once, for a worker that cannot wait."""
        if self.leader and not self.over:
            self._family.kill()

    # -- a worker's end

    def save(self) -> None:
        """Let a worker to come know how things stand, if the step can outlive this one."""
        if self.slot.shelter is not None:
            self.slot.shelter.save(self._memo())

    def _memo(self) -> dict[str, Any]:
        return {
            "run": self._places.run,
            "step": self.step.id,
            "number": self.number,
            "claimed": self.claimed,
            "note": self._note,
            "started": [self.started, self.started_wall],
            "ask_first": self._ask_first,
            "programs": self._programs.memo(),
            "phase": self.phase,
            "limits": self.limits.memo(),
            "streams": self.streams.memo(),
            "said": self.said.memo(),
            "before": [self._saved_before, self._kills_before],
            "end": [self._limit, self._interrupted_by, self._why, self.unknown],
            "detail": self.detail,
            "deaths": self.deaths,
            # They get other names before the commit.
            "output": self.output.inode() if self.over else None,
            "log": self.log.inode() if self.over else None,
        }

    def adopt(self, memo: Mapping[str, Any], base: Mapping[str, str], best: float, now: float) -> None:
        """Go on with an attempt that an earlier worker has left as `memo` says; its slot was taken over.

        A program that has ended meanwhile is found ended; one that never began is started.  Raises OSError.
        """
        shelter = self.slot.shelter
        assert shelter is not None
        self._begin(now, now, best)  # in case that the memo makes no sense, and this is abandoned
        shelter.resume(memo)
        started, started_wall = memo["started"]
        self._begin(started, started_wall, best)
        self._program = self._programs.resume(memo["programs"])
        self.limits.resume(memo["limits"])
        self.phase = memo["phase"]
        self.said.resume(memo["said"])
        self._saved_before, self._kills_before = memo["before"]
        self.detail, self.deaths = memo["detail"], memo["deaths"]
        self._limit, self._interrupted_by, self._why, self.unknown = memo["end"]
        self._prepare(base, memo["note"])
        lost = ""
        try:
            self.output.resume(self._places.output(self.step.id), memo["output"])
            self.log.resume(self._places.log(self.step.id, self.number), memo["log"])
        except FileNotFoundError as exc:
            lost = f"its output was removed while it ran: {exc.filename}"
            self.output.prepare()
            self.log.prepare()
        self._events.watch(self.slot.socket.fileno(), self._on_messages)
        if not self._leader.find():
            self._why = ""
            self._run(self._program, now)
            return
        self.streams.attach(shelter.pipes, self._program.gives_result)
        self.streams.resume(memo["streams"])
        self.streams.fault = self.streams.fault or lost
        if self.phase == ENDING:
            self._kill_at, self._vouched_until = now, now + KILL_PATIENCE
        self._leader.watch()

    def abandon(self) -> None:
        """Kill what could not be taken over, and be over."""
        self._family.kill()
        self._why = self._why or "could not be taken over"
        self._finish()

    # -- its programs

    def _spawn(self, now: float) -> None:
        self._run(self._programs.next(), now)

    def _run(self, program: Program, now: float) -> None:
        self._program = program
        self.phase = RUNNING
        self._exit = None
        self._kill_at = self._vouched_until = math.inf
        self.limits.restart(now, program.own)
        self._programs.started(program)
        shelter = self.slot.shelter
        if shelter is not None:  # from now on this program is the one that the next worker goes on with
            self.streams.attach(shelter.pipes, program.gives_result)
            shelter.announce(self._memo)
        try:
            pipes = self._leader.start(program.argv, self._env, self.step.task.cwd or self._places.work)
        except process.SpawnError as exc:
            self._programs.not_started(program)
            self._fail(str(exc))
            self._finish()
            return
        points.at("program-started")
        if pipes is not None:
            self.streams.attach(pipes, program.gives_result)
            if program.gives_result:
                with contextlib.suppress(OSError):  # then it is made later, where a full disk is waited out
                    self.output.prepare()

    def _on_exit(self, status: int | None) -> None:
        """Note the end of the program's leader."""
        points.at("program-ended")
        if status and status != TEMPORARY and self.phase == RUNNING:
            self._why = self._family.memory_fault(self._kills_before, status)
        self._exit = -signal.SIGKILL if status is None and self.phase == ENDING else status  # we did it
        self.phase = SWEEPING
        self._begin_sweep(self._events.now)

    def _fail(self, why: str) -> None:
        self._why = f"{self._program.name}: {why}" if self._program.name else why

    def _next(self, now: float) -> None:
        """Go on after a program has ended and nothing of it is left."""
        if not self.streams.drain(
            at_once=self._exit != 0 or self._limit is not None or self._interrupted_by is not None
        ):
            return  # its result waits for space on the disk
        self._on_messages(to_the_end=True)  # what it said last, as its last output
        by_itself = not self._limit and not self._interrupted_by
        self._programs.ended(self._program, self._exit, by_itself)
        if self._program.name == CHECK and self._exit == 1 and by_itself:  # it had not happened
            self.output.restart()
            self._spawn(now)
            return
        if self._exit == 0 and by_itself:
            fault = None
            if self._program.gives_result:
                fault = expectation.fault(self.step.task, self.output, self._places.work)
            if fault:
                self._why = f"exited with status 0, but {fault}"
            elif self._programs.left:
                self._spawn(now)
                return
        elif self._program.name and not self._limit and self._exit is not None and self._exit != 0:
            code = f"status {self._exit}" if self._exit >= 0 else f"signal {-self._exit}"
            self._fail(f"ended with {code}")
        self._finish()

    def _finish(self) -> None:
        self.phase = OVER
        self._ended = self._events.now
        self._leader.forget()
        self.streams.drain()
        self._events.forget(self.slot.socket.fileno())
        self.slot.socket.release()
        self._why = self._why or self.streams.fault or missing(self.output, self.log)
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
        self._why = complaint(limit, self.step.task)
        self.detail = process.describe_all(self._family.members())
        self._say("step-ending", f"{self._why}; ending it ({process.describe(self.pid)})", WARNING)
        self._ask_to_end(LIMIT_GRACE, now)

    def _ask_to_end(self, grace: float, now: float) -> None:
        self.phase = ENDING
        self._kill_at = min(self._kill_at, now + grace)
        self._vouched_until = self._kill_at + KILL_PATIENCE
        self.save()  # why it ends, before it does
        process.terminate(self._family.members())

    # -- the end

    def _begin_sweep(self, now: float) -> None:
        left = self._family.left()
        if not left:
            self._next(now)
            return
        names = ", ".join(map(str, left[:8]))
        self._say("leftovers", f"ended and left processes behind; ending them: {names}", NOTICE)
        self._kill_at = now + LEFTOVER_GRACE
        self._vouched_until = self._kill_at + KILL_PATIENCE
        process.terminate(left)

    def _sweep(self, now: float) -> None:
        if self.phase == SWEEPING and not self._family.left():
            self._next(now)

    def _say(self, event: str, text: str, priority: int) -> None:
        self._journal.event(event, f"{self.step.id}: {text}", step=self.step.id, attempt=self.number, priority=priority)

    # -- what the step says

    def _on_messages(self, to_the_end: bool = False) -> None:
        for sign, pid in self.slot.socket.receive(to_the_end):
            if self._family.holds(pid):
                self.said.take(sign, self.limits, self._best, self._events.now)
                self.save()  # it says it but once
                self._owes = self._owes or sign.spend is not None
        if not self._owes:
            self.slot.socket.release()

    def noted(self) -> None:
        """Let the step go on, since the ledger knows what it has spent."""
        self._owes = False
        self.slot.socket.release()
