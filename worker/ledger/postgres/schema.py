"""The tables of a ledger in PostgreSQL, all in the schema `agent`, and how older ones become these.

Texts that are searched for are COLLATE "C": an index must not depend on what the C library of a server, or of its
stand-by, takes for the alphabet.
"""

import contextlib

import psycopg

from worker.errors import StateError
from worker.ledger import LedgerAway
from worker.ledger.postgres import owners
from worker.ledger.postgres.link import Connection

VERSION = 3

# saved.content is null where the file was too large.
_FORMAT_3 = """
CREATE TABLE IF NOT EXISTS agent.saved (
    run text COLLATE "C" NOT NULL,
    step text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    content bytea,
    size bigint NOT NULL,
    at double precision NOT NULL,
    change bigint NOT NULL,
    PRIMARY KEY (run, step, name)
);
CREATE INDEX IF NOT EXISTS saved_change ON agent.saved (run, change);
CREATE TABLE IF NOT EXISTS agent.items (
    run text COLLATE "C" NOT NULL,
    task text COLLATE "C" NOT NULL,
    position integer NOT NULL,
    item text NOT NULL,
    change bigint NOT NULL,
    PRIMARY KEY (run, task, position)
);
CREATE INDEX IF NOT EXISTS items_change ON agent.items (run, change);
-- The secret of the process that has the claim; for how many seconds it holds, 0 where that is not known.
ALTER TABLE agent.effects ADD COLUMN IF NOT EXISTS claimant text NOT NULL DEFAULT '';
ALTER TABLE agent.effects ADD COLUMN IF NOT EXISTS lease double precision NOT NULL DEFAULT 0;
"""
# From each older format to the next.
MIGRATIONS = {
    1: "ALTER TABLE agent.steps ADD COLUMN spend double precision NOT NULL DEFAULT 0",
    2: f"""
ALTER TABLE agent.steps ADD COLUMN item text, ADD COLUMN progress double precision NOT NULL DEFAULT 0;
ALTER TABLE agent.attempts ADD COLUMN item text, ADD COLUMN digest text NOT NULL DEFAULT '';
{_FORMAT_3}
""",
}

SCHEMA = f"""
CREATE TABLE IF NOT EXISTS agent.format (one integer PRIMARY KEY, version integer NOT NULL);
-- Claims, endings and whatever changes an effect draw from here: the newest number tells how far a reader has come.
CREATE SEQUENCE IF NOT EXISTS agent.tokens;
CREATE TABLE IF NOT EXISTS agent.runs (
    run text COLLATE "C" PRIMARY KEY,
    plan text NOT NULL DEFAULT '',
    created timestamptz NOT NULL DEFAULT now()
);
-- plan: the one that this life works on.  number: of its connection, the only one that claims.
CREATE TABLE IF NOT EXISTS agent.workers (
    run text COLLATE "C" NOT NULL,
    worker text COLLATE "C" NOT NULL,
    life text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    plan text NOT NULL DEFAULT '',
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    lease double precision NOT NULL,
    seen timestamptz NOT NULL,
    idle boolean NOT NULL DEFAULT false,
    PRIMARY KEY (run, worker)
);
CREATE TABLE IF NOT EXISTS agent.facts (
    run text COLLATE "C" NOT NULL,
    worker text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    value text NOT NULL,
    PRIMARY KEY (run, worker, name)
);
-- What can be claimed, and the attempts that are open.  state: open, running or done.  former: who made the attempt,
-- if its claim was taken over.  Its key begins with the step: with the run first, a server whose statistics do not
-- know this run yet may take it for small and read all of it for each claim.
CREATE TABLE IF NOT EXISTS agent.steps (
    run text COLLATE "C" NOT NULL,
    step text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL DEFAULT 'open',
    number integer NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    worker text COLLATE "C" NOT NULL DEFAULT '',
    life text COLLATE "C" NOT NULL DEFAULT '',
    former text NOT NULL DEFAULT '',
    lease_until timestamptz NOT NULL DEFAULT to_timestamp(0),
    definition text NOT NULL DEFAULT '',
    started double precision NOT NULL DEFAULT 0,
    boot text NOT NULL DEFAULT '',
    key text NOT NULL DEFAULT '',
    item text,
    progress double precision NOT NULL DEFAULT 0,
    spend double precision NOT NULL DEFAULT 0,
    PRIMARY KEY (step, run)
);
CREATE INDEX IF NOT EXISTS steps_running ON agent.steps (run, token) WHERE state = 'running';
-- Attempts that have ended.  change: drawn when it did.
CREATE TABLE IF NOT EXISTS agent.attempts (
    run text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    step text COLLATE "C" NOT NULL,
    number integer NOT NULL,
    definition text NOT NULL,
    started double precision NOT NULL,
    boot text NOT NULL,
    outcome text NOT NULL,
    counted boolean NOT NULL,
    final boolean NOT NULL,
    cause text NOT NULL,
    status integer,
    ended double precision,
    took double precision NOT NULL,
    delay double precision NOT NULL,
    progress double precision NOT NULL,
    spend double precision NOT NULL,
    detail text NOT NULL,
    output_size bigint NOT NULL,
    log_size bigint NOT NULL,
    unsure boolean NOT NULL,
    key text NOT NULL,
    worker text NOT NULL,
    item text,
    digest text NOT NULL DEFAULT '',
    life text NOT NULL DEFAULT '',
    change bigint NOT NULL,
    output bytea,
    log bytea,
    PRIMARY KEY (run, seq)
);
CREATE UNIQUE INDEX IF NOT EXISTS attempts_number ON agent.attempts (run, step, number);
CREATE INDEX IF NOT EXISTS attempts_change ON agent.attempts (run, change);
-- Done means done: the database itself refuses a second time.
CREATE UNIQUE INDEX IF NOT EXISTS attempts_done ON agent.attempts (run, step) WHERE outcome = 'done';
-- taken: the claim was taken over from a holder that was gone.
CREATE TABLE IF NOT EXISTS agent.effects (
    run text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    parameters text NOT NULL,
    state text COLLATE "C" NOT NULL,
    step text COLLATE "C" NOT NULL,
    token bigint NOT NULL,
    worker text COLLATE "C" NOT NULL,
    at double precision NOT NULL,
    result bytea,
    size bigint NOT NULL,
    life text COLLATE "C" NOT NULL DEFAULT '',
    taken boolean NOT NULL DEFAULT false,
    lease_until timestamptz NOT NULL DEFAULT to_timestamp(0),
    change bigint NOT NULL,
    PRIMARY KEY (run, key)
);
CREATE INDEX IF NOT EXISTS effects_change ON agent.effects (run, change);
{_FORMAT_3}
"""

