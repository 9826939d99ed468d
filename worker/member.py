"""Membership: how a worker takes part in a run whose ledger is on a PostgreSQL server.

Its name there is kept in the state folder, so that its next life is known again and gets back at once what the
one before it held.  What a ledger of its own has, from a time before there was the server, is taken along once.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from worker import __version__, checkpoint, clock, config, files, folder, fromcopy, plural, shared_plan
from worker.checkpoint import CheckpointError
from worker.config import Config
from worker.errors import StateError
from worker.folder import Places
from worker.fromcopy import Doubt
from worker.installed import Installed
from worker.ledger import Ledger, LedgerCorrupt, Row, Saved, Server
from worker.ledger.sqlite import SUFFIXES, SqliteLedger
from worker.plan import Plan
from worker.steps import fill

# A server that cannot be reached in this time is away; the caller tries again.
_PATIENCE = 5.0


class Card(NamedTuple):
    """What a state folder says about the worker that it belongs to."""

    id: str
    config: str
    home: str  # which folder that is: a copy of it is another worker's


def join(settings: Config, steps: Plan, places: Places, notices: list[str]) -> tuple[Server, Plan]:
    """Return the ledger on the server, in which our former attempts are ours again, and the plan that it knows.

    Raises LedgerAway while the server cannot be reached, StateError if it does not let us in, or if others
    are at work on another list under this run's name.
    """
    store = connect(settings, places)
    try:
        notices += filter(None, [exposure(settings)])
        listed = shared_plan.enlist(steps, store)
        _bring_along(store, places, notices)
        store.note({"run": places.run})
    except BaseException:
        store.close()
        raise
    return store, listed


def connect(settings: Config, places: Places, credentials: Mapping[str, bytes] = {}) -> Server:
    """Return the ledger on the server, as this folder's worker; the caller holds the folder's lock."""
    from worker.ledger.postgres import Member, PostgresLedger  # takes longer to import than all the rest

    card = _renewed(_card(places.root), places.root, settings.files[0])
    me = Member(card.id, os.urandom(8).hex(), socket.gethostname(), os.getpid(), __version__)
    return PostgresLedger.join(
        address(settings, places.secrets, credentials), settings.run, me, settings.lease, _PATIENCE
    )


def look(root: str, unit: Installed | None, writable: bool = False) -> Ledger | None:
    """Return the ledger of the state folder `root`, if it is on a server; None if it is not.

    It is for reading, unless `writable`; then the caller holds the folder's lock.  Raises AgentError if the task
    list, or the server, cannot be read.
    """
    card = _card(root)
    # The list of a unit is root's word; what the folder says is a step's.
    settings = None if card is None else config.load(card.config if unit is None else unit.config)
    if card is None or settings is None or settings.ledger is None:
        return None
    from worker.ledger.postgres import PostgresLedger

    secrets = os.environ.get("CREDENTIALS_DIRECTORY")
    known = {} if unit is None else unit.secrets
    if writable:
        return connect(settings, Places(settings.run, root, "", secrets), known)
    try:
        place = address(settings, secrets, known)
        return PostgresLedger.look(place, settings.run, _PATIENCE, card.id)
    except FileNotFoundError:
        raise StateError(f"run {settings.run}: the server does not know it yet", "start a worker on it") from None


def address(settings: Config, secrets: str | None, credentials: Mapping[str, bytes]) -> str:
    """Return the server's address with its secrets filled in, from `credentials` or the files of the folder `secrets`.

    Raises StateError if one is missing.
    """
    from urllib.parse import quote

    def secret(name: str) -> str:
        if not name.startswith("secret:"):
            raise StateError(f"ledger: '{{{name}}}' stands for nothing", "only {secret:NAME} does")
        name = name.removeprefix("secret:")
        try:
            found = credentials.get(name)
            said = files.read(os.path.join(secrets or "", name)) if found is None else found
            return quote(said.decode().rstrip("\r\n"), safe="")
        except (OSError, UnicodeDecodeError) as exc:
            hint = f"add LoadCredential={name}:/PATH to the unit, or use a PGPASSFILE"
            raise StateError(f"ledger: the unit has no credential '{name}' that can be read ({exc})", hint) from None

    filled: str = fill(settings.ledger or "", secret)
    return filled


def exposure(settings: Config) -> str | None:
    """Return a warning if the ledger's server, on another machine, proves nothing.  Raises StateError as `address`."""
    from worker.ledger.postgres import errors, tls

    return tls.exposure(errors.parse(fill(settings.ledger or "", lambda name: "x")))


