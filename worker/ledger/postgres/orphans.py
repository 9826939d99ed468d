"""Orphans: attempts whose holders are gone, found by their leases and taken over; see worker.ledger.Ledger.orphans."""

import math

from worker import clock
from worker.ledger import Row
from worker.ledger.postgres import answers
from worker.ledger.postgres.link import Link
from worker.ledger.postgres.rows import ME, OPEN, Held


class Orphans:
    """What this worker has seen of other workers' leases.

    `overdue_at`: when to look again (monotonic clock), since a claim has run out and its holder will be gone if it is
    still so then.
    """

    def __init__(self, link: Link, held: Held, lease: float) -> None:
        """`held` takes in what is taken over, for a `lease` in seconds."""
        self.overdue_at = math.inf
        self._link = link
        self._held = held
        self._lease = lease
        # Claims that we have seen run out, by token and end, and when their holders are gone (monotonic clock).
        self._silent: dict[tuple[int, int], float] = {}

    def take_over(self) -> list[Row]:
        """Make them ours, and return them."""
        with self._link.call() as connection:
            began, patient = clock.monotonic(), self._link.may_take_over()
            gone = [claim for claim, gone_at in self._silent.items() if patient and gone_at <= began]
            asked = {"lease": self._lease, "held": self._held.tokens()}
            asked |= {"tokens": [token for token, _until in gone], "untils": [until for _token, until in gone]}
            found = connection.execute(_TAKE_OVER, self._link.me | asked, binary=True).fetchall()
            late = connection.execute(_LATE, self._link.me | asked).fetchall() if patient else []
        now, before = clock.monotonic(), self._silent
        self._silent = {(token, until): before.get((token, until), now + lease / 2) for token, until, lease in late}
        self.overdue_at = min((gone_at for gone_at in self._silent.values() if gone_at > began), default=math.inf)
        rows = sorted(answers.rows(found))
        self._held.add(((row.step, row.number, row.seq) for row in rows), began)
        return rows


# A claim's lease as a number that is the same each time it is asked for, whatever the client's time zone.
_UNTIL = "(extract(epoch FROM s.lease_until) * 1000000)::bigint"
# One that ends later than a lease from now was made before the clock of the database was put back.
_RUN_OUT = """
(s.lease_until < now() OR s.lease_until > now() + coalesce(w.lease, %(lease)s) * interval '1 second')
"""
# Claims that have run out, and how long their holders' leases are.
_LATE = f"""
SELECT s.token, {_UNTIL}, coalesce(w.lease, %(lease)s)
FROM agent.steps s LEFT JOIN agent.workers w ON w.run = s.run AND w.worker = s.worker
WHERE s.run = %(run)s AND s.state = 'running' AND {_RUN_OUT} AND s.life <> %(life)s
"""
# Claims whose holders are gone: those that have been found run out before and are the same still, and those of
# workers that have left; attempts that were open in a checkpoint and are nobody's here; and those that we have
# taken over without hearing of it.
_TAKE_OVER = f"""
WITH me AS (
    {ME}
), late AS (
    SELECT s.step AS name FROM agent.steps s CROSS JOIN me
    WHERE s.run = %(run)s AND s.state = 'running'
        AND (s.life = '' OR (s.life = %(life)s AND s.former <> '')
            OR (s.token, {_UNTIL}) IN (SELECT * FROM unnest(%(tokens)s::bigint[], %(untils)s::bigint[]))
            OR EXISTS (SELECT FROM agent.workers w
                WHERE w.run = s.run AND w.worker = s.worker AND w.life = s.life AND w.seen = to_timestamp(0)
                    AND {_RUN_OUT}))
        AND NOT (s.life = %(life)s AND s.token = ANY (%(held)s::bigint[]))
    FOR UPDATE OF s SKIP LOCKED)
UPDATE agent.steps s SET
    token = nextval('agent.tokens'), worker = %(worker)s, life = %(life)s,
    former = coalesce(nullif(former, ''), worker), lease_until = now() + %(lease)s * interval '1 second'
FROM late WHERE s.step = late.name AND s.run = %(run)s
RETURNING {OPEN}
"""
