"""The tables of a ledger in SQLite, and how those of older formats become these."""

from worker.ledger.sqlite.effects import SCHEMA as EFFECTS_SCHEMA

VERSION = 3

# saved.content is NULL where the file was too large.
_FORMAT_3 = """
CREATE TABLE saved (
    step TEXT NOT NULL,
    name TEXT NOT NULL,
    content BLOB,
    size INTEGER NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (step, name)
);
CREATE TABLE items (task TEXT NOT NULL, position INTEGER NOT NULL, item TEXT NOT NULL, PRIMARY KEY (task, position));
ALTER TABLE effects ADD COLUMN claimant TEXT NOT NULL DEFAULT '';
ALTER TABLE effects ADD COLUMN taken INTEGER NOT NULL DEFAULT 0;
"""
SCHEMA = f"""
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE attempts (
    seq INTEGER PRIMARY KEY,
    step TEXT NOT NULL,
    number INTEGER NOT NULL,
    definition TEXT NOT NULL,
    started REAL NOT NULL,
    boot TEXT NOT NULL,
    outcome TEXT,
    counted INTEGER NOT NULL DEFAULT 0,
    final INTEGER NOT NULL DEFAULT 0,
    cause TEXT NOT NULL DEFAULT '',
    status INTEGER,
    ended REAL,
    took REAL NOT NULL DEFAULT 0,
    delay REAL NOT NULL DEFAULT 0,
    progress REAL NOT NULL DEFAULT 0,
    spend REAL NOT NULL DEFAULT 0,
    detail TEXT NOT NULL DEFAULT '',
    output_size INTEGER NOT NULL DEFAULT 0,
    log_size INTEGER NOT NULL DEFAULT 0,
    output BLOB,
    log BLOB,
    unsure INTEGER NOT NULL DEFAULT 0,
    key TEXT NOT NULL DEFAULT '',
    worker TEXT NOT NULL DEFAULT '',
    item TEXT,
    digest TEXT NOT NULL DEFAULT ''
);
-- Done means done: the database itself refuses a second time.
CREATE UNIQUE INDEX done ON attempts (step) WHERE outcome = 'done';
{EFFECTS_SCHEMA}
{_FORMAT_3}
"""
# From each older format to the next.
MIGRATIONS = {
    1: f"""
ALTER TABLE attempts ADD COLUMN unsure INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN key TEXT NOT NULL DEFAULT '';
ALTER TABLE attempts ADD COLUMN worker TEXT NOT NULL DEFAULT '';
{EFFECTS_SCHEMA}
""",
    2: f"""
ALTER TABLE attempts ADD COLUMN item TEXT;
ALTER TABLE attempts ADD COLUMN digest TEXT NOT NULL DEFAULT '';
{_FORMAT_3}
""",
}
