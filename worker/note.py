"""The note for the next attempt: why the last one ended, what it said at the end, what is left of the budget.

A small JSON file, readable by every kind of step; its path is in AGENT_NOTE.
"""

import json
from typing import Any

from worker import clock, files
from worker.board import Progress
from worker.ledger import Row
from worker.task import Retry

# Lines of each stream that go into the note, and how long each may be.
_LINES, _LINE_MAX = 50, 500
_DETAIL_MAX = 8 * 1024


def write(path: str, row: Row, log: bytes, output: bytes, past: Progress, retry: Retry, left: dict[str, float]) -> None:
    """Replace the note at `path` by one about the attempt `row`; `left` of the run's budget.  Raises OSError."""
    files.publish(path, json.dumps(build(row, log, output, past, retry, left), ensure_ascii=False).encode())


def build(row: Row, log: bytes, output: bytes, past: Progress, retry: Retry, left: dict[str, float]) -> dict[str, Any]:
    """Return the note about the attempt `row`; times in seconds, never longer than some 60 kB."""
    return {
        "step": row.step,
        "attempt": row.number,
        "outcome": row.outcome,
        "cause": row.cause,
        "status": row.status,
        "started": clock.stamp(row.started),
        "elapsed": round(row.took, 3) if row.took else None,
        "progress": past.best or None,
        "attempts_left": retry.attempts - past.failures,
        "patience_left": round(max(0.0, retry.patience - past.waited), 3),
        "budget_left": left,
        "doing": row.detail[:_DETAIL_MAX] or None,
        "log": _last_lines(log),
        "output": _last_lines(output),
    }


def _last_lines(data: bytes) -> list[str]:
    lines = data[-_LINES * _LINE_MAX * 2 :].decode(errors="backslashreplace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return [line[:_LINE_MAX] for line in lines[-_LINES:]]
