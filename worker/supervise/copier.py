"""The copier: has the checkpoint brought here, now and then beside the looks, at the turns of a machine's life at once.

A machine that dies, or a line that hangs, while a copy is under way holds up nothing: looks go on, and what has not
come when the machine is given up, or the command's time is over, is dropped.
"""

import math
from typing import NamedTuple

from worker import clock
from worker.journal import INFO, WARNING
from worker.supervise import copy, remote, transfer
from worker.supervise.book import Book
from worker.supervise.clockwork import Clockwork
from worker.supervise.command import Runner, Running
from worker.supervise.provider import Hand
from worker.supervise.record import Machine
from worker.supervise.remote import Script
from worker.supervise.sandbox import Sandbox
from worker.supervise.transfer import Offer


class _Copy(NamedTuple):
    """One that is under way: at first the machine is asked for it, then it comes."""

    running: Running
    machine: Machine
    asked: Script
    name: str
    offer: Offer | None = None


class Copier:
    """At most one copy is under way."""

    def __init__(self, sandbox: Sandbox, hand: Hand, runner: Runner, clockwork: Clockwork, book: Book) -> None:
        """`runner` has none but these commands, and a note of its own."""
        self._sandbox = sandbox
        self._hand = hand
        self._runner = runner
        self._clockwork = clockwork
        self._book = book
        self._under_way: _Copy | None = None
        self._due = -math.inf
        self._fault = ""
        self.failures = 0  # in a row

    @property
    def fault(self) -> str:
        """Why the last one has not come, or ""."""
        return self._fault

    def tend(self, machine: Machine, there: bool) -> float:
        """Take in a copy that has come, begin one if it is time; return when to call again (monotonic clock).

        `there`: the machine has a checkpoint by now.
        """
        while self._under_way is not None:
            if self._under_way.running.answer() is None:
                return self._under_way.running.until
            self._go_on()
        if self._sandbox.shared or not there:
            return math.inf
        if clock.monotonic() < self._due:
            return self._due
        self._due = clock.monotonic() + self._sandbox.copy_every
        asked, name = transfer.ask(machine, remote.CHECKPOINT, "copy", self._sandbox.max_file)
        running = self._hand.script_beside(
            machine, asked.text, self._runner, self._clockwork.events, self._clockwork.wake
        )
        self._under_way = _Copy(running, machine, asked, name)
        return running.until

    def take(self, machine: Machine, there: bool) -> bool:
        """Take a copy at once, and return whether it is here.  What goes wrong is said if there is one to be had."""
        self.drop()
        if self._sandbox.shared:
            return True

        def fetch(into: str) -> str:
            return transfer.get(self._hand, machine, remote.CHECKPOINT, into, "copy", self._sandbox.max_file)

        fault = copy.take(self._book.root, self._sandbox.run, fetch, self._hand.judge)
        if there or not fault:
            self._say(machine, fault)
        return not fault

    def drop(self) -> None:
        """End what is under way, and let the next one be due at once.  What has come by now is taken in."""
        under_way, self._due = self._under_way, -math.inf
        if under_way is not None and under_way.offer is not None and under_way.running.answer() is not None:
            self._go_on()
        elif under_way is not None:
            under_way.running.end()
            self._under_way = None
            copy.drop(self._book.root)

    def _go_on(self) -> None:
        """Have what is offered come, or let the copy be what has come, or say why not."""
        assert self._under_way is not None
        done, self._under_way = self._under_way, None
        answer = done.running.answer()
        assert answer is not None
        if done.offer is None:
            offer = transfer.offered(done.asked.reply(answer), done.name, self._sandbox.max_file)
            if isinstance(offer, str):
                self._say(done.machine, offer)
                return
            running = self._hand.get_beside(
                done.machine, offer.path, copy.expect(self._book.root), offer.size, self._runner,
                self._clockwork.events, self._clockwork.wake,
            )  # fmt: skip
            self._under_way = done._replace(running=running, offer=offer)
            return
        fault = "" if answer.ok else answer.fault()
        fault = fault or done.offer.fault(copy.incoming(self._book.root))
        fault = fault or copy.keep(self._book.root, self._sandbox.run, self._hand.judge)
        copy.drop(self._book.root)
        self._say(done.machine, fault)

    def _say(self, machine: Machine, fault: str) -> None:
        """Say what goes wrong, once, and when it is well again."""
        if fault and fault != self._fault:
            text = f"{machine.name}: the checkpoint cannot be copied: {fault}; the copy before stays"
            self._book.say("warning", text, WARNING, machine)
        elif not fault and self._fault:
            self._book.say("state", f"{machine.name}: the checkpoint is copied again", INFO, machine)
        self._fault = fault
        self.failures = self.failures + 1 if fault else 0
