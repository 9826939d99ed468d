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

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
from worker.ledger import Claim, Ending, Heard, Recorded, Row, Saved
from worker.ledger.postgres import answers, plan
from worker.ledger.postgres.effects import PostgresEffects
from worker.ledger.postgres.errors import standby
from worker.ledger.postgres.facts import Facts
from worker.ledger.postgres.kept import Kept
from worker.ledger.postgres.link import LONG, Connection, Link, Member
from worker.ledger.postgres.news import News
from worker.ledger.postgres.orphans import Orphans
from worker.ledger.postgres.rows import CLOSED, OPEN, RECORD, RUNNING, Held, in_order, recording
from worker.ledger.postgres.schema import are_ready, prepare
from worker.ledger.postgres.usage import Usage

__all__ = ["Member", "PostgresLedger"]

_BATCH = 5000


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
        self.lease = lease
        self._held = Held()
        self._facts = Facts(link, self._held)
        self._kept = Kept(link)
        self._news = News(link)
        self._orphans = Orphans(link, self._held, lease)
        self._usage = Usage(link)

    @property
    def overdue_at(self) -> float:
        return self._orphans.overdue_at

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
                    recovering = connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)
                    raise standby(link.place, recovering)
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

    def enlist(
        self,
        steps: Sequence[tuple[str, str]],
        identity: Sequence[tuple[str, str]] | None = None,
        found: Collection[str] = (),
    ) -> dict[str, bool] | None:
        with self._link.call(LONG) as connection:
            return plan.enlist(connection, self._link, steps, steps if identity is None else identity, found)

    def record(self, endings: Sequence[Ending], claims: Sequence[Claim], most: int | None = None) -> Recorded:
        most = len(claims) if most is None else most
        granted: dict[tuple[str, int], int] = {}
        closed: set[tuple[str, int]] = set()
        taken: list[str] = []
        idle = False
        parts = in_order(endings, claims)
        points.at("ledger-written")
        with self._link.call() as connection:
            asked_at = clock.monotonic()
            with connection.transaction() if len(parts) > 1 else contextlib.nullcontext():
                for ended, wanted in parts:
                    asked = {"most": most, "lease": self.lease} | recording(ended, wanted, self._held)
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
        self._held.add(((step, number, token) for (step, number), token in granted.items()), asked_at)
        return Recorded([claim for claim in claims if (claim.step, claim.number) in granted], lost, tuple(taken))

    def renew(self, steps: Sequence[str]) -> list[str]:
        numbers = [self._held.number(step) for step in steps]
        tokens = [self._held.token(step, number) for step, number in zip(steps, numbers, strict=True)]
        with self._link.call() as connection:
            asked_at = clock.monotonic()
            asked = {"lease": self.lease, "steps": list(steps), "tokens": tokens}
            seen, kept = connection.execute(_RENEW, self._link.me | asked).fetchone() or (False, [])
            gone = [(step, number) for step, number in zip(steps, numbers, strict=True) if step not in set(kept)]
            lost = self._unrecorded(connection, gone)
        self.replaced = not seen
        self._held.confirm(kept, asked_at)
        for step, number in gone:
            if step in lost:
                self._held.forget(step, number)
        return lost

    def still_ours(self, step: str) -> bool:
        return not self.renew([step])

    def surely_ours(self, step: str) -> bool:
        return clock.monotonic() - self.confirmed_at(step) <= self.lease / 2

    def confirmed_at(self, step: str) -> float:
        return self._held.confirmed_at(step)

    def orphans(self) -> list[Row]:
        return self._orphans.take_over()

    def news(self, idle: bool) -> list[Row]:
        return self._news.read(idle)

    def rows(self) -> Iterator[Row]:
        last = 0
        while True:
            with self._link.call() as connection:
                asked = {"last": last, "batch": _BATCH}
                found = connection.execute(_ROWS, self._link.me | asked, binary=True).fetchall()
            yield from answers.rows(found)
            if len(found) < _BATCH:
                return
            last = found[-1][0]

    def fact(self, name: str) -> str | None:
        return self._facts.fact(name)

    def note(self, facts: dict[str, str]) -> None:
        self._facts.note(facts)

    def add(
        self, amounts: Mapping[str, float], facts: Mapping[str, str] = {}, mark: tuple[str, str] | None = None
    ) -> None:
        self._facts.add(amounts, facts, mark)

    def heard(self, said: Mapping[tuple[str, int], Heard]) -> None:
        self._facts.heard(said)

    def save_files(self, step: str, files: Sequence[Saved]) -> None:
        self._kept.save_files(step, files)

    def saved(self, step: str | None = None) -> Iterator[Saved]:
        return self._kept.saved(step)

    def restore_saved(self, files: Iterable[Saved]) -> int:
        return self._kept.restore_saved(files)

    def add_items(self, task: str, items: Sequence[str]) -> None:
        self._kept.add_items(task, items)

    def items(self) -> dict[str, list[str]]:
        return self._kept.items()

    def usage(self, facts: Sequence[str]) -> tuple[dict[str, str], float]:
        return self._usage.read(facts)

    def last_closed(self, step: str) -> Row | None:
        found = self._one(_LAST_CLOSED, {"step": step})
        return None if found is None else answers.rows([found])[0]

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
        values["lease"] = self.lease
        asked_at = clock.monotonic()
        with connection.transaction():
            connection.execute("INSERT INTO agent.runs (run) VALUES (%(run)s) ON CONFLICT DO NOTHING", values)
            found = connection.execute(_REGISTER, values).fetchone()
            assert found is not None
            held = connection.execute(_INHERIT, values).fetchall()
            self._news.begin(connection)
        self._link.number = found[0]
        self._held.add(held, asked_at)

    def _greet(self, connection: Connection) -> int:
        """Return the number of a new connection: from now on the one before it is granted nothing."""
        found = connection.execute(_GREET, self._link.me).fetchone()
        self.replaced = found is None
        return 0 if found is None else int(found[0])


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
# Whatever is changed draws a number; an attempt's ending draws a higher one than its claim.
_REVISION = """
SELECT greatest(
    (SELECT max(change) FROM agent.attempts WHERE run = %(run)s),
    (SELECT max(token) FROM agent.steps WHERE run = %(run)s AND state = 'running'),
    (SELECT max(change) FROM agent.effects WHERE run = %(run)s),
    (SELECT max(change) FROM agent.saved WHERE run = %(run)s),
    (SELECT max(change) FROM agent.items WHERE run = %(run)s),
    0)
"""
