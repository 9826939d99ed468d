"""State from a copy: what a run does not know because its ledger came from a copy.

Anything may have happened between the moment of the copy and now: on the machine that is lost, or in the part of the
ledger that is.  So a step or an effect that has a look-up is asked before its first attempt after the copy, and for
one without (`redo: never`) the list decides with `after_restore`.  The doubt stands in the ledger's facts, so that it
outlives every worker, until the run is done.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from worker import board as boards
from worker import clock
from worker.board import Board
from worker.ledger import Ledger, Row
from worker.plan import Plan, Step
from worker.timespan import show

_AFTER, _SINCE, _HOW = "doubt_after", "doubt_since", "doubt_how"
_SETTLED = "doubt_settled "  # before the key of an effect of which a person has said that it had not happened


class Doubt(NamedTuple):
    """`after`: the newest attempt that the copy had; `since`: when it was made (wall clock), None if nobody knows;
    `how` it came to be the ledger, for people."""

    after: int
    since: float | None
    how: str

    def when(self) -> str:
        """Return when the copy was made, and how old it is, for people."""
        if self.since is None:
            return "of unknown age"
        return f"made at {clock.stamp(self.since)}, {show(max(0.0, clock.wall() - self.since))} ago"


def cast(store: Ledger, how: str, since: float | None) -> None:
    """Note durably that `store` was made from a copy."""
    after = max((row.seq for row in store.rows()), default=0)
    store.note({_AFTER: str(after), _SINCE: "" if since is None else repr(since), _HOW: how})


def read(store: Ledger) -> Doubt | None:
    """Return the doubt in which the run of `store` is, if it is."""
    after = store.fact(_AFTER)
    if not after:
        return None
    since = store.fact(_SINCE)
    return Doubt(int(after), float(since) if since else None, store.fact(_HOW) or "")


# What is noted when the doubt is over.
LIFTED = {_AFTER: "", _SINCE: "", _HOW: ""}


def settled(key: str) -> dict[str, str]:
    """Return what is noted when a person has said that the effect under `key` had not happened."""
    return {_SETTLED + key: "redo"}


def is_settled(store: Ledger, key: str) -> bool:
    """Return whether a person has said that."""
    return store.fact(_SETTLED + key) is not None


def watch(rows: Iterable[Row], doubt: Doubt | None, tried: set[str]) -> Iterator[Row]:
    """Yield the rows, and put the steps into `tried` of which an attempt has ended since the copy.

    One that is open, and is begun only now, still has to ask.
    """
    for row in rows:
        if doubt is not None and row.seq > doubt.after and row.outcome is not None:
            tried.add(row.step)
        yield row


def spread(board: Board, plan: Plan, tried: set[str], ask: bool) -> None:
    """Let the board know that what waits and was not `tried` since the copy may have happened.

    `ask`: also where only a person can tell.
    """
    concerned = ("check", "never") if ask else ("check",)
    for step in plan.steps:
        if step.task.redo in concerned and step.id not in tried and board.state(step.id) == boards.WAITING:
            board.set_progress(step.id, board.progress(step.id)._replace(unsure=True))


def only_a_person_knows(step: Step, board: Board) -> bool:
    """Return whether a step that waits may have happened since the copy, and nothing can be asked."""
    return step.task.redo == "never" and board.progress(step.id).unsure


def opening(doubt: Doubt, board: Board) -> str:
    """Return the line that says what follows from it."""
    waiting = [
        step for step in board.steps if board.state(step.id) == boards.WAITING and board.progress(step.id).unsure
    ]
    asked = sum(step.task.redo == "check" for step in waiting)
    lines = [f"the ledger is {doubt.how}, a copy {doubt.when()}; what came after it is not known here"]
    if asked:
        lines.append("steps with 'check:' are asked before they begin")
    if asked < len(waiting):
        lines.append("steps with 'redo: never' are unknown when it is their turn ('after_restore: go' begins them)")
    return "; ".join(lines)


def cause(doubt: Doubt) -> str:
    """Return why a step is unknown."""
    return f"it may have happened after the copy {doubt.when()}, from which this run goes on"
