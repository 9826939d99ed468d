"""The swap: the state that a restore has prepared takes the place of the one that was there, all of it or nothing.

STATE/.restore/               being prepared: means nothing, and the next restore begins anew
STATE/restoring-TIME.RUN/     complete and durable: this is the state now, though not all in its place yet
STATE/before-restore-TIME/    what was there before, whole

The rename from the first to the second decides.  Whatever dies after it, `finish` goes on where that was; each
start does so before it looks at anything else.  Nothing is deleted or overwritten.
"""

import contextlib
import os
import shutil
import time

from worker import files, points
from worker.errors import StateError
from worker.folder import Places

_PREPARED, _DECIDED, _BEFORE = ".restore", "restoring-", "before-restore-"
_LEDGER = "ledger.db"
# Gone before the new ledger comes: it must not meet the log of another one.  The ledger first, so that nobody
# opens it without its log.
_OLD = (
    *(f"{_LEDGER}{ending}" for ending in ("", "-wal", "-shm", "-journal", ".mark")),
    "worker.json", "ended", "copy", "home",
)  # fmt: skip
_FOLDERS = ("out", "steps", "log")
_BOTH = (*_FOLDERS, "checkpoint.json")


def prepare(root: str) -> Places:
    """Return the places of an empty state in which a restore may prepare.  The caller holds the lock."""
    discard(root)
    for name in ("", *_FOLDERS):
        os.mkdir(f"{root}/{_PREPARED}/{name}", mode=0o750)
    return Places("", f"{root}/{_PREPARED}", "")


def discard(root: str) -> None:
    """Remove what was being prepared."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(f"{root}/{_PREPARED}")


def decide(root: str, run: str) -> None:
    """Let what was prepared, which is the run `run`, be the state.  Durable when this returns; `finish` comes next."""
    for name in (*_FOLDERS, ""):
        files.sync_folder(f"{root}/{_PREPARED}/{name}")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    while os.path.lexists(f"{root}/{_BEFORE}{stamp}"):
        stamp += "+"
    points.at("restore-prepared")
    os.rename(f"{root}/{_PREPARED}", f"{root}/{_DECIDED}{stamp}.{run}")
    files.sync_folder(root)
    points.at("restore-decided")


def pending(root: str) -> list[str]:
    """Return what was decided and is not finished."""
    try:
        return sorted(name for name in os.listdir(root) if name.startswith(_DECIDED))
    except OSError:
        return []


def finish(root: str) -> str | None:
    """Do what was decided, if anything is left of it; return where the state before is.  The caller holds the lock."""
    before = None
    for name in pending(root):
        stamp, _, run = name.removeprefix(_DECIDED).partition(".")
        if not files.is_plain_name(run):
            raise StateError(f"{root}/{name}: is no restore that the agent has made", "move it away")
        before = _swap(root, f"{root}/{name}", f"{root}/{_BEFORE}{stamp}", run)
    return before


def _swap(root: str, new: str, before: str, run: str) -> str | None:
    os.makedirs(before, mode=0o750, exist_ok=True)
    if os.path.lexists(f"{new}/{_LEDGER}"):  # it comes last: as long as it is here, all that has its name is old
        for part in _OLD:
            _put(f"{root}/{part}", f"{before}/{part}")
        _put(f"{root}/runs/{run}", f"{before}/shelf")  # or it would be taken for the newer one
    for part in _BOTH:
        if os.path.lexists(f"{new}/{part}"):
            _put(f"{root}/{part}", f"{before}/{part}")
    files.sync_folder(before)
    files.sync_folder(root)
    for part in (*_BOTH, _LEDGER):
        if os.path.lexists(f"{new}/{part}"):
            os.rename(f"{new}/{part}", f"{root}/{part}")
            points.at("restore-placed")
    files.sync_folder(root)
    os.rmdir(new)
    with contextlib.suppress(OSError):
        os.rmdir(before)  # nothing was there before
    return before if os.path.isdir(before) else None


def _put(source: str, target: str) -> None:
    """Move what is there, unless it is an empty folder; what is at `target` already stays."""
    with contextlib.suppress(OSError):
        os.rmdir(source)
    while os.path.lexists(target):
        target += "+"
    with contextlib.suppress(FileNotFoundError):
        files.move(source, target)
        points.at("restore-moved")
