"""A rehearsal: an alert is tried by hand, before it is needed, and nothing is noted down of it.

For an installed unit it has to happen where a real one does, with the user, sandbox and credentials of agent-alert@.
So `agentctl alert --test` listens on a socket in /run and starts that unit, whose `agentctl alert` finds somebody
who listens and holds the rehearsal before it does what it is there for: an alert that is due is not lost.
"""

import contextlib
import os
import pwd
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping

from worker import alert, config, environment, ping, unit
from worker.alert import Alert
from worker.contact import Contact
from worker.errors import FAULT, OK, AgentError

_RUN = "/run"
_TEST = Alert("test", "this is a test, nothing has happened", "a-step", "these would be\nthe step's last lines")
# Behind all that is printed, if all of it worked.
_WELL = b"\0well"
_PATIENCE = struct.pack("ll", 5, 0)  # struct timeval


def hold(contact: Contact, unit_name: str, base: Mapping[str, str]) -> int:
    """Run the command and call the URLs, once; say how each has ended; return whether all went well."""
    faults = []
    if contact.argv:
        fault = alert.attempt(_TEST, contact, unit_name, base)
        faults.append(fault)
        print(f"alert: {contact.argv[0]!r} {fault or 'exited with status 0'}", flush=True)
    # Last the one after which the service waits for the next end again.
    for kind in ("start", "fail", "finish"):
        url = getattr(contact.ping, kind)
        if url is not None:
            well, said = ping.send(url, base)
            faults.append("" if well else said)
            print(f"ping: {kind}: {said}", flush=True)
    if not faults:
        print("there is nobody to tell: neither 'alert:' nor 'ping:' is given")
        return FAULT
    return FAULT if any(faults) else OK


def of_list(path: str, environ: Mapping[str, str]) -> int:
    """Hold it here, as a worker in the foreground would tell.  Raises ConfigError."""
    told = config.load(path).contact
    return hold(told, "", environment.own_anyhow(environ, told.given, print))


def ask(name: str) -> int:
    """Have it held in the unit that tells of the unit `name`; print what was said there.  Raises AgentError."""
    teller = f"agent-alert@{name}.service"
    user = unit.properties(teller, "LoadState", "User")
    if user.get("LoadState") != "loaded":
        raise AgentError(f"{teller}: systemd does not know it here", "name a list: agentctl alert --test LIST")
    path = _path(name)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            listener.bind(path)
            try:
                os.chmod(path, 0o600)
                os.chown(path, pwd.getpwnam(user.get("User") or "root").pw_uid, -1)
                listener.listen(1)
                return _listen(listener, teller)
            finally:
                os.unlink(path)
    except OSError as exc:
        raise AgentError(f"{exc.filename or path}: {exc.strerror}", "use sudo, or name a list") from exc


def _listen(listener: socket.socket, teller: str) -> int:
    # It does its work after it has said that it is up.
    with subprocess.Popen(["systemctl", "start", "--wait", teller], stdin=subprocess.DEVNULL) as starting:
        over = os.pidfd_open(starting.pid)
        select.select([listener.fileno(), over], [], [])
        os.close(over)
        if not select.select([listener], [], [], 0)[0]:
            raise AgentError(f"{teller} has not come to it", f"see 'journalctl -u {teller}'")
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as file:
            said = file.read()
    text = said.removesuffix(_WELL)
    sys.stdout.write(text.decode(errors="replace"))
    return OK if said != text else FAULT


def hold_if_asked(find: Callable[[], Contact | None], name: str, environ: Mapping[str, str]) -> None:
    """Hold it if somebody listens for the unit `name`; what is printed goes there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
        # Somebody who listens no more, suspended say, must not keep an alert that is due.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
        listener.connect(_path(name))
        before = os.dup(1), os.dup(2)
        try:
            for number in (1, 2):
                os.dup2(listener.fileno(), number)
            told = find() or Contact(name)
            base = environment.own_anyhow(environ, told.given, lambda text: print(f"alert: {text}", flush=True))
            if hold(told, f"{name}.service", base) == OK:
                listener.sendall(_WELL)
        finally:
            for number, kept in zip((1, 2), before, strict=True):
                os.dup2(kept, number)
                os.close(kept)


def _path(name: str) -> str:
    return f"{_RUN}/{name}-alert-test"
