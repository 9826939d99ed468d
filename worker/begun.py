"""Begun steps: what the ledger has begun and not ended well stays in the plan, although its item has left the world.

A pattern matches no more what a step has moved away, a file of lines shrinks, a list is edited: the step is still
to be done, asked about or settled, and what needs it waits.  A task that has become one step, or many, cannot do the
steps that it had before: those that may have happened are unknown until a person settles them.  Only a person takes a
step out, with its task; then it is not run, and it is named, and no run is done, until it is settled.
"""

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from worker import ledger, plan, plural
from worker.board import doubtful
from worker.ledger import Ending, Row
from worker.plan import Plan, Step

# The fact that names the steps which were begun, are not done, and had left the list when a worker last read it.
LEFT = "left"
_NAMED = 8  # so many steps are named in one line


class Unlisted(NamedTuple):
    """A step that was begun, is not done, and whose task is no longer in the list.

    `doubt`: its last attempt was cut off, and nobody knows whether it has happened.
    """

    step: str
    attempt: int
    outcome: str
    cause: str
    doubt: bool


def keep(listed: Plan, left: Iterable[Row]) -> Plan:
    """Return the plan with the steps of these rows, the last of each, as far as their tasks are in the list.

    One whose key is now another step's is that step's affair.
    """
    found = [step for row in left if (step := _rebuilt(listed, row)) is not None]
    if any(step.task.key is not None for step in found):
        taken = {step.key(listed.run) for step in listed.steps if step.task.key is not None}
        found = [step for step in found if step.key(listed.run) not in taken]
    return listed.keeping(found) if found else listed


def misfit(step: Step) -> bool:
    """Return whether the step is of a task that was one step and has items now, or the other way round."""
    return _is_item(step.id) != (step.task.foreach is not None)


def without_misfits(known: Plan) -> Plan:
    """Return the plan without the steps that do not fit their tasks; `keep` finds those that are still needed."""
    odd = [step for step in known.steps if step.id in known.kept and misfit(step)]
    return known.dropping(odd) if odd else known


def _is_item(name: str) -> bool:
    return "@" in name


def unlisted(known: Plan, left: Iterable[Row], running: Container[str]) -> list[Unlisted]:
    """Return the steps of these rows that the plan does not have, but for those that are `running` here.

    One that a person has settled with "redo" is as if it had never been begun.
    """
    rows = list(left)
    followed = succeeded(known, rows)
    return [
        Unlisted(row.step, row.number, row.outcome or ledger.INTERRUPTED, row.cause, doubtful(row))
        for row in rows
        if row.step not in known.by_id
        and row.step not in running
        and row.outcome != ledger.REDO
        and row.step not in followed
    ]


def succeeded(known: Plan, left: Iterable[Row]) -> set[str]:
    """Return the steps of these rows whose key is that of a step in the plan, which goes on for them."""
    keys = {step.key(known.run) for step in known.steps if step.task.key is not None}
    return {row.step for row in left if (row.key or f"{known.run}:{row.step}") in keys} if keys else set()


def of_ending(ending: Ending) -> Unlisted:
    """Return the same of an attempt that has just ended, and not well."""
    doubt = ending.unsure or ending.outcome == ledger.UNKNOWN
    return Unlisted(ending.step, ending.number, ending.outcome, ending.cause, doubt)


def kept_lines(known: Plan) -> Iterator[str]:
    """Yield a line for each task that has steps only because they were begun."""
    by_task: dict[str, list[str]] = {}
    for step in known.steps:
        if step.id in known.kept:
            by_task.setdefault(step.task.id, []).append(step.id)
    for task, steps in by_task.items():
        what = plural.of(len(steps), "begun step stays", "begun steps stay")
        whose = "its item has" if len(steps) == 1 else "their items have"
        why = f"{whose} left"
        if misfit(known.by_id[steps[0]]):
            why = f"the task is {'many steps' if known.tasks[task].foreach else 'one step'} now"
        yield f"{task}: {what} in the plan although {why}: {_names(steps)}"


def unlisted_lines(found: Iterable[Unlisted]) -> Iterator[str]:
    """Yield a line for each step of which nobody knows whether it has happened, and one for each other task."""
    failed: dict[str, list[str]] = {}
    for entry in found:
        if entry.doubt:
            yield (
                f"{entry.step}: no longer in the list, and nobody knows whether it has happened (attempt "
                f"{entry.attempt} {entry.outcome}: {entry.cause}); look, and say so: agentctl settle '{entry.step}' "
                "--done, or --redo"
            )
        else:
            failed.setdefault(entry.step.partition("@")[0], []).append(entry.step)
    for task, steps in failed.items():
        what = plural.of(len(steps), "step was", "steps were")
        yield f"{task}: no longer in the list; {what} begun and not done: {_names(steps)}"


def doubts(found: Iterable[Unlisted]) -> str:
    """Return what the last line of a run says of steps that nobody has settled; empty if there are none."""
    steps = [entry.step for entry in found if entry.doubt]
    if not steps:
        return ""
    return f"; no longer in the list, and not settled: {_names(steps)}"


def _names(steps: list[str]) -> str:
    return ", ".join(steps[:_NAMED]) + (", ..." if len(steps) > _NAMED else "")


def _rebuilt(listed: Plan, row: Row) -> Step | None:
    """Return the step of a row from its task and its item; None if the list has no such task with items."""
    task = listed.tasks.get(row.step.partition("@")[0])
    if task is None:
        return None
    if _is_item(row.step) != (task.foreach is not None):
        # Its program is not the task's any more: asked about as redo: never is, and never begun.
        return Step(row.step, task._replace(redo="never"), row.item) if doubtful(row) else None
    if task.foreach is None:
        return None
    item = plan.item_of(row.step) if row.item is None else row.item  # an older version has not kept it
    if item is None or plan.step_id(task.id, item) != row.step:
        return None
    return Step(row.step, task, item)
