"""Restoring: a run goes on in this state folder from a checkpoint or a ledger that came from elsewhere.

Nothing is changed unless the whole file is sound, no worker is at work here, and nothing here knows more than the
file does (or that is to be set aside).  What was here before is kept; see worker/swap.py for what a crash leaves.
"""

import contextlib
import os
import pwd
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from typing import IO, NamedTuple

from worker import (
    checkpoint,
    clock,
    config,
    files,
    folder,
    fromcopy,
    knowledge,
    member,
    plural,
    privileges,
    recovery,
    schema,
    swap,
)
from worker import unit as units
from worker.budget import GRANTED, USED
from worker.checkpoint import CheckpointError
from worker.errors import AgentError, ConfigError, StateError, StateHeld
from worker.folder import Places
from worker.installed import Installed
from worker.knowledge import Known
from worker.ledger import DONE, LedgerCorrupt, Row, StorageFull
from worker.ledger.sqlite import VERSION, SqliteLedger, checks
from worker.ledger.sqlite.database import log as sqlite_log

SQLITE = b"SQLite format 3\0"
_FORCE = "nothing was changed; to set aside what is here all the same: --force"


def restore(file: str, root: str, unit: Installed | None, force: bool) -> list[str]:
    """Let the run in `file` ("-": standard input) be the one in the state folder `root`; return what to tell.

    Durable when this returns.  Raises AgentError with everything as it was.
    """
    source = _open(file)
    listed = _run_of(unit.config) if unit else None
    _refuse_if_active(unit)
    _become_owner(root, unit)
    try:
        if not os.path.isdir(root):
            os.makedirs(root, mode=0o750)
        held = folder.lock(root)
        try:
            swap.finish(root)
            return _restore(source, root, unit, listed, force)
        finally:
            swap.discard(root)
            os.close(held.fd)
    except StorageFull as exc:
        raise StateError(f"{root}: cannot be written: {exc}", "nothing was restored; try again") from exc
    except OSError as exc:
        raise StateError(f"{exc.filename or root}: {exc.strerror}", "nothing was restored; mend that") from exc


class _Source(NamedTuple):
    """A file that is open already, since its reader may be somebody else than the state folder's owner."""

    name: str
    main: IO[bytes] | None  # of a ledger, and its log
    log: IO[bytes] | None
    data: bytes  # of a checkpoint
    ending: str = ""  # that of the log's name


def _open(name: str) -> _Source:
    if name == "-":
        return _Source("standard input", None, None, sys.stdin.buffer.read())
    path = os.path.abspath(name)
    with privileges.of_owner(path):
        return _open_file(path, path)


def _open_file(name: str, path: str) -> _Source:
    try:
        file = open(files.open_plain(path), "rb")  # noqa: SIM115 - until the process ends
        if file.read(len(SQLITE)) != SQLITE:
            file.seek(0)
            if os.fstat(file.fileno()).st_size > checkpoint.LARGEST:
                raise StateError(f"{name}: is larger than any checkpoint", "nothing was changed; take another copy")
            return _Source(name, None, None, file.read())
        file.seek(0)
        pid = folder.holder(os.path.dirname(path))
        if pid is not None:
            hint = f"let it write a copy: agentctl export COPY.db --state {os.path.dirname(path)}"
            raise StateHeld(f"{name}: a worker is at work on it, process {pid or 'unknown'}", hint)
        ending = sqlite_log(path)
        log = open(files.open_plain(path + ending), "rb") if ending else None  # noqa: SIM115
        if log and os.fstat(log.fileno()).st_size > checkpoint.LARGEST:
            raise StateError(f"{name}{ending}: is larger than any log", "nothing was changed; take another copy")
    except OSError as exc:
        if os.path.isdir(path):
            hint = f"name the file: {name.rstrip('/')}/checkpoint.json"
            raise StateError(f"{name}: is a folder", hint) from None
        raise StateError(f"{exc.filename or name}: cannot be read: {exc.strerror}", _advice(exc, path)) from exc
    return _Source(name, file, log, b"", ending)


def _advice(exc: OSError, path: str) -> str:
    """Return what to do about a copy of root's that lies in another user's folder, where only he counts."""
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        return missing_hint(path)
    if not isinstance(exc, PermissionError) or os.getuid() != 0:
        return "use sudo" if isinstance(exc, PermissionError) else ""
    return f"the folder is not root's, so only what its owner may read counts: sudo mv {shlex.quote(path)} /root/"


