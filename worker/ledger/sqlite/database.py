"""How this program uses SQLite: connections, durable transactions, and what its errors mean."""

import contextlib
import os
import sqlite3
from collections.abc import Iterator

from worker import files, mounts, points
from worker.errors import StateError
from worker.ledger import LedgerCorrupt, LedgerLocked, StorageFull

# Well below any WatchdogSec: waiting for another writer must not look like a hang.
_BUSY_SECONDS = 5.0
LOGS = ("-wal", "-journal")
_JOURNAL, _JOURNAL_HEAD = bytes.fromhex("d9d505f920a163d7"), 28
_WAIT_AND_RETRY = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
}


class Database(sqlite3.Connection):
    """A connection; `write_ahead`: the database has a write-ahead log, and not a rollback journal."""

    write_ahead = True


def connect(path: str, mode: str) -> Database:
    """Open the database at `path`; `mode` is that of sqlite.org/uri.html: ro, rw or rwc."""
    name = path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    uri = f"file:{name}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_SECONDS, isolation_level=None, factory=Database)


def approach(db: Database, path: str) -> None:
    """Let the database at `path`, which is about to be read for the first time, be read as it can be where it lies.

    One that comes with a write-ahead log to where memory is not shared is ours alone until it is prepared.
    """
    db.write_ahead = mounts.shares_memory(mounts.kind(path))
    if not db.write_ahead:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")


def prepare(db: Database) -> None:
    """Let every transaction that is meant to be durable survive a power cut, however the database is stored."""
    if db.write_ahead:
        db.execute("PRAGMA journal_mode = WAL")  # kept in the file: whoever opens it uses the log
    else:
        db.execute("PRAGMA journal_mode = TRUNCATE")
        db.execute("PRAGMA locking_mode = NORMAL")
        db.execute("PRAGMA user_version").fetchone()  # the lock is given back at the next look
    db.execute("PRAGMA synchronous = FULL")


def log(path: str) -> str:
    """Return the ending of what holds a part of the database at `path`: "-wal", "-journal" after a crash, or ""."""
    return next((ending for ending in LOGS if _counts(path + ending) and ending != strange_log(path)), "")


def strange_log(path: str) -> str:
    """Return the ending of a log beside the database at `path` that is another one's; SQLite would play it in.

    A ledger at work says in its header that it has a write-ahead log; our copies, and those at work with a rollback
    journal, say that they have none.
    """
    before = _looked_at(path)
    head = before[0]
    found = ""
    if head and not _ahead(head) and os.path.exists(f"{path}-wal"):
        found = "-wal"
    elif head and before[1].startswith(_JOURNAL) and not _belongs(f"{path}-journal", head):
        found = "-journal"
    # What has changed meanwhile is at work, and its log is its own.
    return found if _looked_at(path) == before else ""


def reading(path: str) -> str:
    """Return the mode in which somebody who does not mean to write opens the database at `path`."""
    if strange_log(path):
        return "ro&immutable=1"
    if _ahead(_head(path)) and not os.path.exists(f"{path}-wal") and not os.access(os.path.dirname(path), os.W_OK):
        return "ro&immutable=1"  # a read-only disk: nobody writes, and there can be no log
    return "ro"


def _looked_at(path: str) -> tuple[bytes, bytes]:
    """Return how the database and its rollback journal begin.

    A commit counts the changes in the one (offset 24), and has a number of its own in the other (offset 12).
    """
    return _head(path), _head(f"{path}-journal")[:_JOURNAL_HEAD]


def _head(path: str) -> bytes:
    try:
        with open(files.open_plain(path), "rb") as file:
            return file.read(100)
    except OSError:
        return b""


def _ahead(head: bytes) -> bool:
    """Return whether a database whose file begins like this has a write-ahead log.

    sqlite.org/fileformat.html, offset 18.
    """
    return head[18:20] == b"\2\2"


def _belongs(journal: str, head: bytes) -> bool:
    """Return whether a rollback journal is of the database whose first page begins with `head`.

    A commit counts the changes of the file on (offset 24) and so saves the first page as it was, which has been
    written over by then, or not.  Before it comes to that, the page still says how large the file was (offset 28).
    sqlite.org/fileformat.html, "The Database Header" and "The Rollback Journal".
    """
    with open(files.open_plain(journal), "rb") as file:
        start = file.read(_JOURNAL_HEAD)
        pages, sector, page = (int.from_bytes(start[at : at + 4], "big") for at in (16, 20, 24))
        file.seek(sector)
        while number := file.read(4):
            before = file.read(page)
            if int.from_bytes(number, "big") == 1:
                changes, now = (int.from_bytes(found[24:28], "big") for found in (before, head))
                return (now - changes) & 0xFFFFFFFF in (0, 1)
            file.seek(4, os.SEEK_CUR)
    return pages == int.from_bytes(head[28:32], "big")


def _counts(log: str) -> bool:
    """Return whether there is anything in a log.  A rollback journal that is over has no head any more."""
    with contextlib.suppress(OSError), open(files.open_plain(log), "rb") as file:
        head = file.read(len(_JOURNAL))
        return head == _JOURNAL or (log.endswith("-wal") and bool(head))
    return False


@contextlib.contextmanager
def transaction(db: Database, durable: bool = True) -> Iterator[None]:
    """One transaction, all or nothing.  IMMEDIATE: a second writer waits here, not in the middle.

    `durable`: it survives a power cut once it has returned (the connection has synchronous=FULL); otherwise
    the next durable one makes it so.  With a rollback journal each is: a power cut could break the file otherwise.
    """
    durable = durable or not db.write_ahead
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


def _limit() -> str:
    """Return what else may be the reason why a file cannot grow."""
    import resource  # for the rare moment

    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most == resource.RLIM_INFINITY:
        return ""
    return f"; no file of this process may be larger than {most} bytes (LimitFSIZE=, ulimit -f)"


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """Tell a full or failing disk (wait and try again) from a file that is no ledger."""
    try:
        yield
    except UnicodeDecodeError as exc:  # out of what SQLite says
        raise LedgerCorrupt(str(exc)) from exc
    except sqlite3.DatabaseError as exc:
        extended = getattr(exc, "sqlite_errorcode", 0)
        code = extended & 0xFF  # the low byte is the primary code
        if extended == sqlite3.SQLITE_READONLY_ROLLBACK:
            what = "a commit was cut off, which the next worker takes back"
            raise StateError(f"the ledger cannot be read as it is: {what}; start the agent") from exc
        if code == sqlite3.SQLITE_BUSY:
            raise LedgerLocked("another program has locked it") from exc
        if code in _WAIT_AND_RETRY:
            raise StorageFull(f"{exc}{_limit()}") from exc
        if code == sqlite3.SQLITE_READONLY:
            raise StateError(f"the ledger can no longer be written: {exc}; remount the disk, start again") from exc
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise LedgerCorrupt(str(exc)) from exc
        if code == sqlite3.SQLITE_CONSTRAINT:
            raise ValueError(f"the ledger refuses this: {exc}") from exc
        if isinstance(exc, sqlite3.ProgrammingError):
            raise  # a fault of ours
        raise LedgerCorrupt(str(exc)) from exc  # a column that is not there, a text that is none
