"""Effects in SQLite.  Several processes may use one file: a claim is theirs as long as they live.

There is no lease: whoever claims is a process of this machine, known by boot, pid and start time, and when it is
gone so is its claim.  No clock can take it away.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator

from worker import clock
from worker.ledger import LedgerCorrupt
from worker.ledger.effects import (
    CLAIMED,
    COMMITTED,
    CONFLICT,
    GRANTED,
    HELD,
    TAKEN_OVER,
    UNKNOWN,
    Answer,
    Effect,
)
from worker.ledger.sqlite.database import Database, errors, transaction

SCHEMA = """
CREATE TABLE effects (
    key TEXT PRIMARY KEY,
    parameters TEXT NOT NULL,
    state TEXT NOT NULL,
    step TEXT NOT NULL,
    token INTEGER NOT NULL,
    worker TEXT NOT NULL,
    at REAL NOT NULL,
    result BLOB,
    size INTEGER NOT NULL DEFAULT 0
);
-- The newest token, and how often anything beside the attempts was changed.
CREATE TABLE effect_counts (token INTEGER NOT NULL, changes INTEGER NOT NULL);
INSERT INTO effect_counts VALUES (0, 0);
"""
_COLUMNS = ", ".join(Effect._fields)
_HOLES = ", ".join("?" * len(Effect._fields))


class SqliteEffects:
    """The effects in a ledger's database; see worker.ledger.effects.Effects."""

    def __init__(self, db: Database, committed: Callable[[], None]) -> None:
        """`committed` is called after each commit."""
        self._db = db
        self._committed = committed
        self._me = _process(os.getpid()) or "?"

    def claim(self, key: str, parameters: str, step: str, lease: float, take_over: bool, claimant: str = "") -> Answer:
        with self._transaction():
            found = self._find(key)
            if found is not None and found.state != COMMITTED and _is_unheard(found, claimant, parameters):
                claim = found._replace(state=CLAIMED, token=self._next("token"), worker=self._me, at=clock.wall())
                return Answer(TAKEN_OVER if found.taken else GRANTED, self._put(claim))
            if (
                found is not None
                and found.state == CLAIMED
                and not _lives(found.worker)
                and found.parameters != parameters
            ):
                found = self._put(found._replace(state=UNKNOWN, worker="", at=clock.wall()))  # a person sees it now
            if found is not None:
                verdict = self._verdict(found, parameters)
                if verdict not in (None, UNKNOWN) or (verdict == UNKNOWN and not take_over):
                    return Answer(str(verdict), found)
                if not take_over:
                    return Answer(UNKNOWN, self._put(found._replace(state=UNKNOWN, worker="", at=clock.wall())))
            token = self._next("token")
            claim = Effect(key, parameters, CLAIMED, step, token, self._me, clock.wall(), claimant=claimant)
            mine = self._put(claim._replace(taken=found is not None))
        return Answer(GRANTED if found is None else TAKEN_OVER, mine)

    def renew(self, key: str, token: int, lease: float) -> bool:
        with self._transaction():
            mine = self._mine(key, token)
            if mine is not None and mine.worker not in ("", self._me):
                self._put(mine._replace(worker=self._me))  # granted by the worker before, to a step that goes on
        return mine is not None

    def commit(self, key: str, token: int, result: bytes | None, size: int, claimant: str = "") -> bool:
        with self._transaction():
            found = self._find(key)
            if found is None or found.token != token or found.claimant not in ("", claimant):
                return False
            if found.state != COMMITTED:  # also one that was given up: whoever has its token knows
                self._put(found._replace(state=COMMITTED, worker="", at=clock.wall(), result=result, size=size))
        return True

    def release(self, key: str, token: int, claimant: str = "") -> bool:
        with self._transaction():
            mine = self._mine(key, token)
            if mine is None or mine.claimant not in ("", claimant):
                return False
            self._forget(key)
        return True

    def abandon(self, key: str, token: int) -> bool:
        with self._transaction():
            mine = self._mine(key, token)
            if mine is None:
                return False
            self._put(mine._replace(worker="", at=clock.wall()))
        return True

    def settle(self, key: str, result: bytes | None) -> Effect | None:
        with self._transaction():
            found = self._find(key)
            if found is None or not (found.state == UNKNOWN or _abandoned(found)):
                return None
            if result is None:
                self._forget(key)
            else:
                self._put(found._replace(state=COMMITTED, at=clock.wall(), result=result, size=len(result)))
        return found

    def all(self) -> Iterator[Effect]:
        with errors():
            for values in self._db.execute(f"SELECT {_COLUMNS} FROM effects ORDER BY key"):
                yield Effect._make(values)

    def restore(self, effects: Iterable[Effect]) -> int:
        added = 0
        with self._transaction():
            for effect in effects:
                found = self._find(effect.key)
                if found is None or (found.state != COMMITTED and effect.state == COMMITTED):
                    self._put(effect._replace(token=self._next("token"), worker="", claimant="", taken=False))
                    added += 1
        return added

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with transaction(self._db):
            yield
        self._committed()

    def revision(self) -> int:
        """Return a number that grows with every change.  Raises LedgerCorrupt."""
        with errors():
            found = self._db.execute("SELECT changes FROM effect_counts").fetchone()
        changes = found[0] if found else None
        if not isinstance(changes, int):  # a page of another table, as a disk that lies returns it
            raise LedgerCorrupt("table effect_counts has no number of changes")
        return changes

    def changed(self) -> None:
        """Count a change of something beside the attempts, inside a transaction."""
        self._next("changes")

    def skip(self, revisions: int) -> None:
        """Let the revision be so much higher, if that is any."""
        if revisions > 0:
            with self._transaction():
                self._db.execute("UPDATE effect_counts SET changes = changes + ?", (revisions,))

    def _verdict(self, found: Effect, parameters: str) -> str | None:
        """Return why `found` cannot be claimed, or None for a claim whose holder is gone."""
        if found.parameters != parameters:
            return CONFLICT
        if found.state != CLAIMED:
            return found.state
        return None if _abandoned(found) else HELD

    def _find(self, key: str) -> Effect | None:
        values = self._db.execute(f"SELECT {_COLUMNS} FROM effects WHERE key = ?", (key,)).fetchone()
        return None if values is None else Effect._make(values)

    def _mine(self, key: str, token: int) -> Effect | None:
        found = self._find(key)
        return found if found is not None and found.state == CLAIMED and found.token == token else None

    def _put(self, effect: Effect) -> Effect:
        self._next("changes")
        self._db.execute(f"INSERT OR REPLACE INTO effects ({_COLUMNS}) VALUES ({_HOLES})", effect)
        return effect

    def _forget(self, key: str) -> None:
        self._next("changes")
        self._db.execute("DELETE FROM effects WHERE key = ?", (key,))

    def _next(self, counter: str) -> int:
        """Count one up; the column of effect_counts is not a user's word."""
        found = self._db.execute(f"UPDATE effect_counts SET {counter} = {counter} + 1 RETURNING {counter}")
        value: int = found.fetchone()[0]
        return value


def _process(pid: int) -> str | None:
    """Return what tells this process from every other, past and future, of this machine; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{clock.boot_id()} {pid} {fields[19]}"  # its start, proc(5) field 22


def _is_unheard(effect: Effect, claimant: str, parameters: str) -> bool:
    """Return whether the one who asks has this claim already: it never heard so, and has not begun."""
    return claimant != "" and (effect.claimant, effect.parameters) == (claimant, parameters)


def _abandoned(effect: Effect) -> bool:
    return effect.state == CLAIMED and not _lives(effect.worker)


def _lives(process: str) -> bool:
    boot, _, rest = process.partition(" ")
    pid = rest.partition(" ")[0]
    return boot == clock.boot_id() and pid.isdecimal() and _process(int(pid)) == process
