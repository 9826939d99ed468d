"""The copy of the run's checkpoint that the supervisor keeps: always whole, never older than it was.

STATE/checkpoint.json; what has just come stands beside it until it has been read from end to end.
"""

import contextlib
import os
from collections.abc import Callable

from worker import checkpoint, files
from worker.checkpoint import CheckpointError
from worker.errors import StateError, quote
from worker.supervise.sound import Sound

# Returns what a checkpoint says, or why it is none; raises OSError.
Judge = Callable[[str], Sound | str]


def path(root: str) -> str:
    return f"{root}/checkpoint.json"


def load(root: str, run: str, judge: Judge) -> Sound | None:
    """Return what the copy says, or None if there is none yet.

    Raises StateError for one that cannot be read or is of another run: to go on without it would be to begin anew.
    """
    try:
        found = judge(path(root))
    except FileNotFoundError:
        return None
    except OSError as exc:
        found = str(exc.strerror)
    if isinstance(found, Sound) and found.run != run:
        found = f"it is of the run {quote(found.run)}, not of '{run}'"
    if isinstance(found, str):
        hint = f"nothing was changed; put a sound copy there, or begin anew: rm {path(root)}"
        raise StateError(f"{path(root)}: {found}", hint)
    return found


def take(root: str, run: str, fetch: Callable[[str], str], judge: Judge) -> str:
    """Let the copy be what `fetch` brings, as `keep` does; return "" or why it is not taken.

    `fetch` puts the file at the path it is given, and returns "" or why it could not.
    """
    try:
        return fetch(expect(root)) or keep(root, run, judge)
    finally:
        drop(root)


def expect(root: str) -> str:
    """Return the path at which the next copy is to come; nothing is there."""
    drop(root)
    return incoming(root)


def incoming(root: str) -> str:
    """Return the path at which what has come lies until it is taken."""
    return f"{path(root)}.incoming"


def keep(root: str, run: str, judge: Judge) -> str:
    """Let the copy be what has come, if that is sound and no older; return "" or why it is not taken.

    The copy before is replaced in one step, after the new one is durable; of what is not taken nothing is left.
    """
    come = incoming(root)
    try:
        fault = _fault(root, run, come, judge)
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


def _fault(root: str, run: str, come: str, judge: Judge) -> str:
    """Return what is wrong with what has come, or ""."""
    try:
        found = judge(come)
    except FileNotFoundError:
        return "nothing came"
    if isinstance(found, str):
        return f"what came is no checkpoint: {found}"
    if found.run != run:
        return f"what came is of the run {quote(found.run)}, not of '{run}'"
    try:
        known = checkpoint.header(path(root)).revision
    except (CheckpointError, OSError):
        return ""  # there is none yet, or none that is worth keeping
    return f"what came is older (revision {found.revision}) than the copy ({known})" if found.revision < known else ""
