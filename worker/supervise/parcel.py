"""What each machine is given: the task list as it was checked, the drop-ins beside it, the files that are named.

STATE/list/DIGEST.yaml   the list and its drop-ins: what somebody writes meanwhile reaches no machine unchecked
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from typing import NamedTuple

from worker import files
from worker.errors import StateError
from worker.supervise import remote
from worker.supervise.sandbox import Sandbox

Marks = tuple[tuple[str, str], ...]  # paths there, and digests of what was put at them


class Item(NamedTuple):
    """A file: where it is to be on the machine, where it is here, and a digest of it."""

    there: str
    here: str
    digest: str


def pack(root: str, sandbox: Sandbox) -> tuple[Item, ...]:
    """Return what a machine is to be given.  Raises StateError for what cannot be read."""
    try:
        listed = [_kept(root, there, here) for there, here in _list(sandbox)]
        others = [Item(there, here, remote.digest_of(here)) for there, here in sandbox.files]
    except OSError as exc:
        raise StateError(f"{exc.filename}: cannot be read: {exc.strerror}") from exc
    _tidy(root, {item.here for item in listed})
    return (*listed, *others)


def put(parcel: Iterable[Item]) -> list[tuple[str, str, str]]:
    """Return what is put on machines, each with its digest if it must be what was checked.

    Another file, a token that is renewed each hour say, goes there as it is when it goes.
    """
    return [(item.there, item.here, item.digest if _listed(item.there) else "") for item in parcel]


def marks(parcel: Iterable[Item]) -> Marks:
    """Return what is remembered of a machine that was given these."""
    return tuple((item.there, item.digest) for item in parcel)


def of_list(given: Marks) -> Marks:
    """Return those that are of the list."""
    return tuple(mark for mark in given if _listed(mark[0]))


def _listed(there: str) -> bool:
    return there == remote.CONFIG or there.startswith(_drop_ins())


def promised(before: Marks, now: Marks) -> Marks:
    """Return what is remembered of a machine from before it is given `now` until it is known to have taken it.

    Of what changes nobody knows which it has; so this is not what any list makes of it.
    """
    had, gets = dict(before), dict(now)
    return tuple((there, gets.get(there, "") if had.get(there) == gets.get(there) else "") for there in had | gets)


def dropped(before: Marks, now: Marks) -> list[str]:
    """Return the drop-ins that a machine has been given and is no longer to have."""
    wanted = {there for there, _digest in now}
    return [there for there, _digest in of_list(before) if there not in wanted]


def _drop_ins() -> str:
    return f"{os.path.splitext(remote.CONFIG)[0]}.d/"


def _list(sandbox: Sandbox) -> list[tuple[str, str]]:
    drop_ins = ((f"{_drop_ins()}{os.path.basename(here)}", here) for here in sandbox.drop_ins)
    return [(remote.CONFIG, sandbox.config), *drop_ins]


def _kept(root: str, there: str, here: str) -> Item:
    """Keep a file of the list as it is now; where there is no space, the file itself has to do."""
    data = files.read(here)
    digest = hashlib.sha256(data).hexdigest()
    kept = f"{root}/list/{digest}.yaml"
    try:
        os.makedirs(os.path.dirname(kept), mode=0o700, exist_ok=True)
        if not os.path.exists(kept):
            files.replace(kept, [data])
    except OSError:
        kept = here
    return Item(there, kept, digest)


def _tidy(root: str, wanted: set[str]) -> None:
    folder = f"{root}/list"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if f"{folder}/{name}" not in wanted:
                os.unlink(f"{folder}/{name}")
