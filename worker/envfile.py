"""Environment files, read as systemd reads EnvironmentFile= (systemd.exec(5)), but never in silence.

A line that systemd would ignore (no '=', a name that is none) is a mistake here, with its line.  Messages
never repeat a value: these files are where secrets live.
"""

import re

from worker import argspace, distant, textfile
from worker.errors import ConfigError, Mark, Problem, quote

_LARGEST = 1 * textfile.MEGABYTE  # a program can be given little more
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(
    r"(AGENT_|LISTEN_).*|NOTIFY_SOCKET|WATCHDOG_(USEC|PID)|STATE_DIRECTORY|CREDENTIALS_DIRECTORY", re.DOTALL
)
_ENTRY = re.compile(
    r"""
    [#;][^\n]*
    | (?P<name>[^=\n]*)=
      (?P<quoted>(?:[ \t]*(?:'[^']*'|"(?:[^"\\]|\\.)*"))*)[ \t]*  # quotes count at the start of a value only
      (?P<bare>(?:[^\\\n]|\\.)*\\?)
    | (?P<junk>[^\n]+)
    """,
    re.DOTALL | re.VERBOSE,
)
_QUOTED = re.compile(r"""'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(.?)", re.DOTALL)
_SPACE = re.compile(r"\s*")


def load(path: str, named_at: Mark | None = None) -> dict[str, str]:
    """Return the variables in the file; raises ConfigError with all that is wrong with it."""
    return parse(distant.read(path, _LARGEST, named_at), path)


def parse(text: str, path: str) -> dict[str, str]:
    """Return the variables in `text`, the last one winning; raises ConfigError naming lines of `path`."""
    variables: dict[str, str] = {}
    problems: list[Problem] = []
    position, line, counted = _skip(text, 0), 1, 0
    while entry := _ENTRY.match(text, position):
        fault = _fault(entry)
        if not fault and entry["name"] is not None:
            name, value = entry["name"].strip(), _quoted(entry["quoted"]) + _bare(entry["bare"])
            excess = argspace.excess(f"{name}={value}")
            fault = (f"{name}: {excess}", argspace.HINT) if excess else None
            variables[name] = value
        if fault:
            what, hint = fault
            line, counted = line + text.count("\n", counted, position), position
            problems.append(Problem(Mark(path, line, 1), what, hint))
        position = _skip(text, entry.end())
    if problems:
        raise ConfigError(problems)
    return variables


def name_fault(name: str) -> tuple[str, str] | None:
    """Return what is wrong with a variable's name and what to do about it, or None when a user may set it."""
    if not _NAME.fullmatch(name):
        hint = "use letters, digits and '_', and no digit first"
        return f"{quote(name)} is not a name for an environment variable", hint
    if _RESERVED.fullmatch(name):
        return f"{quote(name)} is set by the worker for each step", "choose another name"
    return None


def _skip(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _fault(entry: re.Match[str]) -> tuple[str, str] | None:
    if entry["junk"] is not None:
        return "a line without '='", "write NAME=VALUE, or start the line with '#'"
    if entry["name"] is None:
        return None
    if entry["name"].startswith("export "):
        return "'export' is for shells", "write NAME=VALUE"
    if entry["bare"].startswith(("'", '"')):
        return f"the value of {quote(entry['name'].strip())} has a quote that is never closed", "close it"
    return name_fault(entry["name"].strip())


def _quoted(pieces: str) -> str:
    return "".join(
        piece["single"] if piece["double"] is None else _ESCAPE.sub(_in_double_quotes, piece["double"])
        for piece in _QUOTED.finditer(pieces)
    )


def _in_double_quotes(escape: re.Match[str]) -> str:
    if escape[1] == "\n":
        return ""
    return escape[1] if escape[1] in '"\\`$' else escape[0]


def _bare(text: str) -> str:
    kept = text.rstrip(" \t")
    backslashes = len(kept) - len(kept.rstrip("\\"))
    if backslashes % 2:
        kept = text[: len(kept) + 1]  # the last one protects the space after it
    return _ESCAPE.sub(lambda escape: escape[1].replace("\n", ""), kept)
