"""The ledger in PostgreSQL: several workers, on several machines, work through one run.

A claim is a row of `steps` that names its holder, holds for a lease, and carries a token; an ending is recorded
by whoever has the newest token, in the transaction in which that is checked.  All times that decide something
are the server's.  A call that was cut off is made again with the same arguments: an ending that was recorded is
found recorded, and a claim that was granted without our hearing of it is granted again.

Relied on, so that databases which speak PostgreSQL's language can serve as well: READ COMMITTED or stricter,
INSERT ON CONFLICT, data-modifying WITH, FOR UPDATE SKIP LOCKED and FOR SHARE, unnest, json_to_recordset,
sequences, partial unique indexes, COPY.  Not relied on: advisory locks, triggers and functions, temporary tables,
long transactions, the order of commits, LISTEN (where there is none, workers look now and then).
"""

import collections
import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from worker.errors import StateError

try:
    import psycopg  # noqa: F401
except ImportError as exc:
    raise StateError(
        f"ledger: postgresql:// needs psycopg 3, which cannot be used here ({exc})",
        "install the package python3-psycopg, or psycopg[binary] into the agent's environment",
    ) from exc

from worker import clock, points
from worker.ledger import Claim, Ending, Recorded, Row
from worker.ledger.postgres import plan
from worker.ledger.postgres.effects import PostgresEffects
from worker.ledger.postgres.errors import standby
from worker.ledger.postgres.link import LONG, Connection, Link, Member
from worker.ledger.postgres.rows import CLOSED, ME, OPEN, RECORD, RUNNING, Held, in_order, recording, text
from worker.ledger.postgres.schema import are_ready, prepare

__all__ = ["Member", "PostgresLedger"]

# Facts of one machine; all others are the run's.
_OWN_FACTS = ("boot", "config", "version", "outcomes", "worked_until")
_BATCH = 5000
_OUTCOME = Row._fields.index("outcome")
# Whoever has drawn a number has committed so many seconds later; if it should ever take longer, `news` lacks it
# and the next look at all rows has it.
_SETTLED = 3.0


