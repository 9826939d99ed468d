"""A network between a client and a PostgreSQL server, which can lose what the server answers."""

import contextlib
import select
import socket
import threading

# How every answer of the server ends: ready for the next query, in whatever state of a transaction.
_READY = b"Z\0\0\0\5"


class Proxy:
    """Takes connections at `port` and passes them on to the server's; a thread of its own."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.lost = threading.Event()  # an answer was lost
        self._countdown = 0
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._from_server: set[socket.socket] = set()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def lose(self, answer: int = 1) -> None:
        """Lose the next answer, or one of those after it, and the connection with it; what was asked is done."""
        self.lost.clear()
        self._countdown = answer

    def close(self) -> None:
        self._wake.send(b"x")
        self._thread.join()
        for one in (*self._pairs, self._listener, self._wake, self._woken):
            one.close()

    def _work(self) -> None:
        while True:
            ready, _, _ = select.select([self._listener, self._woken, *self._pairs], [], [])
            if self._woken in ready:
                return
            for one in ready:
                if one is self._listener:
                    self._accept()
                elif one in self._pairs:
                    self._pass_on(one)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._server))
        except OSError:
            client.close()
            return
        self._pairs |= {client: server, server: client}
        self._from_server.add(server)

    def _pass_on(self, source: socket.socket) -> None:
        target = self._pairs[source]
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(65536)
        if source in self._from_server and self._countdown and data[-6:-1] == _READY:
            self._countdown -= 1
            if not self._countdown:
                data = b""
                self.lost.set()
        with contextlib.suppress(OSError):
            target.sendall(data)
        if not data:
            for one in (source, target):
                del self._pairs[one]
                self._from_server.discard(one)
                one.close()
