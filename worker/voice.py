"""The voice of a run: what it says in the journal and to systemd, and what it answers when it is asked how it stands.

The words are in worker/status.py; here they meet the run as it is at the moment.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from worker import begun, clock, fromcopy, plural, status
from worker.attempt import Attempt
from worker.board import Board, Replay
from worker.copies import Copies
from worker.crew import Crew
from worker.decide import Verdict
from worker.disk import Disk
from worker.folder import Places
from worker.journal import ERROR, NOTICE, WARNING, Journal
from worker.ledger import Claim, Ending
from worker.meter import Meter
from worker.pause import RESUME, Paused
from worker.standing import Learnt, Standing
from worker.status import News, Outcomes

_ENDED = {"failed": "failed", "out-of-budget": "no budget left"}


class Voice:
    """Speaks for one run; it changes nothing."""

    def __init__(
        self,
        standing: Standing,
        running: Mapping[str, Attempt],
        places: Places,
        journal: Journal,
        disk: Disk,
        crew: Crew,
        meter: Meter,
        copies: Copies,
        outcomes: Outcomes,
    ) -> None:
        self._standing = standing
        self._running = running
        self._places = places
        self._journal = journal
        self._disk = disk
        self._crew = crew
        self._meter = meter
        self._copies = copies
        self._outcomes = outcomes
        self._run = places.run
        self._began = clock.monotonic()

    def opening(self, found: Replay, faults: Sequence[str], undivided: bool) -> None:
        """Say what this worker has found.

        `faults`: how earlier workers ended that were not well; `undivided`: the unit's cgroup is not ours to divide.
        """
        if undivided:
            self._note("steps do not outlive this worker: the unit's cgroup is not its to divide (Delegate=, User=)")
        if faults:
            self._note(f"the last worker was not well: {faults[-1]}")
        changed = self._standing.changed(found.changed)
        for news in status.opening(self._run, self._board, self._places.root, changed, found.gone):
            self._say(news)
        if self._standing.doubt is not None:
            text = f"run {self._run}: {fromcopy.opening(self._standing.doubt, self._board)}"
            self._journal.event("state", text, priority=WARNING)
        self._beside_the_list()

    def _beside_the_list(self) -> None:
        """Name the tasks that have no steps, and the steps that were begun and are in the list no more."""
        lacks = self._standing.plan.lacks
        for problem in (*self._standing.plan.empty, *([lacks] if lacks else [])):
            self._journal.event("plan-changed", str(problem), priority=NOTICE)
        for line in begun.kept_lines(self._standing.plan):
            self._journal.event("plan-changed", line, priority=NOTICE)
        for step in self._running.keys() - self._standing.plan.by_id.keys():
            line = f"{step}: no longer in the list; it runs to its end"
            self._journal.event("plan-changed", line, step=step, priority=NOTICE)
        for line in begun.unlisted_lines(self._standing.unlisted.values()):
            self._journal.event("plan-changed", line, priority=WARNING)

    def started(self, step: str, number: int) -> None:
        text = f"{step}: started" if number == 1 else f"{step}: started, attempt {number}"
        self._journal.event("step-started", text, step=step, attempt=number)

    def ended(self, step: str, number: int, verdict: Verdict, took: float = 0.0) -> None:
        """Say what became of an attempt."""
        self._say(status.news(step, number, verdict, took, self._board), step=step, attempt=number)

    def learnt(self, found: Iterable[Learnt]) -> None:
        """Say what came of reading the items of tasks."""
        plan = self._standing.plan
        for task, problem in found:
            if problem:
                text = f"{task}: failed for good: its items cannot be read: {problem}"
                self._journal.event("step-failed", text, step=task, priority=ERROR)
            else:
                more = plural.of(sum(step.task.id == task for step in plan.steps), "item")
                text = f"{task}: {more}; the run has {plural.of(len(plan.steps), 'step')} now"
                self._journal.event("plan-changed", text, step=task)

    def paused(self, by: Paused | None) -> None:
        """Say that no step begins, by whose word and how it goes on; or that it does."""
        if by is None:
            self._journal.event("resumed", f"run {self._run}: resumed; going on", priority=NOTICE)
        else:
            self._journal.event("paused", f"run {self._run}: {by}; no step begins until {RESUME}", priority=NOTICE)

    def late(self, step: str, number: int) -> None:
        """Say that an attempt was not begun."""
        text = f"{step}: its claim had run out before it could begin, and is another worker's"
        self._journal.event("step-lost", text, step=step, attempt=number, priority=WARNING)

    def lost(self, ending: Ending) -> None:
        """Say that the end of an attempt could not be recorded."""
        step, number = ending.step, ending.number
        text = f"{step}: attempt {number} ended, but its claim is another worker's by now; not recorded"
        self._journal.event("step-lost", text, step=step, attempt=number, priority=WARNING)

    def budget_spent(self, spent: str, at_work: bool) -> None:
        text = f"run {self._run}: the budget is spent, {spent}{'; ending the steps' if at_work else ''}"
        self._journal.event("budget-spent", text, priority=ERROR)

    def budget_reached(self, spent: str, terms: str) -> None:
        """Say that no step is begun any more; `terms`: what those at work may do."""
        text = f"run {self._run}: the budget is spent, {spent}; no step is begun, those at work {terms}"
        self._journal.event("budget-spent", text, priority=ERROR)

    def budget_raised(self) -> None:
        self._note(f"run {self._run}: the budget has been raised; going on")

    def key_kept(self, claim: Claim) -> None:
        """Say so if an attempt is begun under another key than the list's, since the one before it was cut off."""
        listed = self._standing.plan.by_id[claim.step].key(self._run)
        kept = claim.key or f"{self._run}:{claim.step}"
        if kept != listed:
            text = f"{claim.step}: begun again under the key '{kept}' of the attempt that was cut off, whose effect may"
            text += f" have happened; the list says '{listed}' by now"
            self._journal.event("plan-changed", text, step=claim.step, attempt=claim.number, priority=WARNING)

    def state_lost(self, fault: str) -> None:
        """Say that the ledger is no longer in its place, and that the worker ends for that."""
        self._journal.event("state", fault, priority=ERROR)

    def unrecorded(self) -> None:
        """Say that the ledger is waited for no longer."""
        text = f"{self._disk.waiting_for}: not waited for any longer; how steps ended is not recorded"
        self._journal.event("waiting", text, priority=ERROR)

    def reloaded(self, found: Replay) -> None:
        self._journal.event("reloaded", f"the configuration was read again: {plural.of(self._board.total, 'step')}")
        for line in self._standing.changed(found.changed):
            self._journal.event("plan-changed", line, priority=NOTICE)
        self._beside_the_list()

    def closing(self, finished: str) -> None:
        """Say how the run stands at the end of this worker; for `finished` see status.closing."""
        took, outcomes = clock.monotonic() - self._began, self._outcomes
        started, budget = self._crew.started, self._meter.state()
        news = status.closing(finished, self._run, self._board, started, took, outcomes, budget)
        doubts = begun.doubts(self._standing.unlisted.values())
        if doubts:  # nobody is to take this for a run of which all is known
            news = news._replace(text=news.text + doubts, priority=min(news.priority, WARNING))
        self._say(news, AGENT_OUTCOMES=outcomes.text())

    def next_run(self, name: str, finished: str) -> None:
        """Say what becomes of another run's list that has taken the place of this one's."""
        text = f"the list is that of the run '{name}' by now, which has not been begun"
        if finished == "done":
            self._note(f"{text}; the next worker does, and systemd starts it (in the foreground: start it again)")
        else:
            self._journal.event("warning", f"{text}, since this one has {_ENDED[finished]}", priority=ERROR)

    def summary(self) -> str:
        """Return one line for `systemctl status`."""
        return status.summary(self._board, self._running.values(), self._disk.waiting_for)

    def snapshot(self) -> dict[str, Any]:
        """Return how the run stands, for the control socket."""
        running, waiting_for = self._running.values(), self._disk.waiting_for
        found = status.snapshot(self._run, self._board, running, waiting_for, self._outcomes, clock.now())
        unlisted = [entry._asdict() for entry in self._standing.unlisted.values()]
        return found | {"unlisted": unlisted, "budget": self._meter.state().show(), "copy": self._copies.describe()}

    @property
    def _board(self) -> Board:
        return self._standing.board

    def _note(self, text: str) -> None:
        self._journal.event("state", text, priority=NOTICE)

    def _say(self, news: News, **fields: Any) -> None:
        self._journal.event(news.event, news.text, priority=news.priority, **fields)
