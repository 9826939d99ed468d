"""An effect that happens once: the caller's end of what worker/broker.py does, for step.once() and `agentctl once`.

    ask ─► granted ─► begin, do it ─► commit ─► its result            the worker may die between any two of these:
     │                    └ it failed: release                        the caller asks the next one, and commits there
     ├─► committed: the result of whoever did it
     └─► unknown, conflict: raised

Imports no more than it needs, see worker/step.py.
"""

from __future__ import annotations

import _socket
import os
import sys
import time

from worker import points, wire
from worker.step import Conflict, EffectError, NoResult, Unknown, Unreachable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, NoReturn

# How long a worker may be away (it is restarted within seconds): before anything has happened, and once something
# has, of which only we know.
_PATIENCE_BEFORE, _PATIENCE_AFTER = 30.0, 60.0
_RETRY = 0.1
_READ = 65536
_INT = 4
_ROOM = _socket.CMSG_SPACE(4 * _INT)


class Result:
    """What an effect has left: `size` bytes, which `read` returns; None if they are of no use to anybody."""

    __slots__ = ("read", "size", "value")

    def __init__(self, value: Any, size: int, read: Callable[[], bytes] | None) -> None:
        self.value = value  # for the one who made it
        self.size = size
        self.read = read


class Ended:
    """What came of it: the outcome, and the result, `mine` if it was made or found by us, else `stored`."""

    __slots__ = ("mine", "outcome", "size", "stored")

    def __init__(self, outcome: str, mine: Result | None = None, stored: bytes | None = None, size: int = 0) -> None:
        self.outcome = outcome
        self.mine = mine
        self.stored = stored  # None if it was not kept
        self.size = size


def in_step() -> bool:
    """Return whether this process runs inside a step.  Raises EffectError where that cannot be told for sure."""
    if "AGENT_STEP" not in os.environ:
        return False
    if not os.environ.get("NOTIFY_SOCKET"):
        raise EffectError(
            f"in step '{os.environ['AGENT_STEP']}', but NOTIFY_SOCKET, which leads to the worker, is gone"
        )
    return True


def call(
    key: str,
    fn: Callable[[], object],
    lease: float,
    check: Callable[[], object] | None,
    redo: bool,
    parameters: object,
    tell: Callable[[str], object] | None,
    unsure: tuple[type[BaseException], ...] = (),
) -> Any:
    """Do what step.once() promises."""
    import json

    what = digest("json", [json.dumps(parameters, sort_keys=True).encode()])

    def result(value: object) -> Result:
        try:
            data = json.dumps(value).encode()
        except (TypeError, ValueError, RecursionError) as exc:
            return Result(exc, 0, None)
        return Result(None, len(data), lambda: data)

    def found() -> Result | None:
        value = check() if check is not None else None
        return None if value is None else result(value)

    if in_step():
        claim = Claim(key, what, lease, redo or check is not None)

        def doubtful(exc: Exception) -> bool:
            from worker import doubt

            return check is not None or isinstance(exc, unsure) or doubt.of_error(exc)

        ended = claim.perform(lambda: result(fn()), found if check is not None else None, doubtful=doubtful)
    else:
        print(f"once: '{key}': not in a step, so nothing is recorded", file=sys.stderr)
        ended = Ended(wire.EXECUTED, result(fn()))
    if tell is not None:
        tell(ended.outcome)
    return _value(key, ended)


def _value(key: str, ended: Ended) -> Any:
    """Return what was kept as JSON; what a person gave as the result may be plain text."""
    import json

    if ended.mine is not None and ended.mine.read is None:
        raise NoResult(
            f"'{key}': it has happened, but what came of it is nothing that JSON can hold: {ended.mine.value}"
        )
    data = ended.stored if ended.mine is None or ended.mine.read is None else ended.mine.read()
    if data is None:
        why = f"{ended.size} bytes are too many" if ended.size else "JSON could not hold it"
        raise NoResult(f"'{key}': it has happened, but its result was not kept: {why}")
    try:
        return json.loads(data) if data else None
    except ValueError:
        return data.decode(errors="surrogateescape")


def digest(kind: str, parts: Iterable[bytes]) -> str:
    """Return what stands in the ledger for the parameters of an effect."""
    try:
        from _blake2 import blake2b  # hashlib would bring all of OpenSSL
    except ImportError:
        from hashlib import blake2b
    return blake2b(b"\0".join([kind.encode(), *parts]), digest_size=16).hexdigest()