def _card(root: str) -> Card | None:
    try:
        found = files.read_json(_path(root))
        return Card(str(found["id"]), str(found["config"]), str(found["home"]))
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise StateError(f"{_path(root)}: cannot be read: {exc.strerror}", folder.look_hint(exc)) from exc
    except (ValueError, KeyError, TypeError) as exc:
        hint = "remove it if no worker of this machine holds a step; it gets a new name"
        raise StateError(f"{_path(root)}: cannot be read: {exc}", hint) from exc


def _renewed(card: Card | None, root: str, config_path: str) -> Card:
    """Return the folder's card as it is to be now; a new worker's for a folder that has none, or is a copy."""
    status = os.stat(root)
    home = f"{root} {status.st_dev}:{status.st_ino}"
    known = card.id if card is not None and card.home == home else f"{socket.gethostname()}-{os.urandom(4).hex()}"
    new = Card(known, config_path, home)
    if new != card:
        files.replace(_path(root), [json.dumps(new._asdict()).encode() + b"\n"])
    return new


def leave(root: str) -> None:
    """Note that the folder's ledger is on no server."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(root))


def shared(root: str) -> bool:
    """Return whether the ledger of the folder `root` is on a server."""
    return os.path.exists(_path(root))


def _path(root: str) -> str:
    return f"{root}/worker.json"


def _ours(row: Row, store: Server) -> Row:
    """Return an attempt that is open as one of ours: nobody else is there who could close it."""
    return row if row.outcome else row._replace(worker=store.worker)


def _bring_along(store: Server, places: Places, notices: list[str]) -> None:
    """Give the server what only this folder knows: a ledger from before, a checkpoint of the same run."""
    added, doubts = 0, None
    with contextlib.suppress(FileNotFoundError):
        try:
            own = SqliteLedger.open(places.ledger)
        except LedgerCorrupt as exc:
            raise StateError(f"{places.ledger}: {exc}", "mend it, or move it away, before it goes to a server") from exc
        with contextlib.closing(own):
            if own.fact("run") == places.run:
                added += store.restore([(_ours(row, store), own.output(row.seq)) for row in own.rows()])
                added += store.effects.restore(own.effects.all())
                _bring_kept(store, own.saved(), own.items())
                doubts = fromcopy.read(own)
        for suffix in SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                os.rename(places.ledger + suffix, f"{places.ledger}.before-server{suffix}")
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        found = checkpoint.load(places.checkpoint)
        if found.header.run == places.run:
            more = store.restore([(_ours(row, store), output) for row, output in found.attempts])
            more += store.effects.restore(found.effects)
            if more:  # the server is new, or it has lost what it knew
                doubts = Doubt(0, clock.unstamp(found.header.written), "taken from checkpoint.json to the server")
            added += more
            _bring_kept(store, found.saved, found.items)
    if doubts is not None:
        fromcopy.cast(store, doubts.how, doubts.since)
    if added:
        store.orphans()  # those that were open are in our hands then, to be judged as cut off
        notices.append(
            f"{places.root}: {plural.of(added, 'attempt or effect', 'attempts and effects')} taken along to the server"
        )


def _bring_kept(store: Server, saved: Iterable[Saved], items: Mapping[str, Sequence[str]]) -> None:
    store.restore_saved(saved)
    for task, added in items.items():
        store.add_items(task, added)
