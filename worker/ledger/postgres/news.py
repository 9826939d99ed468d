"""News: what the other workers of a run have begun and ended, told once."""

from worker import clock
from worker.ledger import Row
from worker.ledger.postgres import answers
from worker.ledger.postgres.floor import Floor
from worker.ledger.postgres.link import Connection, Link
from worker.ledger.postgres.rows import CLOSED, OPEN

# If a commit should ever take longer, the news lack it and the next look at all rows has it.
_SETTLED = 3.0


class News:
    """What has been told so far."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._floor = Floor(_SETTLED)
        self._told: set[tuple[int, bool]] = set()

    def begin(self, connection: Connection) -> None:
        """Leave out what has been there for long; whoever joins reads all of it."""
        self._floor.value = newest(connection)

    def read(self, idle: bool) -> list[Row]:
        """See Ledger.news."""
        with self._link.call() as connection:
            # Before we look, and committed: who commits after this sees it, and wakes us.
            connection.execute(_BE_IDLE, self._link.me | {"idle": idle})
            mark, now = newest(connection), clock.monotonic()
            asked = self._link.me | {"floor": self._floor.value}
            found = connection.execute(_NEWS, asked, binary=True).fetchall()
        heard = answers.rows(found)
        told, self._told = self._told, {(row.seq, row.outcome is None) for row in heard}
        rows = [row for row in heard if (row.seq, row.outcome is None) not in told]
        self._floor.mark(now, mark)
        return rows


def newest(connection: Connection) -> int:
    """Return the newest number that was drawn."""
    found = connection.execute("SELECT last_value FROM agent.tokens").fetchone()
    return 0 if found is None else int(found[0])


_BE_IDLE = """
UPDATE agent.workers SET idle = %(idle)s
WHERE run = %(run)s AND worker = %(worker)s AND life = %(life)s AND idle <> %(idle)s
"""
_NEWS = f"""
SELECT {CLOSED} FROM agent.attempts WHERE run = %(run)s AND change > %(floor)s AND life <> %(life)s
UNION ALL
SELECT {OPEN} FROM agent.steps
WHERE run = %(run)s AND state = 'running' AND token > %(floor)s AND life <> %(life)s
ORDER BY 1
"""