def missing_hint(path: str) -> str:
    """Return what to do about a copy that is not there, with the nearest folder that is."""
    folder = os.path.dirname(path)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    quoted = shlex.quote(path)
    return (
        f"see what is there: ls -l {shlex.quote(folder)}; where the run is, this writes one: agentctl export {quoted}"
    )


def _run_of(config_path: str) -> tuple[str, str, bool] | None:
    """Return the task list's path, its run, and whether its ledger is on a server; None if there is no list yet."""
    try:
        settings = config.load(config_path)
    except ConfigError:
        return None  # the agent says better what is wrong with it
    return config_path, settings.run, settings.ledger is not None


def _refuse_if_active(unit: Installed | None) -> None:
    """Also a unit that is between two workers is one that has a worker."""
    if unit is None:
        return
    found = units.properties(unit.name, "ActiveState", "SubState")
    if found.get("ActiveState", "inactive") not in ("inactive", "failed"):
        said = f"{found['ActiveState']} ({found.get('SubState')})"
        raise StateHeld(f"{unit.name}.service is {said}", f"first: systemctl stop {unit.name}")


def _become_owner(root: str, unit: Installed | None) -> None:
    """Write as the owner of the state folder does, whose folder is made if there is none."""
    if os.getuid() != 0:
        return
    if not os.path.isdir(root) and unit:
        user, group = _user(unit.name)
        os.makedirs(os.path.dirname(root), exist_ok=True)
        os.mkdir(root, mode=0o750)
        os.chown(root, user, group)
    privileges.give_up(root)


def _user(unit: str) -> tuple[int, int]:
    """Return whom the unit's state belongs to; where systemd does not run, whom an installation makes."""
    name = units.properties(unit, "User").get("User") or "agent"
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        raise StateError(f"the unit's user '{name}' does not exist", "install the agent first") from None
    return entry.pw_uid, entry.pw_gid


def _restore(
    source: _Source, root: str, unit: Installed | None, listed: tuple[str, str, bool] | None, force: bool
) -> list[str]:
    places = Places("", root, "")
    staged = swap.prepare(root)
    try:
        store, written = _ledger(source, staged)
    except (LedgerCorrupt, CheckpointError, ValueError, UnicodeDecodeError) as exc:
        raise StateError(f"{source.name}: {exc}", "nothing was changed; take another copy") from exc
    except StateError as exc:
        raise StateError(str(exc).replace(staged.ledger, source.name)) from exc
    with contextlib.closing(store):
        found = knowledge.of(store.fact("run") or "", store.revision(), store.rows(), store.effects.all())
        if not schema.is_name(found.run, config.LONGEST_RUN):
            raise StateError(f"{source.name}: it does not say of which run it is", "nothing was changed")
        if not force:
            _check(found, places, listed)
        _keep_budget(store, places)
        _keep_results(store, places, staged)
        leftovers = _leftovers(places)
        if source.main is not None or not written:
            written = clock.stamp(max((row.ended or row.started for row in store.rows()), default=0.0))
        store.move()
        store.note({"config": ""})  # of a list on the machine that it came from
        store.note({checks.ID: ""})  # its mark is elsewhere
        fromcopy.cast(store, f"restored from {os.path.basename(source.name)}", clock.unstamp(written))
        checkpoint.write(staged.checkpoint, found.run, store)
    swap.decide(root, found.run)
    before = swap.finish(root)
    done = plural.of(len(found.done), "step")
    said = f"run {found.run}: restored from {source.name}: {done} done, revision {found.revision}"
    go_on = f"systemctl start {unit.name}" if unit else f"agentctl run LIST --state {root}"
    lines = [f"{said}, written {written}; go on with: {go_on}"]
    if before is not None:
        lines.append(f"what was here is in {before}")
    return lines + [f"ended {name}, which the last worker had left" for name in leftovers]


def _ledger(source: _Source, staged: Places) -> tuple[SqliteLedger, str]:
    """Return a ledger in the prepared folder that holds what the source does, and when that was written."""
    if source.main is None:
        found = checkpoint.parse(source.data)
        made = SqliteLedger.create(staged.ledger, found.holdings(found.header.run))
        return made, found.header.written
    for file, suffix in ((source.main, ""), (source.log, source.ending)):
        if file is not None:
            with open(staged.ledger + suffix, "wb") as copy:
                shutil.copyfileobj(file, copy)
    os.chmod(staged.ledger, 0o640)
    store = SqliteLedger.open(staged.ledger)
    for older in range(1, VERSION):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{staged.ledger}.format-{older}")  # the source is a copy of that
    try:
        store.verify()
    except BaseException:
        store.close()
        raise
    return store, ""


