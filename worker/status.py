"""How the run stands and what has become of it: lines for people, data for programs."""

import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from worker import __version__, clock, ledger, plural
from worker import board as boards
from worker.attempt import Attempt
from worker.board import Board
from worker.budget import State, raising
from worker.clock import Now
from worker.decide import Verdict
from worker.journal import ERROR, INFO, NOTICE, WARNING
from worker.ledger import Row
from worker.timespan import show


class Outcomes:
    """How often steps, and effects inside them, were done and found to be done: proof that resuming works."""

    NAMES = ("executed", "skipped", "awaited", "taken-over", "found")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(self.NAMES, 0)

    def step(self, outcome: str, found: bool, again: bool) -> None:
        """Count a step whose attempt had this outcome; `again`: the attempt before it had been cut off."""
        if outcome == ledger.DONE:
            self.effect("found" if found else "taken-over" if again else "executed")

    def effect(self, outcome: str, times: int = 1) -> None:
        """Count an outcome if it is one of NAMES; the others are no proof of anything."""
        if outcome in self.counts:
            self.counts[outcome] += times

    def text(self) -> str:
        """Return those that have occurred: executed 3, skipped 37."""
        return ", ".join(f"{name} {count}" for name, count in self.counts.items() if count) or "nothing executed"


class News(NamedTuple):
    """A line for the journal: a key of journal.MESSAGE_IDS, the text, its priority, the step that it is about."""

    event: str
    text: str
    priority: int
    step: str | None = None


def opening(run: str, board: Board, root: str, changed: Iterable[str], gone: Collection[Row]) -> Iterator[News]:
    """Yield the first lines of a worker's life: none if there is nothing to do but what the list says otherwise now.

    `changed`: what is to be said of steps whose definition is another one than when they were done; `gone`: attempts
    at steps that are no longer in the list.
    """
    done, total = board.count(boards.DONE), board.total
    if done < total:
        begun = done or board.count(boards.RUNNING)
        how = "going on" if begun else "starting"
        text = f"run {run}: {plural.of(total, 'step')}, {done} done; {how} (state in {root})"
        yield News("run-started", text, INFO)
    for text in changed:
        yield News("plan-changed", text, NOTICE)
    finished = sum(row.outcome == ledger.DONE for row in gone)
    if finished:
        yield News(
            "plan-changed",
            f"{plural.of(finished, 'finished step is', 'finished steps are')} no longer in the list",
            INFO,
        )


def changed_line(task: str, steps: int, tasks: int) -> str:
    """Return what is said of a task that is defined otherwise than when `steps` of its steps were done.

    `tasks`: it stands for so many that they are not named one by one.
    """
    if tasks > 1:
        what = f"{task} and {plural.of(tasks - 1, 'more task')}: {plural.of(steps, 'step is', 'steps are')}"
    else:
        what = f"{task}: {plural.of(steps, 'step is', 'steps are')}"
    when = "it was" if steps == 1 else "they were"
    return f"{what} defined otherwise than when {when} done; not done again (another id would run that)"


def news(step: str, number: int, verdict: Verdict, took: float, board: Board) -> News:
    """Return what became of attempt `number` of `step`, which took so many seconds."""
    if verdict.outcome == ledger.DONE:
        how = f"; {verdict.cause}" if verdict.cause else ""
        text = f"{step}: done in {show(took)} ({board.count(boards.DONE)}/{board.total}){how}"
        return News("step-done", text, INFO)
    if verdict.outcome == ledger.UNKNOWN:
        text = f"{step}: unknown: {verdict.cause} (attempt {number}); {settling(verdict.effect or step)}"
        return News("step-unknown", text, ERROR)
    if verdict.final:
        return News("step-failed", f"{step}: failed for good: {verdict.cause} (attempt {number})", ERROR)
    if verdict.outcome == ledger.INTERRUPTED:
        text = f"{step}: attempt {number} interrupted: {verdict.cause}"
        return News("step-interrupted", text, WARNING)
    if verdict.outcome == ledger.AGAIN:
        return News("step-again", f"{step}: attempt {number} {verdict.cause}; next at once", NOTICE)
    wait = f"next in {show(verdict.delay)}" if verdict.delay else "next at once"
    if verdict.outcome == ledger.DEFERRED:
        return News("step-deferred", f"{step}: attempt {number} {verdict.cause}; {wait}", NOTICE)
    return News("step-retry", f"{step}: attempt {number} {verdict.cause}; {wait}", WARNING)


def settling(name: str) -> str:
    """Return what a person is to do about a step or effect of which nobody knows whether it happened."""
    return f"look, and say so: agentctl settle '{name}' --done [RESULT], or --redo"


