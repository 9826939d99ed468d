"""Grants: what a person adds to the budget of a run beyond its configuration, and how it is shown.

A grant has an id, which is recorded with it: whoever does not know whether it was heard says it again, and it counts
once.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable

from worker import budget, outside, report, schema
from worker.budget import GRANTED, NAMES, Budget, State, number
from worker.errors import AgentError
from worker.installed import Installed
from worker.ledger import Ledger, LedgerAway, StorageFull

# Before a server that is away is asked again, while a person waits.
_PAUSES = (0.2, 1.0, 3.0)
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def parse(words: Iterable[str]) -> Budget:
    """Return what words such as "spend=5" add; raises ValueError with what to write instead."""
    amounts: dict[str, float] = {}
    for word in words:
        name, _, amount = word.partition("=")
        if name not in NAMES or not schema.is_amount(amount):
            raise ValueError(f"{word!r} is not one of {', '.join(NAMES)} with an amount, as in spend=5 or hours=1.5")
        amounts[name] = amounts.get(name, 0.0) + float(amount)
    return Budget(**amounts)


def new_id() -> str:
    """Return an id that no other grant has."""
    return os.urandom(8).hex()


def grant(store: Ledger, more: Budget, who: str, id: str) -> str:
    """Let the run have so much more, durably, unless the grant `id` counts already; return it in words.

    Raises AgentError if that was another one.
    """
    given = {name: amount for name, amount in zip(NAMES, more, strict=True) if amount}
    what = ", ".join(
        f"{number(amount)} more {name.removesuffix('s') if amount == 1 else name}" for name, amount in given.items()
    )
    what = what or "nothing more"
    mark = f"grant_{id}"
    before = store.fact(mark)
    if before not in (None, what):
        raise AgentError(f"the grant '{id}' was another one: {before}", "take another --id, or leave it out")
    store.add({GRANTED[name]: amount for name, amount in given.items()}, mark=(mark, what))
    return f"budget: {what}, as {who} says"


def from_outside(root: str, unit: Installed | None, words: Iterable[str], id: str | None, who: str) -> str:
    """Let the run in the state folder `root` have more, as `who` says; return what was done.

    Raises AgentError; where nobody knows whether it was done, with how to say it again.
    """
    given, id = list(words), new_id() if id is None else id
    if not _ID.fullmatch(id):
        raise AgentError(f"{id!r} is no id of a grant", "up to 64 letters, digits, dots, hyphens and underscores")
    try:
        more = parse(given)
    except ValueError as exc:
        raise AgentError(str(exc)) from None
    request = {"grant": " ".join(given), "who": who, "id": id}
    again = f"say it again with --id {id}, and it counts once"
    done = outside.tell(root, unit, request, None, lambda store: _insist(lambda: grant(store, more, who, id)), again)
    return "\n".join([done, *_in_vain(root, unit, more)])


def _insist(action: Callable[[], str]) -> str:
    """Return `action()`, made again while the server that it asks is away for a moment."""
    for pause in _PAUSES:
        try:
            return action()
        except LedgerAway:
            time.sleep(pause)
    return action()


def _in_vain(root: str, unit: Installed | None, more: Budget) -> list[str]:
    """Return a line for each thing of which there was no limit to raise, as far as that can be known now."""
    limits = None
    with contextlib.suppress(AgentError, StorageFull), contextlib.closing(report.open_ledger(root, unit)) as store:
        limits = report.limits_of(store)
    if limits is None:
        return []
    names = (name for name, amount, limit in zip(NAMES, more, limits, strict=True) if amount and limit is None)
    return [f"{name}: the list sets no limit, so there is none to raise yet" for name in names]


def show(root: str, unit: Installed | None) -> str:
    """Return the budget of the run in `root` as lines: what is used of what there is."""
    with contextlib.closing(report.open_ledger(root, unit)) as store:
        limits = report.limits_of(store)
        state = budget.read(store, limits or Budget())
    lines = []
    for name, limit, used in zip(NAMES, state.limits, state.used, strict=True):
        allowed = f" of {number(limit)}" if limit is not None else " used" if limits is None else ", no limit"
        lines.append(f"{name:<9} {number(used)}{allowed}")
    if limits is None:
        lines.append(
            "of how much is not known here: no worker has read its list yet, or it has a mistake (agentctl check), "
            "or is that of another run by now"
        )
    return "\n".join([*lines, *_spent(state)])


def _spent(state: State) -> list[str]:
    spent = state.spent()
    return [f"out of budget: {spent}; {budget.raising(state)}"] if spent else []
