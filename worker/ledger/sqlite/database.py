"""How this program uses SQLite: connections, durable transactions, and what its errors mean."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator

from worker import points
from worker.errors import StateError
from worker.ledger import LedgerCorrupt, StorageFull

# Well below any WatchdogSec: waiting for another writer must not look like a hang.
_BUSY_SECONDS = 5.0
_WAIT_AND_RETRY = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
}


def connect(path: str, mode: str) -> sqlite3.Connection:
    """Open the database at `path`; `mode` is that of sqlite.org/uri.html: ro, rw or rwc."""
    name = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return sqlite3.connect(f"file:{name}?mode={mode}", uri=True, timeout=_BUSY_SECONDS, isolation_level=None)


def strange_log(path: str) -> bool:
    """Return whether the -wal beside the database at `path` is another one's, into which SQLite would play it.

    A ledger at work says in its header that it has a log (sqlite.org/fileformat.html, offset 18); our copies say
    that they have none.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(18)
        return file.read(2) == b"\1\1" and os.path.exists(f"{path}-wal")
    return False


@contextlib.contextmanager
def transaction(db: sqlite3.Connection, durable: bool = True) -> Iterator[None]:
    """One transaction, all or nothing.  IMMEDIATE: a second writer waits here, not in the middle.

    `durable`: it survives a power cut once it has returned (the connection has synchronous=FULL); otherwise
    the next durable one makes it so.
    """
    with errors():
        if not durable:
            db.execute("PRAGMA synchronous = NORMAL")
        try:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
        finally:
            if not durable:
                db.execute("PRAGMA synchronous = FULL")
    points.at("ledger-committed")


@contextlib.contextmanager
def errors() -> Iterator[None]:
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
