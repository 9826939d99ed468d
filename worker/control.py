"""The control socket: where the worker is asked how the run stands, and where steps claim and commit effects.

The loop itself answers how the run stands, so an answer is proof that the worker is alive, and silence that it is
not.  Nothing that a client does, or leaves undone, holds the loop up: what does not keep to worker/wire.py, or does
not take its answer at once, is dropped.
"""

import array
import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from worker import clock, closing, files, wire
from worker.events import Events
from worker.ledger.effects import RESULT_MAX
from worker.sender import Sender, peer_of

# The loop answers within milliseconds; a worker that needs longer is hanging.
_PATIENCE = 2.0
# A request may have to wait for the ledger.
_LONG_PATIENCE = 30.0
_CONNECTIONS_MAX = 1024
_UNANSWERED_MAX = 4  # a client waits for its answers
_ORDERS = ("settle", "grant", "pause", "resume")  # a person's word
_TO_BROKER = ("once", *_ORDERS)
_PEER = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid
_NO_ORDERS = (
    "a step cannot say this: budgets are granted, doubts settled and the agent paused by a person outside the run"
)
_ONLY_ASKS = "this user may ask how the run stands, and no more; use sudo"
_READ = 65536
_ANSWER_MAX = 16 << 20  # bytes; a step may have taken the worker's place
_ROOM = socket.CMSG_SPACE(closing.RECEIVED_MAX * array.array("i").itemsize)


class Connection:
    """One client, and what it has sent so far."""

    __slots__ = ("_drop", "_rest", "_result", "_socket", "closed", "pid", "uid", "unanswered")

    def __init__(self, connected: socket.socket, drop: Callable[["Connection"], None]) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._drop = drop
        self._rest = b""
        self._result: bytes | None = None
        self.closed = False
        # Of the process that connected; its pid is 0 if it cannot be seen from here.
        peer = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        self.pid, self.uid, _group = _PEER.unpack(peer)
        self.unanswered = 0  # requests that the broker has not looked at yet

    def fileno(self) -> int:
        return self._socket.fileno()

    def peer(self) -> contextlib.AbstractContextManager[Sender]:
        """The process that has connected; it can be asked inside the block, while the connection is open."""
        return peer_of(self._socket, self.pid)

    def receive(self) -> list[tuple[bytes, bytes | None]] | None:
        """Return the lines that have come, each with its result; None once nothing more will come.

        Raises ValueError for what is no request.
        """
        try:
            data, control, _flags, _address = self._socket.recvmsg(_READ, _ROOM, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError:
            return None
        results = [result for _level, _kind, rights in control for result in _take_results(rights)]
        if results:
            if self._result is not None or len(results) > 1:
                raise ValueError("more than one result")
            self._result = results[0]
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, [*lines, self._rest])) > wire.LINE_MAX:
            raise ValueError("a line that is too long")
        result, found = self._result, [(line, None) for line in lines[:-1]]
        if not lines:
            return []
        self._result = None
        return [*found, (lines[-1], result)]

    def answer(self, fields: Mapping[str, object], result: bytes | None = None) -> None:
        """Send one line, and `result` beside it; a client that does not take it at once is dropped."""
        descriptors = []
        try:
            if result:
                descriptors.append(_memfd(result))
            self.send(wire.encode(fields), descriptors)
        except OSError:
            self._drop(self)
        finally:
            for fd in descriptors:
                os.close(fd)

    def send(self, data: bytes, descriptors: list[int]) -> None:
        """Send all of `data`, or raise OSError."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        if not self.closed and self._socket.sendmsg([data], rights) < len(data):
            raise BlockingIOError

    def close(self) -> None:
        self.closed = True
        self._socket.close()


class Requests(Protocol):
    """Who answers requests for effects.  Called by handlers of events, so nothing may be done at once."""

    def take(self, client: Connection, request: dict[str, str], result: bytes | None) -> None:
        """Note a request."""

    def gone(self, client: Connection) -> None:
        """Note that a client is gone."""

    def needs(self, client: Connection) -> bool:
        """Return whether a client has a claim or waits for one."""


class Server:
    """The worker's end."""

    def __init__(
        self,
        path: str,
        events: Events,
        snapshot: Callable[[], dict[str, Any]],
        broker: Requests | None = None,
        is_ours: Callable[[int], bool] = lambda _pid: False,
    ) -> None:
        """Listen at `path`, replacing what a dead worker left there.

        `is_ours`: whether a process is a step's or another program of the worker, which may give no orders.  Raises
        OSError.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._path = path
        self._events = events
        self._snapshot = snapshot
        self._broker = broker
        self._is_ours = is_ours
        self._clients: dict[Connection, None] = {}  # the oldest first
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(path)
        self._inode = os.stat(path).st_ino
        os.chmod(path, 0o660)  # the unit's group may ask how the run stands; see _handle
        self._socket.listen(128)
        events.watch(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Close every connection; claims stay as they are, and the next worker hears of them."""
        self._broker = None
        for client in list(self._clients):
            self._drop(client)
        self._events.forget(self._socket.fileno())
        self._socket.close()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:  # and not another worker's, where our folder was moved
                os.unlink(self._path)

    def _accept(self) -> None:
        if len(self._clients) >= _CONNECTIONS_MAX:
            self._make_room()
            return
        try:
            connected, _address = self._socket.accept()
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return  # otherwise it has gone already
        client = Connection(connected, self._drop)
        self._clients[client] = None
        self._events.watch(client.fileno(), lambda: self._read(client))

    def _make_room(self) -> None:
        """Drop the oldest client that has no claim and waits for none; if all do, let others wait outside."""
        for client in self._clients:
            if not client.unanswered and not (self._broker and self._broker.needs(client)):
                self._drop(client)
                return
        if self._clients:
            self._events.forget(self._socket.fileno())  # until one of them goes

    def _read(self, client: Connection) -> None:
        try:
            requests = client.receive()
            for line, result in requests or ():
                self._handle(client, wire.decode(line), result)
        except ValueError:
            requests = None
        if requests is None:
            self._drop(client)

    def _handle(self, client: Connection, request: dict[str, str], result: bytes | None) -> None:
        if client.closed:
            return  # dropped for a request before this one
        if request.get("ask") == "status":
            with contextlib.suppress(OSError):  # the asker may have gone
                client.send(json.dumps(self._snapshot()).encode(), [])
        elif any(word in request for word in _TO_BROKER) and client.unanswered < _UNANSWERED_MAX:
            if client.uid not in (0, os.geteuid()):
                client.answer({"error": _ONLY_ASKS})
            elif any(word in request for word in _ORDERS) and self._is_ours(client.pid):
                client.answer({"error": _NO_ORDERS})
            elif self._broker is None:
                client.answer({"error": "this worker keeps no effects"})
            else:
                client.unanswered += 1
                self._broker.take(client, request, result)
                return
        self._drop(client)

    def _drop(self, client: Connection) -> None:
        if client.closed:
            return
        self._events.forget(client.fileno())
        client.close()
        del self._clients[client]
        self._events.watch(self._socket.fileno(), self._accept)
        if self._broker is not None:
            self._broker.gone(client)


