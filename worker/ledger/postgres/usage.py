"""Usage: what all attempts of a run have spent, and facts beside it, in one question that is cheap however often asked.

The sum is what the rows say.  Up to the floor nothing is added to it any more, so that part is kept, and each time
only what is newer is summed up.
"""

import math
from collections.abc import Sequence

from worker import clock
from worker.ledger.postgres.facts import owner
from worker.ledger.postgres.floor import Floor
from worker.ledger.postgres.link import Link

# The server gives up on a call, and on a transaction that waits for its caller, before that.
_SETTLED = 15.0
# Should it ever take longer, the sum is wrong for no more than this.
_COUNT_ANEW = 300.0
# A fact that changes when attempts are replaced by what a checkpoint knows, whatever their numbers.
RESTORED = "restored"


class Usage:
    """The sum so far: `_sum` is of all attempts up to the number `_counted`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._sum, self._counted = 0.0, 0
        self._floor = Floor(_SETTLED)
        self._restored = ""
        self._count_at = -math.inf

    def read(self, names: Sequence[str]) -> tuple[dict[str, str], float]:
        """See Ledger.usage."""
        if clock.monotonic() >= self._count_at:
            self._forget()
        facts, spent = self._ask(names)
        if facts.get(RESTORED, "") != self._restored:
            if self._counted:
                self._forget()
                facts, spent = self._ask(names)
            self._restored = facts.get(RESTORED, "")
        return {name: facts[name] for name in names if name in facts}, spent

    def _forget(self) -> None:
        self._sum, self._counted = 0.0, 0
        self._floor = Floor(_SETTLED)
        self._restored = ""
        self._count_at = clock.monotonic() + _COUNT_ANEW

    def _ask(self, names: Sequence[str]) -> tuple[dict[str, str], float]:
        wanted, floor = [*names, RESTORED], self._floor.value
        owners = [owner(self._link, name) for name in wanted]
        asked = {"names": wanted, "owners": owners, "counted": self._counted, "floor": floor}
        facts: dict[str, str] = {}
        settled = newer = 0.0
        newest = 0
        with self._link.call() as connection:
            for kind, name, value, amount, number in connection.execute(_USAGE, self._link.me | asked).fetchall():
                if kind == "fact":
                    facts[name] = value
                elif kind == "settled":
                    settled = amount
                elif kind == "newest":
                    newest = number
                else:
                    newer += amount
        self._sum, self._counted = self._sum + settled, floor
        self._floor.mark(clock.monotonic(), newest)  # not earlier: the answer may have taken its time
        return facts, math.fsum((self._sum, newer))


_USAGE = """
SELECT 'fact', name, value, 0::double precision, 0::bigint FROM agent.facts
WHERE run = %(run)s AND (worker, name) IN (SELECT * FROM unnest(%(owners)s::text[], %(names)s::text[]))
UNION ALL SELECT 'settled', '', '', coalesce(sum(spend), 0), 0 FROM agent.attempts
WHERE run = %(run)s AND change > %(counted)s AND change <= %(floor)s
UNION ALL SELECT 'newer', '', '', coalesce(sum(spend), 0), 0 FROM agent.attempts
WHERE run = %(run)s AND change > %(floor)s
UNION ALL SELECT 'open', '', '', coalesce(sum(spend), 0), 0 FROM agent.steps
WHERE run = %(run)s AND state = 'running'
UNION ALL SELECT 'newest', '', '', 0, last_value FROM agent.tokens
"""
