"""The control socket: whoever connects is told, as one JSON text, how the run stands.

Answered by the loop itself, so an answer is proof that the worker is alive, and silence that it is not.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from worker.events import Events

# The loop answers within milliseconds; a worker that needs longer is hanging.
_PATIENCE = 2.0


class Server:
    """The worker's end."""

    def __init__(self, path: str, events: Events, snapshot: Callable[[], dict[str, Any]]) -> None:
        """Listen at `path`, replacing what a dead worker left there.  Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._path = path
        self._events = events
        self._snapshot = snapshot
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(path)
        self._socket.listen(16)
        events.watch(self._socket.fileno(), self._answer)

    def close(self) -> None:
        self._events.forget(self._socket.fileno())
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _answer(self) -> None:
        with contextlib.suppress(OSError):  # the asker may have gone
            connection, _address = self._socket.accept()
            with connection:
                connection.setblocking(False)
                connection.sendall(json.dumps(self._snapshot()).encode())


def ask(path: str) -> dict[str, Any] | None:
    """Return the worker's snapshot, or None if it does not answer.

    Raises FileNotFoundError or ConnectionError where no worker listens, PermissionError where we may not ask.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE)
        connection.connect(path)
        data = b""
        try:
            while chunk := connection.recv(65536):
                data += chunk
        except TimeoutError:
            return None
    try:
        found = json.loads(data)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
