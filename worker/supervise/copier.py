"""The copier: has the checkpoint brought here, now and then beside the looks, at the turns of a machine's life at once.

A machine that dies, or a line that hangs, while a copy is under way holds up nothing: looks go on, and what has not
come when the machine is given up, or the command's time is over, is dropped.
"""

import math

from worker import clock
from worker.journal import INFO, WARNING
from worker.supervise import copy, remote
from worker.supervise.book import Book
from worker.supervise.clockwork import Clockwork
from worker.supervise.command import Runner, Running
from worker.supervise.provider import Hand
from worker.supervise.record import Machine
from worker.supervise.sandbox import Sandbox


class Copier:
    """At most one copy is under way."""

    def __init__(self, sandbox: Sandbox, hand: Hand, runner: Runner, clockwork: Clockwork, book: Book) -> None:
        """`runner` has none but these commands, and a note of its own."""
        self._sandbox = sandbox
        self._hand = hand
        self._runner = runner
        self._clockwork = clockwork
        self._book = book
        self._under_way: tuple[Running, Machine] | None = None
        self._due = -math.inf
        self._fault = ""

    def tend(self, machine: Machine, there: bool) -> float:
        """Take in a copy that has come, begin one if it is time; return when to call again (monotonic clock).

        `there`: the machine has a checkpoint by now.
        """
        if self._under_way is not None:
            running, _whose = self._under_way
            if running.answer() is None:
                return running.until
            self._take_in()
        if self._sandbox.shared or not there:
            return math.inf
        if clock.monotonic() < self._due:
            return self._due
        self._due = clock.monotonic() + self._sandbox.copy_every
        incoming = copy.expect(self._book.root)
        running = self._hand.get_beside(
            machine, remote.CHECKPOINT, incoming, self._runner, self._clockwork.events, self._clockwork.wake
        )
        self._under_way = running, machine
        return running.until

    def take(self, machine: Machine, there: bool) -> bool:
        """Take a copy at once, and return whether it is here.  What goes wrong is said if there is one to be had."""
        self.drop()
        if self._sandbox.shared:
            return True

        def fetch(into: str) -> str:
            answer = self._hand.get(machine, remote.CHECKPOINT, into)
            return "" if answer.ok else answer.fault()

        fault = copy.take(self._book.root, self._sandbox.run, fetch)
        if there or not fault:
            self._say(machine, fault)
        return not fault

    def drop(self) -> None:
        """End what is under way, and let the next one be due at once.  What has come by now is taken in."""
        if self._under_way is not None:
            running, _whose = self._under_way
            if running.answer() is None:
                running.end()
                self._under_way = None
                copy.drop(self._book.root)
            else:
                self._take_in()
        self._due = -math.inf

    def _take_in(self) -> None:
        """Let the copy be what has come, or say why not."""
        assert self._under_way is not None
        (running, machine), self._under_way = self._under_way, None
        answer = running.answer()
        assert answer is not None
        fault = copy.keep(self._book.root, self._sandbox.run) if answer.ok else answer.fault()
        copy.drop(self._book.root)
        self._say(machine, fault)

    def _say(self, machine: Machine, fault: str) -> None:
        """Say what goes wrong, once, and when it is well again."""
        if fault and fault != self._fault:
            text = f"{machine.name}: the checkpoint cannot be copied: {fault}; the copy before stays"
            self._book.say("warning", text, WARNING, machine)
        elif not fault and self._fault:
            self._book.say("state", f"{machine.name}: the checkpoint is copied again", INFO, machine)
        self._fault = fault
