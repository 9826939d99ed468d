"""The supervisor's loop: look at the machine, judge, do one thing about it, write that down.

One thread.  systemd is pinged from here alone: while a provider's command is within its time limit, and from waits
that have an end.  Every turn starts from the record, so it makes no difference whether this process or one before it
made the last one.
"""

import math
import os
import re
from collections.abc import Callable

from worker import alert, clock, plural
from worker.errors import CONFIG, OK, OUT_OF_BUDGET, STEP_FAILED, quote
from worker.journal import ERROR, INFO, NOTICE, WARNING, Journal
from worker.supervise import copy, judge, record, remote
from worker.supervise.clockwork import Clockwork
from worker.supervise.judge import Look, Seen, Verdict
from worker.supervise.provider import Hand
from worker.supervise.record import Machine, Record, moment
from worker.supervise.sandbox import Sandbox
from worker.systemd import Notifier
from worker.timespan import show

EXIT = {"done": OK, "failed": STEP_FAILED, "out-of-budget": OUT_OF_BUDGET, "configuration": CONFIG}
_SOON = 0.5  # until a machine that boots is asked again
_SETTLED = 20.0  # until one that was resumed is no longer said to be stopped
_FAULTS = 3  # times that a machine may fail to take what it needs
_LAST_TRIES = 5  # at what is to be had at the end
_BACK_OFF_MAX = 600.0
# A word for commands of any kind, and no option of theirs.
_ID = re.compile(r"[!-,.-~][!-~]{0,254}")


