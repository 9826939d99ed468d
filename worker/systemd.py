"""The worker's line to systemd: readiness, watchdog, status, stored descriptors.  Nothing else talks to PID 1.

Outside a service, or where the sdnotify package is missing, every call does nothing.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# PID 1 spends about 50 us on a status and its other senders queue behind it.
_STATUS_EVERY = 0.5
# A socket that is full must not hold up a step; the next ping comes in a few seconds anyway.
_SEND_TIMEOUT = 0.04
# What it does not take at once of what it is to keep is offered again so often; for so long before somebody is told,
# and for so long once more when this worker ends.
_OFFER_EVERY, _OFFER_QUIETLY, _OFFER_AT_LAST = 0.1, 5.0, 5.0
# PID 1 reads what it is sent before it starts anything; only one that hangs takes this long.
_HEARD_WITHIN = 30.0
_FIRST = 3  # SD_LISTEN_FDS_START
_STATE = ""  # what is owed about the service itself: no name of a descriptor


class Notifier:
    """sd_notify(3) for one worker process."""

    def __init__(self, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
        """Read NOTIFY_SOCKET and WATCHDOG_* from `environ`; `warn` is told of what is wrong, once each."""
        self._warn = warn
        self._warned = False
        self._status: str | None = None
        self._status_at = float("-inf")
        self._owed: dict[str, tuple[tuple[str, ...], int | None]] = {}  # messages, and what goes with the last of them
        self._owed_since = 0.0
        self._socket = _connect(environ, warn)
        self.interval = watchdog_interval(environ, os.getpid(), warn) if self._socket else None

    def ready(self, status: str) -> None:
        """Say that the worker is up; on a busy machine systemd may hear it later, from `flush`."""
        self._say(_STATE, f"READY=1\nSTATUS={status}")

    def ping(self) -> None:
        self._send("WATCHDOG=1")

    def status(self, text: str, now: float) -> None:
        """Show `text` in `systemctl status`; texts that come too fast are dropped, the newest is kept."""
        self._status = text
        self.flush(now)

    def flush(self, now: float) -> float | None:
        """Send what was held back if its time has come; return when to call again, or None."""
        again = None if self._offer(now) else now + _OFFER_EVERY
        if self._status is None or self._socket is None:
            return again
        if now < self._status_at + _STATUS_EVERY:
            return min(again or math.inf, self._status_at + _STATUS_EVERY)
        self._send(f"STATUS={self._status}")
        self._status, self._status_at = None, now
        return again

    def stopping(self, status: str, seconds: float) -> None:
        """Say that the worker is ending and may need `seconds` more for it."""
        self._status = None
        self._say(_STATE, f"STOPPING=1\nSTATUS={status}\nEXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")
        gives_up = time.monotonic() + _OFFER_AT_LAST
        while not self._offer(now := time.monotonic()) and now < gives_up:
            time.sleep(_OFFER_EVERY)

    def passing(self) -> None:
        """Say that this service is up and ends already, and wait until systemd has heard it.

        It has its credentials and its time as before; but a start that is asked for from now on comes after this one.
        """
        if self._socket is None:
            return
        import select
        import socket

        self._socket.socket.settimeout(_HEARD_WITHIN)  # nothing else has to be done meanwhile
        self._send("READY=1")
        self._send("STOPPING=1")
        heard, mine = os.pipe()
        with os.fdopen(heard):
            try:
                socket.send_fds(self._socket.socket, [b"BARRIER=1"], [mine])
            except OSError as exc:
                self._warn(f"systemd does not take our messages ({exc}); going on without")
            finally:
                os.close(mine)
            select.select([heard], [], [], _HEARD_WITHIN)  # it ends when the last copy of the other end is closed

    def starting(self, seconds: float) -> None:
        """Ask for `seconds` more before READY=1 is due."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def reloading(self) -> None:
        """Say that the configuration is being read again; `ready` ends it."""
        self._say(_STATE, "RELOADING=1")

    def store(self, name: str, fd: int) -> None:
        """Let systemd keep a copy of `fd` for the next life of this service (FDSTORE=1, sd_pid_notify_with_fds(3)).

        On a busy machine it may take it later, from `flush`: until then the step does not outlive this worker.  Raises
        OSError if there is no descriptor to be had for that.
        """
        self._say(name, _stored(name), fd=fd)

    def replace(self, name: str, fd: int) -> None:
        """Let systemd keep `fd` under that name, and nothing else.  Raises OSError as `store` does."""
        self._say(name, _removed(name), _stored(name), fd=fd)

    def discard(self, name: str) -> None:
        """Let systemd close its copies of that name."""
        self._say(name, _removed(name))

    def _say(self, about: str, *messages: str, fd: int | None = None) -> None:
        """Send what must not be lost, now or from `flush`, in the place of what is still owed `about` the same."""
        if self._socket is None or (not self._owed and self._is_taken(messages, fd)):
            return
        if not self._owed:
            self._owed_since = time.monotonic()
        copy = None if fd is None else os.dup(fd)
        _old, before = self._owed.pop(about, ((), None))
        if before is not None:
            os.close(before)
        self._owed[about] = (messages, copy)

    def _is_taken(self, messages: Sequence[str], fd: int | None) -> bool:
        """Return whether systemd has taken them, or never will."""
        import socket

        assert self._socket is not None
        try:
            for number, message in enumerate(messages, 1):
                fds = [fd] if fd is not None and number == len(messages) else []
                socket.send_fds(self._socket.socket, [message.encode(errors="backslashreplace")], fds)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as exc:
            self._complain(exc)
        return True

    def _offer(self, now: float) -> bool:
        """Offer again, without a wait, what systemd has not taken; return whether nothing is left of that."""
        if not self._owed:
            return True
        assert self._socket is not None
        self._socket.socket.settimeout(0)
        try:
            for about, (messages, fd) in list(self._owed.items()):
                if not self._is_taken(messages, fd):
                    break
                del self._owed[about]
                if fd is not None:
                    os.close(fd)
        finally:
            self._socket.socket.settimeout(_SEND_TIMEOUT)
        if self._owed and now > self._owed_since + _OFFER_QUIETLY:
            self._owed_since = math.inf  # said once
            self._warn("systemd takes no messages; until it does, a step that begins does not outlive its worker")
        return not self._owed

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        try:
            # sdnotify encodes as Latin-1; systemd wants UTF-8: let the bytes pass unchanged.
            self._socket.notify(message.encode(errors="backslashreplace").decode("latin-1"))
        except OSError as exc:
            self._complain(exc)

    def _complain(self, exc: OSError) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"systemd does not take our messages ({exc}); going on without")


