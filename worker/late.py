"""Late items: those of a task whose file of lines is made by a step that it needs.

The file is read when what the task needs is done, whatever it was before; from then on the items are in the
ledger, so that they outlive the file and are the same for all machines of the run.  Until then the task has the
steps of the file that is there, so that mistakes are found early, or one step that stands for all, `TASK@`.
"""

import os
from collections.abc import Mapping, Sequence

from worker import plan, task
from worker.errors import ConfigError
from worker.plan import Plan, Step
from worker.task import Task


def key(entry: Task) -> str:
    """Return what the ledger keeps a task's items under: with another file it has other items."""
    assert isinstance(entry.foreach, task.Lines)
    return f"{entry.id} {os.path.basename(entry.foreach.path)}"


def known(listed: Plan, items: Mapping[str, Sequence[str]]) -> Plan:
    """Return the plan with the steps of those tasks whose items are in the ledger by now."""
    for name in sorted(listed.late):
        found = items.get(key(listed.tasks[name]))
        if found is not None:
            listed = _with(listed, name, found)
    return listed


def read(listed: Plan, name: str) -> tuple[list[str], Plan]:
    """Return the items of a task, its file being made by now, and the plan with them.  Raises ConfigError."""
    items = plan.late_items(listed.tasks[name])
    grown = _with(listed, name, items)
    problems = plan.key_problems(listed.run, grown.steps) if listed.tasks[name].key is not None else []
    if problems:
        raise ConfigError(problems)
    return items, grown


def without(listed: Plan, name: str) -> Plan:
    """Return the plan with the one step that stands for all of the task, since its items cannot be known."""
    return listed.replacing(name, [plan.placeholder(listed.tasks[name])], late=True)


def _with(listed: Plan, name: str, items: Sequence[str]) -> Plan:
    entry = listed.tasks[name]
    return listed.replacing(name, [Step(plan.step_id(name, item), entry, item) for item in items], late=False)


def is_missing(entry: Task) -> bool:
    """Return whether the task's file is not there, as on a machine that has not made it."""
    assert isinstance(entry.foreach, task.Lines)
    return not os.path.lexists(entry.foreach.path)
