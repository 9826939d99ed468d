"""The scribe: a program that writes the checkpoint of one moment of the ledger, while the worker goes on.

It leaves the new checkpoint beside the old one, whole and durable, and says by its exit status that it has.  To let
it take the old one's place is for the worker alone.
"""

import contextlib
import os
import sys
from collections.abc import Sequence

from worker import checkpoint, files
from worker.errors import AgentError
from worker.ledger import LedgerCorrupt, StorageFull
from worker.ledger.sqlite import SqliteLedger

_NICE = 5


def main(arguments: Sequence[str]) -> None:
    """PATH RUN LEDGER: prepare what is to be the checkpoint of RUN at PATH."""
    path, run, source = arguments
    os.nice(_NICE)  # the steps come first
    try:
        with contextlib.closing(SqliteLedger.open(source, read_only=True)) as store, store.moment():
            files.prepare(path, checkpoint.chunks(run, store))
    except (AgentError, LedgerCorrupt, StorageFull) as exc:
        sys.exit(str(exc))
    except OSError as exc:
        sys.exit(exc.strerror or str(exc))
