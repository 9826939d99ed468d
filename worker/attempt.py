"""One attempt at a step, from spawn to outcome.

A task's `check` (where an earlier attempt was cut off), its `before`, its own program, the command of `expect`
and `after` are executed one after the other in the same attempt, under limits which are its own.  The attempt decides
nothing about the step: it says how it ended (`end`), and the loop goes on from there.
"""

import errno
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from worker import (
    argspace,
    distant,
    environment,
    expectation,
    family,
    points,
    process,
    reasons,
    savedfiles,
    scarcity,
    signs,
)
from worker.clock import Now
from worker.decide import End, Reason
from worker.disk import PATIENCE
from worker.errors import TEMPORARY, AgentError
from worker.events import Events
from worker.execution import ENDING, OVER, RUNNING, SWEEPING, Execution
from worker.family import Effort
from worker.folder import Places
from worker.journal import NOTICE, WARNING, Journal
from worker.limits import Limits, complaint
from worker.output import missing
from worker.plan import Step
from worker.programs import CHECK, Program, Programs
from worker.sender import Sender
from worker.signs import Said
from worker.slot import Slot
from worker.streams import Streams
from worker.timespan import show

# Between SIGTERM and SIGKILL for a step that passed a limit.
LIMIT_GRACE = 10.0


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
        may_go_on: Callable[[], bool],
        ask_first: bool = False,
    ) -> None:
        """`may_go_on`: whether the claim is surely ours, so that a further program of the step may begin.

        `ask_first`: an earlier attempt was cut off, so the step's check is asked whether it had happened.
        """
        self.step = step
        self.number = number
        self.slot = slot
        self.output = slot.output
        self.log = slot.log
        self.streams = Streams(step.id, number, slot.output, slot.log, events, journal, step.task.max_output)
        self.said = Said()
        self.definition = ""  # what the step was when it was claimed
        self.claimed = 0.0  # when, as the ledger has it
        self.deaths: list[float] = []  # when workers that were not well have died while it ran (monotonic clock)
        self.lost = False  # the claim is another worker's by now: whatever comes of it is not recorded
        self.unknown = ""  # the key of an effect inside it of which nobody can tell whether it happened
        self.detail = ""  # what it was doing when it was ended for a limit
        self._limit: str | None = None
        self._interrupted_by: Reason | None = None
        self._confined = False
        self._why, self._reason = "", ""  # and what a program of ours says of its failure
        self._short_since: float | None = None  # since when the machine has been short of what a start needs
        self._start_at: float | None = None  # when that is tried again
        self._short = False  # it was so before any program
        self._lacking: Sequence[str] = ()  # results that this step needs and that are not here
        self._fatal = False  # no other attempt can mend what has failed
        self._owes = False  # the ledger does not know yet what it has spent
        self._held_since: float | None = None  # since when a person holds it still (monotonic clock)
        self._note: str | None = None
        self._secrets: str | None = None
        self._saved_before: savedfiles.Seen | None = None
        self._may_go_on = may_go_on
        self._places = places
        self._journal = journal
        self._events = events
        group = slot.shelter.group if slot.shelter is not None else None
        marker = os.fsencode(f"STATE_DIRECTORY={places.state(step.id)}")
        self._family = family.of(group, marker, others, slot.inherited)
        self._ask_first = ask_first
        self._programs = Programs(step, slot.output.path, ask_first)
        self._execution = Execution(slot, self._family, self.streams, events, self._say, self._next)

    # -- the start, and one program after the other

    def start(
        self, base: Mapping[str, str], note: str | None, best: float, moment: Now, lacking: Sequence[str] = ()
    ) -> None:
        """Spawn the first program; if that fails the attempt is over and `end` says why.

        `note` is the path of a file about the last attempt, `best` the furthest progress before this one.  The start
        waits for the files `lacking`, results of steps that this one needs.
        """
        self._lacking = lacking
        self._begin(moment.monotonic, moment.wall, best)
        try:
            folder = self._places.state(self.step.id)
            self.slot.furnish(folder)
            self._saved_before = savedfiles.look(folder)
            self._execution.kills_before = self._family.memory_kills()
            self._prepare(base, note)
        except (AgentError, OSError) as exc:
            self._why, self._short = str(exc), scarcity.is_scarce(exc)
            self._fatal = argspace.HINT in self._why
            self._finish()
            return
        self._events.watch(self.slot.socket.fileno(), self._on_messages)
        self._run(self._programs.next(), moment.monotonic)

    def _begin(self, started: float, started_wall: float, best: float) -> None:
        self.started, self.started_wall = started, started_wall
        self._ended = started
        self._best = best
        self.limits = Limits(started, self.step.task)
        self._effort = Effort(self._family, self.limits.stall_after / 4, self._events.now)

    def _prepare(self, base: Mapping[str, str], note: str | None, secrets: str | None = None) -> None:
        self._note = note
        home, self._secrets = self.slot.settle_in(self.step.id, self.step.task.secrets, secrets)
        notify = self.slot.socket.path
        self._env = environment.build(base, self.step, self.number, self._places, notify, note, self._secrets, home)

    def _run(self, program: Program, now: float) -> None:
        self.limits.restart(now, program.own)
        self._programs.started(program)
        cwd = self.step.task.cwd or self._places.work
        missing = next((path for path in self._lacking if not os.path.exists(path)), None)
        if missing is not None:
            self._execution.program = program  # the one that is tried again
            self._not_started(program, f"the result {missing} is not here; put it there", True, now)
            return
        try:
            if self.step.task.cwd and not distant.answers(cwd):
                raise process.SpawnError(f"cannot work in '{cwd}': {distant.SILENT}")
            ruleset = self.slot.ruleset(self.step.task, cwd, self._env)
            self._confined = ruleset is not None
            self._execution.start(program, self._env, cwd, self._memo, ruleset)
        except (process.SpawnError, OSError) as exc:
            why = str(exc)
            if scarcity.code(exc) == errno.E2BIG:
                why, self._fatal = f"{exc}: {scarcity.too_long(program.argv, self._env)}", True
            self._not_started(program, why, scarcity.is_scarce(exc), now)
        else:
            if self._short_since is not None:
                self._say("waiting", f"{program.said('')}started; going on", NOTICE)
            self._short_since = self._start_at = None

    def _not_started(self, program: Program, why: str, scarce: bool, now: float) -> None:
        """Try again later if the machine is short of something, as long as the step's patience lasts; else be over."""
        self._programs.not_started(program)
        if scarce:
            if self._short_since is None:
                self._short_since = now
                self._say("waiting", f"{program.said(why)}; trying again, the step is charged for nothing", WARNING)
            if now - self._short_since < self.step.task.retry.patience:
                self._start_at = now + scarcity.RETRY
                self._execution.hold()
                return
            why, self._fatal = f"{why}, for {show(now - self._short_since)}, longer than its patience", True
        self._start_at = None
        self._why = program.said(why)
        self._finish()

    @property
    def leader(self) -> int:
        """The pid of the first process of the program that runs; 0 before there is one."""
        return self._family.leader

    @property
    def pid(self) -> int:
        """The pid of the program itself, which a few lines of sh wait for if it is to outlive the worker."""
        shelter = self.slot.shelter
        if shelter is None:
            return self.leader
        below = process.children(self.leader)
        if not below:  # hidden from us, as what an earlier worker has started is: the first that came after the leader
            others = shelter.group.pids()
            below = [min([pid for pid in others if pid > self.leader] or others, default=self.leader)]
        return below[0]

    def holds(self, sender: Sender) -> bool:
        """Return whether a process is surely one of the step's."""
        return bool(self._family.holds(sender))

    # -- signs of life

    def _on_messages(self, to_the_end: bool = False) -> None:
        for sign, sender in self.slot.socket.receive(to_the_end):
            mine = self._family.holds(sender)
            if mine is None:  # whoever it was, that much is spent
                sign = signs.Sign(spend=sign.spend, id=sign.id)
            if mine is not False and sign != signs.NOTHING:
                self.said.take(sign, self.limits, self._best, self._events.now)
                self.save()  # it says it but once
                self._owes = self._owes or sign.spend is not None
                points.at("message-kept")
            elif sign.id:
                self.slot.socket.refuse()
        if not self._owes:
            self._acknowledge()

    def noted(self) -> None:
        """Let the step go on, since the ledger knows what it has spent."""
        if self._owes:
            self._owes = False
            self._acknowledge()

    def _acknowledge(self) -> None:
        self.slot.socket.release()
        self.said.acknowledged()

    @property
    def last_sign(self) -> float:
        """When the step last gave a sign of life (monotonic clock)."""
        return max(self.limits.last_sign, self.streams.last_data)

    def _hear(self) -> None:
        """Let output count as a sign of life."""
        self.limits.sign(self.last_sign)

    # -- limits

    def deadline(self) -> float:
        """Return when to call `tick` next (monotonic clock); inf for never."""
        phase = self._execution.phase
        if phase == OVER:
            return math.inf
        if self.streams.held_since is not None:
            return self.streams.retry_at
        if phase != RUNNING:
            return self._execution.kill_at
        if self._held_since is not None:
            return math.inf
        if self._start_at is not None:
            return self._start_at
        if self.streams.over:
            return -math.inf
        self._hear()
        return min(self.limits.deadline(), self._effort.look_at)

    def within_limits(self, now: float) -> bool:
        """Return whether the worker can vouch for this step: while it can, systemd's watchdog is pinged."""
        phase, held_since = self._execution.phase, self.streams.held_since
        if phase == OVER or self._start_at is not None:  # the wait for a start has an end
            return True
        if self._held_since is not None and phase == RUNNING:
            return True
        if held_since is not None and phase != ENDING:
            return now < held_since + PATIENCE
        return self._broken(now) is None if phase == RUNNING else now < self._execution.vouched_until

    def excuse(self, seconds: float) -> None:
        """Charge no limit for `seconds` in which the worker itself did not run."""
        self.limits.excuse(seconds)
        self._execution.excuse(seconds)

    def park(self, parked: bool, now: float) -> None:
        """Note whether the step waits for another one, which has limits of its own."""
        self.limits.park(parked, now)

    @property
    def held(self) -> bool:
        """Whether a person holds it still."""
        return self._held_since is not None

    def hold(self, now: float) -> None:
        """Hold its processes still, and let no limit of it run, until `let_go`; what is ending already goes on."""
        if self._held_since is None and self._execution.phase == RUNNING:
            self._held_since = now
            self.save()  # before they stand still: a worker to come has to let them go
            if self.leader:
                self._family.freeze()

    def let_go(self, now: float) -> None:
        """Let it go on, if it is held."""
        if self._held_since is not None:
            self._family.thaw()
            self.excuse(now - self._held_since)
            self._held_since = None
            self.save()

    def tick(self, now: float) -> None:
        """Do what time asks for: retry a full disk, end a step that passed a limit, kill what did not end."""
        held_since = self.streams.held_since
        if held_since is not None and now >= self.streams.retry_at and self.streams.retry(now):
            self.excuse(now - held_since)
            self._execution.look(now)
        if self._execution.phase != RUNNING:
            self._execution.tick(now)
        elif self._held_since is not None:
            pass
        elif self._start_at is not None:
            if now >= self._start_at:
                self._run(self._execution.program, now)
        elif self.streams.held_since is None:
            if self._effort.seen(now):  # CPU time is a sign of life, too
                self.limits.sign(now)
            limit = self._broken(now)
            if limit is not None:
                self._end_for(limit, now)

    def _broken(self, now: float) -> str | None:
        if self.streams.over:
            return "max_output"
        self._hear()
        return self.limits.broken(now)

    # -- the end

    def _end_for(self, limit: str, now: float) -> None:
        self._limit = limit
        self._why = complaint(limit, self.step.task)
        self.detail = process.describe_all(self._family.members())
        self._say("step-ending", f"{self._why}; ending it ({process.describe(self.pid)})", WARNING)
        self._ask_to_end(LIMIT_GRACE, now)

    def interrupt(self, reason: Reason, grace: float, now: float) -> None:
        """End the step because the worker stops: SIGTERM now, SIGKILL after `grace` seconds.

        One whose last program has ended already, by itself, is let come to its end.
        """
        phase = self._execution.phase
        if self._start_at is not None:
            self._start_at, self._interrupted_by = None, reason
            self._finish()
        elif phase in (RUNNING, ENDING):
            self._interrupted_by = reason
            self._ask_to_end(grace, now)
        elif phase == SWEEPING and self.streams.held_since is not None and reason != "budget":
            self._interrupted_by = reason  # its result could be kept nowhere; only who is in no hurry waits for space
            self._next(now)
        elif phase == SWEEPING and self._programs.left:
            self._interrupted_by = reason

    def lose(self, grace: float, now: float) -> None:
        """End the step because its claim is another worker's by now."""
        self.lost = True
        self.interrupt("lease", grace, now)

    def go_on(self, now: float) -> None:
        """Begin the program that has waited for the claim to be renewed, if there is one."""
        self._execution.look(now)

    def _ask_to_end(self, grace: float, now: float) -> None:
        self.let_go(now)  # nothing that stands still can answer SIGTERM
        self._execution.give(grace, now)
        self.save()  # why it ends, before it does
        self._execution.terminate()

    def kill(self) -> None:
        """Kill every process of the step at once, for a worker that cannot wait."""
        if self.leader and not self.over:
            self._family.kill()

    def on_exits(self, ended: Mapping[int, int], now: float) -> None:
        """Note which of our children have ended."""
        self._execution.on_exits(ended, now)

    def _next(self, now: float) -> None:
        """Go on after a program has ended and nothing of it is left."""
        self.let_go(now)  # it was killed while it was held
        program, raw = self._execution.program, self._execution.status
        status = self._programs.plain(program, raw)
        by_itself = not self._limit and not self._interrupted_by
        if by_itself and self._execution.trouble:
            self._not_started(program, self._execution.trouble, True, now)
            return
        if by_itself and self._programs.left and not self._may_go_on():
            return  # by now another worker may be at the step, or have done it
        if not self.streams.drain(at_once=status != 0 or not by_itself):
            return  # its result waits for space on the disk
        self._on_messages(to_the_end=True)  # what it said last, as its last output
        fault = None
        if status == 0 and by_itself and program.gives_result:
            fault = expectation.fault(self.step.task, self.output, self._places.work)
        if self.streams.over:
            fault = complaint("max_output", self.step.task)
        following, why = self._programs.ended(program, raw, by_itself, fault)
        if following is not None:
            if program.name == CHECK and not self._programs.found:
                self.output.restart()  # what it printed is no result
            self._run(following, now)
            return
        if status != 0 and by_itself and program.ours:
            self._reason = reasons.last_words(self.log.contents(), self.step.task.http is not None)
        elif status and by_itself and self._confined:
            self._reason = reasons.of_confined(self.log.contents())
        if why and not self._limit:
            self._why = f"{program.name}: {self._reason}" if self._reason and not program.own else why
        self._finish()

    def _finish(self) -> None:
        self.let_go(self._events.now)
        self._execution.finish()
        self._ended = self._events.now
        self.streams.drain()
        self._events.forget(self.slot.socket.fileno())
        self.slot.socket.drop()
        done = self._status == 0
        fault = "" if done else self._execution.fault  # what was killed for memory was not the one that spoke
        self._why = self._why or fault or self.streams.fault or missing(self.output, self.log)
        self.streams.close(done=done and not self._why)

    def _say(self, event: str, text: str, priority: int) -> None:
        self._journal.event(event, f"{self.step.id}: {text}", step=self.step.id, attempt=self.number, priority=priority)

    # -- the outcome

    @property
    def _status(self) -> int | None:
        """How the last program ended, as the list takes it."""
        return self._programs.plain(self._execution.program, self._execution.status)

    @property
    def over(self) -> bool:
        return self._execution.phase == OVER

    def end(self) -> End:
        """Return how the attempt ended; only once it is over."""
        status = self._status
        asked = status == TEMPORARY and not self._why  # for no other end does it matter what was saved
        before = self._saved_before
        fresh = asked and before is not None and savedfiles.changed(self._places.state(self.step.id), before)
        return End(
            status,
            limit=self._limit,
            interrupted_by=self._interrupted_by,
            why=self._why,
            took=max(0.0, self._ended - self.started),
            progress=self.said.progress,
            saved=fresh,
            retry_after=self.said.retry_after,
            effect=self._programs.effect,
            found=self._programs.found,
            unknown=self.unknown,
            accepted=self._programs.accepted,
            reason=self._reason,
            hopeless=self._programs.hopeless,
            short=self._short,
            fatal=self._fatal,
        )

    # -- from one worker to the next

    def save(self) -> None:
        """Let a worker to come know how things stand, if the step can outlive this one."""
        if self.slot.shelter is not None:
            self.slot.shelter.save(self._memo())

    def _memo(self) -> dict[str, Any]:
        why = self._why or self._execution.fault
        return {
            "run": self._places.run,
            "step": self.step.id,
            "number": self.number,
            "claimed": self.claimed,
            "note": self._note,
            "notify": self.slot.socket.path,
            "secrets": self._secrets,
            "started": [self.started, self.started_wall],
            "ask_first": self._ask_first,
            "programs": self._programs.memo(),
            "phase": self._execution.phase,
            "limits": self.limits.memo(),
            "streams": self.streams.memo(),
            "said": self.said.memo(),
            "counted": self.said.counted(),
            "before": [savedfiles.memo(self._saved_before), self._execution.kills_before],
            "end": [self._limit, self._interrupted_by, why, self.unknown],
            "detail": self.detail,
            "deaths": self.deaths,
            "held_since": self._held_since,
            # They get other names before the commit.
            "output": self.output.inode() if self.over else None,
            "log": self.log.inode() if self.over else None,
        }

    def adopt(self, memo: Mapping[str, Any], base: Mapping[str, str], best: float, now: float) -> None:
        """Go on with an attempt that an earlier worker has left as `memo` says; its slot was taken over.

        A program that has ended meanwhile is found ended; one that never began is started.  Raises OSError.
        """
        shelter, execution = self.slot.shelter, self._execution
        assert shelter is not None
        self._begin(now, now, best)  # in case that the memo makes no sense, and this is abandoned
        shelter.resume(memo)
        started, started_wall = memo["started"]
        self._begin(started, started_wall, best)
        execution.program = self._programs.resume(memo["programs"])
        self.limits.resume(memo["limits"])
        execution.phase = memo["phase"]
        self.said.resume(memo["said"], memo.get("counted", ()))
        saved_before, execution.kills_before = memo["before"]
        self._saved_before = savedfiles.resume(saved_before)
        self.detail, self.deaths = memo["detail"], memo["deaths"]
        self._limit, self._interrupted_by, self._why, self.unknown = memo["end"]
        self._held_since = memo.get("held_since")
        self._prepare(base, memo["note"], memo.get("secrets"))
        lost = ""
        try:
            self.output.resume(self._places.output(self.step.id), memo["output"])
            self.log.resume(self._places.log(self.step.id, self.number), memo["log"])
        except FileNotFoundError as exc:
            lost = f"its output was removed while it ran: {exc.filename}"
            self.output.prepare()
            self.log.prepare()
        self._events.watch(self.slot.socket.fileno(), self._on_messages)
        if not execution.adopt(memo["streams"], lost, now):
            self._why = ""
            self._run(execution.program, now)

    def abandon(self) -> None:
        """Kill what could not be taken over, and be over."""
        self._family.kill()
        self._why = self._why or self._execution.fault or "could not be taken over"
        self._finish()
