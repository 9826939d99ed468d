"""Plans, ledger rows and checkpoints for tests that need no file."""

import hashlib

from worker.errors import Mark
from worker.ledger import Ending, Row
from worker.plan import Plan, Step
from worker.task import Retry, Task

RETRY = Retry(attempts=3, delay=10.0)
ENDED = Ending(
    step="a",
    number=1,
    outcome="done",
    counted=False,
    final=False,
    cause="",
    status=0,
    ended=1001.0,
    took=1.0,
    delay=0.0,
    progress=0.0,
    spend=0.0,
    detail="",
    output=b"",
    output_size=0,
    log=b"",
    log_size=0,
)


def task(name: str, run: str = "true", retry: Retry = RETRY) -> Task:
    return Task(
        id=name,
        mark=Mark("list.yaml", 1, 1),
        run=run,
        http=None,
        python=None,
        args="{}",
        shell=("/bin/sh", "-c"),
        env={},
        env_files=(),
        env_file_marks=(),
        secrets=(),
        cwd=None,
        cwd_mark=None,
        foreach=None,
        foreach_mark=None,
        needs=(),
        needs_marks=(),
        before=None,
        after=None,
        expect=None,
        key=None,
        redo="always",
        check=None,
        timeout=None,
        stall_after=None,
        watchdog=None,
        progress_every=None,
        retry=retry,
    )


def graph(**needs: tuple[str, ...]) -> Plan:
    """Return a plan in which each named task needs the tasks listed."""
    steps = tuple(Step(name, task(name)._replace(needs=needed), None) for name, needed in needs.items())
    return Plan(steps, {step.id: step for step in steps})


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
        "took": 1.0,
        "delay": 0.0,
        "progress": 0.0,
        "spend": 0.0,
        "detail": "",
        "output_size": 0,
        "log_size": 0,
    }
    return Row(**{**found, **values})  # type: ignore[arg-type]


def sealed(text: str) -> str:
    """Return a checkpoint that was changed by hand with the digest that it is to have now."""
    lines = text.rpartition("\n{}\n")[0] + "\n{}\n"
    return f'{lines}], "sha256": "{hashlib.sha256(lines.encode()).hexdigest()}"}}\n'
