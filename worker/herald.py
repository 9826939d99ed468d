"""The herald: lets dead-man services know that the run begins and is done, and leaves word of an end for the worse.

STATE/pinged is there from a begin to the end that was made known, so that one is made known even if the worker died
just before it could.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping

from worker import alert, budget, clock, contact, environment, files, ledger, ping, process
from worker.alert import Alert, Words
from worker.board import doubtful
from worker.budget import State
from worker.companions import Companion
from worker.contact import Contact, Ping
from worker.errands import Errands
from worker.errors import OUT_OF_BUDGET, STEP_FAILED
from worker.folder import Places
from worker.journal import Journal
from worker.ledger import Ledger, Row, StorageFull

_NAME = "ping"


class Herald(Companion):
    """A companion of the run."""

    def __init__(
        self,
        settings: Callable[[], Contact],
        places: Places,
        store: Ledger,
        running: Mapping[str, object],
        meter: Callable[[], State],
        environ: Mapping[str, str],
        errands: Errands,
        journal: Journal,
    ) -> None:
        """`settings` returns the contact in force, `meter` how the budget stands; `running` has those at work."""
        self._settings = settings
        self._places = places
        self._ledger = store
        self._running = running
        self._meter = meter
        self._environ = environ
        self._errands = errands
        self._journal = journal
        self._saved: Contact | None = None
        self._begun = False
        self._at_work = False
        self._pinged = f"{places.root}/pinged"
        self._save()

    def begin(self) -> None:
        alert.forget_words(self._places.root)
        alert.forget_told(self._places.root, alert.GAVE_UP)
        self._begun = True
        self._owe()
        self._ping("start", self._settings().ping.start)

    def keep(self, now: float) -> None:
        """Take note of another contact; what was told is over once a step runs again."""
        self._look()
        if not self._at_work and self._running:
            self._at_work = True
            alert.forget_told(self._places.root)

    def conclude(self, finished: str) -> None:
        """Make an end known, after the begin, and wait until it is.  While there is work left there is no end."""
        if finished not in ("done", "failed", "out-of-budget"):
            return
        self._look()
        self._errands.wait(clock.monotonic() + ping.LONGEST, _NAME)
        if finished == "failed":
            alert.say_last(self._places.root, Words(STEP_FAILED, self._failure()))
        elif finished == "out-of-budget":
            alert.say_last(self._places.root, Words(OUT_OF_BUDGET, self._spent()))
        elif os.path.exists(self._pinged):
            self._ping("finish", self._settings().ping.finish)
            self._errands.wait(clock.monotonic() + ping.LONGEST, _NAME)

    def _look(self) -> None:
        """Take note of another contact."""
        if self._settings() is not self._saved:
            self._save()
            if self._begun:
                self._owe()

    def _owe(self) -> None:
        """Note that an end of this run is to be made known, if anybody wants to know."""
        if self._settings().ping != Ping():
            with contextlib.suppress(OSError):  # then an end is not made known if the worker dies just before
                files.publish(self._pinged, b"begun\n")

    def _save(self) -> None:
        self._saved = self._settings()
        try:
            contact.save(self._places.root, self._saved)
        except OSError as exc:
            text = f"{exc.filename or self._places.root}: whom to tell cannot be kept: {exc.strerror}"
            self._journal.warning(f"{text}; who is told while the configuration is wrong, is as it was before")

    def _ping(self, kind: str, url: str | None) -> None:
        """Send one out; a finish without a URL is made known already."""
        if url is None:
            self._ended(kind, "")
            return
        base = environment.own_anyhow(self._environ, self._settings().given, self._journal.warning)
        try:
            self._errands.start(
                _NAME,
                ping.PROGRAM,
                ping.environment(url, base),
                "/",
                ping.LONGEST,
                lambda report: self._ended(kind, ping.fault(url, report)),
            )
        except process.SpawnError as exc:
            self._ended(kind, str(exc))

    def _ended(self, kind: str, fault: str) -> None:
        if fault:
            self._journal.warning(f"ping: {kind}: {fault}")
        elif kind == "finish":
            with contextlib.suppress(OSError):
                os.unlink(self._pinged)

    def _failure(self) -> Alert:
        """Return which step has failed for good, and its last lines, as far as the ledger can be read now."""
        try:
            rows = list(self._ledger.rows())
            final = _failures(rows, int(self._ledger.fact("counted_from") or 0))
            final = final or [row for row in {row.step: row for row in rows}.values() if doubtful(row)]
            if not final:
                return Alert(alert.FAILED, "a step failed for good")
            row = final[-1]
            lines = self._lines(row)
        except StorageFull as exc:
            return Alert(alert.FAILED, f"a step failed for good, and the ledger cannot be read: {exc}")
        how = "unknown" if doubtful(row) else "failed for good"
        cause = f"{row.step}: {how}: {row.cause} (attempt {row.number})"
        if len(final) > 1:
            cause += f"; and {len(final) - 1} more"
        return Alert(alert.FAILED, cause, row.step, lines, _mark(rows))

    def _lines(self, row: Row) -> str:
        """Return the end of what a step has logged, or printed if it has logged nothing."""
        said = self._ledger.log(row.seq)
        if not said.strip():
            said = self._ledger.output(row.seq) or b""
        if not said.strip():
            with contextlib.suppress(OSError), open(self._places.output(row.step), "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - alert.LINES_BYTES))
                said = file.read(alert.LINES_BYTES)
        return alert.last_lines(said)

    def _spent(self) -> Alert:
        """Return what is used up, without saying how much more: the cause is the same however often it is met."""
        state = self._meter()
        name = state.spent().partition(":")[0]
        limit = budget.number(state.limits._asdict().get(name))
        mark = ""
        with contextlib.suppress(StorageFull):
            mark = _mark(self._ledger.rows())
        cause = f"the budget is spent: {name}, limit {limit}; {budget.raising(state)}"
        return Alert(alert.OUT_OF_BUDGET, cause, mark=mark)


def _mark(rows: Iterable[Row]) -> str:
    """Return when the newest attempt began."""
    return f"{max((row.started for row in rows), default=0.0):.6f}"


def _failures(rows: Iterable[Row], counted_from: int) -> list[Row]:
    """Return the last attempts of the steps that have failed for good, or are unknown, the latest last."""
    last = {row.step: row for row in rows}
    final = [row for row in last.values() if row.final and row.seq > counted_from and row.outcome != ledger.DONE]
    unknown = [row for row in last.values() if row.outcome == ledger.UNKNOWN]
    return sorted({row.seq: row for row in final + unknown}.values())
