"""The supervisor's loop: budgets, the next machine, a turn of its life (life.py), and the end (ending.py).

One thread.  systemd is pinged from here alone: while a provider's command that is waited for is within its time limit,
and from waits that have an end.  Every turn starts from the record, so it makes no difference whether this process or
one before it made the last one.
"""

from worker import alert, clock
from worker.errors import CONFIG, OK, OUT_OF_BUDGET, STEP_FAILED
from worker.journal import INFO
from worker.supervise import judge, parcel, record
from worker.supervise.book import Book
from worker.supervise.clockwork import Clockwork
from worker.supervise.copier import Copier
from worker.supervise.ending import Ending
from worker.supervise.life import Life
from worker.supervise.making import BACK_OFF_MAX
from worker.supervise.parcel import Item
from worker.supervise.provider import Hand
from worker.supervise.record import moment
from worker.supervise.rest import Watch
from worker.supervise.sandbox import Sandbox
from worker.supervise.teller import Teller
from worker.systemd import Notifier

EXIT = {"done": OK, "failed": STEP_FAILED, "out-of-budget": OUT_OF_BUDGET, "configuration": CONFIG}


class Supervisor:
    """One run, kept alive, by one reading of its files."""

    def __init__(
        self, sandbox: Sandbox, given: tuple[Item, ...], hand: Hand, copier: Copier, book: Book, clockwork: Clockwork,
        notifier: Notifier, tell: Teller,
    ) -> None:  # fmt: skip
        self._sandbox = sandbox
        self._given = parcel.marks(given)
        self._hand = hand
        self._book = book
        self._clockwork = clockwork
        self._notifier = notifier
        self._watch = Watch(hand, book, tell, sandbox.poll, lambda machine: copier.take(machine, there=True))
        self._life = Life(sandbox, given, hand, copier, book, self._watch, tell)
        self._ending = Ending(sandbox, hand, book, self._watch, tell, self._life.copy)

    def work(self) -> int | None:
        """Keep the run alive until it has ended or a budget is spent; return the exit status.

        None: the files are to be read again, and gone on with from the record.
        """
        self._revive()
        while not self._book.known.concluded:
            self._notifier.status(self._summary(), clock.monotonic())
            self._clockwork.wait(self._turn())
            if self._clockwork.reload:
                return None
        assert self._book.known.outcome is not None
        return EXIT[self._book.known.outcome]

    def rests(self) -> bool:
        """Return whether the run has ended in a way that leaves nothing to do."""
        known = self._book.known
        if known.outcome == "out-of-budget":
            return known.concluded and bool(self._spent())
        return known.concluded and known.outcome == "done" and not self._changed()

    def _turn(self) -> float:
        """Do what is next; return how long to wait before the next turn."""
        known = self._book.known
        if known.outcome is not None:
            return self._ending.turn()
        self._watch.tend()
        spent = self._spent()
        if spent:
            return self._life.end("out-of-budget", spent)
        return self._life.turn(known.machine) if known.machine is not None else self._next()

    def _next(self) -> float:
        """Choose the next machine's name."""
        fruitless = 0
        for machine in reversed(self._book.known.machines):
            if machine.progress:
                break
            fruitless += 1
        if fruitless > 1:  # something is wrong that a new machine does not mend
            delay = min(BACK_OFF_MAX, self._sandbox.poll * 2.0 ** min(fruitless - 2, 20))
            self._life.fruitless(fruitless, delay)
            self._clockwork.wait(delay)
        self._book.note(self._book.known.add(moment()))
        return 0.0

    def _revive(self) -> None:
        """Go on after an end that need not be the last one: a budget raised, a list mended."""
        known, changed = self._book.known, self._changed()
        if not known.concluded:
            if known.outcome is not None and changed:  # that was the end of the list before
                self._book.note(known._replace(outcome=None, why=""))
            return
        if self.rests():
            why = self._spent() if known.outcome == "out-of-budget" else known.why
            self._book.say("nothing-to-do", f"{known.run}: {known.outcome} ({why})", INFO)
            self._watch.round()
            return
        alert.forget_told(self._book.root)
        known = known._replace(outcome=None, concluded=False, why="")
        last = known.machines[-1] if known.machines else None
        if last is not None and last.state in (record.PAUSED, record.KEPT, record.LEFT) and last.why in EXIT:
            now = moment()
            # One that has been extended has had what it needs; another one would begin the run anew.
            state = record.STARTING if last.extended is not None else record.CREATING
            fresh = last._replace(state=state, why="", well=now, restarts=0, resumes=0, unanswered=0)
            fresh = fresh._replace(absent=0, quiet=False, faults=0, fence=None)
            known = known.put(fresh)
        self._book.known = known

    def _changed(self) -> bool:
        """Return whether the list is another one than the last machine was given."""
        last = self._book.known.machines[-1] if self._book.known.machines else None
        before = parcel.of_list(last.given) if last is not None else ()
        return bool(before) and before != parcel.of_list(self._given)

    # -- helpers

    def _spent(self) -> str:
        return judge.spent(self._sandbox.budget, self._book.known, moment())

    def _summary(self) -> str:
        steps, machine = self._book.known.steps, self._book.known.machine
        done = f"{steps.get('done', 0)}/{steps['total']} done" if steps.get("total") else "nothing done yet"
        waiting = f" ({self._life.waiting})" if self._life.waiting else ""
        return f"{done} · {machine.name}: {machine.state}{waiting}" if machine is not None else done
