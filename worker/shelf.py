"""The shelf: a state folder holds one run at a time, and keeps the others for when they come back.

A run's name outlives every process and is part of every key, so a list with another name is another
run: the state of the one before is put into runs/NAME/, whole, and taken out again when a list with its
name comes back.  Nothing is copied or deleted.

Renames one after the other; the ledger goes last and comes first, so that a crash in between is finished
by the next start.
"""

import contextlib
import os

from worker import files
from worker.errors import StateError
from worker.folder import Places

_FOREIGN = "it is not the agent's; move it away, or use another state folder"
_LEDGER = tuple(f"ledger.db{ending}" for ending in ("-wal", "-journal", "-shm", ".mark", ""))
_PARTS = ("ended", "out", "steps", "home", "log", "checkpoint.json", *_LEDGER)


def put_away(places: Places, run: str) -> None:
    """Move the state of `run` out of the way.  The caller holds the lock and has closed the ledger."""
    shelf = _folder(places, run)
    os.makedirs(shelf, mode=0o750, exist_ok=True)
    _move(places.root, shelf, _PARTS)


def take_out(places: Places) -> bool:
    """Bring the state of this run back if it is on the shelf; return whether it was."""
    shelf = _folder(places, places.run)
    if not os.path.isdir(shelf):
        return False
    _move(shelf, places.root, _PARTS[::-1])
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{shelf}/lock")  # of whoever has settled something there
    os.rmdir(shelf)
    return True


def _folder(places: Places, run: str) -> str:
    if not files.is_plain_name(run):
        raise StateError(f"{places.root}: holds a run named {run!a}, which is no name of a run", _FOREIGN)
    return f"{places.root}/runs/{run}"


def _move(source: str, target: str, parts: tuple[str, ...]) -> None:
    for name in parts:
        if not os.path.lexists(f"{source}/{name}"):
            continue
        if os.path.lexists(f"{target}/{name}") and _remove_empty(f"{source}/{name}"):
            continue  # it was moved before the crash, and a new start has made an empty one
        _remove_empty(f"{target}/{name}")
        files.move(f"{source}/{name}", f"{target}/{name}")
    files.sync_folder(source)
    files.sync_folder(target)


def _remove_empty(folder: str) -> bool:
    """Remove a folder if it is one and empty; return whether that was done."""
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True
