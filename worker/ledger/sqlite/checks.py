"""Whether a file is a ledger in SQLite that can be believed: its format, its tables, its indexes, its values.

SQLite sees a torn page, but not that an index and its table say different things (from 3.46 on not even where it
looks at everything), that a number has become a text, or that a column has another name.  Whether a step is done is
asked of both, so both are compared here.
"""

import contextlib
import os
import shutil
import sqlite3
from typing import NamedTuple

from worker import files, mounts
from worker.errors import StateError
from worker.ledger import OUTCOMES, LedgerCorrupt
from worker.ledger.effects import CLAIMED, COMMITTED, UNKNOWN
from worker.ledger.sqlite.database import LOGS, Database, connect, errors, log, reading
from worker.ledger.sqlite.schema import SCHEMA, VERSION

# Larger ledgers are read as they are: a look at every page would hold up the start for too long.
_CHECKED_MAX = 512 * 1024 * 1024
# Each value is looked at in a ledger up to this size, which costs some 100 ms, and in one beside which a worker that
# met something strange has left a file with this ending.
_SMALL = 8 * 1024 * 1024
SUSPECT = ".suspect"
ID = "ledger_id"  # a fact: what its mark knows a ledger by
_STORED = {"TEXT": "text", "INTEGER": "integer", "REAL": "real", "BLOB": "blob"}
_WORDS = (("attempts", "outcome", OUTCOMES), ("effects", "state", (CLAIMED, COMMITTED, UNKNOWN)))
# Each index that decides something, with the column that it finds rows by and those that it has.
_INDEXES = (
    ("attempts", "done", "step", "outcome = 'done'"),
    ("effects", "sqlite_autoindex_effects_1", "key", "true"),
)


class Found(NamedTuple):
    """A ledger that was looked at: of which run it is, what it is known by to its mark, and how far it has come."""

    run: str | None
    id: str | None
    revision: int


