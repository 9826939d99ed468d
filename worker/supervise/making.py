"""Making a machine: by its name, which is in the record before the machine is anywhere."""

import re

from worker.errors import quote
from worker.journal import NOTICE, WARNING
from worker.supervise import judge, record, rest, teller
from worker.supervise.book import Book
from worker.supervise.provider import Hand
from worker.supervise.record import Machine, moment
from worker.supervise.rest import Watch
from worker.supervise.sandbox import Sandbox
from worker.supervise.teller import Teller
from worker.timespan import show

BACK_OFF_MAX = 600.0
_MADE = 3  # tries before somebody is told
# A word for commands of any kind, and no option of theirs.
_ID = re.compile(r"[!-,.-~][!-~]{0,254}")


class Maker:
    """Turns until the machine is there, and may be prepared."""

    def __init__(self, sandbox: Sandbox, hand: Hand, book: Book, watch: Watch, tell: Teller) -> None:
        self._sandbox = sandbox
        self._hand = hand
        self._book = book
        self._watch = watch
        self._teller = tell

    def turn(self, machine: Machine) -> float:
        """Do what is next; return how long to wait before the next turn."""
        self._watch.round()  # what was left, and answers by now, is stopped before there is another worker
        state = judge.ABSENT
        if machine.begun:
            state, machine = rest.ask(self._hand, machine)
            if state == judge.UNSURE:
                return self._not_created(machine, "whether it has been made is not known: 'state' does not say")
            if state == judge.ABSENT and machine.absent < judge.SIGHTS:
                self._book.put(machine)
                return self._sandbox.poll
        elif not self._book.put(machine._replace(begun=True), must=True):
            return self._sandbox.poll  # what is not written down is not made
        machine = machine._replace(begun=True, absent=0)
        if state in (judge.RUNNING, judge.STOPPED):
            self._book.say("machine-made", f"{machine.name}: it had been made; going on with it", NOTICE, machine)
            if state == judge.STOPPED:
                self._hand.do("resume", machine)
        else:
            answer = self._hand.do("create", machine)
            if not answer.ok:
                return self._not_created(machine, answer.fault())
            found = _id(answer.output) or machine.name
            if not _ID.fullmatch(found):
                return self._not_created(machine, f"its id cannot be {quote(found)}")
            machine = machine._replace(id=found)
            self._book.say("machine-made", f"{machine.name}: made", NOTICE, machine)
            for text in answer.warnings():
                self._book.say("warning", f"{machine.name}: {text}", WARNING, machine)
        now = moment()
        machine = machine._replace(state=record.PREPARING, made=now, well=now, awaited=now, faults=0, why="")
        self._book.put(machine)
        return 0.0

    def _not_created(self, machine: Machine, fault: str) -> float:
        delay = min(BACK_OFF_MAX, self._sandbox.poll * 2.0 ** min(machine.faults, 20))
        why = f"could not be made: {fault}"
        machine = machine._replace(faults=machine.faults + 1, why=why)
        self._book.put(machine)
        self._book.say("warning", f"{machine.name}: {why}; again in {show(delay)}", WARNING, machine)
        if machine.faults >= _MADE:
            self._teller.tell(teller.NO_MACHINE, f"{machine.name}: {why}")
        return delay


def _id(output: str) -> str:
    """Return the id that `create` has printed: the last line of one word, as others may be said to somebody else."""
    words = [line.split() for line in output.splitlines()]
    single = [line[0] for line in words if len(line) == 1]
    return single[-1] if single else (output.split() or [""])[-1]
