"""As much of the worker's loop as errands need."""

import signal
from pathlib import Path

from worker import clock, process
from worker.errands import Errands, Report
from worker.events import Events, Signals

ENV = {"PATH": process.DEFAULT_PATH}


class Loop:
    """Events, errands, and what came of those."""

    def __init__(self, owner: Path, leftovers: bool = True) -> None:
        self.events = Events()
        self.errands = Errands(self.events, self.wait, str(owner), leftovers)
        self.reports: list[Report] = []
        self._signals = Signals(self.events, [signal.SIGCHLD], lambda _: self.errands.on_exits(process.reap()))

    def wait(self, until: float) -> None:
        self.events.handle(self.events.poll(max(0.0, until - clock.monotonic())))

    def send(self, *argv: str, timeout: float = 60.0, name: str = "copy") -> int:
        return self.errands.start(name, argv, ENV, "/", timeout, self.reports.append).pid

    def finish(self) -> Report:
        assert self.errands.wait(clock.monotonic() + 60.0, "copy")
        return self.reports[-1]

    def close(self) -> None:
        self.errands.close()
        self._signals.close()