def _stored(name: str) -> str:
    return f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0"


def _removed(name: str) -> str:
    return f"FDSTOREREMOVE=1\nFDNAME={name}"


def _connect(environ: Mapping[str, str], warn: Callable[[str], None]) -> Any | None:
    if not environ.get("NOTIFY_SOCKET"):
        return None
    try:
        import sdnotify
    except ImportError:
        warn("NOTIFY_SOCKET is set but the sdnotify package is missing; systemd will not hear from us")
        return None
    try:
        notifier = sdnotify.SystemdNotifier(debug=True)  # debug: raise instead of swallowing errors
    except OSError as exc:
        warn(f"NOTIFY_SOCKET cannot be reached ({exc}); going on without")
        return None
    notifier.socket.settimeout(_SEND_TIMEOUT)
    return notifier


def stored(environ: Mapping[str, str]) -> dict[str, int]:
    """Return the descriptors that an earlier life has stored, by name; they are ours now (sd_listen_fds(3))."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return {}
    names = environ.get("LISTEN_FDNAMES", "").split(":")
    found = {name: _FIRST + place for place, name in enumerate(names[: int(environ.get("LISTEN_FDS", "0"))])}
    for fd in found.values():
        os.set_inheritable(fd, False)
    return found


def watchdog_interval(environ: Mapping[str, str], pid: int, warn: Callable[[str], None]) -> float | None:
    """Return how often to ping, in seconds, or None for not at all (sd_watchdog_enabled(3)).

    A third of WATCHDOG_USEC: two pings may be late before systemd loses patience.
    """
    usec = environ.get("WATCHDOG_USEC")
    if usec is None:
        return None
    if not (usec.isascii() and usec.isdigit() and 0 < int(usec) < 2**63):
        warn(f"WATCHDOG_USEC '{usec}' is not a number of microseconds; sending no watchdog pings")
        return None
    owner = environ.get("WATCHDOG_PID")
    if owner is not None and owner != str(pid):
        warn(f"WATCHDOG_PID '{owner}' is another process than this one ({pid}); sending no watchdog pings")
        return None
    return int(usec) / 1e6 / 3
