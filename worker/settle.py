"""Settling: a person says whether something that was cut off has happened.

A step, or an effect inside one, is unknown when nobody can tell.  Done: its result is what the person gives, and
it is never done again.  Redo: nothing had happened, and it is begun anew.
"""

import json
import os
import time
from collections.abc import Callable

from worker import begun, clock, files, folder, fromcopy, ledger, outside, process, recovery
from worker.board import doubtful
from worker.decide import doubt
from worker.errors import AgentError
from worker.folder import Places
from worker.installed import Installed
from worker.ledger import DONE, REDO, Claim, Ending, Ledger, Row
from worker.ledger.effects import UNKNOWN


def settle(
    store: Ledger, places: Places, name: str, result: bytes | None, who: str, dead: Callable[[Row], None] | None = None
) -> str:
    """Settle the step or effect `name`: done with `result`, or to be done again if that is None.

    `dead`: no worker lives, so an open attempt was cut off; called with its row, it makes sure that nothing of it runs.
    Durable when this returns; returns what was done, for people.  A step that failed, or was cut off where that
    harms nobody, may be settled as well: its item may be gone for good.  Raises AgentError if nothing that was begun
    and is not done has that name.
    """
    rows: dict[str, Row] = {}
    for row in store.rows():
        if row.step not in rows or rows[row.step].outcome != DONE:
            rows[row.step] = row
    last = rows.get(name)
    cut_off = last is not None and last.outcome is None and dead is not None and not store.shared
    if last is not None and (doubtful(last) if last.outcome else cut_off or last.boot == _SETTLED):
        unknown = (effect.key for effect in store.effects.all() if effect.state == UNKNOWN)
        inside = next((key for key in unknown if last.cause.endswith(doubt(key))), None)
        if inside is not None:
            raise AgentError(f"{name}: its effect '{inside}' is what is unknown", "settle that, and it goes on")
        if cut_off and dead is not None:
            dead(last)
        return _settle_step(store, places, last, result, who)
    effect = store.effects.settle(name, result)
    waiting = [row for row in rows.values() if row.outcome == ledger.UNKNOWN and row.cause.endswith(doubt(name))]
    if effect is None and not waiting and last is not None and last.outcome not in (None, DONE):
        return _settle_step(store, places, last, result, who)
    if effect is None and not waiting:  # if some wait, it was settled by a call whose answer was lost
        raise AgentError(f"'{name}': {_standing(store, name, last)}", _unknown(store, rows, dead is not None))
    if result is None:
        store.note(fromcopy.settled(name))  # after a copy, an effect that the ledger does not know is in doubt again
    for row in waiting:  # they can go on now
        _close(store, row, None, who)
    said = "has happened" if result is not None else "has not happened"
    return f"effect '{name}': {said}, as {who} says"


def _settle_step(store: Ledger, places: Places, last: Row, result: bytes | None, who: str) -> str:
    if result is not None:
        files.publish(places.output(last.step), result)  # what an attempt has left there was not its result
    _close(store, last, result, who)
    left: list[str] = json.loads(store.fact(begun.LEFT) or "[]")
    if result is not None and last.step in left:  # it is done, and none of those that the list has
        left.remove(last.step)
        done = int(store.fact("done_left") or 0) + 1
        store.note({"done_left": str(done), begun.LEFT: json.dumps(left)})
    return f"{last.step}: {'done' if result is not None else 'to be done again'}, as {who} says"


# In place of a boot's id: the attempt is a person's word.  Made in two writes, it may be found open, and is closed.
_SETTLED = "settled"


def _close(store: Ledger, last: Row, result: bytes | None, who: str) -> None:
    """Record one more attempt, which is the person's word."""
    now = clock.wall()
    number = last.number + 1 if last.outcome else last.number
    claim = Claim(last.step, number, last.definition, now, _SETTLED, last.key, item=last.item)
    ending = Ending(
        step=last.step,
        number=claim.number,
        outcome=REDO if result is None else DONE,
        counted=False,
        final=False,
        cause=f"settled by {who}",
        status=None,
        ended=now,
        spend=0.0 if last.outcome else last.spend,
        output=result or b"",
        output_size=len(result or b""),
    )
    claimed = not last.outcome or store.record([], [claim], 1).claims
    if not claimed or store.record([ending], [], 0).lost:
        raise AgentError(f"{last.step}: another worker has just begun it again", "see 'agentctl list'")


def _standing(store: Ledger, name: str, row: Row | None) -> str:
    if row is not None:
        whose = f" with the worker {row.worker}" if row.worker else ""
        return "this step is done" if row.outcome else f"this step is running{whose}"
    effect = next((effect for effect in store.effects.all() if effect.key == name), None)
    if effect is None:
        return "there is no step or effect of that name"
    return f"this effect of {effect.step} is not unknown, it is {effect.state}"


def _unknown(store: Ledger, rows: dict[str, Row], dead: bool) -> str:
    names = [name for name, row in rows.items() if (row.outcome or (dead and not store.shared)) and doubtful(row)]
    names += [effect.key for effect in store.effects.all() if effect.state == UNKNOWN]
    return f"unknown are: {', '.join(names[:8])}" if names else "nothing is unknown here"


def from_outside(root: str, unit: Installed | None, name: str, result: bytes | None, who: str) -> str:
    """Settle `name` in the run of the folder `root`, as `who` says: by its worker if one lives, else here and now.

    Return what was done.  Raises AgentError.
    """
    request = {"settle": name, "who": who, "kept": result is not None}
    places = Places("", root, "")
    again = "'agentctl list' says so; if not, say it again"
    here = lambda store: settle(store, places, name, result, who, lambda row: _end(places, row))  # noqa: E731
    return outside.tell(root, unit, request, result, here, again)


def _end(places: Places, row: Row) -> None:
    """End what a dead worker has left of an attempt.  Raises AgentError if the next worker would go on with it."""
    left = process.leftovers([recovery.marker(places, row)])
    if left and os.path.exists(places._replace(runtime=folder.runtime(places.root)).seen):
        raise AgentError(
            f"{row.step}: is at work without its worker, which died: {left[0]}",
            "the next worker goes on with it: start that, and say it again if the step is unknown then",
        )
    recovery.end_leftovers([row], places, lambda until: time.sleep(max(0.0, until - clock.monotonic())))