# Several workers make the tables at the same moment: all but one find them made, in one of these ways.
_RACES = (
    psycopg.errors.UniqueViolation,
    psycopg.errors.DuplicateSchema,
    psycopg.errors.DuplicateTable,
    psycopg.errors.DuplicateObject,
    psycopg.errors.SerializationFailure,
    psycopg.errors.DeadlockDetected,
)
_TRIES = 10


def prepare(connection: Connection, place: str) -> None:
    """Make the tables, or bring older ones up to date; they are of our format when this returns.

    Raises StateError if a newer version of the program made them.
    """
    for _ in range(_TRIES):
        version = _find(connection, place)
        if version == VERSION:
            return
        with contextlib.suppress(*_RACES), connection.transaction():
            if version is None:
                _create(connection)
            else:
                _migrate(connection)
    raise LedgerAway(f"{place}: others are making the tables; trying again")


def are_ready(connection: Connection, place: str) -> bool:
    """Return whether the tables are there; raises StateError if they are not of our format.  Changes nothing."""
    version = _find(connection, place)
    if version is not None and version < VERSION:
        raise StateError(f"{place}: its tables are of an older version of the agent", "start it, and it converts them")
    return version is not None


def _find(connection: Connection, place: str) -> int | None:
    """Return the format of the tables, or None if there are none.

    Raises StateError if it is a newer one, or if other roles decide what the tables do.
    """
    owners.check(connection, place)
    try:
        found = connection.execute("SELECT version FROM agent.format WHERE one = 1").fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None
    version: int | None = None if found is None else found[0]
    if version is not None and type(version) is not int:
        raise StateError(f"{place}: the format of its tables is no number", "put agent.format back as it was")
    if version is not None and version > VERSION:
        raise StateError(
            f"{place}: its tables were made by a newer version of the agent (format {version}, this one knows "
            f"{VERSION})",
            "install that version here too, or use another database",
        )
    return version


def _create(connection: Connection) -> None:
    # Asked first, since whoever may not make a schema may not say IF NOT EXISTS either.
    if connection.execute("SELECT true FROM pg_namespace WHERE nspname = 'agent'").fetchone() is None:
        connection.execute("CREATE SCHEMA agent")
    connection.execute(SCHEMA)
    connection.execute("INSERT INTO agent.format VALUES (1, %s)", (VERSION,))


def _migrate(connection: Connection) -> None:
    """Go one format further, all of it or nothing; who comes second waits here and finds it done."""
    found = connection.execute("SELECT version FROM agent.format WHERE one = 1 FOR UPDATE").fetchone()
    version = VERSION if found is None else found[0]
    if version < VERSION:
        connection.execute(MIGRATIONS[version])
        connection.execute("UPDATE agent.format SET version = %s", (version + 1,))
