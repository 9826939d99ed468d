"""Late items: those of a task whose file of lines, or files that match, may be made by a step that it needs.

They are read when what the task needs is done, whatever was there before.  From then on the lines of a file are in
the ledger, so that they outlive it, and where machines share the run so are the matches of a pattern; else these are
looked for again at each start, as those of an inbox.  Until they are read the task has the steps of what is there, so
that mistakes are found early, or one step that stands for all, `TASK@`.
"""

import os
from collections.abc import Mapping, Sequence

from worker import plan, task
from worker.errors import ConfigError
from worker.plan import Plan, Step
from worker.task import Task


def key(entry: Task) -> str:
    """Return what the ledger keeps a task's items under: with another file it has other items."""
    foreach = entry.foreach
    assert isinstance(foreach, task.Glob | task.Lines)
    return f"{entry.id} {os.path.basename(foreach.path if isinstance(foreach, task.Lines) else foreach.pattern)}"


def stay(entry: Task, shared: bool) -> bool:
    """Return whether the items of a task are kept in the ledger once they are read; `shared`: it is on a server."""
    return shared or isinstance(entry.foreach, task.Lines)


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


def settled(listed: Plan, due: Sequence[str]) -> Plan:
    """Return the plan as it stands for a run that no worker is at: nothing stands for items that are not there.

    `due`: the tasks whose items could be read now.
    """
    for name in due:
        if f"{name}@" in listed.by_id:
            listed = listed.replacing(name, [], late=False)
    return listed
