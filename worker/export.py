"""Exporting: the run as it stands, in one file that another machine can go on from."""

import contextlib
import os
import sys

from worker import checkpoint, report
from worker.errors import AgentError, StateError
from worker.ledger import LedgerCorrupt
from worker.ledger.sqlite import SqliteLedger


def export(file: str, root: str, unit: str | None) -> str | None:
    """Write the run of the state folder `root` to `file`; return what to tell, if anything.

    A name that ends in .db gets the ledger, every other one a checkpoint; "-" is standard output.  Out of a ledger.db
    all of it is of one moment, whether a worker is at work or not; out of a server it may know more than its revision
    says.  A file has its name only once it is whole and durable.
    """
    if file != "-" and os.path.dirname(os.path.realpath(file)) == os.path.realpath(root):
        raise AgentError(f"{file}: is in the run's own folder", "name a file elsewhere")
    if file != "-" and os.path.exists(file) and not os.path.isfile(file):  # a device would be replaced, for everybody
        raise AgentError(f"{file}: is no plain file", "name one; '-' is standard output")
    with contextlib.closing(report.open_ledger(root, unit)) as store:
        run = store.fact("run") or ""
        try:
            if file.endswith(".db"):
                if not isinstance(store, SqliteLedger):
                    raise AgentError(f"{file}: the run's ledger is on a server", "name a file that ends in .json")
                store.copy_to(os.path.abspath(file))
                return f"run {run}: revision {_revision(os.path.abspath(file))} is in {file}"
            with store.moment() if isinstance(store, SqliteLedger) else contextlib.nullcontext():
                if file != "-":
                    checkpoint.write(os.path.abspath(file), run, store)
                    return f"run {run}: revision {checkpoint.header(file).revision} is in {file}"
                said = b"".join(checkpoint.chunks(run, store))
            # Whoever reads it may take his time; until he had all of it, no worker could write to some ledgers.
            sys.stdout.buffer.write(said)
            sys.stdout.buffer.flush()
            return None
        except LedgerCorrupt as exc:
            raise StateError(f"{root}/ledger.db: {exc}", "nothing was written") from exc
        except BrokenPipeError:
            raise  # whoever read it has had enough
        except OSError as exc:
            raise StateError(f"{exc.filename or file}: {exc.strerror}", "nothing was written") from exc


def _revision(path: str) -> int:
    """Return what the ledger that was written is of; the run's own may be further by now."""
    with contextlib.closing(SqliteLedger.open(path, read_only=True)) as copy:
        return copy.revision()
