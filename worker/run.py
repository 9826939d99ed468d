"""The run: next step, attempt, commit, checkpoint, until nothing is left.

One thread, one loop.  Each turn settles the attempts that are over, asks `decide` what follows, writes
ends and new claims in one durable transaction, starts what was claimed, and waits for events.
"""

import contextlib
import math
import os
import random
import signal
from collections.abc import Mapping
from typing import Any

from worker import (
    __version__,
    clock,
    config,
    control,
    decide,
    environment,
    folder,
    ledger,
    plan,
    process,
    recovery,
    sandbox,
    status,
)
from worker import board as boards
from worker import note as notes
from worker.attempt import Attempt
from worker.checkpoint import Keeper
from worker.config import Config
from worker.decide import Verdict
from worker.disk import Disk, Stopped
from worker.errors import OK, STEP_FAILED, WORK_LEFT, ConfigError, StateError
from worker.events import Events, Signals
from worker.folder import Places
from worker.journal import ERROR, NOTICE, Journal
from worker.ledger import Claim, Ending, Ledger
from worker.output import Spool
from worker.plan import Plan, Step
from worker.slot import Slot
from worker.systemd import Notifier
from worker.watchdog import Watchdog

# A step asked to end because the worker stops has this long; the unit's TimeoutStopSec= is longer.
STOP_GRACE = 30.0
_EXIT_GRACE = 10.0  # and the worker so long for its own last writes


