"""At the limit of a budget: no step is begun, and those at work come to their end, by themselves or asked to.

Spending up to the limit is not above it, and a step that reaches it has been paid for.  So it has time: with `finish`
until its own end, with `stop` GRACE seconds before it is asked to end.
"""

import math

from worker.timespan import show

FINISH, STOP = POLICIES = ("finish", "stop")
GRACE = 10.0


class AtLimit:
    """Whether, and since when (monotonic clock), the budget has been used up while steps are at work."""

    def __init__(self) -> None:
        self._since = math.inf

    @property
    def reached(self) -> bool:
        return self._since < math.inf

    def reach(self, now: float) -> bool:
        """Note that the budget is used up; return whether that is new."""
        new = not self.reached
        self._since = min(self._since, now)
        return new

    def forget(self) -> bool:
        """Note that something is left of the budget; return whether that is new."""
        new = self.reached
        self._since = math.inf
        return new

    def ends_at(self, policy: str) -> float:
        """Return when steps at work are asked to end; inf for never."""
        return self._since + GRACE if policy == STOP else math.inf


def terms(policy: str) -> str:
    """Return what steps at work have, for people."""
    return f"have {show(GRACE)} to come to their end" if policy == STOP else "go on to their own end"