class PostgresLedger:
    """The ledger of one run on a server; see worker.ledger.Server.

    `replaced`: another life of this worker has joined since.  Then nothing that we ask for is granted any more.
    """

    shared = True

    def __init__(self, link: Link, lease: float) -> None:
        self.worker = link.member.id
        self.replaced = False
        self.effects = PostgresEffects(link)
        self._link = link
        self._lease = lease
        self._held = Held()
        # Claims that we have seen run out, by token and end, and when their holders are gone (monotonic clock).
        self._silent: dict[tuple[int, int], float] = {}
        self.overdue_at = math.inf
        # `news` has told what was drawn up to the floor; the marks say when which number was the newest one.
        self._floor = 0
        self._marks: collections.deque[tuple[float, int]] = collections.deque()
        self._told: set[tuple[int, bool]] = set()

    @classmethod
    def join(
        cls, dsn: str, run: str, member: Member, lease: float, timeout: float, calm: float | None = None
    ) -> "PostgresLedger":
        """Take part in a run: the tables are there, and what an earlier life of this member held is ours.

        That life can commit nothing any more.  From others nothing is taken over before we have been in touch for
        `calm` seconds, by default a lease.  Raises LedgerAway if the server does not answer in `timeout`
        seconds a host, StateError if it does not let us in, is read-only, or is of a newer format.
        """
        link = Link(dsn, run, member, timeout)
        link.calm = lease if calm is None else calm
        ledger = cls(link, lease)
        try:
            with link.call() as connection:
                if connection.execute("SHOW transaction_read_only").fetchone() == ("on",):
                    raise standby(link.place)
                if connection.execute("SHOW server_encoding").fetchone() not in (("UTF8",), ("SQL_ASCII",)):
                    raise StateError(
                        f"{link.place}: the database cannot hold every text", "make one with ENCODING 'UTF8'"
                    )
                prepare(connection, link.place)
                ledger._register(connection)
            link.enter(ledger._greet)
        except BaseException:
            link.close()
            raise
        return ledger

    @classmethod
    def look(cls, dsn: str, run: str, timeout: float, worker: str = "") -> "PostgresLedger":
        """Return the run's ledger for reading; `worker`: whose facts about its own machine are meant.

        Raises FileNotFoundError if there is no such run, StateError and LedgerAway as `join` does.
        """
        link = Link(dsn, run, Member(worker, "", "", 0, ""), timeout, read_only=True)
        try:
            with link.call() as connection:
                if not are_ready(connection, link.place) or not connection.execute(_IS_RUN, link.me).fetchone():
                    raise FileNotFoundError(f"{link.place}: no run '{run}'")
            link.enter()
        except BaseException:
            link.close()
            raise
        return cls(link, 0.0)

    def enlist(self, steps: Sequence[tuple[str, str]]) -> None:
        with self._link.call(LONG) as connection:
            plan.enlist(connection, self._link, steps)

    def record(self, endings: Sequence[Ending], claims: Sequence[Claim], most: int | None = None) -> Recorded:
        most = len(claims) if most is None else most
        granted: dict[tuple[str, int], int] = {}
        closed: set[tuple[str, int]] = set()
        taken: list[str] = []
        idle = False
        parts = in_order(endings, claims)
        points.at("ledger-written")
        with self._link.call() as connection:
            with connection.transaction() if len(parts) > 1 else contextlib.nullcontext():
                for ended, wanted in parts:
                    asked = {"most": most, "lease": self._lease} | recording(ended, wanted, self._held)
                    for kind, step, number, token in connection.execute(RECORD, self._link.me | asked).fetchall():
                        if kind == "closed":
                            closed.add((step, number))
                        elif kind == "claimed":
                            granted[step, number] = token
                        elif kind == "taken":
                            taken.append(step)
                        idle = idle or kind == "idle"
            lost = self._unrecorded(connection, [key for e in endings if (key := (e.step, e.number)) not in closed])
            if endings and idle:
                self._link.wake(connection)
        points.at("ledger-committed")
        for ending in endings:
            self._held.forget(ending.step, ending.number)
        self._held.add((step, number, token) for (step, number), token in granted.items())
        return Recorded([claim for claim in claims if (claim.step, claim.number) in granted], lost, tuple(taken))

    def renew(self, steps: Sequence[str]) -> list[str]:
        numbers = [self._held.number(step) for step in steps]
        tokens = [self._held.token(step, number) for step, number in zip(steps, numbers, strict=True)]
        with self._link.call() as connection:
            asked = {"lease": self._lease, "steps": list(steps), "tokens": tokens}
            seen, kept = connection.execute(_RENEW, self._link.me | asked).fetchone() or (False, [])
            gone = [(step, number) for step, number in zip(steps, numbers, strict=True) if step not in set(kept)]
            lost = self._unrecorded(connection, gone)
        self.replaced = not seen
        for step, number in gone:
            if step in lost:
                self._held.forget(step, number)
        return lost

    def orphans(self) -> list[Row]:
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
        rows = sorted(map(Row._make, found))
        self._held.add((row.step, row.number, row.seq) for row in rows)
        return rows

    def news(self, idle: bool) -> list[Row]:
        with self._link.call() as connection:
            # Before we look, and committed: who commits after this sees it, and wakes us.
            connection.execute(_BE_IDLE, self._link.me | {"idle": idle})
            mark, now = self._mark(connection), clock.monotonic()
            asked = {"floor": self._floor}
            found = connection.execute(_NEWS, self._link.me | asked, binary=True).fetchall()
        told, self._told = self._told, {(values[0], values[_OUTCOME] is None) for values in found}
        rows = [Row._make(values) for values in found if (values[0], values[_OUTCOME] is None) not in told]
        self._advance(now, mark)
        return rows

    def rows(self) -> Iterator[Row]:
        last = 0
        while True:
            with self._link.call() as connection:
                asked = {"last": last, "batch": _BATCH}
                found = connection.execute(_ROWS, self._link.me | asked, binary=True).fetchall()
            yield from map(Row._make, found)
            if len(found) < _BATCH:
                return
            last = found[-1][0]

    def fact(self, name: str) -> str | None:
        found = self._one(_FACT, {"owner": self._owner(name), "name": name})
        return None if found is None else found[0]

    def note(self, facts: dict[str, str]) -> None:
        with self._link.call() as connection:
            connection.execute(_NOTE, self._link.me | self._facts(facts))

    def add(self, amounts: Mapping[str, float], facts: Mapping[str, str] = {}) -> None:
        with self._link.call() as connection, connection.transaction():
            connection.execute(_ADD, self._link.me | self._facts({name: repr(more) for name, more in amounts.items()}))
            connection.execute(_NOTE, self._link.me | self._facts(facts))

    def spent(self, amounts: Mapping[tuple[str, int], float]) -> None:
        tokens = [self._held.token(step, number) for step, number in amounts]
        asked = {"steps": [step for step, _number in amounts], "tokens": tokens, "amounts": list(amounts.values())}
        with self._link.call() as connection:
            connection.execute(_SPENT, self._link.me | asked)

    def spending(self) -> float:
        found = self._one(_SPENDING, {})
        return 0.0 if found is None else float(found[0])

    def last_closed(self, step: str) -> Row | None:
        found = self._one(_LAST_CLOSED, {"step": step})
        return None if found is None else Row._make(found)

    def output(self, seq: int) -> bytes | None:
        found = self._one("SELECT output FROM agent.attempts WHERE run = %(run)s AND seq = %(seq)s", {"seq": seq})
        return None if found is None else found[0]

    def log(self, seq: int) -> bytes:
        found = self._one("SELECT log FROM agent.attempts WHERE run = %(run)s AND seq = %(seq)s", {"seq": seq})
        return (found[0] or b"") if found else b""

    def restore(self, rows: Iterable[tuple[Row, bytes | None]]) -> int:
        entries = list(rows)
        with self._link.call(LONG) as connection:
            return plan.restore(connection, self._link, entries)

    def revision(self) -> int:
        found = self._one(_REVISION, {})
        return 0 if found is None else int(found[0])

    def fileno(self) -> int:
        return self._link.fileno()

    def notified(self) -> bool:
        return self._link.notified()

    def close(self) -> None:
        """Leave: the others need not wait for us.  What we hold is theirs when its lease has run out."""
        self._link.close(_LEAVE)

    def _one(self, query: str, values: dict[str, Any]) -> tuple[Any, ...] | None:
        with self._link.call() as connection:
            return connection.execute(query, self._link.me | values, binary=True).fetchone()

    def _facts(self, facts: Mapping[str, str]) -> dict[str, list[str]]:
        names = list(facts)
        return {"owners": list(map(self._owner, names)), "names": names, "values": list(map(text, facts.values()))}

    def _owner(self, fact: str) -> str:
        return self.worker if fact in _OWN_FACTS else ""

    def _unrecorded(self, connection: Connection, refused: Sequence[tuple[str, int]]) -> list[str]:
        """Return the steps, of attempts that could not be closed, whose endings this life has not recorded before."""
        lost = []
        for step, number in refused:
            asked = self._link.me | {"step": step, "number": number}
            if connection.execute(_RECORDED, asked).fetchone() is None:
                lost.append(step)
        return lost

    # -- taking part

    def _register(self, connection: Connection) -> None:
        """Be this run's worker of this name, in its newest life, and hold what the life before held."""
        member = self._link.member
        values = self._link.me | {"host": member.host, "pid": member.pid, "version": member.version}
        values["lease"] = self._lease
        with connection.transaction():
            connection.execute("INSERT INTO agent.runs (run) VALUES (%(run)s) ON CONFLICT DO NOTHING", values)
            found = connection.execute(_REGISTER, values).fetchone()
            assert found is not None
            held = connection.execute(_INHERIT, values).fetchall()
            self._advance(clock.monotonic(), self._mark(connection))
        self._link.number, self._floor = found[0], self._marks[0][1]
        self._held.add(held)

    def _greet(self, connection: Connection) -> int:
        """Return the number of a new connection: from now on the one before it is granted nothing."""
        found = connection.execute(_GREET, self._link.me).fetchone()
        self.replaced = found is None
        return 0 if found is None else int(found[0])

    def _mark(self, connection: Connection) -> int:
        found = connection.execute("SELECT last_value FROM agent.tokens").fetchone()
        return 0 if found is None else int(found[0])

    def _advance(self, now: float, mark: int) -> None:
        """Raise the floor to what has been settled by now, and so was among the rows just read."""
        self._marks.append((now, mark))
        while self._marks[0][0] <= now - _SETTLED:
            self._floor = self._marks.popleft()[1]


