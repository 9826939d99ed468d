"""The end of a supervision: take what is to be had from the last machine, bring it to rest, and say what is left.

What is refused is tried again.  `done` is what a copy here shows, or one that was taken after the machine said so:
without one the run is not done, and the machine stays at hand until the copy comes or the budget is spent.
"""

from collections.abc import Callable

from worker import plural
from worker.journal import ERROR, NOTICE, WARNING
from worker.supervise import copy, record, remote, rest, teller, transfer
from worker.supervise.book import Book
from worker.supervise.provider import Hand
from worker.supervise.record import Machine, Record, moment
from worker.supervise.rest import Rest, Watch
from worker.supervise.sandbox import Sandbox
from worker.supervise.teller import Teller
from worker.timespan import show

_TRIES = 5  # at what is to be had, and then at bringing the machine to rest
_BACK_OFF_MAX = 600.0


class Ending:
    """Turns until the record says that nothing is left to do; each returns how long to wait before the next one."""

    def __init__(
        self, sandbox: Sandbox, hand: Hand, book: Book, watch: Watch, tell: Teller, take: Callable[[Machine], bool]
    ) -> None:
        """`take` takes a copy of a machine's checkpoint and returns whether it is here."""
        self._sandbox = sandbox
        self._hand = hand
        self._book = book
        self._watch = watch
        self._teller = tell
        self._take = take
        self._tries = 0
        self._collected = False
        self._refused = 0  # times that the machine could not be brought to rest
        self._without = 0  # times that the run was done, and no copy came

    def turn(self) -> float:
        machine = self._book.known.machine
        if machine is not None:
            wait = self._last(machine)
            if wait is not None:
                return wait
        self._watch.round()
        known = self._book.known
        if not self._book.note(known._replace(concluded=True), must=True):
            return self._sandbox.poll
        machines = plural.of(len(known.machines), "machine")
        text = f"{known.run}: {known.outcome} ({known.why}); {machines} in {show(known.started.until(moment()))}"
        well = known.outcome == "done" and not known.left
        self._book.say("supervision-ended", text + left(known), NOTICE if well else ERROR)
        return 0.0

    def _last(self, machine: Machine) -> float | None:
        """Be done with the last machine; return how long to wait before the next try, None if none is needed."""
        known = self._book.known
        if machine.state == record.CREATING and not machine.begun:
            self._book.note(known.drop(machine))
            return None
        keep = known.outcome == "done" and self._sandbox.keep
        if machine.state in (record.STARTING, record.WORKING, record.LEAVING) and not self._collected:
            wait = self._collect(machine, keep)
            if wait is not None:
                return wait
            machine = self._book.known.machine or machine
        self._collected = True
        if keep:
            remote.release(self._hand, machine)
            self._rest(machine, record.KEPT)
            return None
        rested = self._put_down(machine)
        if rested.state:
            self._rest(rested.machine, rested.state)
            return None
        self._book.put(rested.machine)
        self._refused += 1
        if self._refused < _TRIES:
            return self._sandbox.poll
        text = f"{machine.name}: {rest.describe(rested.machine)}: {rested.fault}; see to it yourself"
        self._book.say("warning", text, ERROR, machine)
        self._rest(rested.machine, record.LEFT)
        return None

    def _collect(self, machine: Machine, keep: bool) -> float | None:
        """Take the copy and the results; return how long to wait if that is to be tried again."""
        done = self._book.known.outcome == "done"
        reply = remote.knock(self._hand, machine)  # one that does not answer must not hold up its end
        if not reply.ok:
            copied, faults = False, [f"nothing can be fetched: {reply.fault}"] if self._sandbox.results and done else []
        else:
            if not keep:
                machine = machine._replace(quiet=remote.stop(self._hand, machine).ok)
                self._book.put(machine)
            copied = machine.state == record.STARTING or self._take(machine)
            results = self._sandbox.results if done else ()
            faults = list(transfer.fetch(self._hand, machine, results, self._book.root, self._sandbox.max_file))
        if done and (faults or not copied):  # it is all there, and worth another try
            self._tries += 1
            if self._tries < _TRIES:
                return self._sandbox.poll
            self._tries = 0
            if not copied and not self._complete():
                return self._not_done(machine)
        for fault in faults:
            self._book.say("warning", f"{machine.name}: {fault}", ERROR, machine)
        self._teller.over(teller.NO_COPY)
        return None

    def _complete(self) -> bool:
        """Return whether the copy that is here shows that everything is done."""
        found = copy.load(self._book.root, self._sandbox.run, self._hand.judge)
        total = int(self._book.known.steps.get("total", 0))
        return found is not None and 0 < total <= found.done

    def _not_done(self, machine: Machine) -> float:
        """Go back to looking at the machine: that it is done is its word alone."""
        text = f"{machine.name}: it says that the run is done, and no copy of that comes; looking again"
        if not self._without:
            self._book.say("warning", text, ERROR, machine)
        self._teller.tell(teller.NO_COPY, text)
        self._book.note(self._book.known._replace(outcome=None, why="").put(machine._replace(quiet=False)))
        self._without += 1
        return min(_BACK_OFF_MAX, self._sandbox.poll * 2.0 ** min(self._without, 20))

    def _put_down(self, machine: Machine) -> Rest:
        if not machine.quiet or self._refused:
            rested = rest.put_down(self._hand, machine, lambda _machine: None)
        else:
            remote.release(self._hand, machine)  # while it can be asked
            state, machine = rest.ask(self._hand, machine)
            rested = rest.pause(self._hand, machine, state)
        if not rested.state and not rested.machine.quiet:
            text = f"{machine.name}: {rested.fault}; trying again to stop it"
            self._book.say("warning", text, WARNING, machine)
        return rested

    def _rest(self, machine: Machine, state: str) -> None:
        self._book.put(machine._replace(state=state, why=str(self._book.known.outcome), fence=None))


def left(known: Record) -> str:
    """Return what is to be said at the end of machines that may run on, or ""."""
    names = ", ".join(f"{machine.id} ({rest.describe(machine)})" for machine in known.left)
    return f"; left, see to it yourself: {names}" if names else ""
