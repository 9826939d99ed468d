"""The snapshot: a program that makes the ledger and the checkpoint of one moment, then becomes the user's command.

STATE/copy/ledger.db          by SQLite's own backup, looked through before it has its name
STATE/copy/checkpoint.json    made from that; each is replaced whole
STATE/copy/lock               held until the command has ended, with all that it started

It is a process of its own, so that the worker pays for its start alone; where the ledger is on a server there is the
checkpoint only.  An older state never takes the place of a newer one.
"""

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from worker import checkpoint, files
from worker.checkpoint import CheckpointError
from worker.errors import AgentError
from worker.ledger import LedgerCorrupt, StorageFull
from worker.ledger.sqlite import SqliteLedger

_NICE = 5
_NOT_MADE, _NOT_FOUND = 1, 127


class SnapshotError(Exception):
    """There is no new snapshot; the message says why, and the one before is whole."""


def main(arguments: Sequence[str]) -> NoReturn:
    """FOLDER RUN SOURCE COMMAND...: make the snapshot of SOURCE, a ledger or a checkpoint, then run the command."""
    folder, run, source, *command = arguments
    os.nice(_NICE)  # the steps come first
    try:
        make(folder, run, source)
    except (SnapshotError, AgentError, CheckpointError, LedgerCorrupt, StorageFull) as exc:
        sys.exit(f"no snapshot was made: {exc}")
    except OSError as exc:
        sys.exit(f"no snapshot was made: {exc.filename or folder}: {exc.strerror}")
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and the command would
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as exc:
        print(f"{command[0]}: cannot be run: {exc.strerror}", file=sys.stderr)
        sys.exit(_NOT_FOUND)


def make(folder: str, run: str, source: str) -> None:
    """Replace the snapshot in `folder` by what `source` holds now, durably; raises SnapshotError among others."""
    os.makedirs(folder, mode=0o750, exist_ok=True)
    _lock(folder)
    ledger, portable = f"{folder}/ledger.db", f"{folder}/checkpoint.json"
    if not source.endswith(".db"):
        _refuse_older(portable, run, checkpoint.header(source).revision)
        files.replace(portable, [files.read(source)])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(ledger)  # from before the run's ledger went to a server
        return
    with contextlib.closing(SqliteLedger.open(source, read_only=True)) as store:
        _refuse_older(portable, run, store.revision())
        store.copy_to(ledger)
    with contextlib.closing(SqliteLedger.open(ledger, read_only=True)) as store:
        checkpoint.write(portable, run, store)


def _lock(folder: str) -> None:
    """Take the folder for this process, and for what it becomes and starts."""
    fd = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT, 0o640)
    os.set_inheritable(fd, True)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SnapshotError("another copy is still under way") from None


def _refuse_older(portable: str, run: str, revision: int) -> None:
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        there = checkpoint.header(portable)
        if there.run == run and there.revision > revision:
            folder = os.path.dirname(portable)
            raise SnapshotError(
                f"the copy in {folder} is newer than the run (revision {there.revision} and {revision}); "
                f"if the run was put back on purpose: rm -r {folder}"
            )
