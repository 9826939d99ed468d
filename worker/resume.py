"""Resuming: open what an earlier worker left, and use what is sound of it.

The ledger is the truth and checkpoint.json its portable copy.  Each can stand in for the other:
a ledger that is gone or unreadable is made anew from the checkpoint, and a ledger that knows less
than the checkpoint (it was copied without its -wal, say) is given what it lacks.  What cannot be
read is set aside, never overwritten; if nothing sound is left the worker does not start.
"""

import os
from typing import NamedTuple

from worker import checkpoint, folder
from worker.checkpoint import CheckpointError
from worker.errors import StateError
from worker.folder import Places
from worker.ledger import LedgerCorrupt, StorageFull
from worker.ledger.sqlite import SUFFIXES, SqliteLedger


class Resumed(NamedTuple):
    """An open ledger, and what people should know of how it came about."""

    ledger: SqliteLedger
    notices: list[str]


def open_ledger(places: Places) -> Resumed:
    """Return the ledger of the state folder, which the caller has locked.

    Raises StateError if nothing sound is left, if a newer version wrote it or if it belongs to
    another run; then every file is where it was.
    """
    notices: list[str] = []
    ledger, broken = _open(places)
    if ledger is not None:
        _compare(ledger, places, notices)
    else:
        ledger = _rebuild(places, broken, notices)
    try:
        _bind(ledger, places)
    except BaseException:
        ledger.close()
        raise
    return Resumed(ledger, notices)


def _open(places: Places) -> tuple[SqliteLedger | None, str | None]:
    """Return the ledger, or what is wrong with it, or neither if there is none."""
    try:
        return SqliteLedger.open(places.ledger), None
    except FileNotFoundError:
        return None, None
    except LedgerCorrupt as exc:
        return None, str(exc)
    except StorageFull as exc:
        raise StateError(f"{places.ledger}: cannot be opened: {exc}", "make room or mend the disk") from exc


def _compare(ledger: SqliteLedger, places: Places, notices: list[str]) -> None:
    """Give a sound ledger what only the checkpoint knows."""
    try:
        head = checkpoint.header(places.checkpoint)
        if head.revision > ledger.revision():
            _head, rows = checkpoint.load(places.checkpoint)
            added = ledger.restore(rows)
            notices.append(
                f"{places.ledger}: older than checkpoint.json; {added} attempts taken over from there"
            )
    except FileNotFoundError:
        pass
    except (CheckpointError, OSError) as exc:
        aside = folder.set_aside(places.checkpoint)
        notices.append(f"{places.checkpoint}: {exc}; set aside as {aside}, a new one is made from the ledger")


def _rebuild(places: Places, broken: str | None, notices: list[str]) -> SqliteLedger:
    """Make a ledger from the checkpoint, or an empty one if there is no trace of an earlier one."""
    try:
        head, rows = checkpoint.load(places.checkpoint)
    except FileNotFoundError:
        if broken is not None:
            raise _hopeless(places, f"{places.ledger}: {broken}, and there is no checkpoint.json") from None
        head, rows = None, []
    except (CheckpointError, OSError) as exc:
        lost = f"{places.ledger}: {broken}" if broken else f"{places.ledger}: missing"
        raise _hopeless(places, f"{lost}, and {places.checkpoint}: {exc}") from exc
    if broken is not None:
        aside = folder.set_aside(places.ledger, SUFFIXES)
        notices.append(f"{places.ledger}: {broken}; set aside as {aside}")
    elif any(os.path.exists(places.ledger + suffix) for suffix in SUFFIXES):
        folder.set_aside(places.ledger, SUFFIXES)  # a -wal without its database must not meet the new one
    ledger = SqliteLedger.create(places.ledger)
    if head is not None:
        ledger.restore(rows)
        ledger.note({**head.facts, "run": head.run})
        notices.append(f"{places.ledger}: made anew from checkpoint.json, {len(rows)} attempts")
    return ledger


def _hopeless(places: Places, what: str) -> StateError:
    return StateError(
        what,
        f"nothing was changed; put a sound checkpoint.json into {places.root}, "
        f"or begin anew with: mv {places.root}/ledger.db {places.root}/checkpoint.json /var/tmp/",
    )


def _bind(ledger: SqliteLedger, places: Places) -> None:
    """A state folder belongs to one run: its name is part of every key."""
    name = ledger.fact("run")
    if name is None:
        ledger.note({"run": places.run})
    elif name != places.run:
        raise StateError(
            f"{places.root}: holds the run '{name}', the configuration says '{places.run}'",
            "give the run its old name back, or use another state folder (--state, or move this one away)",
        )
