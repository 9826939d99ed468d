"""Bringing machines to rest: what the run has left must not work on, and must not cost.

A machine that could not be stopped when it was given up is looked at again, at each poll and at the end, until it is
known to be down.  One that was said to be gone is looked at again too, more and more seldom: the word may be wrong.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from worker import clock
from worker.journal import ERROR, NOTICE
from worker.supervise import judge, record, remote
from worker.supervise.book import Book
from worker.supervise.provider import Hand
from worker.supervise.record import Machine
from worker.supervise.teller import LEFT, Teller

_SHARE = 4  # of the time, at most one part in so many is spent on machines that do not answer
_SELDOM = 600.0
_ROUNDS = 3  # that a machine whose agent is stopped may resist being paused before somebody is told


class Rest(NamedTuple):
    """What came of it: `state` is "" while the machine may run on."""

    state: str
    machine: Machine
    fault: str  # of the last command that did not do its work


def put_down(hand: Hand, machine: Machine, copy: Callable[[Machine], object], answers: bool | None = None) -> Rest:
    """Have the worker there ended and the machine paused, one way or the other.

    `copy` is called between the two, when the worker has ended.  `answers`: whether the machine does, if that is known.
    """
    state, machine = ask(hand, machine)
    fault = ""
    if state != judge.STOPPED and answers is not False:  # to ask one that is stopped may start it
        reply = remote.knock(hand, machine)
        if reply.ok:
            machine = machine._replace(absent=0)
            reply = remote.stop(hand, machine)
            if reply.ok:
                machine = machine._replace(quiet=True)
                copy(machine)
        if reply.holder:
            return Rest(record.TAKEN, machine, reply.fault)
        fault = reply.fault
    return pause(hand, machine, state, fault)


def ask(hand: Hand, machine: Machine) -> tuple[str, Machine]:
    """Return what the provider says of the machine, and the machine with what is remembered of that."""
    state = hand.state(machine)
    return state, machine._replace(absent=machine.absent + 1 if state == judge.ABSENT else 0)


def pause(hand: Hand, machine: Machine, state: str, fault: str = "") -> Rest:
    """Have a machine paused whose worker has ended, as far as that could be had; `state` is its provider's word."""
    if hand.offers("pause"):
        answer = hand.do("pause", machine)
        fault = fault if answer.ok else f"pause: {answer.fault()}"
        paused = answer.ok and state != judge.ABSENT
    else:
        paused = machine.quiet
    if paused or state == judge.STOPPED:
        return Rest(record.PAUSED, machine, "")
    if state == judge.ABSENT and machine.absent >= judge.SIGHTS:
        return Rest(record.GONE, machine, "")
    return Rest("", machine, fault or "it does not answer")


class Watch:
    """Looks after machines that were left."""

    def __init__(self, hand: Hand, book: Book, teller: Teller, poll: float, copy: Callable[[Machine], object]) -> None:
        """`copy` takes a copy of a machine's checkpoint."""
        self._hand = hand
        self._book = book
        self._teller = teller
        self._poll = poll
        self._copy = copy
        self._due = -math.inf
        self._rounds: dict[int, int] = {}
        self._gone: dict[int, tuple[float, float]] = {}  # when one that is gone is asked again, and the pause before

    def tend(self) -> None:
        """Look at each of them, if it is time."""
        if clock.monotonic() >= self._due:
            self.round()

    def round(self) -> None:
        """Look at each of them now, and put down those that can be."""
        begun = clock.monotonic()
        for machine in self._book.known.machines:
            if machine.state == record.LEFT:
                self._again(machine)
            elif machine.state == record.GONE and machine.begun:
                self._doubt(machine)
        now = clock.monotonic()
        self._due = now + max(self._poll, _SHARE * (now - begun))

    def left(self, machine: Machine, why: str) -> None:
        """Note that a machine could not be brought to rest; from now on it is looked after here."""
        self._book.put(machine._replace(state=record.LEFT, fence=None))
        self._tell(machine, why)

    def _again(self, machine: Machine) -> None:
        rest = put_down(self._hand, machine, self._copy_of_last)
        if not rest.state:
            self._book.put(rest.machine)
            self._rounds[machine.number] = self._rounds.get(machine.number, 0) + 1
            self._tell(rest.machine, rest.fault)
            return
        what = {
            record.PAUSED: "it is stopped now",
            record.GONE: "it is gone by now",
            record.TAKEN: "another supervision has it by now, so it is left to that one",
        }[rest.state]
        again = "it answers again; " if rest.machine.quiet and not machine.quiet else ""
        self._book.say("state", f"{machine.name}: {again}{what}", NOTICE, machine)
        self._book.put(rest.machine._replace(state=rest.state))
        self._teller.over(LEFT, machine.name)

    def _doubt(self, machine: Machine) -> None:
        now = clock.monotonic()
        due, before = self._gone.get(machine.number, (-math.inf, self._poll))
        if now < due:
            return
        if remote.knock(self._hand, machine).ok:
            text = f"{machine.name}: it was said to be gone, and answers; stopping it"
            self._book.say("warning", text, ERROR, machine)
            back = machine._replace(state=record.LEFT, absent=0)
            self._book.put(back)
            self._again(back)
        else:
            self._gone[machine.number] = (now + before, min(_SELDOM, 2 * before))

    def _tell(self, machine: Machine, why: str) -> None:
        if not machine.quiet or self._rounds.get(machine.number, 0) >= _ROUNDS:
            self._teller.tell(LEFT, f"{machine.name}: {describe(machine)}: {why}", machine.name)

    def _copy_of_last(self, machine: Machine) -> None:
        """Take what it has done, unless another machine has gone on from less by now."""
        now = self._book.known.machine
        if self._book.known.outcome is None and (now is None or now.state in (record.CREATING, record.PREPARING)):
            self._copy(machine)


def describe(machine: Machine) -> str:
    """Return what is known of a machine that is left."""
    if machine.quiet:
        return "its worker is stopped, but it is not paused, and may cost"
    return "it is neither stopped nor paused: its worker may be at work, and it may cost"
