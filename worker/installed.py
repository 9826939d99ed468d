"""The installed unit that a command is about, and what of it only root may read."""

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple

from worker import files, unit


class Installed(NamedTuple):
    """An installed unit.

    `config`: its task list, which counts whatever the state folder says.  `secrets`: its credentials, by name, as far
    as they were needed and this user could read them.
    """

    name: str
    config: str
    secrets: Mapping[str, bytes] = {}


def find(name: str, config: str, root: str) -> Installed:
    """Return the unit `name`, with its credentials where the ledger of the state folder `root` may need them."""
    needed = os.path.lexists(f"{root}/worker.json")  # only a hint: what is read is the unit's own, and stays here
    return Installed(name, config, _secrets(name) if needed else {})


def _secrets(name: str) -> dict[str, bytes]:
    """Return what a unit's credentials contain: of a running one as systemd laid them out, else at their source."""
    folder = f"/run/credentials/{name}.service"
    try:
        paths = {entry: f"{folder}/{entry}" for entry in os.listdir(folder)}
    except OSError:
        paths = unit.credentials(name)
    found: dict[str, bytes] = {}
    for credential, path in paths.items():
        with contextlib.suppress(OSError):
            found[credential] = files.read(path)
    return found
