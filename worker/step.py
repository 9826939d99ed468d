"""What a step's own code may say to the worker that runs it, and keep between its attempts.

    from worker import step

    for number, page in enumerate(pages[step.load_json() or 0 :]):
        work(page)
        step.progress(number + 1, len(pages))

Messages go to $NOTIFY_SOCKET as with sd_notify(3) and never raise.  spend(), retry_after(), extend() and what is
called with `wait` return once the worker has acknowledged the message: it is kept then, whatever becomes of that
worker.  If the worker dies before, the next one is told again, and counts it once.  The other messages are not waited
for before the end of the process: the worker believes a message only while it can see that its sender belongs to the
step.  A message that no worker takes in time is dropped.  Run by hand, without the variables that a step finds in its
environment, all of this works and does nothing.

Only the worker's own interpreter has this module; `python:` steps run in it, and PYTHONPATH is not set.  A
shell script, or a program with a Python of its own, calls `agentctl beat`, `agentctl progress 3/10`, `agentctl save`
and so on instead, or uses any sd_notify(3) library.
"""

from __future__ import annotations

# Not `socket`: with what it imports in turn it costs half an interpreter's start.
import _socket
import atexit
import os
import sys
import time

TYPE_CHECKING = False  # `typing` itself would cost as much again
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

AGAIN = 75  # EX_TEMPFAIL: "not now", or with new progress or saved state "start me afresh, at once"

# How long the worker may take to accept a message, and to have read those that were sent if it is one of an earlier
# version, which acknowledges nothing.
_PATIENCE = 1.0
# How long a message waits for its acknowledgement, a restart of the worker included; and one of money that was spent.
_PATIENCE_RESTART, _PATIENCE_SPEND = 10.0, 120.0
_SAY_AGAIN = 0.1
_TAKEN = b"+"  # see worker/signs.py
_STATUS_MAX = 1024
_TOO_MUCH = 1e18  # the worker would take it for nonsense
_socket_kept: _socket.socket | None = None
_settles = False  # at the end of the process
_furthest: tuple[float, str] | None = None  # the progress that was told


def beat(status: str | None = None, *, wait: bool = False) -> None:
    """Tell the worker that the step is alive (WATCHDOG=1) and, if given, what it is doing."""
    _tell("WATCHDOG=1", *([] if status is None else [_status(status)]), wait=wait)


def status(text: str) -> None:
    """Tell the worker what the step is doing; a sign of life, but no beat."""
    _tell(_status(text))


def progress(done: float, total: float | None = None, *, wait: bool = False) -> None:
    """Tell the worker how far the step is.  Raises ValueError unless these are numbers from 0 up."""
    global _furthest
    text = _decimal(done) + ("" if total is None else f"/{_decimal(total)}")
    if not wait and (_furthest is None or done >= _furthest[0]):
        _furthest = done, text
    _tell(f"X_AGENT_PROGRESS={text}", wait=wait)


def spend(amount: float) -> bool:
    """Tell the worker that this much more was spent; return whether the ledger has it.

    It has not if no worker took it within two minutes, or if this process is none of the step's.  By hand, and with a
    worker of an earlier version, it is taken to have it.
    Call it before you use what was paid for: the run's budget counts what is said.  Raises ValueError unless it is
    a number from 0 up.
    """
    field = f"X_AGENT_SPEND={_decimal(amount)}"
    if _is_acknowledged():
        return _ask([field], _PATIENCE_SPEND)
    _tell(field)
    if _settles:
        settle()
    return True


def retry_after(seconds: float) -> None:
    """Ask that the next attempt come no sooner than in `seconds`, should this one end with AGAIN."""
    _tell(f"X_AGENT_RETRY_AFTER={_decimal(seconds)}", wait=True)


def extend(seconds: float) -> None:
    """Ask for `seconds` from now before `timeout` ends the step, ten times that in all; the other limits stay."""
    _tell(f"EXTEND_TIMEOUT_USEC={round(float(_decimal(seconds)) * 1e6)}", wait=True)


