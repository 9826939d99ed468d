"""The fields of a task: a reader for each, and the tables that say which key holds which.

Adding a key is adding a line to a table here and a field to worker.task.Task.
"""

import itertools
import json
import math
import os
import re
from typing import Any

from worker import argspace, envfile, plural, schema
from worker.errors import TEMPORARY, Mark, Problem, quote
from worker.schema import Source, Table, Wrong
from worker.task import Command, Confine, Foreach, Glob, Items, Lines, Range, Retry
from worker.yamlfile import Mapping, Node, Scalar, Sequence

LONGEST_ID = 100
LONGEST_KEY = 200
_MOST_IN_RANGE = 1_000_000
_STATUS_MAX = 599  # of HTTP
_JSON_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_CALL = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def _arguments(node: Node, source: Source) -> tuple[str, ...]:
    values = schema.list_of(schema.any_text)(node, source)
    if values and not values[0]:
        raise Wrong(node, "the first item names the program, and is empty", "write a program")
    if values and "/" not in values[0] and len(words := values[0].split()) > 1:
        what = f"the first item names the program, and {quote(values[0])} is {len(words)} words"
        raise Wrong(node, what, f"write each word as an item of its own: [{', '.join(words)}, ...]")
    return values


def command(node: Node, source: Source) -> Command:
    """A text for the shell, or a list of arguments."""
    if type(node) is Mapping:
        raise Wrong(node, "wants a text for the shell or a list of arguments, found a mapping", "quote the text")
    return _arguments(node, source) if type(node) is Sequence else schema.text(node, source)


def _shell(node: Node, source: Source) -> tuple[str, ...]:
    """A shell, to which "-c" is added, or a list of its arguments."""
    if type(node) is not Scalar:
        return _arguments(node, source)
    shell = schema.text(node, source)
    words = shell.split()
    if len(words) > 1 and not os.path.exists(shell):
        listed = words if words[-1].endswith("c") and words[-1].startswith("-") else [*words, "-c"]
        raise Wrong(node, f"{quote(shell)} names a program, and no arguments", f"write a list: [{', '.join(listed)}]")
    return (shell, "-c")


def _env(node: Node, source: Source) -> dict[str, str]:
    if type(node) is not Mapping:
        raise Wrong(node, f"wants a mapping of names to texts, found {schema.found(node)}", "write NAME: VALUE")
    env = {}
    for key, value in node.entries:
        wrong_name = envfile.name_fault(key.text)
        if wrong_name:
            source.problems.append(Problem(key.mark, f"env: {wrong_name[0]}", wrong_name[1]))
            continue
        try:
            env[key.text] = schema.any_text(value, source)
            if fault := argspace.excess(f"{key.text}={env[key.text]}"):
                raise Wrong(value, fault, argspace.HINT)
        except Wrong as wrong:
            source.problems.append(Problem(wrong.where, f"env: {key.text}: {wrong.what}", wrong.hint))
    return env


def _env_files(node: Node, source: Source) -> tuple[tuple[str, Mark], ...]:
    one = schema.marked(schema.path)
    return _list_or_none(one)(node, source) if type(node) is Sequence else (one(node, source),)


def _range(node: Node, source: Source) -> Range:
    value = schema.text(node, source)
    parts = re.fullmatch(r"([0-9]{1,9}) *- *([0-9]{1,9})", value)
    if not parts:
        raise Wrong(node, f"{quote(value)} is not a range", "write two numbers of up to nine digits, like 1-40")
    first, last = parts.groups()
    numbers = Range(int(first), int(last), max(map(len, parts.groups())) if _padded(first, last) else 0)
    if numbers.first > numbers.last:
        raise Wrong(node, f"the range {quote(value)} runs backwards", f"write {last}-{first}")
    if numbers.last - numbers.first >= _MOST_IN_RANGE:
        raise Wrong(node, f"the range {quote(value)} is too long", f"use at most {_MOST_IN_RANGE} numbers")
    return numbers


def _padded(*numbers: str) -> bool:
    return any(len(number) > 1 and number.startswith("0") for number in numbers)


def _foreach(node: Node, source: Source) -> Foreach:
    if type(node) is Sequence:
        pairs = schema.list_of(schema.marked(schema.any_text))(node, source)
        return Items(tuple(text for text, _ in pairs), tuple(mark for _, mark in pairs))
    if type(node) is not Mapping or len(node.entries) != 1:
        what = schema.found(node) if type(node) is not Mapping else plural.of(len(node.entries), "key")
        raise Wrong(node, f"wants a list, or exactly one of {', '.join(_FOREACH)}; found {what}")
    nothing = Items((), ())  # stands in where a problem has been noted
    chosen: Foreach = next(iter(schema.fields(node, _FOREACH, source).values()), nothing)
    return chosen


def _exit_code(node: Node, source: Source) -> int:
    value = schema.integer(node, source)
    if value > 255:
        raise Wrong(node, f"{value} is not an exit code", "use 1 to 255")
    return value


def _unsure_code(node: Node, source: Source) -> int:
    value = schema.integer(node, source)
    if value > _STATUS_MAX:
        raise Wrong(node, f"{value} is neither an exit code nor a status of HTTP", f"use 1 to {_STATUS_MAX}")
    return value


def _success_code(node: Node, source: Source) -> int:
    value = _exit_code(node, source)
    if value == TEMPORARY:
        raise Wrong(node, f"{value} means 'not now', and cannot mean 'done'", "let the program end with another one")
    return value


def _list_or_none(reader: schema.Reader[Any]) -> schema.Reader[tuple[Any, ...]]:
    """A list; an empty one takes back what `defaults` say."""
    some = schema.list_of(reader)
    return lambda node, source: () if type(node) is Sequence and not node.items else some(node, source)


