"""The plan that the machines of one run have in common, although each finds other items in its world.

Who comes while others are at work takes the steps that those have: were one machine to know of an item more, the
others would begin what needs its task too early.  What only the newcomer has found waits until it is alone.
"""

from collections.abc import Mapping

from worker import late, plan, plural, task
from worker.errors import Problem, StateError
from worker.ledger import Ledger
from worker.plan import Plan, Step


def enlist(listed: Plan, store: Ledger) -> Plan:
    """Let the ledger know the plan, and return the one to work on.  Raises as Ledger.enlist does."""
    if listed.late:
        listed = late.known(listed, store.items())
    if not store.shared:
        return listed
    world = _world(listed)
    listing = listed.listing()
    found = {step.id for step in listed.steps if step.task.id in world}
    run = store.enlist(listing, listed.identity(listing), found)
    return listed if run is None else _adopted(listed, world, found, run)


def _world(listed: Plan) -> set[str]:
    """Return the tasks whose items each machine finds by itself."""
    return {
        name
        for name, entry in listed.tasks.items()
        if isinstance(entry.foreach, task.Glob | task.Lines) and not plan.is_late(entry)
    }


def _adopted(listed: Plan, world: set[str], found: set[str], run: Mapping[str, bool]) -> Plan:
    """Return the plan with those steps of the tasks in `world` that `run` has, done or not."""
    left_out = len(found - run.keys())
    steps: dict[str, list[Step]] = {name: [] for name in world}
    for step in listed.steps:
        if step.task.id in world and step.id in run:
            steps[step.task.id].append(step)
    for name, done in run.items():
        entry = listed.tasks.get(name.partition("@")[0])
        if done or entry is None or entry.id not in world or name in found:
            continue
        item = plan.item_of(name)
        if item is None or plan.step_id(entry.id, item) != name:
            what = f"run '{listed.run}' is being worked on with a step that this machine cannot find: {name}"
            raise StateError(what, "start again when the others have ended, or let this machine see its item")
        steps[entry.id].append(Step(name, entry, item))
    for name, those in steps.items():
        listed = listed.replacing(name, those, late=False)
    if left_out:
        first = listed.tasks[min(world)]
        what = f"foreach: other workers are at this run without {plural.of(left_out, 'item')} that are here by now"
        note = Problem(first.foreach_mark, what, "they are taken up when no other one is at work")
        listed = listed.lacking(note)
    return listed
