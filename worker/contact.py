"""Whom to tell of the run, and how: `alert:` and `ping:` of the configuration.

A copy lies in the state folder, because an alert may be due when the configuration cannot be read: it is then that
of the last worker that could.  The URLs of dead-man services are secrets, so nobody but the user may read it; what
`{secret:NAME}` in them stands for is not in it.
"""

import contextlib
import json
import os
from typing import NamedTuple

from worker import fields, files, ping, schema, steps
from worker.schema import Source, Table, Wrong
from worker.task import Command, Given, arguments
from worker.yamlfile import Node

FILE = "alert.json"


class Ping(NamedTuple):
    """The URLs to call when a worker begins, when the run is done, and with an alert."""

    start: str | None = None
    finish: str | None = None
    fail: str | None = None

    @property
    def secrets(self) -> list[str]:
        """The names of the secrets that the URLs refer to."""
        return steps.secrets(list(self))


class Contact(NamedTuple):
    """The command that tells somebody, the folder it works in, what is called beside it, and what both find."""

    run: str
    command: Command | None = None
    folder: str = "/"
    ping: Ping = Ping()
    given: Given = Given()

    @property
    def argv(self) -> list[str]:
        """The command as arguments, empty if there is none."""
        return [] if self.command is None else arguments(self.command)


def save(root: str, contact: Contact) -> None:
    """Keep `contact` in the state folder `root`.  Raises OSError."""
    path = f"{root}/{FILE}"
    if contact.command is None and contact.ping == Ping():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    keep(root, contact)


def keep(root: str, contact: Contact) -> None:
    """Keep `contact` in the folder `root`, also if it is nobody.  Raises OSError."""
    if load(root) != contact:
        parts = {"ping": contact.ping._asdict(), "given": contact.given._asdict()}
        data = json.dumps(contact._asdict() | parts)
        files.replace(f"{root}/{FILE}", [data.encode()], mode=0o600)


def load(root: str) -> Contact | None:
    """Return what was kept in the state folder `root`, or None if there is nothing that can be read."""
    try:
        content = files.read_json(f"{root}/{FILE}")
        command, given = content["command"], content.get("given", {"env": {}, "env_files": ()})
        return Contact(
            run=content["run"],
            command=tuple(command) if isinstance(command, list) else command,
            folder=content["folder"],
            ping=Ping(**content["ping"]),
            given=Given(dict(given["env"]), tuple(given["env_files"])),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_ping(node: Node, source: Source) -> Ping:
    """`ping:` of the configuration."""
    return Ping(**schema.fields(node, _PING, source))


def read_alert(node: Node, source: Source) -> Command:
    """`alert:` of the configuration."""
    return fields.command(node, source)


def _url(node: Node, source: Source) -> str:
    value = schema.text(node, source)
    filled = str(steps.fill(value, lambda name: "x" if name.startswith("secret:") else "{}"))
    if "{" in filled or "}" in filled:
        raise Wrong(node, "braces in this URL stand for nothing", "only {secret:NAME} does; %7B and %7D are plain ones")
    if not ping.is_url(f"http://{filled}" if value.startswith("{") else filled):
        # Not shown: whoever knows it may speak in our name.
        raise Wrong(node, "this is not the URL of a page", "write http://HOST/PATH or https://HOST/PATH")
    return value


_PING: Table = {"start": _url, "finish": _url, "fail": _url}