def is_served(path: str) -> bool:
    """Return whether a process listens at `path`; never waits for it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(path)
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
    return True


def ask(path: str) -> dict[str, Any] | None:
    """Return the worker's snapshot, or None if it does not answer.

    Raises FileNotFoundError or ConnectionError where no worker listens, PermissionError where we may not ask.
    """
    try:
        found = json.loads(_exchange(path, {"ask": "status"}, None, _PATIENCE) or b"")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def request(path: str, fields: Mapping[str, object], result: bytes | None = None) -> dict[str, str] | None:
    """Return the worker's answer to one request, which `result` goes along with; None and raised as for `ask`."""
    answer = _exchange(path, fields, result, _LONG_PATIENCE)
    if answer is None:
        return None
    try:
        found = wire.decode(answer.rstrip(b"\n"))
    except ValueError:
        return None
    return found if "error" in found or "told" in found else None


def _exchange(path: str, fields: Mapping[str, object], result: bytes | None, patience: float) -> bytes | None:
    """Send a request and return what comes, a line or all there is; None if that does not come in time."""
    data, descriptors = bytearray(), [_memfd(result)] if result else []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            until = clock.monotonic() + patience
            connection.settimeout(patience)
            connection.connect(path)
            socket.send_fds(connection, [wire.encode(fields)], descriptors)
            while chunk := connection.recv(_READ):
                data += chunk
                if b"\n" in chunk:
                    break
                if len(data) > _ANSWER_MAX or clock.monotonic() > until:
                    return None  # whoever it is, it is no worker
                connection.settimeout(max(0.001, until - clock.monotonic()))
        return bytes(data)
    except TimeoutError:
        return None
    finally:
        for fd in descriptors:
            os.close(fd)


def _take_results(rights: bytes) -> list[bytes]:
    """Read and close the descriptors that came with a request; raise ValueError if one is no result."""
    numbers = array.array("i")
    numbers.frombytes(rights[: len(rights) - len(rights) % numbers.itemsize])
    try:
        return [_read_memfd(fd) for fd in numbers]
    finally:
        closing.close(numbers)


def _read_memfd(fd: int) -> bytes:
    """Return what a memfd holds.  Reading anything else, a pipe or a file on a server, could block the loop."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
        data = b"" if size > RESULT_MAX else os.pread(fd, size, 0)
    except OSError:
        raise ValueError("no memfd") from None
    if len(data) != size:
        raise ValueError("a result that is too long")
    return data


def _memfd(data: bytes) -> int:
    fd = os.memfd_create("result")
    try:
        files.write_all(fd, data)
    except OSError:
        os.close(fd)
        raise
    return fd