def _retry(node: Node, source: Source) -> dict[str, Any]:
    found = schema.fields(node, _RETRY, source)
    for one, other in itertools.combinations(("success", "unsure", "never"), 2):
        both = set(found.get(one, ())) & set(found.get(other, ()))
        if both:
            what = f"retry: {min(both)} is in both '{one}' and '{other}'"
            source.problems.append(Problem(node.mark, what, "take it out of one of them"))
    return found


def _pattern(node: Node, source: Source) -> str:
    value = schema.text(node, source)
    try:
        re.compile(value)
    except re.error as exc:
        raise Wrong(node, f"{quote(value)} is not a regular expression: {exc}") from None
    return value


def _as_text(node: Node, source: Source) -> Any:
    """A tree of texts, as they were typed."""
    if type(node) is Scalar:
        return node.text
    if type(node) is Sequence:
        return [_as_text(item, source) for item in node.items]
    assert type(node) is Mapping
    return {key.text: _as_text(value, source) for key, value in node.entries}


def _as_json(node: Node, source: Source) -> Any:
    """A tree of JSON values: what JSON itself would call a number, true, false or null is one, unless quoted."""
    if type(node) is Scalar:
        literal = node.plain and _JSON_LITERAL.fullmatch(node.text)
        return _json_value(node) if literal else node.text
    if type(node) is Sequence:
        return [_as_json(item, source) for item in node.items]
    assert type(node) is Mapping
    return {key.text: _as_json(value, source) for key, value in node.entries}


def _json_value(node: Scalar) -> Any:
    try:
        value = json.loads(node.text)
    except ValueError:  # thousands of digits
        value = math.inf
    if value in (math.inf, -math.inf):
        raise Wrong(node, f"{quote(node.text)} is a larger number than JSON can carry", "quote it to send a text")
    return value


def _mapping_of(reader: schema.Reader[Any]) -> schema.Reader[dict[str, Any]]:
    def read(node: Node, source: Source) -> dict[str, Any]:
        if type(node) is not Mapping:
            raise Wrong(node, f"wants a mapping, found {schema.found(node)}")
        return {key.text: reader(value, source) for key, value in node.entries}

    return read


def _http(node: Node, source: Source) -> dict[str, Any]:
    return schema.fields(node, _HTTP, source, ("url",))


def _call(node: Node, source: Source) -> str:
    value = schema.text(node, source)
    if not _CALL.fullmatch(value):
        raise Wrong(node, f"{quote(value)} names no function", "write MODULE:FUNCTION")
    return value


def _key(node: Node, source: Source) -> str:
    value = schema.text(node, source)
    strange = re.sub(r"\{(run|step|item)\}", "", value)
    if "{" in strange or "}" in strange:
        raise Wrong(node, f"{quote(value)} has braces that stand for nothing", "use {run}, {step} and {item}")
    if len(value) > LONGEST_KEY or not strange.isprintable():
        raise Wrong(node, f"{quote(value)} is not a key", f"use up to {LONGEST_KEY} printable characters")
    return value


def _confine(node: Node, source: Source) -> Confine:
    """`yes` or `no`, or what a confined step may write besides."""
    if type(node) is Mapping:
        return Confine(True, schema.fields(node, _CONFINE, source, ("write",)).get("write", ()))
    return Confine(schema.choice("yes", "no")(node, source) == "yes")


def _expect(node: Node, source: Source) -> dict[str, Any]:
    return schema.fields(node, _EXPECT, source)


_FOREACH: Table = {
    "lines": lambda node, source: Lines(schema.path(node, source)),
    "glob": lambda node, source: Glob(schema.pattern(node, source)),
    "range": _range,
}
_RETRY: Table = {
    "attempts": schema.integer,
    "delay": schema.span,
    "max_delay": schema.span,
    "patience": schema.span,
    "never": _list_or_none(_exit_code),
    "unsure": _list_or_none(_unsure_code),
    "success": _list_or_none(_success_code),
}
_HTTP: Table = {
    "method": schema.text,
    "url": schema.text,
    "headers": _mapping_of(schema.long_text),
    "json": _as_json,
    "body": schema.long_text,
    "file": schema.path,
    "timeout": schema.positive_span,
    "max": schema.size,
}
_CONFINE: Table = {"write": schema.list_of(schema.path)}
_EXPECT: Table = {
    "file": schema.text,
    "matches": _pattern,
    "run": command,
    "status": lambda node, source: list(schema.list_of(schema.integer)(node, source)),
    "json": _mapping_of(_as_json),
}
DEFAULTS: Table = {
    "shell": _shell,
    "env": _env,
    "env_file": _env_files,
    "secrets": _list_or_none(schema.name(LONGEST_ID)),
    "cwd": schema.marked(schema.path),
    "confine": _confine,
    "timeout": schema.limit,
    "stall_after": schema.limit,
    "watchdog": schema.positive_span,
    "progress_every": schema.positive_span,
    "max_output": schema.size_limit,
    "retry": _retry,
}
TASK: Table = {
    "id": schema.marked(schema.name(LONGEST_ID)),
    "run": command,
    "http": _http,
    "python": _call,
    "args": _mapping_of(_as_text),
    "foreach": schema.marked(_foreach),
    "needs": schema.list_of(schema.marked(schema.text)),
    "before": command,
    "after": command,
    "expect": schema.marked(_expect),
    "key": _key,
    "redo": schema.choice("always", "check", "never"),
    "check": command,
    **DEFAULTS,
}
BASE: dict[str, Any] = {
    "shell": ("/bin/sh", "-c"),
    "env": {},
    "env_file": (),
    "secrets": (),
    "needs": (),
    "retry": Retry(),
}
KINDS = ("run", "http", "python")
