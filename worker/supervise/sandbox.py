"""The YAML of a supervision as a Sandbox: what is to run, on whose machines, how patiently, for how much.

`load()` either returns one that holds or raises one ConfigError with everything that is wrong with the file, the
provider's file and the task list.  Time spans, texts and paths are read as in a task list.
"""

import math
import os
import re
from typing import Any, NamedTuple

from worker import config, contact, fields, schema, yamlfile
from worker.contact import Contact, Ping
from worker.errors import ConfigError, Mark, Problem, quote
from worker.schema import Source, Table, Wrong
from worker.supervise.judge import Budget, Limits
from worker.supervise.provider import COMMANDS, PLACE, PLACES, TIMEOUTS, Provider
from worker.task import Command
from worker.yamlfile import Mapping, Node, Scalar

SHIPPED = os.path.join(os.path.dirname(__file__), "providers")
_LONGEST_NAME = 40  # it becomes a part of machines' names, which are host names
# A run that nobody watches must have an end.
_MACHINES, _HOURS = 10, 168.0
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_NOT_OURS = ("PATH", "HOME", "USER", "SHELL", "IFS", "ENV")


class Sandbox(NamedTuple):
    """One run to be kept alive, and how."""

    name: str
    config: str  # the task list
    drop_ins: tuple[str, ...]  # what the folder beside it adds
    run: str  # its name
    shared: bool  # its ledger is on a server: nothing to copy or to restore
    provider: Provider
    files: tuple[tuple[str, str], ...]  # what else a new machine needs: (path there, path here)
    results: tuple[tuple[str, str], ...]  # what to get at the end: (path here, path there)
    setup: str
    budget: Budget
    limits: Limits
    poll: float
    copy_every: float
    extend_every: float
    boot: float  # how long a machine may take until it answers
    fence: float
    keep: bool  # leave the machine running at the end
    contact: Contact  # whom to tell if it does not end well
    max_file: int  # bytes; no larger file is fetched from a machine


def load(path: str) -> Sandbox:
    """Return what the file says; raises ConfigError with all that is wrong with it."""
    path = os.path.abspath(path)
    problems: list[Problem] = []
    top = _fields(path, _SANDBOX, problems, ("config", "provider")) or {}
    settings = None
    if "config" in top:
        try:
            settings = config.load(top["config"][0])
        except ConfigError as exc:
            problems += exc.problems
    name = top.get("name") or os.path.splitext(os.path.basename(path))[0]
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) or len(name) > _LONGEST_NAME:
        hint = f"add 'name:' with up to {_LONGEST_NAME} of a-z, 0-9 and '-', as host names have them"
        problems.append(Problem(Mark(path, 1, 1), f"{quote(name)} cannot name machines", hint))
    provider = _provider(path, top, problems)
    if problems or settings is None or provider is None:
        raise ConfigError(problems)
    return Sandbox(
        name=name,
        config=top["config"][0],
        drop_ins=settings.files[1:],
        run=settings.run,
        shared=settings.ledger is not None,
        provider=provider,
        files=top.get("files", ()),
        results=top.get("results", ()),
        setup=top.get("setup", ""),
        budget=Budget(**{"machines": _MACHINES, "hours": _HOURS} | top.get("budget", {})),
        limits=Limits(
            stale=top.get("stale", 600.0),
            age=top.get("limit") or math.inf,
            unanswered=top.get("unanswered", 2),
            restarts=top.get("restarts", 1),
        ),
        poll=top.get("poll", 20.0),
        copy_every=top.get("copy_every", 60.0),
        extend_every=top.get("extend_every", 600.0),
        boot=top.get("boot", 300.0),
        fence=top.get("fence", 300.0),
        keep=top.get("at_end") == "keep",
        contact=Contact(settings.run, top.get("alert"), os.path.dirname(path), top.get("ping", Ping())),
        max_file=top.get("max_file", 256 * 2**20),
    )


def _fields(path: str, table: Table, problems: list[Problem], required: tuple[str, ...] = ()) -> dict[str, Any] | None:
    root = yamlfile.load(path, problems)
    if root is None:
        return None
    source = Source(os.path.dirname(path), problems)
    try:
        return schema.fields(root, table, source, required)
    except Wrong as wrong:
        problems.append(Problem(wrong.where, wrong.what, wrong.hint))
        return None


def _provider(path: str, top: dict[str, Any], problems: list[Problem]) -> Provider | None:
    """Return the provider that is named, with what the sandbox says otherwise."""
    if "provider" not in top:
        return None
    file, mark = top["provider"]
    if not os.path.exists(file):
        shipped = ", ".join(sorted(os.path.splitext(name)[0] for name in os.listdir(SHIPPED)))
        problems.append(Problem(mark, f"provider: there is no {quote(file)}", f"write {shipped}, or a path with a '/'"))
        return None
    found = _fields(file, _PROVIDER, problems, ("commands",))
    if found is None:
        return None
    known: dict[str, tuple[str | None, Mark]] = found.get("variables", {})
    said: dict[str, tuple[str | None, Mark]] = top.get("variables", {})
    for name, (_value, where) in said.items():
        if name not in known:
            hint = f"it knows {', '.join(known)}" if known else "it has none"
            problems.append(Problem(where, f"variables: the provider knows no {quote(name)}", hint))
    variables = {name: value for name, (value, _where) in (known | said).items()}
    for name, value in variables.items():
        if value is None:
            what = f"variables: the provider needs a value for {name}"
            problems.append(Problem(mark, what, f"add 'variables: {{{name}: ...}}'; {file} says what it is"))
    commands: dict[str, tuple[Command, Mark]] = found.get("commands", {}) | top.get("commands", {})
    for kind in ("state", "exec", "create", "put", "get"):
        if kind not in commands and "commands" in found:
            problems.append(Problem(Mark(file, 1, 1), f"commands: {quote(kind)} is missing", f"add '{kind}:'"))
    for kind, (command, where) in commands.items():
        _check_places(kind, command, where, variables, problems)
    timeouts = TIMEOUTS | found.get("timeouts", {}) | top.get("timeouts", {})
    plain = {kind: command for kind, (command, _where) in commands.items()}
    return Provider(file, plain, {name: value or "" for name, value in variables.items()}, timeouts)