class Supervisor:
    """One run, kept alive."""

    def __init__(
        self, sandbox: Sandbox, root: str, known: Record, hand: Hand, clockwork: Clockwork, journal: Journal,
        notifier: Notifier,
    ) -> None:  # fmt: skip
        self._sandbox = sandbox
        self._root = root
        self._record = known
        self._hand = hand
        self._clockwork = clockwork
        self._journal = journal
        self._notifier = notifier
        self._look_at = self._copy_at = -math.inf
        self._copy_fault = ""
        self._waiting = ""  # why a machine that boots does not answer yet
        self._last_tries = 0
        self._unsaved = False
        self._turns: dict[str, Callable[[Machine], float]] = {
            record.CREATING: self._create,
            record.PREPARING: self._prepare,
            record.STARTING: self._start,
            record.WORKING: self._work,
            record.LEAVING: self._leave,
        }

    @property
    def record(self) -> Record:
        """What is known of the supervision."""
        return self._record

    def work(self) -> int:
        """Keep the run alive until it has ended or a budget is spent; return the exit status."""
        self._revive()
        while not self._record.concluded:
            self._notifier.status(self._summary(), clock.monotonic())
            self._clockwork.wait(self._turn())
        assert self._record.outcome is not None
        return EXIT[self._record.outcome]

    def _turn(self) -> float:
        """Do what is next; return how long to wait before the next turn."""
        if self._record.outcome is not None:
            return self._conclude()
        spent = judge.spent(self._sandbox.budget, self._record, moment())
        if spent:
            return self._end("out-of-budget", spent)
        machine = self._record.machine
        return self._turns[machine.state](machine) if machine is not None else self._next()

    # -- a machine's life

    def _next(self) -> float:
        """Choose the next machine's name."""
        fruitless = 0
        for machine in reversed(self._record.machines):
            if machine.progress:
                break
            fruitless += 1
        if fruitless > 1:  # something is wrong that a new machine does not mend
            delay = min(_BACK_OFF_MAX, self._sandbox.poll * 2.0 ** min(fruitless - 2, 20))
            self._say("waiting", f"{fruitless} machines in a row did no step; the next in {show(delay)}", ERROR)
            self._clockwork.wait(delay)
        self._note(self._record.add(moment()))
        return 0.0

    def _create(self, machine: Machine) -> float:
        self._recover()
        state = judge.ABSENT
        if machine.begun:
            state = self._hand.state(machine)
        elif not self._note(self._record.put(machine._replace(begun=True)), must=True):
            return self._sandbox.poll  # what is not written down is not made
        machine = machine._replace(begun=True)
        if state in (judge.RUNNING, judge.STOPPED):
            self._say("machine-made", f"{machine.name}: it had been made; going on with it", NOTICE, machine)
            if state == judge.STOPPED:
                self._hand.do("resume", machine)
        else:
            answer = self._hand.do("create", machine)
            if not answer.ok:
                return self._not_created(machine, answer.fault())
            found = (answer.output.split() or [machine.name])[-1]
            if not _ID.fullmatch(found):
                return self._not_created(machine, f"its id cannot be {quote(found)}")
            machine = machine._replace(id=found)
            self._say("machine-made", f"{machine.name}: made", NOTICE, machine)
        now = moment()
        machine = machine._replace(state=record.PREPARING, made=now, well=now, awaited=now, faults=0)
        self._note(self._record.put(machine))
        return 0.0

    def _recover(self) -> None:
        """Take back those that could not be reached when they were given up, before there is another worker.

        If it was this machine that had no network, they have gone on meanwhile.
        """
        for machine in self._record.machines:
            if machine.state == record.LEFT and not remote.knock(self._hand, machine):
                stopped = remote.stop(self._hand, machine)
                self._copy(machine)
                if self._hand.do("pause", machine).ok or stopped:
                    self._say("state", f"{machine.name}: it answers again; it is stopped now", NOTICE, machine)
                    self._note(self._record.put(machine._replace(state=record.PAUSED)))

    def _not_created(self, machine: Machine, fault: str) -> float:
        delay = min(_BACK_OFF_MAX, self._sandbox.poll * 2.0 ** min(machine.faults, 20))
        self._note(self._record.put(machine._replace(faults=machine.faults + 1)))
        self._say("warning", f"{machine.name}: could not be made: {fault}; again in {show(delay)}", WARNING, machine)
        return delay

    def _prepare(self, machine: Machine) -> float:
        if machine.awaited is not None:
            self._waiting = remote.knock(self._hand, machine)
            if self._waiting and machine.awaited.until(moment()) <= self._sandbox.boot:
                return _SOON
            if self._waiting:
                why = f"it has not answered in the {show(self._sandbox.boot)} since it was made"
                return self._give_up(machine, f"{why}: {self._waiting}")
            machine = machine._replace(awaited=None)
        found = None if self._sandbox.shared else copy.load(self._root, self._sandbox.run)
        path = copy.path(self._root) if found is not None else None
        fault = remote.prepare(self._hand, machine, self._sandbox.setup, self._given(), path)
        if fault:
            machine = machine._replace(faults=machine.faults + 1)
            if machine.faults >= _FAULTS:
                return self._give_up(machine, f"it cannot be prepared: {fault}")
            self._note(self._record.put(machine))
            self._say("warning", f"{machine.name}: cannot be prepared: {fault}; trying again", WARNING, machine)
            return self._sandbox.poll
        ready = machine._replace(state=record.STARTING, extended=moment(), done=copy.done(found))
        known = self._record.put(ready)
        if machine.number > 1 and not self._sandbox.shared:
            # What was spent after the copy is spent, though the worker that goes on from it knows nothing of it.
            lost = max(0.0, known.spend - copy.spend(found))
            known = known._replace(spend=known.spend - lost, spend_lost=known.spend_lost + lost)
        self._hand.do("extend", machine)
        return 0.0 if self._note(known, must=True) else self._sandbox.poll

    def _start(self, machine: Machine) -> float:
        """Have the worker started; from here on no state is put on the machine any more."""
        renewed = not machine.renew or not remote.prepare(self._hand, machine, "", self._given(), None)
        if not renewed or not remote.start(self._hand, machine):
            self._look_at = clock.monotonic() + self._sandbox.poll
            return self._act(machine, self._judge(machine, Seen(None, self._hand.state(machine))), None)
        steps = self._record.steps
        done = (
            f"{steps['done']} of {plural.of(steps['total'], 'step')} done" if steps.get("total") else "no step done yet"
        )
        self._say("machine-started", f"{machine.name}: the run goes on there; {done}", NOTICE, machine)
        fresh = machine._replace(state=record.WORKING, well=moment(), unanswered=0, awaited=None, renew=False)
        self._note(self._record.put(fresh))
        self._look_at = clock.monotonic() + _SOON
        self._copy_at = -math.inf
        return _SOON

    def _given(self) -> tuple[tuple[str, str], ...]:
        folder = os.path.splitext(remote.CONFIG)[0] + ".d"
        drop_ins = ((f"{folder}/{os.path.basename(here)}", here) for here in self._sandbox.drop_ins)
        return ((remote.CONFIG, self._sandbox.config), *drop_ins, *self._sandbox.files)

    def _work(self, machine: Machine) -> float:
        if clock.monotonic() >= self._look_at:
            look = remote.look(self._hand, machine)
            state = judge.RUNNING if look is not None else self._hand.state(machine)
            self._look_at = clock.monotonic() + self._sandbox.poll
            verdict = self._judge(machine, Seen(look, state))
            wait = self._act(machine, verdict, look)
            if verdict.action != judge.WAIT or look is None:
                return wait
            machine = self._record.machine or verdict.machine
        # In the same turn as a look, so that looks which take long do not crowd it out.
        if clock.monotonic() >= self._copy_at:
            self._copy(machine)
        extended = machine.extended or machine.made
        if self._hand.offers("extend") and extended.until(moment()) >= self._sandbox.extend_every:
            self._extend(machine)
        return max(0.0, min(self._look_at, self._copy_at) - clock.monotonic())

    def _judge(self, machine: Machine, seen: Seen) -> Verdict:
        now = moment()
        waited = machine.awaited.until(now) if machine.awaited is not None else math.inf
        patience = {judge.ABSENT: 0.0, judge.STOPPED: _SETTLED}.get(seen.state, self._sandbox.boot)
        if seen.look is None and waited < patience:
            self._look_at = clock.monotonic() + _SOON
            return Verdict(judge.WAIT, "", machine)
        return judge.judge(machine, seen, self._sandbox.limits, now)

    def _act(self, machine: Machine, verdict: Verdict, look: Look | None) -> float:
        """Do what was decided about the machine."""
        known, machine = self._record, verdict.machine
        if look is not None:
            machine = machine._replace(awaited=None)
            known = known._replace(steps=look.steps or known.steps, spend=max(known.spend, look.spend or 0.0))
        self._note(known.put(machine))
        if verdict.action == judge.WAIT:
            if verdict.why:
                self._say("warning", f"{machine.name}: {verdict.why}; looking again", WARNING, machine)
            return max(0.0, self._look_at - clock.monotonic())
        if verdict.action == judge.FINISH:
            return self._end(verdict.outcome, verdict.why)
        if verdict.action == judge.REPLACE:
            return self._give_up(machine, verdict.why)
        if verdict.action == judge.RESUME:
            return self._resume(machine, verdict.why)
        assert look is not None
        self._say("machine-restarted", f"{machine.name}: {verdict.why}; starting it again there", WARNING, machine)
        if not remote.start_again(self._hand, machine, look):
            return self._give_up(machine._replace(unanswered=1), f"{verdict.why}, and it cannot be started again there")
        self._note(self._record.put(machine._replace(well=moment())))
        self._look_at = clock.monotonic() + _SOON
        return _SOON

    def _resume(self, machine: Machine, why: str) -> float:
        self._say("machine-resumed", f"{machine.name}: {why}; resuming it", WARNING, machine)
        answer = self._hand.do("resume", machine)
        if not self._hand.offers("resume") or not answer.ok:
            fault = answer.fault() if self._hand.offers("resume") else "the provider has no 'resume'"
            return self._give_up(machine, f"{why}, and it cannot be resumed: {fault}")
        self._hand.do("extend", machine)
        now = moment()
        self._note(self._record.put(machine._replace(well=now, awaited=now, extended=now)))
        self._look_at = clock.monotonic()
        return 0.0

    def _extend(self, machine: Machine) -> None:
        answer = self._hand.do("extend", machine)
        if not answer.ok:
            self._say("warning", f"{machine.name}: cannot be extended: {answer.fault()}", WARNING, machine)
        self._note(self._record.put(machine._replace(extended=moment())))

    def _give_up(self, machine: Machine, why: str) -> float:
        self._say("machine-left", f"{machine.name}: {why}; the run goes on elsewhere", ERROR, machine)
        self._note(self._record.put(machine._replace(state=record.LEAVING, why=why, fence=None)))
        return 0.0

    def _leave(self, machine: Machine) -> float:
        """See to it that the machine does not work on beside the next one."""
        state = self._hand.state(machine)
        if state in (judge.ABSENT, judge.STOPPED):
            return self._left(machine, record.GONE if state == judge.ABSENT else record.PAUSED)
        stopped = False
        if not machine.unanswered and machine.fence is None:
            stopped = remote.stop(self._hand, machine)
            self._copy(machine)
        paused = self._hand.offers("pause") and self._hand.do("pause", machine).ok
        if paused or (stopped and not self._hand.offers("pause")):
            return self._left(machine, record.PAUSED)
        if machine.unanswered and not remote.knock(self._hand, machine):
            self._say("machine-started", f"{machine.name}: it answers again; going on there", NOTICE, machine)
            back = machine._replace(state=record.WORKING, unanswered=0, why="", fence=None, well=moment())
            self._note(self._record.put(back))
            return 0.0
        now = moment()
        if machine.fence is None:
            machine = machine._replace(fence=now)
            text = f"{machine.name}: can be neither reached nor paused, so its worker may be at work; waiting "
            self._say("waiting", f"{text}{show(self._sandbox.fence)} before the next machine", ERROR, machine)
            self._note(self._record.put(machine))
        assert machine.fence is not None
        left = self._sandbox.fence - machine.fence.until(now)
        if left > 0:
            return min(left, self._sandbox.poll)
        text = f"{machine.name}: still neither reached nor paused; going on all the same: end it by hand"
        self._say("warning", text, ERROR, machine)
        return self._left(machine, record.LEFT)

    def _left(self, machine: Machine, state: str) -> float:
        self._note(self._record.put(machine._replace(state=state, fence=None)))
        return 0.0

    # -- copies, budgets, the end

    def _copy(self, machine: Machine) -> bool:
        """Take a copy of the checkpoint; what goes wrong with that is said once."""
        self._copy_at = clock.monotonic() + self._sandbox.copy_every
        if self._sandbox.shared:
            self._copy_at = math.inf
            return True

        def fetch(into: str) -> str:
            answer = self._hand.get(machine, remote.CHECKPOINT, into)
            return "" if answer.ok else answer.fault()

        fault = copy.take(self._root, self._sandbox.run, fetch)
        if fault and fault != self._copy_fault and self._record.steps:
            text = f"{machine.name}: the checkpoint cannot be copied: {fault}; the copy before stays"
            self._say("warning", text, WARNING, machine)
        elif not fault and self._copy_fault:
            self._say("state", f"{machine.name}: the checkpoint is copied again", INFO, machine)
        self._copy_fault = fault
        return not fault

    def _end(self, outcome: str, why: str) -> float:
        self._note(self._record._replace(outcome=outcome, why=why))
        return 0.0

    def _conclude(self) -> float:
        """Take what is to be had from the last machine, and let it rest."""
        known, machine = self._record, self._record.machine
        if machine is not None:
            if known.outcome == "out-of-budget" and machine.state != record.CREATING:
                remote.stop(self._hand, machine)
            copied = machine.state not in (record.WORKING, record.LEAVING) or self._copy(machine)
            results = self._sandbox.results if known.outcome == "done" else ()
            faults = list(remote.fetch(self._hand, machine, results))
            if known.outcome == "done" and (faults or not copied):  # it is all there, and worth another try
                self._last_tries += 1
                if self._last_tries < _LAST_TRIES:
                    return self._sandbox.poll
            for fault in faults:
                self._say("warning", f"{machine.name}: {fault}", ERROR, machine)
            if not (known.outcome == "done" and self._sandbox.keep) and not self._hand.do("pause", machine).ok:
                text = f"{machine.name}: cannot be paused; see to it yourself"
                self._say("warning", text, WARNING, machine)
            known = known.put(machine._replace(state=record.PAUSED, why=str(known.outcome)))
        if not self._note(known._replace(concluded=True), must=True):
            return self._sandbox.poll
        machines = plural.of(len(known.machines), "machine")
        text = f"{known.run}: {known.outcome} ({known.why}); {machines} in {show(self._took())}"
        self._say("supervision-ended", text, NOTICE if known.outcome == "done" else ERROR)
        return 0.0

    def _revive(self) -> None:
        """Go on after an end that need not be the last one: a budget raised, a list mended."""
        known = self._record
        if not known.concluded:
            return
        spent = judge.spent(self._sandbox.budget, self._record, moment()) if known.outcome == "out-of-budget" else ""
        if known.outcome == "done" or spent:
            self._say("nothing-to-do", f"{known.run}: {known.outcome} ({spent or known.why})", INFO)
            return
        alert.forget_told(self._root)
        known = known._replace(outcome=None, concluded=False, why="")
        last = known.machines[-1] if known.machines else None
        if last is not None and last.state == record.PAUSED and last.why in EXIT:
            now = moment()
            fresh = last._replace(state=record.STARTING, why="", well=now, restarts=0, resumes=0, unanswered=0)
            known = known.put(fresh._replace(renew=True))
        self._record = known

    # -- helpers

    def _note(self, known: Record, must: bool = False) -> bool:
        """Let the record be this one; return whether it is on the disk.

        One that is not is tried again next time; if it `must` be there before anything is done, it is as before.
        """
        if known == self._record and not self._unsaved:
            return True
        before, self._record = self._record, known
        try:
            record.save(self._root, known)
        except OSError as exc:
            if not self._unsaved:
                text = f"{record.path(self._root)}: cannot be written: {exc.strerror}; going on with what runs"
                self._say("warning", text, ERROR)
            self._unsaved = True
            if must:
                self._record = before
            return False
        self._unsaved = False
        return True

    def _took(self) -> float:
        return self._record.started.until(moment())

    def _summary(self) -> str:
        steps, machine = self._record.steps, self._record.machine
        done = f"{steps.get('done', 0)}/{steps['total']} done" if steps.get("total") else "nothing done yet"
        waiting = f" ({self._waiting})" if self._waiting else ""
        return f"{done} · {machine.name}: {machine.state}{waiting}" if machine is not None else done

    def _say(self, event: str, text: str, priority: int, machine: Machine | None = None) -> None:
        self._journal.event(event, text, priority=priority, AGENT_MACHINE=machine.name if machine is not None else "")
