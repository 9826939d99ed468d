"""The link: one worker's connection to a PostgreSQL server.

Whoever calls gets an answer, or an exception, within a bounded time: a server that is frozen, or a network that
swallows everything, must not freeze a worker.  A link that broke is made anew by the next call.

Each connection has a number, which our row in the `workers` table names; only the connection named there claims
anything, and it locks that row while it does.  So whatever a connection before it had still to say, which the
server may read long after we have given up on it, is finished or void once a new one has greeted.
"""

import contextlib
import hashlib
import itertools
import math
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import psycopg
from psycopg.abc import Buffer
from psycopg.conninfo import make_conninfo
from psycopg.types.string import StrDumperUnknown
from psycopg.waiting import Ready, Wait

from worker import clock
from worker.ledger import LedgerCorrupt
from worker.ledger.postgres import errors, tls
from worker.ledger.postgres.rows import text

# A call takes at most this long, or that long if it moves many rows; then the server is taken for dead.
_PATIENCE, LONG = 12.0, 90.0
# An answer has at most so many bytes on its way; all of it is held in memory.  Asked for once in so many reads.
_ANSWER_MAX, _READS = 512 * 1024 * 1024, 64
_RECEIVED = slice(128, 136)  # tcpi_bytes_received in struct tcp_info (linux/tcp.h)
# The server gives up on a statement a little earlier, so that it ends with a reason.
_SHARE = 0.8
# A short call looks up a few rows by their keys, in the same way each time.  A server whose statistics do not know
# this run yet would take it for quicker to read all of a table, or to think about it anew each time.
_PLANS = {
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
}
# A pool is tried so often, and has so long to lend us a second connection; one that keeps us waiting has lent us ours.
_LOOKS, _POOL_PATIENCE = 3, 2.0
# One can be made to wait by another worker's transaction, which is short.
_LOCK_SECONDS = 5.0

_DEFAULTS = {
    "application_name": "agent",
    # A network that is gone is noticed in ten seconds, whether we are waiting for an answer or writing.
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}


class Member(NamedTuple):
    """A worker: `id` is its name for good, `life` tells this process from its earlier ones."""

    id: str
    life: str
    host: str
    pid: int
    version: str


class _Text(StrDumperUnknown):
    """Sends a text as far as a server can store it, whoever it came from: a person, a file, a step."""

    def dump(self, obj: str) -> Buffer | None:
        return super().dump(text(obj))


class Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose waits have an end; one that was waited for in vain is closed."""

    patience = _PATIENCE

    def wait(self, gen: Any, *_args: Any, **_options: Any) -> Any:
        gives_up = clock.monotonic() + self.patience
        descriptor, before = self.pgconn.socket, 0
        poller = select.poll()
        try:
            wanted = next(gen)
            for reads in itertools.count(1):
                if reads % _READS == 0:  # no call of ours but a long one comes to this
                    received = _received(descriptor)
                    before = before or received
                    if received - before > _ANSWER_MAX:
                        self.pgconn.finish()
                        raise psycopg.OperationalError(f"an answer of more than {_ANSWER_MAX >> 20} MiB")
                poller.register(descriptor, (wanted & Wait.R and select.POLLIN) | (wanted & Wait.W and select.POLLOUT))
                found = poller.poll(max(0.0, gives_up - clock.monotonic()) * 1000)
                if not found or clock.monotonic() >= gives_up:  # one that has no end always has something
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"no answer in {self.patience:.0f} s")
                readable, writable = found[0][1] & ~select.POLLOUT, found[0][1] & select.POLLOUT
                wanted = gen.send(Ready((Ready.R if readable else 0) | (Ready.W if writable else 0)))
        except StopIteration as end:
            return end.value


class Link:
    """The connection, the run and the worker that it is for; `number` is that of the connection, 0 for none."""

    def __init__(self, dsn: str, run: str, member: Member, timeout: float, read_only: bool = False) -> None:
        """Nothing is connected yet.  `timeout`: for each host.  Raises StateError for an address that is none."""
        parameters = _DEFAULTS | tls.protected(errors.parse(dsn))
        parameters.setdefault("connect_timeout", str(max(2, round(timeout))))
        parameters["client_encoding"] = "UTF8"
        self.place = errors.show(parameters)
        self.run = run
        self.member = member
        self.life = f"{member.id}:{member.life}"  # no two workers have the same
        self.number = 0
        self._address = make_conninfo("", **parameters)
        self._read_only = read_only
        self._channel = "agent_" + hashlib.sha256(run.encode()).hexdigest()[:32]
        self._connection: Connection | None = None
        self._entered = False
        self._greet: Callable[[Connection], int] | None = None
        self._listens = False
        self._woken = False
        self.calm = math.inf  # seconds; without a call for so long we were not in touch
        self._since: float | None = None
        self._last = -math.inf

    @property
    def me(self) -> dict[str, object]:
        """What statements ask of us: `run`, `worker`, `life` and the number of the `connection`."""
        return {"run": self.run, "worker": self.member.id, "life": self.life, "connection": self.number}

    @contextlib.contextmanager
    def call(self, patience: float | None = None) -> Iterator[Connection]:
        """Yield the connection, in autocommit mode; say of psycopg's errors what they mean for a worker.

        Whatever leaves the block as an exception takes a transaction that is open with it.
        """
        try:
            connection = self._ready()
            if (patience or _PATIENCE) != connection.patience:
                self._set_patience(connection, patience or _PATIENCE)
            yield connection
            self._touched()
        except psycopg.Error as exc:
            self._since = None
            self._recover()
            raise errors.on_calling(exc, self.place, not self._entered) from exc
        except (ValueError, TypeError, LookupError) as exc:
            self._since = None
            self._recover()
            what = f"its answer is not what was asked for ({type(exc).__name__}: {exc})"
            raise LedgerCorrupt(f"{self.place}: {what}") from exc
        except BaseException:
            self._recover()
            raise

    def may_take_over(self) -> bool:
        """Return whether we have been in touch for so long, without a break, that silence of others means something.

        After an outage nobody's claims have been renewed, and their holders live: whoever was away himself takes
        nothing for abandoned before everybody has had the time to say a word.
        """
        return self._since is not None and clock.monotonic() - self._since >= self.calm

    def enter(self, greet: Callable[[Connection], int] | None = None) -> None:
        """Note that the server has let us in: from now on what it refuses is waited out, as in a fail-over.

        `greet` is called first on every further connection and returns its number.
        """
        self._entered, self._greet = True, greet

    def wake(self, connection: Connection) -> None:
        """Wake the other workers that have nothing to do; each once, until it says again that it has not.

        After a commit, not in it: a transaction that notifies lets no other one commit at the same time.
        """
        if self._listens:
            connection.execute(_WAKE, self.me | {"channel": self._channel})

    def fileno(self) -> int:
        """Return the connection's descriptor, -1 while there is none."""
        try:
            return -1 if self._connection is None else self._connection.pgconn.socket
        except psycopg.Error:  # it is closed
            return -1

    def notified(self) -> bool:
        """Return whether another worker has waked us, or the connection has broken; never blocks."""
        connection = self._connection
        if connection is not None:
            try:
                connection.pgconn.consume_input()
                while (notice := connection.pgconn.notifies()) is not None:
                    self._hear(notice.be_pid)
                if connection.broken:
                    raise psycopg.OperationalError("the connection is lost")
            except psycopg.Error:
                self._drop()
                self._woken = True
        woken, self._woken = self._woken, False
        return woken

    def close(self, farewell: str = "") -> None:
        """Close the connection, after a last statement if it still works."""
        connection = self._connection
        if farewell and connection is not None and not connection.closed:
            with contextlib.suppress(psycopg.Error):
                connection.execute(farewell, self.me)
        self._drop()

    def _touched(self) -> None:
        now = clock.monotonic()
        if self._since is None or now - self._last > self.calm:
            self._since = now
        self._last = now

    def _ready(self) -> Connection:
        if self._connection is not None and self._connection.closed:
            self._drop()
        if self._connection is None:
            self._connection = self._connect()
            try:
                self._listens = not self._read_only and _listen(self._connection, self._channel)
                if self._greet is not None:
                    self.number = self._greet(self._connection)
                self._touched()
            except BaseException:
                self._drop()
                raise
        return self._connection

    def _connect(self) -> Connection:
        try:
            connection = Connection.connect(self._address, autocommit=True)
        except psycopg.Error as exc:
            raise errors.on_connecting(exc, self.place, not self._entered) from None
        connection.adapters.register_dumper(str, _Text)
        try:
            if self._is_pooled(connection):  # before anything is set there, which others would find
                raise errors.pooled(self.place, not self._entered)
        except BaseException:
            connection.close()
            raise
        connection.add_notify_handler(lambda notice: self._hear(notice.pid))
        try:
            connection.execute(_OURS_ALONE)
            self._set_patience(connection, _PATIENCE)
            connection.execute(_READ_ONLY if self._read_only else _DURABLE)
            connection.execute(_ISOLATION)
        except BaseException:
            connection.close()
            raise
        return connection

    def _is_pooled(self, connection: Connection) -> bool:
        """Return whether what we have connected to lends us a connection of the server for each transaction alone.

        A pool gives numbers of its own to its clients.  One that lends our connection to another client of ours, who
        has just begun a transaction, does so to anybody.
        """
        backend = _backend(connection)
        if backend == connection.info.backend_pid:
            return False
        for _ in range(_LOOKS):
            try:
                with Connection.connect(self._address) as other:  # in a transaction until it is closed
                    other.patience = _POOL_PATIENCE
                    if _backend(other) == backend or _backend(connection) != backend:
                        return True
            except psycopg.Error:
                break
        return False

    def _set_patience(self, connection: Connection, patience: float) -> None:
        """Let the server end what takes longer, and a transaction that waits for us: its locks stop the others."""
        connection.patience = patience
        connection.execute(
            f"SET statement_timeout = {int(patience * _SHARE * 1000)}; "
            f"SET idle_in_transaction_session_timeout = {int(patience * 1000)}; "
            f"SET lock_timeout = {int(_LOCK_SECONDS * 1000)}"
        )
        plans = _PLANS if patience != LONG else {name: "DEFAULT" for name in _PLANS}
        with contextlib.suppress(psycopg.errors.UndefinedObject):  # another kind of database, with its own planner
            connection.execute("; ".join(f"SET {name} = {value}" for name, value in plans.items()))

    def _hear(self, backend: int) -> None:
        connection = self._connection
        if connection is None or connection.pgconn.backend_pid != backend:
            self._woken = True

    def _recover(self) -> None:
        """Roll back what a failed call has begun; a connection that cannot do that is given up."""
        connection = self._connection
        if connection is None:
            return
        try:
            if not connection.closed and connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                return
            if not connection.closed:
                connection.rollback()
                return
        except psycopg.Error:
            pass
        self._drop()

    def _drop(self) -> None:
        connection, self._connection, self.number = self._connection, None, 0
        if connection is not None:
            connection.close()


