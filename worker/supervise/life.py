"""A machine's life under the supervisor, from its name to its rest: one turn is one thing done about it.

    creating -> preparing -> starting -> working -> leaving -> gone, paused, taken or left

Every turn starts from the record, so it makes no difference whether this process or one before it made the last one.
"""

import math
from collections.abc import Callable

from worker import clock, plural
from worker.journal import ERROR, NOTICE, WARNING
from worker.supervise import copy, judge, parcel, record, remote, rest, teller
from worker.supervise.book import Book
from worker.supervise.copier import Copier
from worker.supervise.judge import Look, Seen, Verdict
from worker.supervise.making import BACK_OFF_MAX, Maker
from worker.supervise.parcel import Item
from worker.supervise.provider import Hand
from worker.supervise.record import Machine, moment
from worker.supervise.remote import Reply
from worker.supervise.rest import Watch
from worker.supervise.sandbox import Sandbox
from worker.supervise.teller import Teller
from worker.timespan import show

_SOON = 0.5  # until a machine that boots is asked again
_SETTLED = 20.0  # until one that was resumed is no longer said to be stopped
_FAULTS = 3  # times that a machine may fail to do what it is told; a provider's "not so often" is none of its faults
_FRUITLESS = "fruitless"


class Life:
    """What is done about the machine that has the run; `turn` returns how long to wait before the next one."""

    def __init__(
        self, sandbox: Sandbox, given: tuple[Item, ...], hand: Hand, copier: Copier, book: Book, watch: Watch,
        tell: Teller,
    ) -> None:  # fmt: skip
        self._sandbox = sandbox
        self._files = parcel.put(given)
        self._marks = parcel.marks(given)
        self._hand = hand
        self._copier = copier
        self._book = book
        self._watch = watch
        self._teller = tell
        self._maker = Maker(sandbox, hand, book, watch, tell)
        self._refusals = 0  # in a row
        self._look_at = -math.inf
        self._to_copy = False  # the machine has a checkpoint by now
        self._not_taken = ""  # why a machine did not take the changed list
        self._times_not_taken = 0
        self.waiting = ""  # why a machine that boots does not answer yet
        self._turns: dict[str, Callable[[Machine], float]] = {
            record.CREATING: self._maker.turn,
            record.PREPARING: self._prepare,
            record.STARTING: self._start,
            record.WORKING: self._work,
            record.LEAVING: self._leave,
        }

    def turn(self, machine: Machine) -> float:
        return self._turns[machine.state](machine)

    def copy(self, machine: Machine) -> bool:
        """Take a copy of the checkpoint at once; return whether it is here."""
        return self._copier.take(machine, self._to_copy or machine.progress)

    def fruitless(self, machines: int, delay: float) -> None:
        """Say that so many machines in a row did no step."""
        text = f"{plural.of(machines, 'machine')} in a row did no step"
        self._book.say("waiting", f"{text}; the next in {show(delay)}", ERROR)
        self._teller.tell(teller.NO_MACHINE, text, _FRUITLESS)

    def end(self, outcome: str, why: str) -> float:
        """Note how the supervision ends; what is left to do about that comes with the next turn."""
        self._book.note(self._book.known._replace(outcome=outcome, why=why))
        return 0.0

    def _refused(self, machine: Machine, fault: str) -> float:
        """Let the provider have a rest that wants to be asked less often; return how long."""
        delay = min(BACK_OFF_MAX, self._sandbox.poll * 2.0 ** min(self._refusals, 20))
        if not self._refusals:
            text = f"{machine.name}: the provider does not want to be asked so often: {fault}; waiting"
            self._book.say("warning", text, WARNING, machine)
        self._refusals += 1
        if self._refusals >= teller.TIMES:
            self._teller.tell(teller.NO_MACHINE, f"{machine.name}: its provider refuses to be asked: {fault}", "asked")
        return delay

    def _answered(self) -> None:
        if self._refusals:
            self._refusals = 0
            self._teller.over(teller.NO_MACHINE, "asked")

    def _prepare(self, machine: Machine) -> float:
        if machine.awaited is not None:
            reply = remote.knock(self._hand, machine)
            self.waiting = reply.fault
            if reply.holder:
                return self._give_up(machine, reply.fault)
            if reply.refused:
                return self._refused(machine, reply.fault)
            if self.waiting and machine.awaited.until(moment()) <= self._sandbox.boot:
                return _SOON
            if self.waiting:
                why = f"it has not answered in the {show(self._sandbox.boot)} since it was made"
                return self._give_up(machine, f"{why}: {self.waiting}")
            machine = machine._replace(awaited=None)
        found = None if self._sandbox.shared else copy.load(self._book.root, self._sandbox.run, self._hand.judge)
        path = copy.path(self._book.root) if found is not None else None
        machine = self._promise(machine)
        dropped = parcel.dropped(machine.given, self._marks)
        reply = remote.prepare(self._hand, machine, self._sandbox.setup, self._files, dropped, path)
        if not reply.ok:
            return self._not_prepared(machine, reply)
        self._answered()
        ready = machine._replace(
            state=record.STARTING,
            extended=moment(),
            done=found.done if found is not None else 0,
            given=self._marks,
            why="",
            faults=0,
        )
        known = self._book.known.put(ready)
        if machine.number > 1 and not self._sandbox.shared:
            # What was spent after the copy is spent, though the worker that goes on from it knows nothing of it.
            lost = max(0.0, known.spend - (found.spend if found is not None else 0.0))
            known = known._replace(spend=known.spend - lost, spend_lost=known.spend_lost + lost)
        self._extend(machine)
        return 0.0 if self._book.note(known, must=True) else self._sandbox.poll

    def _not_prepared(self, machine: Machine, reply: Reply) -> float:
        if reply.holder:
            return self._give_up(machine, reply.fault)
        why = f"cannot be prepared: {reply.fault}"
        machine = machine._replace(faults=machine.faults + (not reply.refused), why=why)
        if machine.faults >= _FAULTS:
            return self._give_up(machine, f"it {why}")
        self._book.put(machine)
        if reply.refused:
            return self._refused(machine, reply.fault)
        self._book.say("warning", f"{machine.name}: {why}; trying again", WARNING, machine)
        return self._sandbox.poll

    def _start(self, machine: Machine) -> float:
        """Have the worker started; from here on no state is put on the machine any more."""
        changed = machine.given != self._marks
        reply = Reply()
        if changed:
            machine = self._promise(machine)
            reply = self._renew(machine)
        if reply.ok:
            reply = remote.start(self._hand, machine, reload=changed)
        if reply.holder:
            return self._give_up(machine, reply.fault)
        if not reply.ok:
            state = self._hand.state(machine)
            if reply.refused and state != judge.STOPPED:
                return self._refused(machine, reply.fault)
            self._look_at = clock.monotonic() + self._sandbox.poll
            return self._act(machine, self._judge(machine, Seen(None, state)), None)
        self._answered()
        steps = self._book.known.steps
        done = (
            f"{steps['done']} of {plural.of(steps['total'], 'step')} done" if steps.get("total") else "no step done yet"
        )
        self._book.say("machine-started", f"{machine.name}: the run goes on there; {done}", NOTICE, machine)
        fresh = machine._replace(
            state=record.WORKING, well=moment(), unanswered=0, absent=0, awaited=None, faults=0, given=self._marks
        )
        self._book.put(fresh)
        self._teller.over(teller.NO_MACHINE)
        self._teller.over(teller.LEFT, machine.name)
        self._look_at = clock.monotonic() + _SOON
        self._copier.drop()
        self._to_copy = False
        return _SOON

    def _promise(self, machine: Machine) -> Machine:
        """Note what the machine is about to be given beside what it may have: none of it stays if it is dropped."""
        machine = machine._replace(given=parcel.promised(machine.given, self._marks))
        self._book.put(machine)
        return machine

    def _renew(self, machine: Machine) -> Reply:
        """Put the list as it is now in the place of what the machine was given."""
        reply = remote.renew(self._hand, machine, self._files, parcel.dropped(machine.given, self._marks))
        self._taken(machine, reply.fault)
        return reply

    def _taken(self, machine: Machine, fault: str) -> bool:
        """Say why the machine has not taken the changed list, once; return whether it has."""
        if fault and fault != self._not_taken:
            text = f"{machine.name}: the changed list cannot be put there: {fault}; trying again"
            self._book.say("warning", text, WARNING, machine)
        self._not_taken = fault
        self._times_not_taken = self._times_not_taken + 1 if fault else 0
        if self._times_not_taken >= teller.TIMES:
            self._teller.tell(teller.NO_LIST, f"{machine.name}: the changed list cannot be put there: {fault}")
        elif not fault:
            self._teller.over(teller.NO_LIST)
        return not fault

    def _work(self, machine: Machine) -> float:
        if clock.monotonic() >= self._look_at:
            look, reply = remote.look(self._hand, machine)
            look = judge.believe(look, self._sandbox.run) if look is not None else None
            state = judge.RUNNING if look is not None else self._hand.state(machine)
            self._look_at = clock.monotonic() + self._sandbox.poll
            if reply.refused and state != judge.STOPPED:
                self._look_at = clock.monotonic() + self._refused(machine, reply.fault)
            else:
                wait = self._looked(machine, look, state)
                if wait is not None:
                    return wait
                machine = self._book.known.machine or machine
        # In the same turn as a look, so that looks which take long do not crowd it out.
        copy_at = self._copier.tend(machine, self._to_copy)
        self._tell_of_copies(machine)
        extended = machine.extended or machine.made
        if self._hand.offers("extend") and extended.until(moment()) >= self._sandbox.extend_every:
            self._extend(machine)
            self._book.put(machine._replace(extended=moment()))
        return max(0.0, min(self._look_at, copy_at) - clock.monotonic())

    def _looked(self, machine: Machine, look: Look | None, state: str) -> float | None:
        """Do what a look asks for; return how long to wait then, None if there is nothing but to go on."""
        behind = machine.given != self._marks
        if look is not None:
            self._answered()
            if behind and not look.holder:
                machine = self._promise(machine)
                if self._hand_over(machine):
                    return _SOON
        verdict = self._judge(machine, Seen(look, state))
        if verdict.action == judge.FINISH and behind:
            return self._not_handed_over(machine, verdict.why)
        wait = self._act(machine, verdict, look)
        if verdict.action != judge.WAIT or look is None:
            return wait
        self._to_copy = look.checkpoint or look.steps.get("done", 0) > 0
        if verdict.machine.progress:
            self._teller.over(teller.NO_MACHINE, _FRUITLESS)
        return None

    def _tell_of_copies(self, machine: Machine) -> None:
        if self._copier.failures >= teller.TIMES:
            cause = f"{machine.name}: the checkpoint cannot be copied: {self._copier.fault}"
            self._teller.tell(teller.NO_COPY, cause)
        elif not self._copier.failures:
            self._teller.over(teller.NO_COPY)

    def _hand_over(self, machine: Machine) -> bool:
        """Have a machine at work take a changed list, before anything is decided by what came of the old one."""
        if not self._renew(machine).ok:
            return False
        if not remote.start(self._hand, machine, reload=True).ok:
            return self._taken(machine, "it does not do what it is told")
        text = f"{machine.name}: the changed list is there, and its worker reads it"
        self._book.say("reloaded", text, NOTICE, machine)
        self._book.put(machine._replace(given=self._marks, well=moment(), unanswered=0, awaited=None, faults=0))
        self._look_at = clock.monotonic() + _SOON
        return True

    def _not_handed_over(self, machine: Machine, why: str) -> float:
        """Do not let the end of the old list be that of the changed one, which another machine may take."""
        machine = machine._replace(faults=machine.faults + 1)
        if machine.faults >= _FAULTS:
            return self._give_up(machine, f"it has ended ({why}) and does not take the changed list: {self._not_taken}")
        self._book.put(machine)
        return self._sandbox.poll

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
        known, machine = self._book.known, verdict.machine
        if look is not None:
            machine = machine._replace(awaited=None)
            known = known._replace(steps=look.steps or known.steps, spend=max(known.spend, look.spend or 0.0))
        self._book.note(known.put(machine))
        if verdict.action == judge.WAIT:
            if verdict.why:
                self._book.say("warning", f"{machine.name}: {verdict.why}; looking again", WARNING, machine)
            return max(0.0, self._look_at - clock.monotonic())
        if verdict.action == judge.FINISH:
            return self.end(verdict.outcome, verdict.why)
        if verdict.action == judge.REPLACE:
            return self._give_up(machine, verdict.why)
        if verdict.action == judge.RESUME:
            return self._resume(machine, verdict.why)
        assert look is not None
        return self._restart(machine, verdict.why, look)

    def _restart(self, machine: Machine, why: str, look: Look) -> float:
        self._book.say("machine-restarted", f"{machine.name}: {why}; starting it again there", WARNING, machine)
        reply = remote.start_again(self._hand, machine, look)
        if reply.holder:
            return self._give_up(machine, reply.fault)
        if not reply.ok:
            wait = self._failed(machine._replace(restarts=machine.restarts - 1), reply.refused, reply.fault)
            if wait is None:
                text = f"{why}, and it cannot be started again there: {reply.fault}"
                return self._give_up(machine._replace(unanswered=1), text)
            return wait
        self._book.put(machine._replace(well=moment(), faults=0))
        self._look_at = clock.monotonic() + _SOON
        return _SOON

    def _failed(self, machine: Machine, refused: bool, fault: str) -> float | None:
        """Try again what a machine was told in vain: return how long to wait, None if that was often enough."""
        machine = machine._replace(faults=machine.faults + (not refused))
        if machine.faults >= _FAULTS:
            return None
        self._book.put(machine)
        wait = self._refused(machine, fault) if refused else self._sandbox.poll
        self._look_at = clock.monotonic() + wait
        return wait

    def _resume(self, machine: Machine, why: str) -> float:
        self._book.say("machine-resumed", f"{machine.name}: {why}; resuming it", WARNING, machine)
        self._copier.drop()
        if not self._hand.offers("resume"):
            return self._give_up(machine, f"{why}, and it cannot be resumed: the provider has no 'resume'")
        answer = self._hand.do("resume", machine)
        if not answer.ok:
            text = f"{machine.name}: it cannot be resumed: {answer.fault()}"
            wait = self._failed(machine._replace(resumes=machine.resumes - 1), answer.refused, answer.fault())
            if wait is None:
                return self._give_up(machine, f"{why}, and it cannot be resumed: {answer.fault()}")
            self._book.say("warning", f"{text}; trying again", WARNING, machine)
            return wait
        self._extend(machine)
        now = moment()
        self._book.put(machine._replace(well=now, awaited=now, extended=now, faults=0))
        self._look_at = clock.monotonic()
        return 0.0

    def _extend(self, machine: Machine) -> None:
        answer = self._hand.do("extend", machine)
        if not answer.ok:
            self._book.say("warning", f"{machine.name}: cannot be extended: {answer.fault()}", WARNING, machine)

    def _give_up(self, machine: Machine, why: str) -> float:
        self._book.say("machine-left", f"{machine.name}: {why}; the run goes on elsewhere", ERROR, machine)
        self._copier.drop()
        self._book.put(machine._replace(state=record.LEAVING, why=why, fence=None))
        return 0.0

    def _leave(self, machine: Machine) -> float:
        """See to it that the machine does not work on beside the next one."""
        answers = None
        if machine.unanswered and not machine.returned:  # given up for its silence: one that can be asked again is well
            answers = remote.knock(self._hand, machine).ok
            if answers:
                self._book.say("machine-started", f"{machine.name}: it answers again; going on there", NOTICE, machine)
                back = machine._replace(state=record.WORKING, unanswered=0, absent=0, why="", fence=None, returned=True)
                self._book.put(back._replace(well=moment()))
                return 0.0
        rested = rest.put_down(self._hand, machine, self.copy, answers)
        machine = rested.machine
        if rested.state:
            self._book.put(machine._replace(state=rested.state, fence=None))
            return 0.0
        if machine.quiet:
            text = f"{machine.name}: {rest.describe(machine)}: {rested.fault}; trying that again beside the next one"
            self._book.say("warning", text, WARNING, machine)
            self._watch.left(machine, rested.fault)
            return 0.0
        now = moment()
        if machine.fence is None:
            machine = machine._replace(fence=now)
            text = f"{machine.name}: can be neither reached nor paused, so its worker may be at work; waiting "
            self._book.say("waiting", f"{text}{show(self._sandbox.fence)} before the next machine", ERROR, machine)
        self._book.put(machine)
        assert machine.fence is not None
        left = self._sandbox.fence - machine.fence.until(now)
        if left > 0:
            return min(left, self._sandbox.poll)
        text = f"{machine.name}: still neither reached nor paused; going on all the same: end it by hand"
        self._book.say("warning", text, ERROR, machine)
        self._watch.left(machine, rested.fault)
        return 0.0