_IS_RUN = "SELECT true FROM agent.runs WHERE run = %(run)s"
_REGISTER = """
INSERT INTO agent.workers (run, worker, life, number, host, pid, version, lease, seen)
VALUES (%(run)s, %(worker)s, %(life)s, nextval('agent.tokens'), %(host)s, %(pid)s, %(version)s, %(lease)s, now())
ON CONFLICT (run, worker) DO UPDATE SET
    life = excluded.life, number = excluded.number, host = excluded.host, pid = excluded.pid,
    version = excluded.version, lease = excluded.lease, seen = excluded.seen, plan = '', idle = false
RETURNING number
"""
# What a former life had taken over from others and not closed is left to `orphans`, which tells whose it was.
_INHERIT = """
WITH mine AS (
    UPDATE agent.steps
    SET token = nextval('agent.tokens'), life = %(life)s, lease_until = now() + %(lease)s * interval '1 second'
    WHERE run = %(run)s AND worker = %(worker)s AND state = 'running'
    RETURNING step, number, token, former)
SELECT step, number, token FROM mine WHERE former = ''
"""
_GREET = """
UPDATE agent.workers SET number = nextval('agent.tokens'), seen = now(), idle = false
WHERE run = %(run)s AND worker = %(worker)s AND life = %(life)s RETURNING number
"""
_LEAVE = """
UPDATE agent.workers SET seen = to_timestamp(0), idle = false
WHERE run = %(run)s AND worker = %(worker)s AND life = %(life)s
"""
_RENEW = f"""
WITH seen AS (
    UPDATE agent.workers SET seen = now()
    WHERE run = %(run)s AND worker = %(worker)s AND life = %(life)s RETURNING worker
), kept AS (
    UPDATE agent.steps s SET lease_until = now() + %(lease)s * interval '1 second'
    FROM unnest(%(steps)s::text[], %(tokens)s::bigint[]) AS held (step, token)
    WHERE s.run = %(run)s AND s.step = ANY (%(steps)s::text[]) AND s.step = held.step
        AND {RUNNING} AND s.token = held.token AND s.life = %(life)s
    RETURNING s.step)
SELECT EXISTS (SELECT FROM seen), ARRAY (SELECT step FROM kept)
"""
_RECORDED = """
SELECT true FROM agent.attempts
WHERE run = %(run)s AND step = %(step)s AND number = %(number)s AND life = %(life)s
"""
# A claim's lease as a number that is the same each time it is asked for, whatever the client's time zone.
_UNTIL = "(extract(epoch FROM s.lease_until) * 1000000)::bigint"
# Claims that have run out, and how long their holders' leases are.
_LATE = f"""
SELECT s.token, {_UNTIL}, coalesce(w.lease, %(lease)s)
FROM agent.steps s LEFT JOIN agent.workers w ON w.run = s.run AND w.worker = s.worker
WHERE s.run = %(run)s AND s.state = 'running' AND s.lease_until < now() AND s.life <> %(life)s
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
            OR (s.lease_until < now() AND (
                (s.token, {_UNTIL}) IN (SELECT * FROM unnest(%(tokens)s::bigint[], %(untils)s::bigint[]))
                OR EXISTS (SELECT FROM agent.workers w
                    WHERE w.run = s.run AND w.worker = s.worker AND w.life = s.life AND w.seen = to_timestamp(0)))))
        AND NOT (s.life = %(life)s AND s.token = ANY (%(held)s::bigint[]))
    FOR UPDATE OF s SKIP LOCKED)
UPDATE agent.steps s SET
    token = nextval('agent.tokens'), worker = %(worker)s, life = %(life)s,
    former = coalesce(nullif(former, ''), worker), lease_until = now() + %(lease)s * interval '1 second'
FROM late WHERE s.step = late.name AND s.run = %(run)s
RETURNING {OPEN}
"""
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
_ROWS = f"""
(SELECT {CLOSED} FROM agent.attempts WHERE run = %(run)s AND seq > %(last)s ORDER BY 1 LIMIT %(batch)s)
UNION ALL
(SELECT {OPEN} FROM agent.steps
    WHERE run = %(run)s AND state = 'running' AND token > %(last)s ORDER BY 1 LIMIT %(batch)s)
ORDER BY 1 LIMIT %(batch)s
"""
_LAST_CLOSED = f"""
SELECT {CLOSED} FROM agent.attempts WHERE run = %(run)s AND step = %(step)s ORDER BY number DESC LIMIT 1
"""
_FACT = "SELECT value FROM agent.facts WHERE run = %(run)s AND worker = %(owner)s AND name = %(name)s"
_NOTE = """
INSERT INTO agent.facts (run, worker, name, value)
SELECT %(run)s, * FROM unnest(%(owners)s::text[], %(names)s::text[], %(values)s::text[])
ON CONFLICT (run, worker, name) DO UPDATE SET value = excluded.value
"""
_ADD = """
INSERT INTO agent.facts (run, worker, name, value)
SELECT %(run)s, * FROM unnest(%(owners)s::text[], %(names)s::text[], %(values)s::text[])
ON CONFLICT (run, worker, name) DO UPDATE SET
    value = (agent.facts.value::double precision + excluded.value::double precision)::text
"""
_SPENT = f"""
UPDATE agent.steps s SET spend = said.amount
FROM unnest(%(steps)s::text[], %(tokens)s::bigint[], %(amounts)s::double precision[]) AS said (step, token, amount)
WHERE s.run = %(run)s AND s.step = ANY (%(steps)s::text[]) AND s.step = said.step
    AND {RUNNING} AND s.token = said.token AND s.life = %(life)s
"""
_SPENDING = """
SELECT coalesce((SELECT sum(spend) FROM agent.attempts WHERE run = %(run)s), 0)
    + coalesce((SELECT sum(spend) FROM agent.steps WHERE run = %(run)s AND state = 'running'), 0)
"""
# Every claim, ending and effect draws a number; an attempt's ending draws a higher one than its claim.
_REVISION = """
SELECT greatest(
    (SELECT max(change) FROM agent.attempts WHERE run = %(run)s),
    (SELECT max(token) FROM agent.steps WHERE run = %(run)s AND state = 'running'),
    (SELECT max(change) FROM agent.effects WHERE run = %(run)s),
    0)
"""