def _check(found: Known, places: Places, listed: tuple[str, str, bool] | None) -> None:
    """Raise AgentError if there is a reason not to restore `found` here."""
    if member.shared(places.root) or (listed and listed[2]):
        hint = f"start the agent and it goes on from there; or take 'ledger:' out of the list. {_FORCE.capitalize()}"
        raise StateError(f"{places.root}: the ledger of this run is on a server, which knows better", hint)
    if listed is not None and listed[1] != found.run:
        hint = f"write 'run: {found.run}' into it. {_FORCE.capitalize()}"
        raise AgentError(f"{listed[0]}: is the list of the run '{listed[1]}', this is the run '{found.run}'", hint)
    for here in _here(places, found.run):
        reason = knowledge.objection(here, found)
        if reason is not None:
            raise StateError(f"{places.root}: {reason}", _FORCE)


def _here(places: Places, run: str) -> Iterator[Known]:
    """Yield what is known here: in the state folder, and on the shelf for `run`."""
    for root in (places.root, f"{places.root}/runs/{run}"):
        place = places._replace(root=root)
        found: list[Known] = []
        try:
            with contextlib.closing(SqliteLedger.open(place.ledger, read_only=True)) as store:
                name = store.fact("run")
                if name is not None:
                    found.append(knowledge.of(name, store.revision(), store.rows(), store.effects.all()))
        except FileNotFoundError:
            pass
        except (LedgerCorrupt, StorageFull) as exc:
            raise StateError(f"{place.ledger}: cannot be read: {exc}", _FORCE) from exc
        try:
            head, attempts, effects, *_others = checkpoint.load(place.checkpoint)
            found.append(knowledge.of(head.run, head.revision, (row for row, _ in attempts), effects))
        except FileNotFoundError:
            pass
        except CheckpointError as exc:
            raise StateError(f"{place.checkpoint}: {exc}", _FORCE) from exc
        if len(found) == 2 and found[0].run == found[1].run:
            found = [found[0].join(found[1])]
        yield from found


def _keep_budget(store: SqliteLedger, places: Places) -> None:
    """Let what the run has used, and was granted, be no less than is known here."""
    names = (*USED.values(), *GRANTED.values())
    with (
        contextlib.suppress(FileNotFoundError, LedgerCorrupt, StateError),
        contextlib.closing(SqliteLedger.open(places.ledger, read_only=True)) as here,
    ):
        if here.fact("run") == store.fact("run"):
            known = {name: (here.fact(name) or "0", store.fact(name) or "0") for name in names}
            store.note({name: mine for name, (mine, its) in known.items() if float(mine) > float(its)})


def _keep_results(store: SqliteLedger, places: Places, staged: Places) -> None:
    """Give the prepared state the results which the ledger does not have and that lie here, under a second name."""
    here: dict[str, Row] = {}
    with (
        contextlib.suppress(FileNotFoundError, LedgerCorrupt, StateError),
        contextlib.closing(SqliteLedger.open(places.ledger, read_only=True)) as old,
    ):
        if old.fact("run") == store.fact("run"):
            here = {row.step: row for row in old.rows() if row.outcome == DONE}
    for row in store.rows():
        if row.outcome != DONE or not row.output_size or store.output(row.seq) is not None:
            continue
        same = here.get(row.step, row)
        if (same.number, same.ended) != (row.number, row.ended):
            continue  # the result of another attempt
        with contextlib.suppress(OSError):
            if os.stat(places.output(row.step)).st_size == row.output_size:
                os.link(places.output(row.step), staged.output(row.step))


def _leftovers(places: Places) -> list[str]:
    """End what a dead worker's steps have left; no process of theirs is alive when this returns."""
    try:
        with contextlib.closing(SqliteLedger.open(places.ledger, read_only=True)) as old:
            rows = [row for row in old.rows() if row.outcome is None]
    except (FileNotFoundError, LedgerCorrupt, StateError):
        return []
    return recovery.end_leftovers(rows, places, lambda until: time.sleep(max(0.0, until - clock.monotonic())))