class Claim:
    """One caller's dealings with the worker over one key."""

    def __init__(
        self, key: str, parameters: str, lease: float, take_over: bool, on_wait: Callable[[str], object] | None = None
    ) -> None:
        """`on_wait` is called with the step that is at it when we have to wait.  Raises ValueError for a bad key."""
        fault = wire.fault(key, lease)
        if fault:
            raise ValueError(fault)
        self.key = key
        self._step = os.environ["AGENT_STEP"]
        self._path = os.path.join(os.path.dirname(os.environ["NOTIFY_SOCKET"]), "control")
        self._parameters = parameters
        self._lease = lease
        self._take_over = take_over
        self._on_wait = on_wait
        self._claimant = os.urandom(16).hex()  # nobody else knows it: what we have claimed is ours to end
        self._token = ""
        self._most = 0
        self._happened = False
        self._socket: _socket.socket | None = None
        self._rest = b""
        self._memfd = -1

    @property
    def held_by(self) -> int:
        """The descriptor whose last copy, when closed, gives the claim up; -1 if the worker is away."""
        return -1 if self._socket is None else self._socket.fileno()

    def perform(
        self,
        effect: Callable[[], Result],
        check: Callable[[], Result | None] | None,
        ready: Callable[[], object] | None = None,
        doubtful: Callable[[Exception], bool] | None = None,
    ) -> Ended:
        """Return what came of the effect, which is done here if nobody else has done it; it is committed then.

        `effect` raises an Exception if it did not happen, which goes on; one that is `doubtful`, or any other
        BaseException, leaves it open.
        `check` says what an earlier try that was cut off has left, None if nothing.  `ready` is called before
        either, while nothing can have happened yet.  Raises Conflict, Unknown, Unreachable, EffectError.
        """
        made: Result | None = None
        outcome = wire.EXECUTED
        points.at("once-asking")
        try:
            while True:
                answer = self._ask_for_it()
                verdict = answer["verdict"]
                if verdict == wire.COMMITTED:
                    return Ended(answer["outcome"], None, self._stored(answer), int(answer["size"]))
                if verdict not in (wire.GRANTED, wire.TAKEN_OVER):
                    self._refuse(answer)
                self._token, self._most = answer["token"], int(answer["most"])
                if made is None:
                    if ready is not None:
                        ready()
                    outcome, made = self._happen(verdict == wire.TAKEN_OVER, effect, check, doubtful)
                else:
                    self._begin()  # it has happened, whatever becomes of us
                if self._commit(outcome, made):
                    points.at("once-committed")
                    return Ended(outcome, made)
                # Another has the claim by now, or had; ours has happened, so nothing is done again.
                self._take_over = self._happened = True
        finally:
            self._close()

    def _happen(
        self,
        again: bool,
        effect: Callable[[], Result],
        check: Callable[[], Result | None] | None,
        doubtful: Callable[[Exception], bool] | None,
    ) -> tuple[str, Result]:
        """Do it, unless the check finds it done; the claim is given up if either raises."""
        self._begin()
        points.at("once-claimed")
        if again and check is not None:
            found = check()
            if found is not None:
                return wire.FOUND, found
        try:
            made = effect()
        except Exception as exc:
            if doubtful is None or not doubtful(exc):
                self._release()
            raise
        points.at("once-happened")
        return wire.TAKEN_OVER if again else wire.EXECUTED, made

    def _ask_for_it(self) -> dict[str, str]:
        return self._ask(
            {
                "once": "claim",
                "key": self.key,
                "parameters": self._parameters,
                "step": self._step,
                "lease": self._lease,
                "claimant": self._claimant,
                "take_over": self._take_over,
                "waited": self._happened,
            },
            _PATIENCE_AFTER if self._happened else _PATIENCE_BEFORE,
        )

    def _begin(self) -> None:
        try:
            self._send(wire.encode({"once": "begin", "key": self.key, "token": self._token}))
        except OSError:
            self._disconnect()  # the worker has just died; the next one takes a claim for begun

    def _commit(self, outcome: str, made: Result) -> bool:
        kept = made.read() if made.read is not None and made.size <= self._most else None
        fields = {
            "once": "commit",
            "key": self.key,
            "token": self._token,
            "claimant": self._claimant,
            "step": self._step,
            "outcome": outcome,
            "size": made.size,
            "kept": kept is not None,
        }
        try:
            return self._ask(fields, _PATIENCE_AFTER, kept or b"")["verdict"] == wire.COMMITTED
        except Unreachable as exc:
            raise Unreachable(f"{exc}; it has happened, and that is not recorded") from None

    def _release(self) -> None:
        try:
            self._ask(
                {"once": "release", "key": self.key, "token": self._token, "claimant": self._claimant}, _PATIENCE_BEFORE
            )
        except EffectError as exc:
            print(f"once: '{self.key}': that it did not happen is not recorded: {exc}", file=sys.stderr)

    def _refuse(self, answer: dict[str, str]) -> NoReturn:
        key, step, since = self.key, answer["step"], answer["since"]
        if answer["verdict"] == wire.CONFLICT:
            raise Conflict(
                f"'{key}': stands for something else, which step '{step}' claimed at {since}; use another key, "
                f"or if that was tried in vain: agentctl settle '{key}' --redo"
            )
        raise Unknown(
            f"'{key}': step '{step}' was cut off in it at {since}, and nobody can tell whether it happened; "
            f"look, and say so: agentctl settle '{key}' --done [RESULT], or --redo"
        )

    def _stored(self, answer: dict[str, str]) -> bytes | None:
        if answer["kept"] != "yes":
            return None
        return b"" if self._memfd < 0 else os.pread(self._memfd, int(answer["size"]), 0)

    # -- the connection

    def _ask(self, request: dict[str, object], patience: float, result: bytes = b"") -> dict[str, str]:
        """Return the worker's answer; a worker that is away, or dies meanwhile, is waited for and asked again.

        Raises Unreachable when there was none for `patience` seconds, EffectError for a request that is refused.
        """
        line, gives_up = wire.encode(request), 0.0
        while True:
            began = time.monotonic()
            try:
                self._send(line, result)
                answer = self._receive()
            except OSError as exc:
                self._disconnect()
                now = time.monotonic()
                if not gives_up or now - began > patience:  # the one that has just died had lived for long
                    gives_up = now + patience
                if now >= gives_up or not isinstance(exc, (ConnectionError, FileNotFoundError, BlockingIOError)):
                    raise Unreachable(f"'{self.key}': the worker cannot be reached at {self._path}: {exc}") from None
                time.sleep(_RETRY)
                continue
            if "error" in answer:
                raise EffectError(f"'{self.key}': the worker refuses: {answer['error']}")
            return answer

    def _send(self, line: bytes, result: bytes = b"") -> None:
        if self._socket is None:
            self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            self._socket.connect(self._path)
        if not result:
            self._socket.sendall(line)
            return
        fd = os.memfd_create("result")
        try:
            write_all(fd, result)
            rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fd.to_bytes(_INT, sys.byteorder))]
            sent = self._socket.sendmsg([line], rights)
            self._socket.sendall(line[sent:])
        finally:
            os.close(fd)

    def _receive(self) -> dict[str, str]:
        """Return the next answer but for those that say to wait."""
        assert self._socket is not None
        while True:
            while b"\n" not in self._rest:
                data, control, _flags, _address = self._socket.recvmsg(_READ, _ROOM, _socket.MSG_CMSG_CLOEXEC)
                for _level, _kind, rights in control:
                    self._memfd = int.from_bytes(rights[:_INT], sys.byteorder)
                if not data:
                    raise ConnectionResetError("it has closed the connection")
                self._rest += data
            line, _, self._rest = self._rest.partition(b"\n")
            answer = wire.decode(line)
            if answer.get("verdict") != wire.WAITING:
                return answer
            if self._on_wait is not None:
                self._on_wait(answer["step"])

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._rest = None, b""

    def _close(self) -> None:
        """End the connection, also for those who have a copy of its descriptor."""
        if self._socket is not None:
            try:  # noqa: SIM105 - contextlib costs as much as all of this module
                self._socket.shutdown(_socket.SHUT_RDWR)
            except OSError:
                pass  # the worker was faster
        self._disconnect()
        if self._memfd >= 0:
            os.close(self._memfd)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, or raise OSError.  (worker/files.py has the same, and imports more.)"""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
