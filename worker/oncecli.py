"""`agentctl once`: a command that happens once.  What it promises is in worker/stepcli.py, for its --help.

The command's output goes into a file without a name and is printed when the effect is committed.  The command has
a copy of our connection to the worker: should we be killed, the claim is not given up before the command has ended.
"""

from __future__ import annotations

import errno
import os
import sys

from worker import once
from worker.step import AGAIN, Conflict, EffectError, Unknown, Unreachable
from worker.stepcli import Misuse

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Exit statuses, besides 64 for bad use and AGAIN.
CONFLICT = 65  # EX_DATAERR
NO_RESULT = 74  # EX_IOERR
UNKNOWN = 76  # EX_PROTOCOL
_FAILED = 1
_CANNOT_START, _NOT_FOUND = 126, 127  # as a shell has it
_BY_SIGNAL = 128
_HAPPENED, _DID_NOT = 0, 1  # what a check says
_CHUNK = 256 * 1024
# The machine is short of something, which says nothing of the command (as worker/scarcity.py).
_SHORT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY)


class _Options:
    """What the command line says."""

    def __init__(self) -> None:
        self.key = ""
        self.lease = 60.0
        self.check: str | None = None
        self.parameters: str | None = None
        self.unsure: tuple[int, ...] = ()
        self.redo = self.quiet = False
        self.command: list[str] = []


class _Failed(Exception):
    """The command has failed; the exit status says why.  `unsure`: it may have done it all the same."""

    def __init__(self, status: int, unsure: bool = False) -> None:
        self.status = status
        self.unsure = unsure


def main(words: Sequence[str]) -> int:
    """Run one `agentctl once`; return its exit status.  Raises Misuse."""
    options = _parse(words)
    try:
        if not once.in_step():
            return _run_by_hand(options)
        return _Command(options).run()
    except _Failed as exc:
        return exc.status
    except EffectError as exc:
        print(f"agentctl once: {exc}", file=sys.stderr)
        kinds = ((Conflict, CONFLICT), (Unknown, UNKNOWN), (Unreachable, AGAIN))
        return next((status for kind, status in kinds if isinstance(exc, kind)), _FAILED)
    except KeyboardInterrupt:
        return _BY_SIGNAL + 2


def _parse(words: Sequence[str]) -> _Options:
    options = _Options()
    if "--" not in words:
        raise Misuse("write the command behind '--', as in: agentctl once greet-ann -- ./mail.sh ann")
    at = words.index("--")
    options.command = list(words[at + 1 :])
    rest, keys = iter(words[:at]), []
    for word in rest:
        name, equals, value = word.partition("=")
        if word in ("--redo", "--quiet"):
            setattr(options, word[2:], True)
        elif name in ("--check", "--lease", "--parameters", "--unsure"):
            value = value if equals else next(rest, "")
            if not value:
                raise Misuse(f"{name} needs a value")
            setattr(options, name[2:], _READERS.get(name, str)(value))
        elif word.startswith("-"):
            raise Misuse(f"there is no option {name!r}; see agentctl once --help")
        else:
            keys.append(word)
    if len(keys) != 1 or not options.command:
        raise Misuse("needs one KEY before '--' and a command behind it; see agentctl once --help")
    options.key = keys[0]
    return options


def _span(text: str) -> float:
    from worker import timespan

    try:
        return timespan.parse(text)
    except ValueError as exc:
        raise Misuse(str(exc)) from None


def _codes(text: str) -> tuple[int, ...]:
    codes = text.replace(",", " ").split()
    if not codes or not all(code.isascii() and code.isdigit() and 0 < int(code[:4]) < 256 for code in codes):
        raise Misuse(f"{text!r} is no list of exit statuses from 1 to 255, as in --unsure 28,52,56")
    return tuple(map(int, codes))


_READERS: dict[str, Callable[[str], object]] = {"--lease": _span, "--unsure": _codes}


def _run_by_hand(options: _Options) -> int:
    print(f"agentctl once: '{options.key}': not in a step, so nothing is recorded", file=sys.stderr, flush=True)
    try:
        os.execvp(options.command[0], options.command)
    except OSError as exc:
        return _not_started(options.command[0], exc)


