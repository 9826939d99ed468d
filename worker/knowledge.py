"""Knowledge: what a ledger or a checkpoint knows of its run, and what would be lost if another took its place."""

from collections.abc import Iterable
from typing import NamedTuple

from worker import plural
from worker.ledger import DONE, Row
from worker.ledger.effects import COMMITTED, Effect

_NAMED = 3  # so many steps are called by name


class Known(NamedTuple):
    """What a state knows: of which run, which attempts were made, what was done, which effects happened."""

    run: str
    revision: int
    attempts: frozenset[tuple[str, int]]
    done: frozenset[str]
    effects: frozenset[str]

    def join(self, other: "Known") -> "Known":
        """Return what both know of the run."""
        return Known(
            self.run,
            max(self.revision, other.revision),
            self.attempts | other.attempts,
            self.done | other.done,
            self.effects | other.effects,
        )


def of(run: str, revision: int, rows: Iterable[Row], effects: Iterable[Effect]) -> Known:
    """Return what these attempts and effects of a run are."""
    attempts, done = set(), set()
    for row in rows:
        attempts.add((row.step, row.number))
        if row.outcome == DONE:
            done.add(row.step)
    happened = frozenset(effect.key for effect in effects if effect.state == COMMITTED)
    return Known(run, revision, frozenset(attempts), frozenset(done), happened)


def objection(here: Known, found: Known) -> str | None:
    """Return what would be lost if `found` took the place of `here`; None if nothing would."""
    if here.run != found.run:
        if not here.attempts and not here.effects:
            return None
        return f"the run '{here.run}' is here, {plural.of(len(here.done), 'step')} done; this is the run '{found.run}'"
    for what, lost in (("step", here.done - found.done), ("effect", here.effects - found.effects)):
        if lost:
            names = ", ".join(sorted(lost)[:_NAMED]) + (", ..." if len(lost) > _NAMED else "")
            many = plural.of(len(lost), f"{what} that is done here is", f"{what}s that are done here are")
            return f"{many} not in that file ({names})"
    newer = len(here.attempts - found.attempts)
    many = plural.of(newer, "attempt is", "attempts are")
    return f"what is here is newer, {many} not in that file" if newer else None
