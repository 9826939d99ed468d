"""Grants: what a person adds to the budget of a run beyond its configuration, and how it is shown."""

import contextlib
from collections.abc import Iterable

from worker import budget, outside, report, schema
from worker.budget import GRANTED, NAMES, Budget, State, number
from worker.errors import AgentError
from worker.ledger import Ledger


def parse(words: Iterable[str]) -> Budget:
    """Return what words such as "spend=5" add; raises ValueError with what to write instead."""
    amounts: dict[str, float] = {}
    for word in words:
        name, _, amount = word.partition("=")
        if name not in NAMES or not schema.is_amount(amount):
            raise ValueError(f"{word!r} is not one of {', '.join(NAMES)} with an amount, as in spend=5 or hours=1.5")
        amounts[name] = amounts.get(name, 0.0) + float(amount)
    return Budget(**amounts)


def grant(store: Ledger, more: Budget, who: str) -> str:
    """Let the run have so much more, durably; return it in words."""
    given = {name: amount for name, amount in zip(NAMES, more, strict=True) if amount}
    store.add({GRANTED[name]: amount for name, amount in given.items()})
    what = ", ".join(f"{number(amount)} more {name}" for name, amount in given.items())
    return f"budget: {what or 'nothing more'}, as {who} says"


def from_outside(root: str, unit: str | None, words: Iterable[str]) -> str:
    """Let the run in the state folder `root` have more; return what was done.  Raises AgentError."""
    given = list(words)
    try:
        more = parse(given)
    except ValueError as exc:
        raise AgentError(str(exc)) from None
    who = outside.user()
    request = {"grant": " ".join(given), "who": who}
    done = outside.tell(root, unit, request, None, lambda store: grant(store, more, who))
    return "\n".join([done, *_in_vain(root, unit, more)])


def _in_vain(root: str, unit: str | None, more: Budget) -> list[str]:
    """Return a line for each thing of which there was no limit to raise."""
    with contextlib.closing(report.open_ledger(root, unit)) as store:
        limits = report.limits_of(store)
    if limits is None:
        return []
    names = (name for name, amount, limit in zip(NAMES, more, limits, strict=True) if amount and limit is None)
    return [f"{name}: the list sets no limit, so there is none to raise yet" for name in names]


def show(root: str, unit: str | None) -> str:
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
            "of how much is not known here: no worker has read its list yet, or it has a mistake (agentctl check)"
        )
    return "\n".join([*lines, *_spent(state)])


def _spent(state: State) -> list[str]:
    spent = state.spent()
    return [f"out of budget: {spent}; {budget.raising(state)}"] if spent else []
