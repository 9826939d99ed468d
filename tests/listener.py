"""A server of a test that takes every connection, each in a thread of its own, until the test ends."""

import contextlib
import socket
import struct
import threading


class Listener:
    """Listens at `port` of `host` once it is made; what it does to a connection is its `talk`.

    A class that has things of its own makes them first: clients may come at once.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def talk(self, client: socket.socket) -> None:
        """Do what is wanted to one connection, which is closed afterwards; an end of the client is none of ours."""
        raise NotImplementedError

    def close(self) -> None:
        """Take no other connection."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(client,), daemon=True).start()

    def _one(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, struct.error), client:
            self.talk(client)
