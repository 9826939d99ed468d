"""Verifying copies: whether a run could go on from them, and how far they are behind."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker import checkpoint, clock, config, files, knowledge, plural, privileges, report, restore, schema
from worker.checkpoint import CheckpointError
from worker.errors import OK, STATE_UNUSABLE, AgentError
from worker.installed import Installed
from worker.knowledge import Known
from worker.ledger import LedgerCorrupt, StorageFull
from worker.ledger.sqlite import SqliteLedger
from worker.ledger.sqlite.database import LOGS
from worker.timespan import show

_LEDGER, _CHECKPOINT = "ledger.db", "checkpoint.json"


class _Broken(Exception):
    """No run could go on from it; the message says why."""


class _Copy(NamedTuple):
    known: Known
    written: float  # wall clock


def verify(paths: Sequence[str], root: str, unit: Installed | None) -> int:
    """Print what each of `paths`, a file or a folder with both, is good for; return whether all could be restored.

    `root`: the state folder of the run that goes on here, if it does.
    """
    paths = [os.path.abspath(path) for path in paths]
    if os.geteuid() != 0:
        return _verify([(path, _named(path)) for path in paths], {}, _here(root, unit))
    asked = []
    for path in paths:
        with privileges.of_owner(path):
            asked.append((path, _named(path)))
    opened = {name: _open(name) for _path, names in asked for name in names}
    privileges.give_up(root)
    with tempfile.TemporaryDirectory(prefix="agent-verify-") as private:
        places = {name: _lay_out(name, found, private) for name, found in opened.items()}
        return _verify(asked, places, _here(root, unit))


def _verify(asked: Sequence[tuple[str, list[str]]], places: Mapping[str, str], here: Known | None) -> int:
    """Print what each path, with its files, is good for; a file lies where `places` says, if it says anything."""
    status = OK
    for path, names in asked:
        try:
            for said in _look(path, names, places, here):
                print(said)
        except _Broken as exc:
            print(f"{path}: {exc}")
            status = STATE_UNUSABLE
    return status


def _named(path: str) -> list[str]:
    """Return the files that a path stands for."""
    if not os.path.isdir(path):
        return [path]
    return [name for name in (f"{path}/{_LEDGER}", f"{path}/{_CHECKPOINT}") if os.path.lexists(name)]


def _open(name: str) -> dict[str, int]:
    """Return descriptors of a file and of the logs beside it, by the ending of their names."""
    found: dict[str, int] = {}
    for ending in ("", *LOGS):
        # Of the file itself it is met again, and said.
        with contextlib.suppress(OSError), privileges.of_owner(name):
            found[ending] = files.open_plain(name + ending)
    return found


def _lay_out(name: str, opened: dict[str, int], private: str) -> str:
    """Return where to look at a file: in place where we still may, else in a copy of what was opened."""
    if "" not in opened or os.access(name, os.R_OK):
        return name
    folder = tempfile.mkdtemp(dir=private)
    for ending, fd in opened.items():
        with open(fd, "rb", closefd=False) as source, open(f"{folder}/copy{ending}", "wb") as copy:
            shutil.copyfileobj(source, copy)
    times = os.fstat(opened[""])
    os.utime(f"{folder}/copy", (times.st_atime, times.st_mtime))
    return f"{folder}/copy"


def _look(path: str, names: list[str], places: Mapping[str, str], here: Known | None) -> list[str]:
    if not names:
        raise _Broken(
            f"there is no {_LEDGER} and no {_CHECKPOINT} in it; {restore.missing_hint(f'{path}/{_CHECKPOINT}')}"
        )
    found = [_read(places.get(name, name)) for name in names]
    lines = [_line(name, copy, here) for name, copy in zip(names, found, strict=True)]
    if len(found) == 2:
        one, other = found[0].known, found[1].known
        if one.run != other.run:
            raise _Broken(f"its files are of two runs, '{one.run}' and '{other.run}'")
        same = one == other
        lines.append(
            f"{path}: " + ("both are of one moment" if same else "they are of two moments; each can be restored")
        )
    return lines


def _read(path: str) -> _Copy:
    """Return what the whole of a copy says; raises _Broken."""
    try:
        with open(files.open_plain(path), "rb") as file:
            ledger = file.read(len(restore.SQLITE)) == restore.SQLITE
        found = _read_ledger(path) if ledger else _read_checkpoint(path)
    except (CheckpointError, LedgerCorrupt, StorageFull, AgentError) as exc:
        raise _Broken(str(exc).removeprefix(f"{path}: ")) from exc
    except FileNotFoundError as exc:
        raise _Broken(f"cannot be read: {exc.strerror}; {restore.missing_hint(path)}") from exc
    except OSError as exc:
        raise _Broken(f"cannot be read: {exc.strerror}") from exc
    if not schema.is_name(found.known.run, config.LONGEST_RUN):
        raise _Broken("it does not say of which run it is")
    return found


def _read_ledger(path: str) -> _Copy:
    with contextlib.closing(SqliteLedger.open(path, read_only=True)) as store:
        store.verify()
        rows = list(store.rows())
        known = knowledge.of(store.fact("run") or "", store.revision(), rows, store.effects.all())
    return _Copy(known, max((row.ended or row.started for row in rows), default=os.stat(path).st_mtime))


def _read_checkpoint(path: str) -> _Copy:
    found = checkpoint.load(path)
    head = found.header
    try:
        SqliteLedger.rehearse(found.holdings(head.run))
    except ValueError as exc:
        raise _Broken(str(exc)) from exc
    known = knowledge.of(head.run, head.revision, (row for row, _ in found.attempts), found.effects)
    written = clock.unstamp(head.written)
    return _Copy(known, os.stat(path).st_mtime if written is None else written)


def _here(root: str, unit: Installed | None) -> Known | None:
    try:
        with contextlib.closing(report.open_ledger(root, unit)) as store:
            return knowledge.of(store.fact("run") or "", store.revision(), store.rows(), store.effects.all())
    except AgentError:
        return None  # there is nothing here to compare with


def _line(path: str, copy: _Copy, here: Known | None) -> str:
    known = copy.known
    age = show(max(0.0, clock.wall() - copy.written))
    done = plural.of(len(known.done), "step")
    said = f"{path}: sound; run {known.run}, {done} done, revision {known.revision}, {age} old"
    if here is None or here.run != known.run:
        return said
    missing, more = len(here.done - known.done), len(known.done - here.done)
    if missing or more:
        lacks = plural.of(missing, "step that is done here is", "steps that are done here are")
        ahead = plural.of(more, "done that is", "done that are")
        said += f"; {lacks} not in it" if missing else ""
        return said + (f"; it has {ahead} not done here" if more else "")
    return f"{said}; every step that is done here is in it"
