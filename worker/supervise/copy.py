"""The copy of the run's checkpoint that the supervisor keeps: always whole, never older than it was.

STATE/checkpoint.json; what has just come stands beside it until it has been read from end to end.
"""

import contextlib
import os
from collections.abc import Callable

from worker import checkpoint, files
from worker.checkpoint import Checkpoint, CheckpointError
from worker.errors import StateError
from worker.ledger import DONE


def path(root: str) -> str:
    return f"{root}/checkpoint.json"


def load(root: str, run: str) -> Checkpoint | None:
    """Return the copy, or None if there is none yet.

    Raises StateError for one that cannot be read or is of another run: to go on without it would be to begin anew.
    """
    try:
        found = checkpoint.load(path(root))
        if found.header.run != run:
            raise CheckpointError(f"it is of the run '{found.header.run}', not of '{run}'")
    except FileNotFoundError:
        return None
    except (CheckpointError, OSError) as exc:
        raise StateError(
            f"{path(root)}: {exc}", f"nothing was changed; put a sound copy there, or begin anew: rm {path(root)}"
        ) from exc
    return found


def take(root: str, run: str, fetch: Callable[[str], str]) -> str:
    """Let the copy be what `fetch` brings, as `keep` does; return "" or why it is not taken.

    `fetch` puts the file at the path it is given, and returns "" or why it could not.
    """
    try:
        return fetch(expect(root)) or keep(root, run)
    finally:
        drop(root)


def expect(root: str) -> str:
    """Return the path at which the next copy is to come; nothing is there."""
    drop(root)
    return incoming(root)


def incoming(root: str) -> str:
    """Return the path at which what has come lies until it is taken."""
    return f"{path(root)}.incoming"


def keep(root: str, run: str) -> str:
    """Let the copy be what has come, if that is sound and no older; return "" or why it is not taken.

    The copy before is replaced in one step, after the new one is durable; of what is not taken nothing is left.
    """
    come = incoming(root)
    try:
        fault = _fault(root, run, come)
        if not fault:
            files.adopt(come, path(root))
        return fault
    except OSError as exc:
        return f"{exc.filename or come}: {exc.strerror}"
    finally:
        drop(root)


def drop(root: str) -> None:
    """Let nothing be left of what has come and is not taken."""
    with contextlib.suppress(OSError):
        os.unlink(incoming(root))


def _fault(root: str, run: str, come: str) -> str:
    """Return what is wrong with what has come, or ""."""
    try:
        checkpoint.load(come)
        found = checkpoint.header(come)
    except FileNotFoundError:
        return "nothing came"
    except CheckpointError as exc:
        return f"what came is no checkpoint: {exc}"
    if found.run != run:
        return f"what came is of the run '{found.run}', not of '{run}'"
    try:
        known = checkpoint.header(path(root)).revision
    except (CheckpointError, OSError):
        return ""  # there is none yet, or none that is worth keeping
    return f"what came is older (revision {found.revision}) than the copy ({known})" if found.revision < known else ""


def spend(found: Checkpoint | None) -> float:
    """Return what the attempts in a copy have spent."""
    return sum(row.spend for row, _output in found.attempts) if found is not None else 0.0


def done(found: Checkpoint | None) -> int:
    """Return how many steps are done in a copy."""
    return sum(row.outcome == DONE for row, _output in found.attempts) if found is not None else 0
