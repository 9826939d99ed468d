"""The ledger in SQLite: one file, one writer, one flush for each durable step.

Write-ahead log with synchronous=FULL: when a transaction returns it survives a power cut
(sqlite.org/pragma.html#pragma_synchronous).  The writer holds the state folder's lock; readers need none.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence

from worker import files, points
from worker.errors import StateError
from worker.ledger import DONE, Claim, Ending, LedgerCorrupt, Row, StorageFull

VERSION = 1
# Larger ledgers are read as they are: a look at every page would hold up the start for too long.
_CHECKED_MAX = 512 * 1024 * 1024
SUFFIXES = ("", "-wal", "-shm")  # the files of one database
# Well below any WatchdogSec: waiting for another writer must not look like a hang.
_BUSY_SECONDS = 5.0

_SCHEMA = """
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
    log BLOB
);
-- Done means done: the database itself refuses a second time.
CREATE UNIQUE INDEX done ON attempts (step) WHERE outcome = 'done';
"""

_ROW = ", ".join(Row._fields)
_ENDING = ", ".join(f"{name} = ?" for name in Ending._fields[2:])  # all but step and number

_WAIT_AND_RETRY = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
}


class SqliteLedger:
    """A ledger in the SQLite file at `path`."""

    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self._seq, self._ended = 0, 0
        self._open: dict[tuple[str, int], int] = {}

    @classmethod
    def create(
        cls,
        path: str,
        rows: Sequence[tuple[Row, bytes | None]] = (),
        facts: Mapping[str, str] | None = None,
    ) -> "SqliteLedger":
        """Make a new ledger that holds `rows` and `facts`.  The file has its final name only once it is complete.

        Raises ValueError for rows that no ledger can hold, leaving no file.
        """
        temp = f"{path}.new"
        for suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp + suffix)
        with _errors(), contextlib.closing(_connect(temp, "rwc")) as db:
            db.execute("PRAGMA journal_mode = WAL")  # kept in the file: whoever opens it uses the log
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            fresh = cls(temp, db)
            fresh.restore(rows)
            fresh.note(dict(facts or {}))
        os.chmod(temp, 0o640)
        files.adopt(temp, path)
        return cls.open(path)

    @classmethod
    def open(cls, path: str, read_only: bool = False) -> "SqliteLedger":
        """Open an existing ledger.

        Raises FileNotFoundError, LedgerCorrupt if it cannot be read as a ledger, StateError if a
        newer version of the program wrote it.
        """
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        with _errors():
            db = _connect(path, "ro" if read_only else "rw")
            if read_only and not os.access(os.path.dirname(path), os.W_OK) and not os.path.exists(f"{path}-wal"):
                db.close()
                db = _connect(path, "ro&immutable=1")  # a read-only disk: nobody writes, and there can be no log
            ledger = cls(path, db)
            try:
                ledger._check(thorough=not read_only)  # before anything that writes: damage is set aside as it is
                if not read_only:
                    db.execute("PRAGMA synchronous = FULL")
                    ledger._load()
            except BaseException:
                db.close()
                raise
        return ledger

    def record(self, endings: Sequence[Ending], claims: Sequence[Claim]) -> None:
        seq, opened = self._seq, {}
        with self._transaction():
            for ending in endings:
                self._close(ending)
            for claim in claims:
                seq += 1
                self._db.execute(
                    "INSERT INTO attempts (seq, step, number, definition, started, boot) VALUES (?, ?, ?, ?, ?, ?)",
                    (seq, *claim),
                )
                opened[claim.step, claim.number] = seq
            points.at("ledger-written")
        for ending in endings:
            del self._open[ending.step, ending.number]
        self._open.update(opened)
        self._seq, self._ended = seq, self._ended + len(endings)

    def rows(self) -> Iterator[Row]:
        with _errors():
            cursor = self._db.execute(f"SELECT {_ROW} FROM attempts ORDER BY seq")
            cursor.row_factory = _row
            yield from cursor

    def fact(self, name: str) -> str | None:
        with _errors():
            found = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def note(self, facts: dict[str, str]) -> None:
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())

    def last_closed(self, step: str) -> Row | None:
        with _errors():
            cursor = self._db.execute(
                f"SELECT {_ROW} FROM attempts WHERE step = ? AND outcome IS NOT NULL ORDER BY seq DESC LIMIT 1",
                (step,),
            )
            cursor.row_factory = _row
            found: Row | None = cursor.fetchone()
        return found

    def output(self, seq: int) -> bytes | None:
        with _errors():
            found = self._db.execute("SELECT output FROM attempts WHERE seq = ?", (seq,)).fetchone()
        return None if found is None else found[0]

    def log(self, seq: int) -> bytes:
        with _errors():
            found = self._db.execute("SELECT log FROM attempts WHERE seq = ?", (seq,)).fetchone()
        return (found[0] or b"") if found else b""

    def restore(self, rows: Iterable[tuple[Row, bytes | None]]) -> int:
        known: dict[tuple[str, int], int] = {}
        done: set[str] = set()
        for row in self.rows():
            known[row.step, row.number] = row.seq
            if row.outcome == DONE:
                done.add(row.step)
        columns = ", ".join(Row._fields[1:])
        holes = ", ".join("?" * (len(Row._fields) - 1))
        added = 0
        with self._transaction():
            for row, output in rows:
                seq = known.get((row.step, row.number))
                if row.step in done or not (seq is None or row.outcome == DONE):
                    continue
                if seq is not None:  # its commit was lost
                    self._db.execute("DELETE FROM attempts WHERE seq = ?", (seq,))
                self._db.execute(f"INSERT INTO attempts ({columns}, output) VALUES ({holes}, ?)", (*row[1:], output))
                added += 1
        with _errors():
            self._load()
        return added

    def revision(self) -> int:
        return self._seq + self._ended

    def close(self) -> None:
        self._db.close()

    def _close(self, ending: Ending) -> None:
        cursor = self._db.execute(
            f"UPDATE attempts SET {_ENDING} WHERE seq = ? AND outcome IS NULL",
            (*ending[2:], self._open[ending.step, ending.number]),
        )
        if cursor.rowcount != 1:
            raise ValueError(f"{ending.step}: attempt {ending.number} is not open; its ending is refused")

    def _check(self, thorough: bool) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise StateError(
                f"{self.path}: written by a newer version of the agent (format {version}, this one knows "
                f"{VERSION}); install that version again, or use another state folder"
            )
        if version < VERSION:
            raise LedgerCorrupt("not a ledger (no format number)")
        if thorough and os.path.getsize(self.path) <= _CHECKED_MAX:
            verdict = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise LedgerCorrupt(str(verdict))

    def _load(self) -> None:
        self._seq, self._ended = self._db.execute(
            "SELECT coalesce(max(seq), 0), count(outcome) FROM attempts"
        ).fetchone()
        self._open = {
            (step, number): seq
            for step, number, seq in self._db.execute("SELECT step, number, seq FROM attempts WHERE outcome IS NULL")
        }

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """One durable transaction.  IMMEDIATE: a second writer waits here, not in the middle."""
        with _errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        points.at("ledger-committed")


def _row(_cursor: sqlite3.Cursor, values: tuple[object, ...]) -> Row:
    return Row._make(values)


def _connect(path: str, mode: str) -> sqlite3.Connection:
    """`mode` is that of sqlite.org/uri.html: ro, rw or rwc."""
    name = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return sqlite3.connect(f"file:{name}?mode={mode}", uri=True, timeout=_BUSY_SECONDS, isolation_level=None)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Tell a full or failing disk (wait and try again) from a file that is no ledger."""
    try:
        yield
    except sqlite3.DatabaseError as exc:
        code = getattr(exc, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
        if code in _WAIT_AND_RETRY:
            raise StorageFull(str(exc)) from exc
        if code == sqlite3.SQLITE_READONLY:
            raise StateError(f"the ledger can no longer be written: {exc}; remount the disk, start again") from exc
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise LedgerCorrupt(str(exc)) from exc
        if code == sqlite3.SQLITE_CONSTRAINT:
            raise ValueError(f"the ledger refuses this: {exc}") from exc
        raise
