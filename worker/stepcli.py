"""agentctl inside a step: `beat`, `progress`, `save` and the others that a step's own script calls.

They may be called in loops, so argparse is not imported, nor anything else before it is needed.  Run by hand,
outside a step, each does nothing and succeeds; so does one whose message no worker is there to take.  `once` is
different: by hand it runs its command, and in a step it needs a worker.
"""

from __future__ import annotations

import os
import sys

from worker import startup

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

USAGE = 64  # EX_USAGE
TEMPORARY = 75  # EX_TEMPFAIL
_FAILED = 1
_CHUNK = 256 * 1024


class Misuse(Exception):
    """The command cannot be carried out as it was given; the message says what to write instead."""


def main(arguments: Sequence[str]) -> int:
    """Run one of COMMANDS; return its exit status.  Bad use is one line on standard error, and USAGE."""
    name, rest = arguments[0], arguments[1:]
    form, text, command = COMMANDS[name]
    if rest and rest[0] in ("-h", "--help"):
        print(f"usage: agentctl {name} {form}\n{text}")
        return 0
    if (len(rest) > 1 and "..." not in form) or (not rest and form[0] != "["):
        more = " (one argument: quote a text of several words)" if len(rest) > 1 else ""
        print(f"usage: agentctl {name} {form}{more}", file=sys.stderr)
        return USAGE
    try:
        status = command(*rest)
        sys.stdout.flush()
        return status or 0
    except Misuse as exc:
        print(f"agentctl {name}: {exc}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        startup.give_up_output()  # the reader has seen enough: `agentctl note | head -1`
    except (OSError, ValueError) as exc:
        print(f"agentctl {name}: {exc}", file=sys.stderr)
        return _FAILED
    return 0


def listing() -> str:
    """Return the commands for `agentctl --help`, one a line."""
    lines = ((f"{name} {form}", text.partition("\n")[0]) for name, (form, text, _) in COMMANDS.items())
    return "\n".join(f"  {usage:26} {text}" for usage, text in lines)


def _beat(status: str | None = None) -> None:
    from worker import step

    step.beat(status, wait=True)


def _progress(text: str) -> None:
    from worker import step

    done, slash, total = text.partition("/")
    try:
        step.progress(float(done), float(total) if slash else None, wait=True)
    except ValueError:
        raise Misuse(f"{text!r} is not N or N/M in numbers from 0 up, as in 3/10") from None


def _spend(text: str) -> int:
    from worker import step

    try:
        if step.spend(float(text)):
            return 0
    except ValueError:
        raise Misuse(f"{text!r} is not an amount from 0 up, as in 0.12") from None
    print(f"agentctl spend: no worker has acknowledged it, so {text} may not be counted", file=sys.stderr)
    return TEMPORARY


def _retry_after(text: str) -> None:
    from worker import step, timespan

    try:
        step.retry_after(timespan.parse(text))
    except ValueError as exc:
        raise Misuse(str(exc)) from None


def _save(name: str = "state") -> None:
    from worker import files

    path = _path(name)
    if path is None:
        print("agentctl save: not in a step (no STATE_DIRECTORY), so nothing was saved", file=sys.stderr)
        return
    first = os.read(0, _CHUNK)
    if not first:
        # As when the program before the pipe failed: its silence must not replace what was saved.
        raise Misuse("nothing on standard input, so what was saved before is kept; 'agentctl save < FILE'")
    files.replace(path, _chunks(first))


def _load(name: str = "state") -> None:
    from worker import files

    path = _path(name)
    if path is not None and os.path.exists(path):
        with open(path, "rb") as file:
            while data := file.read(_CHUNK):
                files.write_all(1, data)


def _note(what: str | None = None) -> None:
    from worker import step

    note = step.note()
    if not note:
        return
    if what == "--json":
        print(_json(note))
    elif what is None:
        print("\n".join(_readable(name, value) for name, value in note.items() if value is not None))
    elif what in note:
        print(_plain(note[what]))
    else:
        raise Misuse(f"the note has no {what!r}; it has {', '.join(note)}")


def _once(*words: str) -> int:
    from worker import oncecli

    return oncecli.main(words)


def _path(name: str) -> str | None:
    from worker import step

    try:
        return step.kept(name)
    except ValueError as exc:
        raise Misuse(f"{exc}; use one like 'summary' or 'summary.json'") from None


def _chunks(first: bytes) -> Iterator[bytes]:
    while first:
        yield first
        first = os.read(0, _CHUNK)


def _readable(name: str, value: Any) -> str:
    """Return one field for people; many lines stand indented below its name."""
    text = _plain(value)
    between = "\n" if "\n" in text else " "
    return f"{name.replace('_', ' ')}:{between}{text}".replace("\n", "\n  ")


def _plain(value: Any) -> str:
    """Return text as it is, a list of texts as lines, nothing for null, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    return "" if value is None else _json(value)


def _json(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=startup.json_ascii())


_ONCE = """run COMMAND once in this run, whatever dies, and print its output now and ever after

KEY names what it does, for all steps, attempts and machines of the run.  The first caller runs COMMAND; its output
is printed when it is recorded.  Later callers get the same output and run nothing; one that comes meanwhile waits.
If COMMAND fails, it counts as not done, and its exit status is ours.  If it is cut off, or ends with a status that
leaves a doubt, nobody knows; then the next caller needs one of the first two of these:

  --check CMD        ask the shell command CMD first: status 0, it had happened, and the result is CMD's output;
                     1, it had not, and COMMAND is run; anything else, it cannot tell.  CMD is asked after
                     every try that has failed, but for those that ended with 75 or could not be started
  --redo             running COMMAND again is harmless, as when the receiver honours AGENT_KEY
  --unsure CODES     exit statuses of COMMAND after which it may have happened all the same: a client's time-out,
                     as in 28,52,56 for curl; 124 and 128+N (of timeout(1), by a signal) always are
  --lease SPAN       where machines share the run, how long the others wait without news (1min)
  --parameters TEXT  what COMMAND does, if not its arguments: the same key with others is refused
  --quiet            do not say on standard error what it came to: executed, skipped (it was done before), awaited
                     (another did it meanwhile), taken-over (done after a try that was cut off), found (by CMD)

COMMAND and CMD find RUN:KEY in AGENT_KEY, to be used as an idempotency key.  SIGTERM is left to COMMAND to obey.
Outside a step COMMAND is run, and nothing is recorded.

exit status: COMMAND's own, or
  64  bad use      65  KEY stands for other parameters
  74  it has happened, but its output, more than 1 MiB, was not kept
  75  not now: the worker cannot be reached, or CMD cannot tell
  76  unknown: a try was cut off, and there is neither --check nor --redo; say 'agentctl settle KEY' what it came to
  126, 127  COMMAND cannot be started     128+N  COMMAND was ended by signal N"""

COMMANDS: dict[str, tuple[str, str, Callable[..., int | None]]] = {
    "beat": ("[STATUS]", "I am alive (WATCHDOG=1), and what I am doing", _beat),
    "progress": ("N[/M]", "I have done N, of M", _progress),
    "spend": ("AMOUNT", "I have spent so much more", _spend),
    "retry-after": ("SPAN", "if I end with exit status 75, let so long pass first", _retry_after),
    "save": ("[NAME]", "keep standard input for my later attempts, atomically", _save),
    "load": ("[NAME]", "print what was saved, or nothing", _load),
    "note": ("[--json|FIELD]", "print how my last attempt ended, or nothing", _note),
    "once": ("KEY [OPTION...] -- COMMAND [ARG...]", _ONCE, _once),
}
