"""Plans and ledger rows for tests that need no file."""

from worker.config import Retry, Task
from worker.errors import Mark
from worker.ledger import Row
from worker.plan import Plan, Step

RETRY = Retry(attempts=3, delay=10.0)


def task(name: str, run: str = "true", retry: Retry = RETRY) -> Task:
    return Task(
        id=name,
        mark=Mark("list.yaml", 1, 1),
        run=run,
        shell=("/bin/sh", "-c"),
        env={},
        env_files=(),
        env_file_marks=(),
        cwd=None,
        cwd_mark=None,
        foreach=None,
        foreach_mark=None,
        timeout=None,
        stall_after=None,
        watchdog=None,
        retry=retry,
    )


def plan_of(*names: str, run: str = "true") -> Plan:
    steps = tuple(Step(name, task(name, run), None) for name in names)
    return Plan(steps, {step.id: step for step in steps})


def row(seq: int, step: str, outcome: str | None, plan: Plan, **values: object) -> Row:
    """Return a row of the ledger for a step of `plan`; its number is 1 unless given."""
    found = {
        "seq": seq,
        "step": step,
        "number": 1,
        "definition": plan.digest(plan.by_id[step]) if step in plan.by_id else "?",
        "started": 1000.0,
        "boot": "this-boot",
        "outcome": outcome,
        "counted": outcome in ("failed", "stalled"),
        "final": False,
        "cause": "",
        "status": None,
        "ended": 1001.0 if outcome else None,
        "retry_at": None,
        "output_size": 0,
        "log_size": 0,
    }
    return Row(**{**found, **values})  # type: ignore[arg-type]