class _Command:
    """The command of one `agentctl once`, in a step."""

    def __init__(self, options: _Options) -> None:
        self._options = options
        parameters = options.parameters
        argv = [os.fsencode(word) for word in options.command]
        kind, parts = ("argv", argv) if parameters is None else ("text", [os.fsencode(parameters)])
        take_over = options.redo or options.check is not None
        try:
            self._claim = once.Claim(options.key, once.digest(kind, parts), options.lease, take_over, self._on_wait)
        except ValueError as exc:
            raise Misuse(str(exc)) from None
        self._env = {**os.environ, "AGENT_KEY": f"{os.environ.get('AGENT_RUN', '')}:{options.key}"}
        self._signal = 0  # that was sent to us

    def run(self) -> int:
        """Return the exit status; the command's output has been printed if that is 0."""
        check = None if self._options.check is None else self._check
        ended = self._claim.perform(self._effect, check, self._leave_signals_to_it, _leaves_a_doubt)
        if ended.mine is not None:
            _copy(ended.mine.value, ended.mine.size, 1)
        elif ended.stored is not None:
            once.write_all(1, ended.stored)
        else:
            self._say(f"it has happened, but its output of {ended.size} bytes was too large to be kept")
            return NO_RESULT
        if not self._options.quiet:
            self._say(ended.outcome)
        return 0

    def _effect(self) -> once.Result:
        """Run the command; raise _Failed if it says that it failed, SystemExit if it was cut off."""
        if self._signal:  # before it was started, so it cannot obey by itself
            raise _Failed(_BY_SIGNAL + self._signal)
        if self._claim.held_by >= 0:
            os.set_inheritable(self._claim.held_by, True)
        result, status = self._spawn(self._options.command)
        if status == 0:
            return result
        _copy(result.value, result.size, 2)
        if status < 0:
            self._say(f"ended by signal {-status}, so nobody knows whether it has happened")
            raise SystemExit(_BY_SIGNAL - status)
        from worker import doubt

        if doubt.of_status(status, self._options.unsure):
            self._say(f"exited with status {status}, so nobody knows whether it has happened")
            raise _Failed(status, unsure=True)
        asks = status != AGAIN and self._options.check is not None
        then = "; the check is asked before it is tried again" if asks else ", so it did not happen"
        self._say(f"failed with exit status {status}{then}")
        raise _Failed(status, unsure=asks)

    def _check(self) -> once.Result | None:
        """Return what the check finds, None if it says that nothing had happened; SystemExit if it cannot tell."""
        result, status = self._spawn(["/bin/sh", "-c", self._options.check or ""])
        if status == _HAPPENED:
            return result
        if status == _DID_NOT:
            return None
        said = f"exited with status {status}" if status > 0 else f"was ended by signal {-status}"
        self._say(f"the check {said}, so it cannot tell")
        raise SystemExit(AGAIN)

    def _spawn(self, argv: list[str]) -> tuple[once.Result, int]:
        """Run `argv` to its end; return its output and its exit status, or the signal that ended it as -N."""
        import signal

        output = _spool()
        try:
            pid = os.posix_spawnp(
                argv[0],
                argv,
                self._env,
                file_actions=[(os.POSIX_SPAWN_DUP2, output, 1)],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores these two
            )
        except OSError as exc:
            raise _Failed(_not_started(argv[0], exc)) from None
        _pid, status = os.waitpid(pid, 0)
        size = os.fstat(output).st_size
        return once.Result(output, size, lambda: os.pread(output, size, 0)), os.waitstatus_to_exitcode(status)

    def _leave_signals_to_it(self) -> None:
        """From now on do not die before the command has: the signals of a stop reach it as well."""
        import signal

        def note(number: int, _frame: object) -> None:
            self._signal = number

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, note)

    def _on_wait(self, step: str) -> None:
        if not self._options.quiet:
            self._say(f"waiting for step '{step}', which is at it")

    def _say(self, text: str) -> None:
        print(f"agentctl once: '{self._options.key}': {text}", file=sys.stderr, flush=True)


def _leaves_a_doubt(exc: Exception) -> bool:
    return isinstance(exc, _Failed) and exc.unsure


def _not_started(program: str, exc: OSError) -> int:
    if exc.errno in _SHORT:
        print(f"agentctl once: cannot start '{program}' now: {exc.strerror}", file=sys.stderr)
        return AGAIN
    print(f"agentctl once: cannot start '{program}': {exc.strerror}", file=sys.stderr)
    return _NOT_FOUND if isinstance(exc, FileNotFoundError) else _CANNOT_START


def _spool() -> int:
    """Return a file without a name, on the disk on which the claim has found room, or else in memory."""
    try:
        return os.open(os.environ["STATE_DIRECTORY"], os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (KeyError, OSError):
        return os.memfd_create("output")


def _copy(fd: int, size: int, to: int) -> None:
    """Write the first `size` bytes of a file to a descriptor."""
    done = 0
    while done < size and (data := os.pread(fd, min(_CHUNK, size - done), done)):
        once.write_all(to, data)
        done += len(data)