def _received(descriptor: int) -> int:
    """Return how many bytes have come in on a connection; 0 for a local one, whose server is this machine's."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            return int.from_bytes(copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)[_RECEIVED], sys.byteorder)
    except OSError:
        return 0


def _backend(connection: Connection) -> int:
    """Return the number of the server's process that we talk to at this moment."""
    found = connection.execute("SELECT pg_catalog.pg_backend_pid()", prepare=False).fetchone()
    return 0 if found is None else int(found[0])


def _listen(connection: Connection, channel: str) -> bool:
    """Return whether this server can wake us; one that cannot is asked now and then all the same."""
    try:
        connection.execute(f"LISTEN {channel}")
    except (psycopg.NotSupportedError, psycopg.errors.SyntaxError):
        return False
    return True


# What other roles put into a database is not found in place of PostgreSQL's own functions and operators, and a row
# that a policy hides from us is an error.  Not among the startup options, which some pools refuse.
_OURS_ALONE = "SET search_path = pg_catalog, pg_temp; SET row_security = off"
# "Done" must mean on the disk, also where somebody has set the database to be quick instead.
_DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
# Stricter ones than we need make our calls fail where they could wait.
_ISOLATION = "SET default_transaction_isolation = 'read committed'"
_READ_ONLY = "SET default_transaction_read_only = on"
# One whose row is locked is just claiming something.
_WAKE = """
WITH waked AS (
    UPDATE agent.workers SET idle = false WHERE run = %(run)s AND worker IN (
        SELECT worker FROM agent.workers WHERE run = %(run)s AND worker <> %(worker)s AND idle
        FOR UPDATE SKIP LOCKED)
    RETURNING worker)
SELECT pg_notify(%(channel)s, '') WHERE EXISTS (SELECT FROM waked)
"""