def effect(step: str, key: str, outcome: str) -> News:
    """Return what became of an effect that a step asked for."""
    text = f"{step}: effect '{key}': {outcome}"
    if outcome == "unknown":
        return News("effect", f"{text}, it was cut off; {settling(key)}", ERROR)
    if outcome == "conflict":
        return News("effect", f"{text}, the key stands for something else; neither done nor skipped", ERROR)
    return News("effect", text, WARNING if outcome == "lost" else INFO)


def closing(
    finished: str, run: str, board: Board, attempts: int, took: float, outcomes: Outcomes, budget: State
) -> News:
    """Return the last line of a worker's life: `finished` is "done", "failed", "out-of-budget", "stopped" or "left"."""
    counts = f"{board.count(boards.DONE)} of {plural.of(board.total, 'step')} done"
    if finished == "stopped":
        return News("run-stopped", f"run {run}: stopped, {counts}", NOTICE)
    if finished == "left":
        return News("run-left", f"run {run}: {counts}; the next worker goes on with what runs", NOTICE)
    if finished == "out-of-budget":
        text = f"run {run}: out of budget, {counts}; {budget.spent()}; {raising(budget)}"
        return News("run-out-of-budget", text, ERROR)
    if finished == "failed":
        text = f"run {run}: failed, {counts}"
        if board.count(boards.FAILED) or board.count(boards.UNKNOWN):  # else for steps that are not in the list
            text += f", {board.count(boards.FAILED)} failed for good"
        if board.count(boards.UNKNOWN):
            text += f", {board.count(boards.UNKNOWN)} unknown (agentctl list)"
        return News("run-failed", text, ERROR)
    if not board.total:
        return News("nothing-to-do", f"run {run}: nothing to do, the list has no steps now", INFO)
    if not attempts:
        all_ = "the only step is" if board.total == 1 else f"all {plural.of(board.total, 'step')} are"
        return News("nothing-to-do", f"run {run}: nothing to do, {all_} done", INFO)
    since = f"{plural.of(attempts, 'attempt')} in {show(took)} since this start"
    return News("run-done", f"run {run}: done, {counts}; {since} ({outcomes.text()})", NOTICE)


def summary(board: Board, running: Collection[Attempt], waiting_for: str | None) -> str:
    """Return one line for `systemctl status`: 37/40 done · task-38, attempt 2."""
    parts = [f"{board.count(boards.DONE)}/{board.total} done"]
    if board.count(boards.FAILED):
        parts.append(f"{board.count(boards.FAILED)} failed")
    if board.count(boards.UNKNOWN):
        parts.append(f"{board.count(boards.UNKNOWN)} unknown")
    if board.count(boards.ELSEWHERE):
        parts.append(f"{board.count(boards.ELSEWHERE)} with other workers")
    if waiting_for:
        parts.append(f"waiting for {waiting_for}")
    parts += [f"{attempt.step.id}, attempt {attempt.number}" for attempt in running]
    return " · ".join(parts)


def snapshot(
    run: str, board: Board, running: Collection[Attempt], waiting_for: str | None, outcomes: Outcomes, now: Now
) -> dict[str, Any]:
    """Return what a living worker says of its run; ages in seconds, times as UTC text.

    `last_sign_age` is the age of the newest sign of life of any running step, None when none runs.
    """
    ages = [round(max(0.0, now.monotonic - attempt.last_sign), 3) for attempt in running]
    current = [
        {
            "step": attempt.step.id,
            "attempt": attempt.number,
            "since": clock.stamp(attempt.started_wall),
            "status": attempt.said.status_text,
            "progress": attempt.said.progress_text or None,
            "pid": attempt.pid,
            "last_sign_age": age,
        }
        for attempt, age in zip(running, ages, strict=True)
    ]
    return {
        "run": run,
        "status": "running",
        "steps": counts(board),
        "outcomes": outcomes.counts,
        "current": current,
        "waiting_for": waiting_for,
        "updated": clock.stamp(now.wall),
        "last_sign_age": min(ages, default=None),
        "worker": {"state": "active", "pid": os.getpid(), "version": __version__},
    }


def counts(board: Board) -> dict[str, int]:
    """Return the counts of steps by state; `elsewhere`: other workers of the run are at them."""
    return {
        "total": board.total,
        "done": board.count(boards.DONE),
        "failed": board.count(boards.FAILED),
        "skipped": 0,
        "unknown": board.count(boards.UNKNOWN),
        "elsewhere": board.count(boards.ELSEWHERE),
        "waiting": board.count(boards.WAITING),
    }