def again(message: str = "") -> NoReturn:
    """End the process with AGAIN; `message` goes to the step's log."""
    if message:
        print(message, file=sys.stderr, flush=True)
    raise SystemExit(AGAIN)


def note() -> dict[str, Any]:
    """Return what the worker noted about the last attempt; empty on a first one."""
    path = os.environ.get("AGENT_NOTE")
    data = _read(path) if path else None
    found = _decoded(data) if data else {}
    return found if isinstance(found, dict) else {}


def save(data: object, name: str = "state") -> None:
    """Keep `data` for later attempts; when this returns it survives a power cut.

    Bytes are kept as they are, text as UTF-8, anything else as JSON.  If this raises OSError, what was
    kept under that name is still there, whole.
    """
    from worker import files

    if isinstance(data, str):
        data = data.encode(errors="surrogateescape")
    elif not isinstance(data, bytes):
        import json

        data = json.dumps(data, ensure_ascii=False).encode(errors="surrogateescape")
    path = kept(name)
    if path is not None:
        files.replace(path, [data])


def load(name: str = "state") -> bytes | None:
    """Return what was last saved under `name`, or None."""
    path = kept(name)
    return None if path is None else _read(path)


def load_json(name: str = "state") -> Any:
    """Return what was last saved under `name` as JSON, or None.  Raises ValueError if it is not JSON."""
    data = load(name)
    return None if data is None else _decoded(data)


class EffectError(Exception):
    """once() can give no result; the message says what has happened."""


class Unreachable(EffectError):
    """There was no worker to claim the effect, or none to record that it has happened."""


class Conflict(EffectError):
    """The key stands for something else; nothing was done."""


class Unknown(EffectError):
    """An earlier try was cut off, and nobody can tell whether it happened; a person has to look."""


class NoResult(EffectError):
    """The effect has happened, but its result was too large to be kept, or is nothing that JSON can hold."""


def once(
    key: str,
    fn: Callable[[], object],
    *,
    lease: float = 60.0,
    check: Callable[[], object] | None = None,
    redo: bool = False,
    parameters: object = None,
    tell: Callable[[str], object] | None = None,
    unsure: tuple[type[BaseException], ...] = (),
) -> Any:
    """Call `fn` the first time, and return its result every time: the side effect in it happens once in the run.

    `key` names the effect in the run, for all its steps, attempts and machines: no time or attempt number in it.
    `parameters` says what else the effect depends on: with others the same key is a Conflict.  The result must
    be something that JSON can hold, and is what JSON gives back: a list for a tuple.  Up to 1 MiB of it are kept.

    If `fn` raises an Exception it counts as not done, and may be tried again, but for time-outs, broken connections
    and what is named in `unsure`: these leave it open, as a try that was cut off does.  With `check` every Exception
    does.  Before it is tried again `check` is called then: it returns the result if that had happened, None if not, and
    raises if it cannot tell, which leaves it open.  `redo`: doing it again is harmless, because the receiver knows
    RUN:KEY, say.  With neither, Unknown is raised.  `lease`: where machines share the run, the others wait so many
    seconds without news.

    `tell` is called with the outcome: "executed"; "skipped", it was done before; "awaited", another did it
    meanwhile; "taken-over", done after an earlier try was cut off; "found", by `check`.
    Outside a step `fn` is called, nothing is recorded, and a line on standard error says so.
    Raises EffectError or one of its kinds; ValueError or TypeError for a key, lease or parameters that cannot be.
    """
    from worker import once as caller

    return caller.call(key, fn, lease, check, redo, parameters, tell, unsure)


def secret(name: str) -> str:
    """Return the secret `name`, without the newline that an editor put behind it.

    Raises LookupError if the step has no such secret.
    """
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    data = _read(os.path.join(folder, _plain(name))) if folder else None
    if data is None:
        raise LookupError(f"there is no secret '{name}' here; add it to the task's 'secrets'")
    try:
        return data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise LookupError(f"the secret '{name}' is not UTF-8 text") from None


