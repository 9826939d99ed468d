"""Exporting: the run as it stands, in one file that another machine can go on from."""

import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, NamedTuple, NoReturn

from worker import checkpoint, files, privileges, report
from worker.errors import FAULT, OK, AgentError, StateError
from worker.installed import Installed
from worker.ledger import LedgerCorrupt, StorageFull
from worker.ledger.sqlite import SqliteLedger
from worker.signs import printable

_CHUNK = 1 << 20
_FIRST_LINE_MAX = 4096  # bytes


def export(file: str, root: str, unit: Installed | None) -> str | None:
    """Write the run of the state folder `root` to `file`; return what to tell, if anything.

    A name that ends in .db gets the ledger, every other one a checkpoint; "-" is standard output.  Out of a ledger.db
    all of it is of one moment, whether a worker is at work or not; out of a server it may know more than its revision
    says.  A file has its name only once it is whole and durable.  Root's rights are given up.
    """
    if file != "-" and os.path.dirname(os.path.realpath(file)) == os.path.realpath(root):
        raise AgentError(f"{file}: is in the run's own folder", "name a file elsewhere")
    if file != "-" and os.path.exists(file) and not os.path.isfile(file):  # a device would be replaced, for everybody
        raise AgentError(f"{file}: is no plain file", "name one; '-' is standard output")
    if file == "-":
        privileges.give_up(root)
        _print(root, unit)
        return None
    if not os.path.isdir(folder := os.path.dirname(os.path.abspath(file))):
        raise AgentError(f"{folder}: there is no such folder", f"make it: mkdir -p {shlex.quote(folder)}")
    try:
        if os.geteuid() == 0:
            said = _by_two(os.path.abspath(file), root, unit)
        else:
            said = _write(os.path.abspath(file), root, unit)
    except OSError as exc:
        raise StateError(f"{exc.filename or file}: {exc.strerror}", "nothing was written") from exc
    return f"run {said.run}: revision {said.revision} is in {file}"


class _Written(NamedTuple):
    """What a file that was written is of; the run itself may be further by now."""

    run: str
    revision: int


def _write(path: str, root: str, unit: Installed | None) -> _Written:
    """Write the run to the file at `path`.  Raises AgentError, or OSError, with no file left."""
    with contextlib.closing(report.open_ledger(root, unit)) as store:
        run = store.fact("run") or ""
        try:
            if not path.endswith(".db"):
                with store.moment() if isinstance(store, SqliteLedger) else contextlib.nullcontext():
                    checkpoint.write(path, run, store)
                return _Written(run, checkpoint.header(path).revision)
            if not isinstance(store, SqliteLedger):
                raise AgentError(f"{path}: the run's ledger is on a server", "name a file that ends in .json")
            store.copy_to(path)
        except LedgerCorrupt as exc:
            raise StateError(f"{root}/ledger.db: {exc}", "nothing was written") from exc
    with contextlib.closing(SqliteLedger.open(path, read_only=True)) as copy:
        return _Written(run, copy.revision())


def _print(root: str, unit: Installed | None) -> None:
    with contextlib.closing(report.open_ledger(root, unit)) as store:
        try:
            with store.moment() if isinstance(store, SqliteLedger) else contextlib.nullcontext():
                said = b"".join(checkpoint.chunks(store.fact("run") or "", store))
        except LedgerCorrupt as exc:
            raise StateError(f"{root}/ledger.db: {exc}", "nothing was written") from exc
        # Whoever reads it may take his time; until he had all of it, no worker could write to some ledgers.
    sys.stdout.buffer.write(said)
    sys.stdout.buffer.flush()


# -- for root


def _by_two(path: str, root: str, unit: Installed | None) -> _Written:
    """Write the run to the file at `path` for root, who trusts neither folder.

    A child with the rights of the state folder's owner reads it; we write with those of the owner of the folder that
    the file is to be in.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _read_for(writer, path.endswith(".db"), root, unit)
    os.close(writer)
    with open(reader, "rb") as source:
        said = _Incoming(child, source)
        try:
            privileges.give_up(os.path.dirname(path))
            files.replace(path, said)
        except _Unread:
            raise SystemExit(said.status or FAULT) from None  # the child has said why
        finally:
            source.close()
            said.wait()
        return said.written()


class _Unread(Exception):
    """The child could not read the run."""


class _Incoming:
    """What the child sends: a line about it and then the bytes, which are whole only if the child ends well."""

    def __init__(self, child: int, source: IO[bytes]) -> None:
        self.status: int | None = None
        self._child = child
        self._source = source
        self._first = b""

    def __iter__(self) -> Iterator[bytes]:
        self._first = self._source.readline(_FIRST_LINE_MAX)
        yield from iter(lambda: self._source.read(_CHUNK), b"")
        self.wait()
        if self.status or not self._first.endswith(b"\n"):
            raise _Unread

    def written(self) -> _Written:
        """Return what the child said of it, made safe to print."""
        run, _, revision = self._first.decode(errors="replace").rstrip("\n").partition(" ")
        return _Written(printable(run), int(revision))

    def wait(self) -> None:
        """Wait for the child's end.  One that still sends meets a closed pipe."""
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


def _read_for(writer: int, whole_ledger: bool, root: str, unit: Installed | None) -> NoReturn:
    """In the child: read the run as its owner, write a line about it and then its bytes, and exit."""
    status = FAULT
    try:
        privileges.give_up(root)
        with open(writer, "wb") as out, tempfile.TemporaryDirectory(prefix="agent-export-") as private:
            copy = os.path.join(private, "run.db" if whole_ledger else "run.json")
            said = _write(copy, root, unit)
            out.write(f"{said.run} {said.revision}\n".encode())
            with open(copy, "rb") as file:
                shutil.copyfileobj(file, out, _CHUNK)
        status = OK
    except AgentError as exc:
        print(exc, file=sys.stderr)
        status = exc.exit_status
    except BrokenPipeError:
        pass  # the one who writes has met an error, and says so
    except (OSError, StorageFull) as exc:
        print(f"{root}: {exc}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(status)
