"""The budget of a run: how often its worker may die, how long it may work, how much its steps may spend.

What is used is counted in the ledger, so that a crash buys no new allowance.  Restarts: deaths of a worker by a
crash, the watchdog or lack of memory; a reboot, and what an operator does, cost nothing.  Hours: the time in which a
worker was at work, its waits included, of all workers together.  Spend: what steps say that they have spent.
"""

from typing import NamedTuple

from worker.ledger import Ledger

RESTARTS, HOURS, SPEND = NAMES = ("restarts", "hours", "spend")
# The facts of a ledger: what is used (spend is the sum of the attempts'), what was granted beyond the configuration.
USED = {RESTARTS: "used_restarts", HOURS: "used_hours"}
GRANTED = {name: f"granted_{name}" for name in NAMES}
_FACTS = (*USED.values(), *GRANTED.values())
WORKED_UNTIL = "worked_until"
COUNTED_END = "counted_end"  # the newest end of a worker that is among the restarts
# Of sums of decimal fractions.
_ROUNDING = 1e-9


class Budget(NamedTuple):
    """What a run may use, or what it has used; None: no limit."""

    restarts: float | None = None
    hours: float | None = None
    spend: float | None = None

    def plus(self, more: "Budget") -> "Budget":
        """Return both together; where there is no limit, more is none either."""
        return Budget(*(None if a is None else a + (b or 0) for a, b in zip(self, more, strict=True)))


class State(NamedTuple):
    """What may be used, grants included, and what is used."""

    limits: Budget
    used: Budget

    def spent(self) -> str:
        """Return what has been used up, for people; empty while nothing is.

        So many restarts are allowed, and one more is too many; of hours and spend nothing is left at the limit.
        """
        for name, limit, used in zip(NAMES, self.limits, self.used, strict=True):
            so_far = used or 0.0
            if limit is not None and (so_far > limit if name == RESTARTS else so_far >= limit - _rounding(limit)):
                return f"{name}: {number(used)} of {number(limit)} used"
        return ""

    def show(self) -> dict[str, dict[str, float | None]]:
        """Return it for programs: by name, `used` and `limit`."""
        return {
            name: {"used": round(used or 0, 6), "limit": None if limit is None else round(limit, 6)}
            for name, limit, used in zip(NAMES, self.limits, self.used, strict=True)
        }

    def left(self) -> dict[str, float]:
        """Return what is left of each limit there is, by name."""
        pairs = zip(NAMES, self.limits, self.used, strict=True)
        return {name: round(max(0.0, limit - (used or 0)), 6) for name, limit, used in pairs if limit is not None}


def _rounding(limit: float) -> float:
    return _ROUNDING * max(1.0, limit)


def number(value: float | None) -> str:
    """Return an amount as a person would write it."""
    return f"{value or 0:.4f}".rstrip("0").rstrip(".")


def raising(state: State) -> str:
    """Return how to raise what is spent, for people."""
    name = state.spent().partition(":")[0]
    return f"to go on: agentctl budget --add {name}=AMOUNT, then start it again" if name else ""


def read(ledger: Ledger, limits: Budget) -> State:
    """Return how the budget stands by the ledger alone."""
    facts, spent = ledger.usage(_FACTS)
    amounts = {name: float(facts.get(name) or 0) for name in _FACTS}
    used = Budget(amounts[USED[RESTARTS]], amounts[USED[HOURS]], spent)
    return State(limits.plus(Budget(*(amounts[GRANTED[name]] for name in NAMES))), used)
