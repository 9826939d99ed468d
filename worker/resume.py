"""Resuming: open what an earlier worker left, and use what is sound of it.

The ledger is the truth and checkpoint.json its portable copy.  Each can stand in for the other:
a ledger that is gone or unreadable is made anew from the checkpoint, and a ledger that knows less
than the checkpoint (it was copied without its -wal, say) is given what it lacks.  What cannot be
read is set aside, never overwritten; if nothing sound is left the worker does not start.
"""

import contextlib
import os
import shlex
from typing import NamedTuple

from worker import checkpoint, clock, files, folder, fromcopy, member, mounts, plural, shelf, swap
from worker.checkpoint import Checkpoint, CheckpointError, Header
from worker.config import Config
from worker.errors import StateError
from worker.folder import Places
from worker.ledger import Ledger, LedgerCorrupt
from worker.ledger.sqlite import SUFFIXES, SqliteLedger, checks, mark
from worker.ledger.sqlite.checks import SUSPECT, Found
from worker.ledger.sqlite.database import LOGS, strange_log
from worker.ledger.sqlite.mark import Said
from worker.plan import Plan


class Resumed(NamedTuple):
    """An open ledger, and what people should know of how it came about."""

    ledger: Ledger
    notices: list[str]
    steps: Plan | None = None  # the plan to work on, if it is not the list's alone