class Run:
    """One worker's work on one run.  The caller holds the state folder's lock."""

    def __init__(
        self,
        settings: Config,
        steps: Plan,
        places: Places,
        store: Ledger,
        journal: Journal,
        notifier: Notifier,
        environ: Mapping[str, str],
        stopped_before: bool,
    ) -> None:
        """`stopped_before`: the last worker ended in order, so no step died because it did."""
        self._stopped_before = stopped_before
        self._config = settings
        self._plan = steps
        self._places = places
        self._ledger = store
        self._journal = journal
        self._notifier = notifier
        self._base = environment.inherited(environ)
        self._hangup_stops = "NOTIFY_SOCKET" not in environ  # a closed terminal, not `systemctl reload`
        self._fingerprint = config.fingerprint(settings.files[0])
        self._boot = clock.boot_id()
        self._events = Events()
        self._running: dict[str, Attempt] = {}
        self._slots: list[Slot] = []  # those without a step
        self._slot_count = 0
        self._watchdog = Watchdog(self._events, notifier, self._running)
        self._disk = Disk(journal, self._watchdog.wait, lambda: self._stopping)
        self._keeper = Keeper(places.checkpoint, places.run, store, journal)
        self._stopping = False
        self._reload = False
        self._began = clock.monotonic()
        self._started = 0  # attempts started by this worker
        self._found = self._replay()
        self._board = self._found.board

    def work(self) -> int:
        """Work until nothing is left or the worker is told to stop; return the exit status."""
        numbers = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        signals = Signals(self._events, numbers, self._on_signal)
        server = control.Server(self._places.control, self._events, self.snapshot)
        try:
            self._notifier.ready(self._summary())
            self._begin(self._found)
            finished: str | None = None
            while finished is None:
                finished = self._turn()
                if finished is not None:
                    self._conclude(finished)
                    # Work may have been dropped in while that was written down.
                    if finished != "stopped" and self._more_to_do():
                        finished = None
            return self._exit_status(finished)
        except Stopped:  # nothing can be written, but the steps have their time to end
            until = clock.monotonic() + STOP_GRACE
            while clock.monotonic() < until and not all(attempt.over for attempt in self._running.values()):
                self._watchdog.wait(until)
            self._conclude("stopped")
            return self._exit_status("stopped")
        finally:
            for attempt in self._running.values():
                attempt.kill()
            for slot in self._slots:
                slot.close()
            server.close()
            signals.close()

    # -- the loop

    def _turn(self) -> str | None:
        """Do everything that can be done now, then wait; return how the run ended, once it has."""
        if self._reload:
            self._reload_config()
        endings = [self._settle(attempt) for attempt in list(self._running.values()) if attempt.over]
        upcoming = decide.Next([]) if self._stopping else self._decide()
        attempts = [self._claim(step) for step in upcoming.start]
        if endings or attempts:
            self._commit(endings, attempts)
        if self._stopping and not self._running:
            return "stopped"
        if upcoming.finished is not None and not self._running:
            return None if self._more_to_do() else upcoming.finished
        if not any(attempt.over for attempt in self._running.values()):
            self._watchdog.wait(min(upcoming.wake_at, self._keeper.due_at()))
        self._keeper.keep(clock.monotonic())
        return None

    def _decide(self) -> decide.Next:
        stop = self._config.on_failure == "stop"
        strangers = sum(step not in self._plan.by_id for step in self._running)  # taken off the list meanwhile
        slots = self._config.concurrency - strangers
        return decide.next_steps(self._board, slots, clock.monotonic(), stop)

    def _claim(self, step: Step) -> Attempt:
        """Return the next attempt at `step`, not started yet."""
        if not self._slots:
            self._slots.append(Slot(self._slot_count, self._places))
            self._slot_count += 1
        slot = self._slots.pop()
        number = self._board.progress(step.id).number + 1
        attempt = Attempt(step, number, slot, self._places, self._journal, self._events, self._leaders)
        attempt.definition = self._plan.digest(step)
        self._board.set(step.id, boards.RUNNING)
        return attempt

    def _settle(self, attempt: Attempt) -> tuple[Attempt, Verdict, Ending]:
        """Judge an attempt that is over; its output is durable when this returns."""
        step, end = attempt.step, attempt.end()
        past = self._board.progress(step.id)
        verdict = decide.judge(end, past, step.task.retry, random.random())
        output, log = attempt.output, attempt.log
        if verdict.outcome == ledger.DONE and os.path.isdir(self._places.output(step.id)):
            end = end._replace(why=f"it has made a folder where its result belongs: {self._places.output(step.id)}")
            verdict = decide.judge(end, past, step.task.retry, random.random())
        done = verdict.outcome == ledger.DONE
        if done:
            self._publish(step.id, output)
        else:
            output.discard()
        ending = Ending(
            step=step.id,
            number=attempt.number,
            outcome=verdict.outcome,
            counted=verdict.counted,
            final=verdict.final,
            cause=verdict.cause,
            status=end.status,
            ended=clock.wall(),
            took=end.took,
            delay=verdict.delay,
            progress=end.progress,
            spend=attempt.spend,
            detail=attempt.detail,
            output=output.contents() if output.inline or not done else None,
            output_size=output.size,
            log=log.contents(),
            log_size=log.size,
        )
        self._disk.persist(log.path, log.retry)
        log.close()
        del self._running[step.id]
        attempt.slot.clear(self._places.state(step.id))
        self._slots.append(attempt.slot)
        self._mark(ending, attempt.definition)
        return attempt, verdict, ending

    def _mark(self, ending: Ending, definition: str) -> None:
        """Bring the board up to date with the end of an attempt at what `definition` stood for."""
        step = ending.step
        if step not in self._plan.by_id:
            return  # taken off the list while it ran
        if ending.outcome == ledger.DONE:
            self._board.set(step, boards.DONE)
            return
        if definition != self._plan.digest(self._plan.by_id[step]):  # mended meanwhile: all its attempts anew
            self._board.set_progress(step, boards.Progress(number=ending.number))
            self._board.set(step, boards.WAITING)
            return
        before, spent = self._board.progress(step), ending.took + ending.delay
        known = boards.advance(before, ending.outcome, ending.counted, spent, ending.progress)
        retry_at = clock.monotonic() + ending.delay
        self._board.set_progress(step, known._replace(number=ending.number, retry_at=retry_at))
        self._board.set(step, boards.FAILED if ending.final else boards.WAITING)

    def _commit(self, ended: list[tuple[Attempt, Verdict, Ending]], starting: list[Attempt]) -> None:
        """Make ends and claims durable in one transaction; then start what was claimed."""
        now = clock.wall()
        endings = [ending for _attempt, _verdict, ending in ended]
        claims = [Claim(a.step.id, a.number, a.definition, now, self._boot) for a in starting]
        self._disk.persist(self._places.root, lambda: self._ledger.record(endings, claims))
        for attempt, verdict, ending in ended:
            self._tell(ending.step, ending.number, verdict, clock.monotonic() - attempt.started)
        if ended:
            self._keeper.changed()
            self._keeper.keep(clock.monotonic())
        for attempt in starting:
            self._started += 1
            step, number = attempt.step.id, attempt.number
            text = f"{step}: started" if number == 1 else f"{step}: started, attempt {number}"
            self._journal.event("step-started", text, step=step, attempt=number)
            self._start(attempt)
        self._notifier.status(self._summary(), clock.monotonic())

    def _start(self, attempt: Attempt) -> None:
        """Start a claimed attempt, with a note about the one before it."""
        step, slot = attempt.step, attempt.slot
        past = self._board.progress(step.id)
        note: str | None = None
        row = self._ledger.last_closed(step.id) if attempt.number > 1 else None
        if row is not None:
            note = self._places.note(slot.number)
            log, output = self._ledger.log(row.seq), self._ledger.output(row.seq) or b""
            try:
                notes.write(note, row, log, output, past, step.task.retry)
            except OSError as exc:
                self._journal.warning(f"{note}: cannot be written ({exc.strerror}); {step.id} goes without")
                note = None
        self._tidy(slot, step)
        self._running[step.id] = attempt
        attempt.start(self._base, note, past.best, clock.now())

    def _tidy(self, slot: Slot, step: Step) -> None:
        """Make what the step needs to find, whatever an earlier one has removed; a full disk is waited out."""
        if not all(os.path.isdir(path) for path in (self._places.out, self._places.work)):
            self._disk.persist(self._places.root, lambda: folder.make(self._places.root))
            recovery.restore_outputs(self._ledger, self._places, self._disk, self._journal, thorough=False)
        # What else is in the way of its own folder is the step's fault, and its attempt's end.
        with contextlib.suppress(StateError):
            self._disk.persist(self._places.state(step.id), lambda: slot.furnish(self._places.state(step.id)))

    def _leaders(self, pid: int) -> set[int]:
        """Return the leading processes of the steps that run, but for `pid`."""
        return {attempt.pid for attempt in self._running.values() if attempt.pid} - {pid}

    def _publish(self, step: str, output: Spool) -> None:
        """Give a result its name in out/, before the commit, so that a committed step always has it.

        A large one is durable then; a small one is made durable by the commit itself, and written
        again from the ledger if a power cut takes the file.
        """
        path = self._places.output(step)
        self._disk.persist(path, lambda: output.publish(path))

    # -- beginning and end

    def _replay(self) -> boards.Replay:
        counted_from = int(self._ledger.fact("counted_from") or 0)
        return boards.replay(self._plan, self._ledger.rows(), counted_from, clock.now())

    def _begin(self, found: boards.Replay) -> None:
        """Take up what an earlier worker left."""
        process.keep_descriptors()
        process.become_subreaper()
        rebooted = self._ledger.fact("boot") != self._boot
        recovery.restore_outputs(self._ledger, self._places, self._disk, self._journal, thorough=rebooted)
        facts = {
            "state": "running",
            "boot": self._boot,
            "version": __version__,
            "runtime": self._places.runtime,
            "config": self._config.files[0],
            "total": str(found.board.total),
        }
        if self._ledger.fact("state") == "failed":
            # The run had come to its end; whoever starts it again wants the failed steps tried again.
            facts["counted_from"] = str(max((row.seq for row in self._ledger.rows()), default=0))
        self._disk.persist(self._places.ledger, lambda: self._ledger.note(facts))
        if "counted_from" in facts:
            found = self._replay()
            self._board = found.board
        self._close_unclosed(found.unclosed)
        self._announce(found)

    def _close_unclosed(self, rows: list[ledger.Row]) -> None:
        """Close attempts that died with their worker, after ending what is left of their processes."""
        for name in recovery.end_leftovers(rows, self._places, self._watchdog.wait):
            self._journal.event("leftovers", f"ended {name}, left by a dead worker", priority=NOTICE)
        closed = recovery.judge_unclosed(rows, self._plan, self._board, self._boot, self._stopped_before)
        if not closed:
            return
        self._disk.persist(self._places.ledger, lambda: self._ledger.record([e for _, e in closed], []))
        definitions = {row.step: row.definition for row in rows}
        for verdict, ending in closed:
            self._mark(ending, definitions[ending.step])
            self._tell(ending.step, ending.number, verdict)
        self._keeper.changed()

    def _announce(self, found: boards.Replay) -> None:
        news = status.opening(self._places.run, self._board, self._places.root)
        if news is not None:
            self._journal.event(news.event, news.text, priority=news.priority)
        for step in found.changed:
            text = f"{step}: defined otherwise than when it was done; not done again (another id would run it)"
            self._journal.event("plan-changed", text, step=step, priority=NOTICE)
        if found.gone:
            text = f"{found.gone} finished steps are no longer in the list"
            self._journal.event("plan-changed", text)

    def _more_to_do(self) -> bool:
        """At the end of the list, take in what was added to the configuration meanwhile."""
        if config.fingerprint(self._config.files[0]) == self._fingerprint:
            return False
        self._reload_config()
        return self._decide().finished is None

    def _reload_config(self) -> None:
        """Read the configuration again; one that is wrong changes nothing."""
        self._reload = False
        self._notifier.reloading()
        self._fingerprint = config.fingerprint(self._config.files[0])
        try:
            settings = config.load(self._config.files[0])
            steps = plan.build(settings)
            sandbox.check(steps, self._places.secrets)
        except ConfigError as exc:
            for problem in exc.problems:
                self._journal.event("reloaded", str(problem), priority=ERROR)
            self._journal.event("reloaded", "the configuration is wrong; the former one stays", priority=ERROR)
        else:
            self._take_over(settings, steps)
        self._notifier.ready(self._summary())

    def _take_over(self, settings: Config, steps: Plan) -> None:
        if settings.run != self._places.run:
            text = f"a run's name cannot change while it runs (to '{settings.run}'); the former list stays"
            self._journal.event("reloaded", text, priority=ERROR)
            return
        self._config, self._plan = settings, steps
        self._board = self._replay().board
        for step in self._running:
            if step in steps.by_id:
                self._board.set(step, boards.RUNNING)
        facts = {"state": "running", "total": str(self._board.total)}
        self._disk.persist(self._places.ledger, lambda: self._ledger.note(facts))
        self._journal.event("reloaded", f"the configuration was read again: {self._board.total} steps")

    def _conclude(self, finished: str) -> None:
        """Write down how the run stands, and say so."""
        if finished != "stopped":
            with contextlib.suppress(Stopped):
                self._disk.persist(self._places.ledger, lambda: self._ledger.note({"state": finished}))
            self._keeper.changed()
        took = clock.monotonic() - self._began
        news = status.closing(finished, self._places.run, self._board, self._started, took)
        self._journal.event(news.event, news.text, priority=news.priority)
        self._keeper.keep(math.inf)

    def _exit_status(self, finished: str) -> int:
        self._notifier.stopping(self._summary(), _EXIT_GRACE)
        return {"done": OK, "failed": STEP_FAILED}.get(finished, WORK_LEFT)

    # -- signals

    def _on_signal(self, number: int) -> None:
        now = self._events.now
        if number == signal.SIGCHLD:
            ended = process.reap()
            for attempt in self._running.values():
                attempt.on_exits(ended, now)
        elif number == signal.SIGHUP and not self._hangup_stops:
            self._reload = True
        elif self._stopping:
            for attempt in self._running.values():
                attempt.kill()
        else:
            self._stopping = True
            self._notifier.stopping("stopping: ending the steps", STOP_GRACE + _EXIT_GRACE)
            for attempt in self._running.values():
                attempt.interrupt("stop", STOP_GRACE, now)

    # -- what people see

    def _summary(self) -> str:
        return status.summary(self._board, self._running.values(), self._disk.waiting_for)

    def snapshot(self) -> dict[str, Any]:
        """Return how the run stands, for the control socket."""
        running = self._running.values()
        return status.snapshot(self._places.run, self._board, running, self._disk.waiting_for, clock.now())

    def _tell(self, step: str, number: int, verdict: Verdict, took: float = 0.0) -> None:
        """Say in the journal what became of an attempt."""
        news = status.news(step, number, verdict, took, self._board)
        self._journal.event(news.event, news.text, step=step, attempt=number, priority=news.priority)