def kept(name: str = "state") -> str | None:
    """Return the path under which save() keeps `name`; None where nothing is kept, by hand.

    Raises ValueError if `name` is not a plain file name.
    """
    folder = os.environ.get("STATE_DIRECTORY")
    return os.path.join(folder, _plain(name)) if folder else None


def settle() -> None:
    """Wait until the worker has read what was sent so far: ten seconds at most.

    One of an earlier version, which acknowledges nothing, closes a pipe (sd_notify_barrier(3)): a second at most.
    """
    if _is_acknowledged():
        # A worker that died may have read the progress and kept nothing of it.
        _ask([] if _furthest is None else [f"X_AGENT_REACHED={_furthest[1]}"], _PATIENCE_RESTART)
        return
    import select

    read, write = os.pipe()
    try:
        sent = _sent(b"BARRIER=1", write)
        os.close(write)
        if sent:
            hangup = select.poll()
            hangup.register(read, 0)
            hangup.poll(_PATIENCE * 1000)
    finally:
        os.close(read)


def _tell(*fields: str, wait: bool = False) -> None:
    global _settles
    if wait and _is_acknowledged():
        _ask(fields, _PATIENCE_RESTART)
    elif os.environ.get("NOTIFY_SOCKET") and _sent("\n".join(fields).encode(errors="replace")) and not _settles:
        _settles = True
        atexit.register(settle)


def _is_acknowledged() -> bool:
    """Return whether the worker that began this step acknowledges messages; so do those that come after it."""
    return bool(os.environ.get("NOTIFY_SOCKET") and os.environ.get("AGENT_ACK"))


def _ask(fields: Sequence[str], patience: float) -> bool:
    """Send the fields as one message until a worker acknowledges it; return whether one did.

    The message has an id, by which a worker knows what it, or the one before it, has counted already.
    """
    message = "\n".join((*fields, f"X_AGENT_ID={os.urandom(8).hex()}")).encode(errors="replace")
    gives_up = time.monotonic() + patience
    while (left := gives_up - time.monotonic()) > 0:
        ours, theirs = _socket.socketpair()
        answer = b""
        try:
            _deliver(message, theirs.fileno())
            theirs.close()
            ours.settimeout(left)
            answer = ours.recv(1)
        except (FileNotFoundError, ConnectionRefusedError):
            return False  # nobody will ever read it
        except OSError:
            pass  # the socket's queue is full, say
        finally:
            theirs.close()
            ours.close()
        if answer:
            return answer == _TAKEN
        time.sleep(_SAY_AGAIN)  # closed without an answer: that worker has died, or has no room for it
    return False


def _sent(message: bytes, *descriptors: int) -> bool:
    """Return whether the worker's socket took the message."""
    try:
        _deliver(message, *descriptors)
    except OSError:
        return False
    return True


def _deliver(message: bytes, *descriptors: int) -> None:
    """Raises OSError.  Not connected: a new worker may have bound the socket anew."""
    global _socket_kept
    address = os.environ.get("NOTIFY_SOCKET", "")
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fd.to_bytes(4, sys.byteorder)) for fd in descriptors]
    if _socket_kept is None:
        _socket_kept = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
        _socket_kept.settimeout(_PATIENCE)
    _socket_kept.sendmsg([message], rights, 0, "\0" + address[1:] if address[:1] == "@" else address)


def _status(text: str) -> str:
    """Return the field for `text`, on one line: what follows a newline would be a field of its own."""
    return "STATUS=" + " ".join(text[:_STATUS_MAX].split("\n"))


def _decimal(number: float) -> str:
    if not 0 <= number < _TOO_MUCH:
        raise ValueError(f"{number!r} is not a number from 0 up, or too large")
    return f"{number:.9f}".rstrip("0").rstrip(".")


def _plain(name: str) -> str:
    """Return `name` if it is a plain file name, and not a hidden one as files.replace() makes; or raise."""
    if not name or name[0] == "." or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a plain name")
    return name


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _decoded(data: bytes) -> Any:
    import json

    return json.loads(data)
