"""How the run stands and what has become of it: lines for people, data for programs."""

import os
from collections.abc import Collection
from typing import Any, NamedTuple

from worker import __version__, clock, ledger
from worker import board as boards
from worker.attempt import Attempt
from worker.board import Board
from worker.clock import Now
from worker.decide import Verdict
from worker.journal import ERROR, INFO, NOTICE, WARNING
from worker.timespan import show


class News(NamedTuple):
    """A line for the journal: a key of journal.MESSAGE_IDS, the text, its priority."""

    event: str
    text: str
    priority: int


def opening(run: str, board: Board, root: str) -> News | None:
    """Return the first line of a worker's life, or None if there is nothing to do."""
    done, total = board.count(boards.DONE), board.total
    if done == total:
        return None
    text = f"run {run}: {total} steps, {done} done; {'going on' if done else 'starting'} (state in {root})"
    return News("run-started", text, INFO)


def news(step: str, number: int, verdict: Verdict, took: float, board: Board) -> News:
    """Return what became of attempt `number` of `step`, which took so many seconds."""
    if verdict.outcome == ledger.DONE:
        text = f"{step}: done in {show(took)} ({board.count(boards.DONE)}/{board.total})"
        return News("step-done", text, INFO)
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


def closing(finished: str, run: str, board: Board, attempts: int, took: float) -> News:
    """Return the last line of a worker's life: `finished` is "done", "failed" or "stopped"."""
    counts = f"{board.count(boards.DONE)} of {board.total} steps done"
    if finished == "stopped":
        return News("run-stopped", f"run {run}: stopped, {counts}", NOTICE)
    if finished == "failed":
        text = f"run {run}: failed, {counts}, {board.count(boards.FAILED)} failed for good"
        return News("run-failed", text, ERROR)
    if not attempts:
        return News("nothing-to-do", f"run {run}: nothing to do, all {board.total} steps are done", INFO)
    since = f"{attempts} {'attempt' if attempts == 1 else 'attempts'} in {show(took)} since this start"
    return News("run-done", f"run {run}: done, {counts}; {since}", NOTICE)


def summary(board: Board, running: Collection[Attempt], waiting_for: str | None) -> str:
    """Return one line for `systemctl status`: 37/40 done · task-38, attempt 2."""
    parts = [f"{board.count(boards.DONE)}/{board.total} done"]
    if board.count(boards.FAILED):
        parts.append(f"{board.count(boards.FAILED)} failed")
    if waiting_for:
        parts.append(f"waiting for space: {waiting_for}")
    parts += [f"{attempt.step.id}, attempt {attempt.number}" for attempt in running]
    return " · ".join(parts)


def snapshot(run: str, board: Board, running: Collection[Attempt], waiting_for: str | None, now: Now) -> dict[str, Any]:
    """Return what a living worker says of its run; ages in seconds, times as UTC text.

    `last_sign_age` is the age of the newest sign of life of any running step, None when none runs.
    """
    ages = [round(max(0.0, now.monotonic - attempt.last_sign), 3) for attempt in running]
    current = [
        {
            "step": attempt.step.id,
            "attempt": attempt.number,
            "since": clock.stamp(attempt.started_wall),
            "status": attempt.status_text,
            "progress": attempt.progress_text or None,
            "pid": attempt.pid,
            "last_sign_age": age,
        }
        for attempt, age in zip(running, ages, strict=True)
    ]
    return {
        "run": run,
        "status": "running",
        "steps": counts(board.total, board.count(boards.DONE), board.count(boards.FAILED), board.count(boards.WAITING)),
        "current": current,
        "waiting_for": waiting_for,
        "updated": clock.stamp(now.wall),
        "last_sign_age": min(ages, default=None),
        "worker": {"state": "active", "pid": os.getpid(), "version": __version__},
    }


def counts(total: int, done: int, failed: int, waiting: int) -> dict[str, int]:
    """Return the counts of steps by state."""
    return {"total": total, "done": done, "failed": failed, "skipped": 0, "unknown": 0, "waiting": waiting}