def examine(path: str) -> Found:
    """Look through the ledger at `path`; no file is changed, or another one than before, if it cannot be believed.

    Raises FileNotFoundError, LedgerCorrupt, StateError if a newer version of the program wrote it.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(path)
    plain(path)
    alone = not mounts.shares_memory(mounts.kind(path)) and log(path) == "-wal"
    if alone or log(path) == "-journal":  # to read it is to change it: there is a commit that was cut off
        return _examine_copy(path)
    memory = f"{path}-shm"
    before = files.read(memory) if os.path.exists(memory) else None
    made = [path + ending for ending in ("-wal", "-shm") if not os.path.exists(path + ending)]
    try:
        with errors(), contextlib.closing(connect(path, reading(path))) as db:
            return _found(db, path)
    except LedgerCorrupt:
        for name in made:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        if before is not None and files.read(memory) != before:
            with open(memory, "r+b") as file:
                file.write(before)
        raise


def plain(path: str) -> None:
    """Raise LedgerCorrupt if a file of the ledger at `path` is a FIFO, say, for which SQLite would wait for ever."""
    for ending in ("", *LOGS):
        if os.path.exists(path + ending) and not os.path.isfile(path + ending):
            raise LedgerCorrupt(f"{os.path.basename(path)}{ending} is no plain file")


def _examine_copy(path: str) -> Found:
    copy = f"{path}.look"
    try:
        for ending in ("", *LOGS):
            if os.path.exists(path + ending):
                shutil.copyfile(path + ending, copy + ending)
        with errors(), contextlib.closing(connect(copy, "rw")) as db:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            return _found(db, path)
    finally:
        for ending in ("", "-shm", *LOGS):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy + ending)


def _found(db: Database, path: str) -> Found:
    version = check(db, path)
    run, id = (
        next((value for (value,) in db.execute("SELECT value FROM facts WHERE name = ?", (name,))), None)
        for name in ("run", ID)
    )
    if version < VERSION:
        return Found(run, None, 0)
    changes = "SELECT coalesce(max(seq), 0) + count(outcome) + (SELECT changes FROM effect_counts) FROM attempts"
    return Found(run, id, db.execute(changes).fetchone()[0])


def format_of(db: Database, path: str) -> int:
    """Return the format; raises LedgerCorrupt if it is none, StateError if it is a newer one."""
    version: int = db.execute("PRAGMA user_version").fetchone()[0]
    if version > VERSION:
        raise StateError(
            f"{path}: written by a newer version of the agent (format {version}, this one knows "
            f"{VERSION}); install that version again, or use another state folder"
        )
    if version < 1:
        raise LedgerCorrupt("not a ledger (no format number)")
    return version


def check(db: Database, path: str, pragma: str = "quick_check") -> int:
    """Return the format of a ledger that can be believed; raises as `format_of` does."""
    version = format_of(db, path)
    if os.path.getsize(path) > _CHECKED_MAX:
        return version
    verdict = db.execute(f"PRAGMA {pragma}(1)").fetchone()[0]
    if verdict != "ok":
        raise LedgerCorrupt(str(verdict))
    tables = _tables(db)
    if version == VERSION:
        _check_tables(tables, db)
    _check_names(db, version)
    _check_indexes(db, tables)
    if pragma != "quick_check" or os.path.getsize(path) <= _SMALL or os.path.exists(path + SUSPECT):
        for table, columns in tables.items():
            _check_values(db, table, columns)
            for _row in db.execute(f"SELECT * FROM {table}"):
                pass  # a text that is none is found by whoever reads it
    return version


_Columns = list[tuple[str, str, bool]]  # name, type, never NULL


def _tables(db: sqlite3.Connection) -> dict[str, _Columns]:
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
    return {
        name: [(column, kind, bool(never)) for _, column, kind, never, *_ in db.execute(f"PRAGMA table_info('{name}')")]
        for name in names
        if name.isidentifier()
    }


def _check_tables(found: dict[str, _Columns], db: Database) -> None:
    """Raise LedgerCorrupt unless the tables are those of our format, and so is the index that refuses a second end."""
    with contextlib.closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(SCHEMA)
        for table, columns in _tables(fresh).items():
            missing = set(columns) - set(found.get(table, []))
            if missing:
                raise LedgerCorrupt(f"table {table} is not what it is to be ({min(missing)[0]})")
        query = "SELECT sql FROM sqlite_schema WHERE name = 'done'"
        if db.execute(query).fetchone() != fresh.execute(query).fetchone():
            raise LedgerCorrupt("its index of done steps is another one")


def _check_names(db: Database, version: int) -> None:
    """Raise LedgerCorrupt for a step or saved file that is called by a path: names become files of ours."""
    names = [("attempts", "step"), *([("saved", "step"), ("saved", "name")] if version >= VERSION else [])]
    for table, column in names:
        foreign = f"{column} = '' OR {column} GLOB '*/*' OR {column} GLOB '.*' OR length({column}) > 255"
        found = db.execute(f"SELECT {column} FROM {table} WHERE {foreign} LIMIT 1").fetchone()
        if found is not None:
            raise LedgerCorrupt(f"not a ledger of the agent's: {column} {found[0]!a} is no name of a file")


def _check_values(db: Database, table: str, columns: _Columns) -> None:
    """Raise LedgerCorrupt for a value of another type than its column, or a word that is none of ours."""
    wrong = [
        f"typeof({column}) <> '{_STORED[kind]}'" + ("" if never else f" AND {column} IS NOT NULL")
        for column, kind, never in columns
        if kind in _STORED
    ]
    for other, column, words in _WORDS:
        if other == table:
            known = ", ".join(f"'{word}'" for word in words)
            wrong.append(f"{column} NOT IN ({known})")
    if wrong and db.execute(f"SELECT 1 FROM {table} WHERE {' OR '.join(wrong)} LIMIT 1").fetchone():
        raise LedgerCorrupt(f"table {table} has a value that it cannot have")


def _check_indexes(db: Database, tables: dict[str, _Columns]) -> None:
    """Raise LedgerCorrupt where an index and its table say different things."""
    for table, index, column, condition in _INDEXES:
        if table not in tables:
            continue
        entries = f"SELECT {column} AS name, rowid AS place FROM {table} INDEXED BY {index} WHERE {condition}"
        same = (
            f"SELECT count(*) FROM ({entries} ORDER BY {column}) AS entry CROSS JOIN {table} AS t NOT INDEXED "
            f"ON t.rowid = entry.place WHERE t.{column} = entry.name AND ({condition})"
        )
        counts = (
            f"SELECT (SELECT count(*) FROM {table} INDEXED BY {index} WHERE {condition}), "
            f"(SELECT count(*) FROM {table} NOT INDEXED WHERE {condition}), ({same})"
        )
        indexed, there, agreed = db.execute(counts).fetchone()
        if not indexed == there == agreed:
            raise LedgerCorrupt(f"index {index} says something else than its table ({indexed}, {there}, {agreed})")
