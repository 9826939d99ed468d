"""What agent-alert@ keeps of what it has told, and whom: in a folder of its own, which no step can write to.

/var/lib/agent-alert/UNIT/alerted      what has been told last
/var/lib/agent-alert/UNIT/alert.json   whom to tell, or nobody, by the last list that it could read

A step that could write there would keep its own failure from being told.  So nothing here depends on the state folder:
that a worker has been up since, systemd knows.
"""

import contextlib
import json
from collections.abc import Mapping

from worker import alert, clock, contact, files
from worker.alert import Alert
from worker.contact import Contact
from worker.errors import AgentError

FOLDER = "/var/lib/agent-alert"
STOPPED = (
    "/run/agent-stopped"  # of each unit, the invocation that was ended by a stop; written by root (units/hooks.sh)
)
WANTED = ("ActiveEnterTimestampMonotonic", "InvocationID")  # properties of the unit


def record(due: Alert, run: str, unit: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return what tells `due` from all that is no news; `unit` are its properties, `before` is what was told last.

    A unit that is given up is news if a worker of it has been up since.
    """
    up = ""
    if due.kind == alert.GAVE_UP:
        entered = unit.get("ActiveEnterTimestampMonotonic", "0")
        up = f"{clock.boot_id()} {entered}" if entered != "0" else before.get("up", "")
    return {"run": run, "kind": due.kind, "step": due.step, "cause": due.cause, "mark": due.mark, "up": up}


def is_news(due: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Return whether `due` is another record than the one `before`, in which an earlier version knew less."""
    return not before or any(before.get(key, value) != value for key, value in due.items())


def last(folder: str) -> dict[str, str]:
    """Return the record of what was told last; empty if there is none that can be read."""
    return alert.read_told(f"{folder}/alerted")


def note(folder: str, told: Mapping[str, str]) -> None:
    """Keep what has been told.  What cannot be kept is told again."""
    with contextlib.suppress(OSError):
        files.replace(f"{folder}/alerted", [json.dumps(told).encode()], mode=0o600)


def whom(config_path: str, folder: str, root: str) -> Contact | None:
    """Return whom to tell by the configuration, or where that cannot be read, whom it named when it last could be.

    That of the last worker, in the state folder `root`, counts only where nothing was ever kept here: it may be a
    step's, whose command would find the credentials of who tells.
    """
    from worker import config

    try:
        found = config.load(config_path).contact
    except AgentError:
        return contact.load(folder) or contact.load(root)
    with contextlib.suppress(OSError):
        contact.keep(folder, found)
    return found


def was_stopped(name: str, invocation: str) -> bool:
    """Return whether this invocation of the unit was ended by somebody who asked for that."""
    try:
        return bool(invocation) and files.read(f"{STOPPED}/{name}", 64).decode().strip() == invocation
    except (OSError, ValueError):
        return False
