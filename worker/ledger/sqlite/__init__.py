"""The ledger in SQLite: one file, one writer, one flush for each durable step.

Write-ahead log with synchronous=FULL: when a transaction returns it survives a power cut
(sqlite.org/pragma.html#pragma_synchronous).  The writer holds the state folder's lock; readers need none.  On a file
system that cannot have such a log it is a rollback journal, and readers and the writer wait for one another.
"""

import contextlib
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from worker import files, points
from worker.errors import StateError
from worker.ledger import DONE, MOVED, Claim, Ending, Heard, Holdings, Recorded, Row, Saved
from worker.ledger.sqlite import checks, mark
from worker.ledger.sqlite.database import LOGS, Database, approach, connect, errors, prepare, reading, transaction
from worker.ledger.sqlite.effects import SqliteEffects
from worker.ledger.sqlite.mark import Mark
from worker.ledger.sqlite.schema import MIGRATIONS, SCHEMA, VERSION

__all__ = ["SUFFIXES", "VERSION", "SqliteLedger"]

SUFFIXES = ("", "-shm", *LOGS)  # the files of one database
_ID = checks.ID  # the fact by which the mark knows its ledger

_ROW = ", ".join(Row._fields)
_ENDING = ", ".join(f"{name} = ?" for name in Ending._fields[2:])  # all but step and number
_ADD = """
INSERT INTO facts VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = CAST(value AS REAL) + CAST(excluded.value AS REAL)
"""
_MARK = """
INSERT INTO facts VALUES (?, ?)
ON CONFLICT (name) DO UPDATE SET value = excluded.value WHERE value <> excluded.value
"""
_CLAIM = """
INSERT INTO attempts (seq, step, number, definition, started, boot, key, item) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_UNSETTLED = f"""
SELECT {_ROW} FROM attempts WHERE seq IN (SELECT max(seq) FROM attempts GROUP BY step)
AND (outcome IS NULL OR outcome = 'unknown' OR (unsure AND outcome <> 'redo'))
AND step NOT IN (SELECT step FROM attempts WHERE outcome = 'done') ORDER BY seq
"""
_SAVE = "INSERT INTO saved (step, name, content, size, at) VALUES (?, ?, ?, ?, ?)"


class SqliteLedger:
    """A ledger in the SQLite file at `path`: of one worker, whose claims have no lease and are never lost."""

    shared = False
    worker = ""

    def __init__(self, path: str, connection: Database) -> None:
        self.path = path
        self.effects = SqliteEffects(connection, self._came_so_far)
        self._db = connection
        self._seq, self._ended = 0, 0
        self._open: dict[tuple[str, int], int] = {}
        self._mark: Mark | None = None

    @classmethod
    def create(cls, path: str, holdings: Holdings = Holdings()) -> "SqliteLedger":  # noqa: B008 - nothing changes it
        """Make a new ledger that holds all this.  The file has its final name only once it is complete.

        Its revision is that of `holdings` at least, so that it grows on where that of a checkpoint ended.  Raises
        ValueError for rows that no ledger can hold, leaving no file.
        """
        temp = f"{path}.new"
        for suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temp + suffix)
        with errors(), contextlib.closing(connect(temp, "rwc")) as db:
            cls(temp, db)._fill(holdings)
        os.chmod(temp, 0o640)
        files.adopt(temp, path)
        return cls.open(path)

    @classmethod
    def rehearse(cls, holdings: Holdings) -> None:
        """Do in memory what `create` does; raises ValueError as that does."""
        with errors(), contextlib.closing(connect(":memory:", "rwc")) as db:
            cls(":memory:", db)._fill(holdings)

    def _fill(self, holdings: Holdings) -> None:
        self._db.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
        self.restore(holdings.rows)
        self.effects.restore(holdings.effects)
        self.restore_saved(holdings.saved)
        for task, added in holdings.items.items():
            self.add_items(task, added)
        self.note(dict(holdings.facts))
        self.effects.skip(holdings.revision - self.revision())

    @classmethod
    def open(cls, path: str, read_only: bool = False, examined: bool = False) -> "SqliteLedger":
        """Open an existing ledger; `examined`: it was looked through before (worker.ledger.sqlite.checks).

        Raises FileNotFoundError, LedgerCorrupt if it cannot be read as a ledger, StateError if a
        newer version of the program wrote it.
        """
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        checks.plain(path)
        if not read_only and not examined:
            checks.examine(path)  # damage stays as it is
        with errors():
            db = connect(path, reading(path) if read_only else "rw")
            ledger = cls(path, db)
            try:
                if not read_only:
                    approach(db, path)
                version = checks.format_of(db, path)
                if version < VERSION:
                    ledger._migrate(version, read_only)
                if not read_only:
                    prepare(db)  # a copy that was put back has no log yet
                ledger._load()
            except BaseException:
                db.close()
                raise
        if not read_only:
            with contextlib.suppress(OSError):
                ledger._mark = Mark(path, ledger.fact(_ID) or "")
        return ledger

    def begin_mark(self) -> None:
        """Begin a mark for this ledger, under a name that no copy of it from before has.  Raises OSError."""
        id = os.urandom(8).hex()
        mark.begin(self.path, id, self.revision())
        self.note({_ID: id})
        if self._mark is not None:
            self._mark.close()
        self._mark = Mark(self.path, id)

    def _came_so_far(self) -> None:
        """Note, outside of the database, how far it has come; called after each durable commit that changes that."""
        if self._mark is not None:
            self._mark.note(self.revision())

    def record(self, endings: Sequence[Ending], claims: Sequence[Claim], most: int | None = None) -> Recorded:
        claims = claims[:most]
        seq, opened = self._seq, {}
        # A claim that is no loss needs no flush of its own; with an ending it has that one's.
        durable = bool(endings) or not all(claim.harmless for claim in claims)
        changes = 0
        with transaction(self._db, durable=durable):
            for ending in endings:
                self._close(ending)
            for claim in claims:
                seq += 1
                self._db.execute(_CLAIM, (seq, *claim[:6], claim.item))
                opened[claim.step, claim.number] = seq
            if durable and self._mark is not None:
                changes = self.effects.revision()  # here it costs no lock
            points.at("ledger-written")
        for ending in endings:
            del self._open[ending.step, ending.number]
        self._open.update(opened)
        self._seq, self._ended = seq, self._ended + len(endings)
        if durable and self._mark is not None:
            self._mark.note(seq + self._ended + changes)
        return Recorded(list(claims), [])

    def renew(self, steps: Sequence[str]) -> list[str]:
        return []

    def still_ours(self, step: str) -> bool:
        return True

    def surely_ours(self, step: str) -> bool:
        return True

    def orphans(self) -> list[Row]:
        return []

    def news(self, idle: bool) -> list[Row]:
        return []

    def enlist(
        self,
        steps: Sequence[tuple[str, str]],
        identity: Sequence[tuple[str, str]] | None = None,
        found: Collection[str] = (),
    ) -> dict[str, bool] | None:
        return None  # the list of the one worker is the plan

    def rows(self) -> Iterator[Row]:
        with errors():
            cursor = self._db.execute(f"SELECT {_ROW} FROM attempts ORDER BY seq")
            cursor.row_factory = _row
            yield from cursor

    def unsettled(self) -> list[Row]:
        """Return the last attempts of the steps that are not done and may have happened."""
        with errors():
            cursor = self._db.execute(_UNSETTLED)
            cursor.row_factory = _row
            return list(cursor)

    def fact(self, name: str) -> str | None:
        with errors():
            found = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if found is None else str(found[0])

    def note(self, facts: dict[str, str]) -> None:
        with transaction(self._db):
            self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())

    def add(
        self, amounts: Mapping[str, float], facts: Mapping[str, str] = {}, mark: tuple[str, str] | None = None
    ) -> None:
        with transaction(self._db):
            if mark is not None and not self._db.execute(_MARK, mark).rowcount:
                return
            self._db.executemany(_ADD, amounts.items())
            self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())

    def heard(self, said: Mapping[tuple[str, int], Heard]) -> None:
        known = [(*words, self._open[attempt]) for attempt, words in said.items() if attempt in self._open]
        with transaction(self._db):
            self._db.executemany("UPDATE attempts SET progress = ?, spend = ? WHERE seq = ?", known)

    def save_files(self, step: str, files: Sequence[Saved]) -> None:
        with transaction(self._db):
            self._db.execute("DELETE FROM saved WHERE step = ?", (step,))
            self._db.executemany(_SAVE, files)
            self.effects.changed()

    def saved(self, step: str | None = None) -> Iterator[Saved]:
        with errors():
            found = self._db.execute(
                "SELECT step, name, content, size, at FROM saved WHERE step = ?1 OR ?1 IS NULL ORDER BY step, name",
                (step,),
            )
            yield from map(Saved._make, found)

    def restore_saved(self, files: Iterable[Saved]) -> int:
        with transaction(self._db):
            known = "SELECT step FROM saved UNION SELECT step FROM attempts WHERE outcome = ?"
            there = {step for (step,) in self._db.execute(known, (DONE,))}
            added = [saved for saved in files if saved.step not in there]
            self._db.executemany(_SAVE, added)
            if added:
                self.effects.changed()
        return len(added)

    def add_items(self, task: str, items: Sequence[str]) -> None:
        with transaction(self._db):
            known = self.items().get(task, [])
            added = list(dict.fromkeys(item for item in items if item not in set(known)))
            self._db.executemany(
                "INSERT INTO items (task, position, item) VALUES (?, ?, ?)",
                [(task, position, item) for position, item in enumerate(added, len(known))],
            )
            if added:
                self.effects.changed()

    def items(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        with errors():
            for task, item in self._db.execute("SELECT task, item FROM items ORDER BY task, position"):
                found.setdefault(task, []).append(item)
        return found

    def usage(self, facts: Sequence[str]) -> tuple[dict[str, str], float]:
        known = {name: value for name in facts if (value := self.fact(name)) is not None}
        with errors():
            found = self._db.execute("SELECT coalesce(sum(spend), 0.0) FROM attempts").fetchone()
        return known, float(found[0])

    def last_closed(self, step: str) -> Row | None:
        with errors():
            cursor = self._db.execute(
                f"SELECT {_ROW} FROM attempts WHERE step = ? AND outcome IS NOT NULL ORDER BY seq DESC LIMIT 1",
                (step,),
            )
            cursor.row_factory = _row
            found: Row | None = cursor.fetchone()
        return found

    def output(self, seq: int) -> bytes | None:
        with errors():
            found = self._db.execute("SELECT output FROM attempts WHERE seq = ?", (seq,)).fetchone()
        return None if found is None else found[0]

    def results(self, most: int) -> Iterator[bytes | None]:
        """Yield the inline output of each attempt that is done and printed up to `most` bytes, oldest first."""
        with errors():
            small = "outcome = ? AND output_size BETWEEN 1 AND ?"
            found = self._db.execute(f"SELECT output FROM attempts WHERE {small} ORDER BY seq", (DONE, most))
            yield from (output for (output,) in found)

    def log(self, seq: int) -> bytes:
        with errors():
            found = self._db.execute("SELECT log FROM attempts WHERE seq = ?", (seq,)).fetchone()
        return (found[0] or b"") if found else b""

    def restore(self, rows: Iterable[tuple[Row, bytes | None]]) -> int:
        known: dict[tuple[str, int], int] = {}
        done: set[str] = set()
        for row in self.rows():
            known[row.step, row.number] = row.seq
            if row.outcome == DONE:
                done.add(row.step)
        holes = ", ".join("?" * len(Row._fields))
        fresh = not known  # then they keep their numbers, by which 'counted_from' means one of them
        added = 0
        with transaction(self._db):
            for row, output in rows:
                values = row._replace(seq=row.seq if fresh else None, worker="")  # type: ignore[arg-type] # no others here
                seq = known.get((row.step, row.number))
                if row.step in done or not (seq is None or row.outcome == DONE):
                    continue
                if seq is not None:  # its commit was lost
                    self._db.execute("DELETE FROM attempts WHERE seq = ?", (seq,))
                self._db.execute(f"INSERT INTO attempts ({_ROW}, output) VALUES ({holes}, ?)", (*values, output))
                added += 1
        with errors():
            self._load()
        return added

    def revision(self) -> int:
        return self._seq + self._ended + self.effects.revision()

    def close(self) -> None:
        self._db.close()
        if self._mark is not None:
            self._mark.close()
            self._mark = None

    @contextlib.contextmanager
    def moment(self) -> Iterator[None]:
        """Let everything that is read inside be of one moment, whatever a worker writes meanwhile."""
        with errors():
            self._db.execute("BEGIN")
            try:
                self._load()
                yield
            finally:
                self._db.execute("COMMIT")

    def verify(self) -> None:
        """Look at every page, every index and every value.  Raises LedgerCorrupt."""
        with errors():
            checks.check(self._db, self.path, "integrity_check")

    def copy_to(self, path: str) -> None:
        """Write what the ledger holds at one moment to `path`, by SQLite's own backup.

        The copy has its name only once it is checked and durable; it is one file, and says that it has no log.
        Raises LedgerCorrupt, leaving what was there before.
        """
        with errors():
            _keep_copy(self._db, path)

    def move(self) -> None:
        """Note that this ledger is on another machine now: nothing that was open goes on here."""
        with transaction(self._db):
            self._db.execute("UPDATE attempts SET boot = ? WHERE outcome IS NULL", (MOVED,))
            self._db.execute("UPDATE effects SET worker = ''")

    def _close(self, ending: Ending) -> None:
        cursor = self._db.execute(
            f"UPDATE attempts SET {_ENDING} WHERE seq = ? AND outcome IS NULL",
            (*ending[2:], self._open[ending.step, ending.number]),
        )
        if cursor.rowcount != 1:
            raise ValueError(f"{ending.step}: attempt {ending.number} is not open; its ending is refused")
        if ending.outcome == DONE:
            self._db.execute("DELETE FROM saved WHERE step = ?", (ending.step,))

    def _load(self) -> None:
        self._seq, self._ended = self._db.execute(
            "SELECT coalesce(max(seq), 0), count(outcome) FROM attempts"
        ).fetchone()
        self._open = {
            (step, number): seq
            for step, number, seq in self._db.execute("SELECT step, number, seq FROM attempts WHERE outcome IS NULL")
        }

    def _migrate(self, version: int, read_only: bool) -> None:
        """Bring an older format up to date, in one transaction, with a copy of it as it was beside it."""
        if read_only:
            raise StateError(f"{self.path}: of an older version of the agent", "start the agent, which converts it")
        _keep_copy(self._db, f"{self.path}.format-{version}")
        steps = "".join(MIGRATIONS[older] for older in range(version, VERSION))
        self._db.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {VERSION}; COMMIT;")


def _row(_cursor: sqlite3.Cursor, values: tuple[object, ...]) -> Row:
    return Row._make(values)


def _keep_copy(db: Database, path: str) -> None:
    """Write a copy of the database by SQLite's own backup; it has its name only once it is checked and durable."""
    temp = f"{path}.new"
    for suffix in SUFFIXES:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp + suffix)
    with contextlib.closing(connect(temp, "rwc")) as copy:
        db.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE")  # one file, beside which no -wal is its own
        checks.check(copy, temp, "integrity_check")
    os.chmod(temp, 0o640)
    files.adopt(temp, path)
