"""The keeper: keeps checkpoint.json up to date without holding up the loop.

A long step's end is in it at once; bursts of short steps share a write, so that a list of 100,000 steps does not
rewrite 100,000 lines for each of them.  What takes long is written by a child (worker/scribe.py) beside the file; it
gets its name from the worker, which holds the state folder, so that nothing which a dead worker has left can put an
older checkpoint over a newer one.
"""

import contextlib
import math
import os

from worker import checkpoint, clock, files, process
from worker.checkpoint import CheckpointError
from worker.companions import Companion
from worker.errands import Errands, Report
from worker.journal import NOTICE, Journal
from worker.ledger import Ledger, StorageFull
from worker.ledger.sqlite import SqliteLedger

_ERRAND = "checkpoint"
# A write may cost at most this share of the time, and is never more than this late.
_SHARE = 0.05
_LATE = 1.0
# From this revision on it is a child that writes: that many claims, ends and effects take some 50 ms.
_LARGE = 6000
# A child that has not written by then never will.
_PATIENCE = 600.0


class Keeper(Companion):
    """Keeps the checkpoint at a path; costs no more than a small share of the time."""

    def __init__(self, path: str, run: str, ledger: Ledger, errands: Errands, journal: Journal) -> None:
        self._path = path
        self._run = run
        self._ledger = ledger
        self._errands = errands
        self._journal = journal
        self._fails = False
        self._stale = False
        self._not_before = -math.inf
        self._asked = 0  # the revision that a child must have found at least

    def begin(self) -> None:
        """Take note if the last worker has left the file behind the ledger."""
        if self._ledger.shared:
            return
        with contextlib.suppress(OSError):
            os.unlink(files.prepared(self._path))
        try:
            known = checkpoint.header(self._path).revision
        except FileNotFoundError:
            known = 0
        except (OSError, CheckpointError):
            known = -1
        with contextlib.suppress(StorageFull):
            self._stale = self._stale or known < self._ledger.revision()

    def changed(self) -> None:
        """Note that the ledger knows more than the file."""
        self._stale = True

    def due_at(self) -> float:
        """Return when to write (monotonic clock); inf while the file is up to date, or being written."""
        return self._not_before if self._stale and not self._errands.busy(_ERRAND) else math.inf

    def keep(self, now: float) -> None:
        """Write if that is due at `now`.  If it fails the ledger still has everything: say so once, try later."""
        if self._stale and now >= self._not_before and not self._errands.busy(_ERRAND):
            source = self._source()
            if source is None:
                self._write()
            else:
                self._send(source)

    def conclude(self, finished: str) -> None:
        """Write what the file lacks, however soon after the last time; the next worker does what takes long."""
        source = self._source()
        if finished == "left" and source is not None:
            return
        self._wait()
        if self._stale and source is not None:
            self._send(source)
            self._wait()
        if self._stale:  # a child that has failed may have done so by its own fault
            self._write()

    def _wait(self) -> None:
        """Wait for a child that is under way; say so if that takes long."""
        text = f"{self._path}: waiting until it is written"
        self._errands.wait_out(math.inf, _ERRAND, lambda _: self._journal.event("state", text, priority=NOTICE))

    def _source(self) -> str | None:
        """Return the ledger's file if a child is to read it; None if there is little to read, or it is on a server."""
        if isinstance(self._ledger, SqliteLedger):
            with contextlib.suppress(StorageFull):
                return self._ledger.path if self._ledger.revision() >= _LARGE else None
        return None

    def _write(self) -> None:
        self._stale = False
        began = clock.monotonic()
        fault = ""
        try:
            checkpoint.write(self._path, self._run, self._ledger)
        except OSError as exc:
            fault = exc.strerror or str(exc)
        except StorageFull as exc:
            fault = str(exc)
        self._ended(fault, clock.monotonic() - began)

    def _send(self, source: str) -> None:
        """Let a child write; what changes from now on is for the next one."""
        self._stale = False
        argv = [*process.ours("scribe"), self._path, self._run, source]
        try:
            self._asked = self._ledger.revision()
            self._errands.start(_ERRAND, argv, {}, os.path.dirname(self._path), _PATIENCE, self._done)
        except (process.SpawnError, OSError, StorageFull) as exc:
            self._ended(str(exc), 0.0)

    def _done(self, report: Report) -> None:
        fault = report.fault or self._place()
        if fault:
            with contextlib.suppress(OSError):
                os.unlink(files.prepared(self._path))
        self._ended(fault, report.took)

    def _place(self) -> str:
        """Let what the child has written be the checkpoint; return what is wrong with it instead, if anything."""
        try:
            found = checkpoint.header(files.prepared(self._path))
            if found.run != self._run or found.revision < self._asked:
                return f"the new one is older than the run, revision {found.revision} and {self._asked}"
            files.place(self._path)
        except CheckpointError as exc:
            return str(exc)
        except OSError as exc:
            return exc.strerror or str(exc)
        return ""

    def _ended(self, fault: str, took: float) -> None:
        """Take note of how a write has ended."""
        if fault and not self._fails:
            self._journal.warning(f"{self._path}: cannot be written ({fault}); trying again, the ledger is current")
        elif self._fails and not fault:
            self._journal.event("state", f"{self._path}: written again", priority=NOTICE)
        self._fails = bool(fault)
        self._stale = self._stale or self._fails
        self._not_before = clock.monotonic() + max(_LATE, took / _SHARE)