def _check_places(
    kind: str, command: Command, where: Mark, variables: dict[str, str | None], problems: list[Problem]
) -> None:
    if isinstance(command, str):
        return  # a shell's affair
    for place in PLACE.findall(" ".join(command)):
        if place not in PLACES and place not in variables:
            hint = f"'{{{place}}}' could be {', '.join((*PLACES, *variables))}"
            problems.append(Problem(where, f"commands: {kind}: nothing stands for '{{{place}}}'", hint))


# -- readers


def _commands(node: Node, source: Source) -> dict[str, tuple[Command, Mark]]:
    return schema.fields(node, dict.fromkeys(COMMANDS, schema.marked(fields.command)), source)


def _timeouts(node: Node, source: Source) -> dict[str, float]:
    return schema.fields(node, dict.fromkeys(TIMEOUTS, schema.positive_span), source)


def _variables(node: Node, source: Source) -> dict[str, tuple[str | None, Mark]]:
    """Texts by name, and where they are named; one without a value is None: somebody has to give it."""
    if type(node) is not Mapping:
        raise Wrong(node, f"wants a mapping of names to texts, found {schema.found(node)}", "write NAME: VALUE")
    values: dict[str, tuple[str | None, Mark]] = {}
    for key, value in node.entries:
        if not _VARIABLE.fullmatch(key.text) or key.text in _NOT_OURS:
            what = f"variables: {quote(key.text)} cannot name a variable"
            source.problems.append(Problem(key.mark, what, "use A-Z, 0-9 and '_'"))
            continue
        empty = type(value) is Scalar and value.plain and not value.text
        try:
            values[key.text] = (None if empty else schema.any_text(value, source), key.mark)
        except Wrong as wrong:
            source.problems.append(Problem(wrong.where, f"variables: {key.text}: {wrong.what}", wrong.hint))
    return values


def _files(node: Node, source: Source) -> tuple[tuple[str, str], ...]:
    """Paths on the machine, absolute, each with the file here."""
    return _pairs(node, source, there_first=True)


def _results(node: Node, source: Source) -> tuple[tuple[str, str], ...]:
    """Paths here, each with the file on the machine, absolute."""
    return _pairs(node, source, there_first=False)


def _pairs(node: Node, source: Source, there_first: bool) -> tuple[tuple[str, str], ...]:
    if type(node) is not Mapping:
        raise Wrong(node, f"wants a mapping of paths to paths, found {schema.found(node)}")
    pairs = []
    for key, value in node.entries:
        there, here = (key, value) if there_first else (value, key)
        try:
            far = schema.text(there, source)
            if not far.startswith("/"):
                raise Wrong(there, f"{quote(far)} is a path on the machine", "write it from '/' on")
            near = schema.path(here, source)
            if there_first and not os.path.isfile(near):
                raise Wrong(here, f"there is no file {quote(near)}", "check the name, or create it")
            pairs.append((far, near) if there_first else (near, far))
        except Wrong as wrong:
            source.problems.append(Problem(wrong.where, wrong.what, wrong.hint))
    return tuple(pairs)


def _number(node: Node, source: Source) -> float:
    value = schema.text(node, source)
    if not schema.is_amount(value) or not float(value):
        raise Wrong(node, f"wants a number above 0, found {quote(value)}")
    return float(value)


def _budget(node: Node, source: Source) -> dict[str, Any]:
    return schema.fields(node, {"machines": schema.integer, "hours": _number, "spend": _number}, source)


def _provider_path(node: Node, source: Source) -> str:
    """A word names one that is shipped, anything with a '/' or an ending is a path."""
    value = schema.text(node, source)
    if "/" in value or value.endswith((".yaml", ".yml")):
        return schema.path(node, source)
    return os.path.join(SHIPPED, f"{value}.yaml")


_SANDBOX: Table = {
    "name": schema.text,
    "config": schema.marked(schema.path),
    "provider": schema.marked(_provider_path),
    "variables": _variables,
    "commands": _commands,
    "timeouts": _timeouts,
    "files": _files,
    "results": _results,
    "setup": schema.text,
    "budget": _budget,
    "limit": schema.limit,
    "poll": schema.positive_span,
    "stale": schema.positive_span,
    "copy_every": schema.positive_span,
    "extend_every": schema.positive_span,
    "boot": schema.positive_span,
    "fence": schema.span,
    "unanswered": schema.integer,
    "restarts": schema.integer,
    "max_file": schema.size,
    "alert": contact.read_alert,
    "ping": contact.read_ping,
    "at_end": schema.choice("stop", "keep"),
}
_PROVIDER: Table = {"variables": _variables, "commands": _commands, "timeouts": _timeouts}