def open_ledger(places: Places, in_order: bool = True) -> Resumed:
    """Return the ledger of the state folder, which the caller has locked; `in_order`: the last worker ended so.

    The state of another run is put on the shelf for it.  Raises StateError if nothing sound is left or
    if a newer version wrote it; then every file is where it was.
    """
    notices: list[str] = []
    looked = _make_room(places, notices)
    kind = mounts.kind(places.root)
    if not mounts.shares_memory(kind):
        what = f"is on {kind}, where SQLite cannot keep a write-ahead log"
        notices.append(f"{places.root}: {what}; using a rollback journal, which is slower")
    if member.shared(places.root):
        if not in_order and not os.path.exists(places.ledger):
            raise StateError(
                f"{places.root}: the run's ledger is on a server, and its last worker here did not end in order",
                f"start it with that 'ledger:' once more, or go on from checkpoint.json: rm {places.root}/worker.json",
            )
        member.leave(places.root)
    found, broken = looked or _look(places)
    if found is not None:
        lost = _lost(found, places, notices)
        ledger = SqliteLedger.open(places.ledger, examined=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(places.ledger + SUSPECT)
        _compare(ledger, places, notices)
        if lost and fromcopy.read(ledger) is None:
            newest = max((row.ended or row.started for row in ledger.rows()), default=None)
            fromcopy.cast(ledger, lost, newest)
        if lost or not found.id:
            ledger.begin_mark()
    else:
        ledger = _rebuild(places, broken, notices)
        ledger.begin_mark()
    if ledger.fact("run") is None:
        ledger.note({"run": places.run})
    return Resumed(ledger, notices)


def join(settings: Config, steps: Plan, places: Places) -> Resumed:
    """Return the ledger on the server that the list names, the state folder being this run's.

    Raises as member.join and open_ledger do.
    """
    notices: list[str] = []
    _make_room(places, notices)
    store, listed = member.join(settings, steps, places, notices)
    return Resumed(store, notices, listed)


def _make_room(places: Places, notices: list[str]) -> "_Looked | None":
    """Let the state folder be this run's, and its files ours; return what its ledger is, None if it came just now."""
    before = swap.finish(places.root)
    if before is not None:
        notices.append(f"{places.root}: a restore that was cut off is finished; what was here before is in {before}")
    strange = strange_log(places.ledger)
    if strange:
        aside = folder.set_aside(places.ledger + strange)
        what = f"was put here beside the {strange} of another one, which is set aside as {aside}"
        notices.append(f"{places.ledger}: {what}")
    for path in (places.ledger, *(places.ledger + ending for ending in LOGS), places.checkpoint):
        _own(path)
    looked = _look(places)
    other = _other_run(places, looked[0])
    if other is not None:
        shelf.put_away(places, other)
        notices.append(f"{places.root}: the state of the run '{other}' is kept in runs/{other}")
    back = shelf.take_out(places)
    if back:
        notices.append(f"{places.root}: the state of the run '{places.run}' is back from runs/{places.run}")
    if os.path.isdir(f"{places.root}/runs"):
        from worker import shelved  # for the few folders that have had several runs

        notices += [found.line() for found in shelved.doubts(places.root)]
    folder.make(places.root)
    return None if back or other is not None else looked


def _own(path: str) -> None:
    """Let a file that somebody else, root say, has put here be ours to write.  Raises StateError if it is not."""
    if os.access(path, os.R_OK | os.W_OK) or not os.path.exists(path):
        return
    try:
        with open(path, "rb") as file:
            files.replace(path, iter(lambda: file.read(1 << 20), b""))
    except OSError as exc:
        hint = f"let it be the agent's: chown --reference={os.path.dirname(path)} {path}"
        raise StateError(f"{path}: cannot be used by this user ({exc.strerror})", hint) from exc


def _other_run(places: Places, found: Found | None) -> str | None:
    """Return the name of the run whose state is here, if it is another one than ours."""
    if found is not None:
        name = found.run
    else:
        try:
            name = checkpoint.header(places.checkpoint).run
        except (CheckpointError, OSError):
            name = None
    return None if name in (None, places.run) else name


_Looked = tuple[Found | None, str | None]


def _look(places: Places) -> _Looked:
    """Return what the ledger is, or what is wrong with it, or neither if there is none; changes nothing."""
    try:
        return checks.examine(places.ledger), None
    except FileNotFoundError:
        return None, None
    except LedgerCorrupt as exc:
        return None, str(exc)


def _lost(found: Found, places: Places, notices: list[str]) -> str:
    """Return why not all that happened is in a ledger that is whole, empty if it is; what is left of it is kept."""
    if not found.id:
        return ""  # a new one, or one of an older format
    try:
        said = mark.read(places.ledger)
    except FileNotFoundError:
        said = Said("", 0, True)
    if said is None:
        return ""
    if said.copied or said.id != found.id:
        notices.append(
            f"{places.ledger}: was put here, or copied with its folder; a copy does not know what came after"
        )
        return "a copy that was put here"
    if said.revision <= found.revision:
        return ""
    kept = folder.keep_copy(places.ledger, ("", *LOGS))
    missing = plural.of(said.revision - found.revision, "change")
    what = f"has lost {missing} that had been written to it: a part of it cannot be read"
    notices.append(f"{places.ledger}: {what}; kept as {kept}")
    return f"all that could be read of one that has lost {missing}"


def _compare(ledger: SqliteLedger, places: Places, notices: list[str]) -> None:
    """Give a sound ledger what only the checkpoint knows."""
    try:
        head = checkpoint.header(places.checkpoint)
        if head.run != places.run:
            raise CheckpointError(f"it is of the run '{head.run}'")
        if head.revision > ledger.revision():
            found = checkpoint.load(places.checkpoint)
            known = {(row.step, row.number) for row in ledger.rows() if row.outcome}
            # What a power cut takes is a claim that is no loss: its step was to be begun again without being asked.
            lost = any(row.outcome and (row.step, row.number) not in known for row, _output in found.attempts)
            effects = ledger.effects.restore(found.effects)
            added = ledger.restore(found.attempts) + effects
            if lost or effects:
                fromcopy.cast(ledger, "older than checkpoint.json was", clock.unstamp(head.written))
            ledger.restore_saved(found.saved)
            for task, items in found.items.items():
                ledger.add_items(task, items)
            if added:
                notices.append(
                    f"{places.ledger}: older than checkpoint.json; {plural.of(added, 'attempt')} taken over from there"
                )
    except FileNotFoundError:
        pass
    except (CheckpointError, OSError, ValueError) as exc:  # no ledger can hold what is in it
        aside = folder.set_aside(places.checkpoint)
        notices.append(f"{places.checkpoint}: {exc}; set aside as {aside}, a new one is made from the ledger")


def _rebuild(places: Places, broken: str | None, notices: list[str]) -> SqliteLedger:
    """Make a ledger from the checkpoint, or an empty one if there is no trace of an earlier one."""
    try:
        found = checkpoint.load(places.checkpoint)
    except FileNotFoundError:
        if broken is not None:
            raise _hopeless(places, f"{places.ledger}: {broken}, and there is no checkpoint.json") from None
        trace = _trace(places)
        if trace is not None:  # a run was here: an empty ledger would do all of it again
            what = f"{places.ledger}: missing, and there is no checkpoint.json, but {trace} is there"
            raise _hopeless(places, what) from None
        found = Checkpoint(Header(places.run, 0, {}), [], [], [], {})
    except (CheckpointError, OSError) as exc:
        lost = f"{places.ledger}: {broken}" if broken else f"{places.ledger}: missing"
        raise _hopeless(places, f"{lost}, and {places.checkpoint}: {exc}") from exc
    if broken is not None:
        aside = folder.set_aside(places.ledger, SUFFIXES)
        notices.append(f"{places.ledger}: {broken}; set aside as {aside}")
    elif any(os.path.exists(places.ledger + suffix) for suffix in SUFFIXES):
        # A log without its database must not meet the new one.
        aside = folder.set_aside(places.ledger, SUFFIXES)
        notices.append(f"{places.ledger}: missing, but its log is there; set aside as {aside}")
    try:
        ledger = SqliteLedger.create(places.ledger, found.holdings(places.run))
    except ValueError as exc:
        raise _hopeless(places, f"{places.ledger}: missing, and {places.checkpoint}: {exc}") from exc
    if found.header.revision:
        fromcopy.cast(ledger, "made anew from checkpoint.json", clock.unstamp(found.header.written))
        notices.append(f"{places.ledger}: made anew from checkpoint.json, {plural.of(len(found.attempts), 'attempt')}")
    return ledger


def _trace(places: Places) -> str | None:
    """Return a file that only an earlier worker on a run can have left here, None if there is none."""
    beside = [places.ledger + ending for ending in (mark.ENDING, *LOGS)]
    with contextlib.suppress(FileNotFoundError):
        beside += [f"{places.out}/{name}" for name in sorted(os.listdir(places.out)) if not name.startswith(".")]
    return next((path for path in beside if os.path.lexists(path)), None)


def _hopeless(places: Places, what: str) -> StateError:
    known = [*(places.ledger + ending for ending in (*SUFFIXES, mark.ENDING)), places.checkpoint, places.out]
    there = " ".join(shlex.quote(path) for path in known if os.path.lexists(path))
    hint = f"put a sound checkpoint.json into {places.root}, or begin anew with: mv {there} /var/tmp/"
    return StateError(what, f"nothing was changed; {hint}")
