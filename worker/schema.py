"""How nodes become values: a reader for each kind of value, and tables that say which key holds which kind.

A reader takes a node and returns a value, or raises Wrong.  A table is `{key: reader}`: adding a key is
adding a line.  `fields()` reads a mapping by its table and goes on after a mistake, so that all are found.
"""

import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from worker import argspace, timespan
from worker.errors import Mark, Problem, quote
from worker.yamlfile import Mapping, Node, Scalar, Sequence


class Source(NamedTuple):
    """What a reader knows about the file it reads, and where it leaves what is wrong."""

    folder: str
    problems: list[Problem]


T = TypeVar("T")
Reader = Callable[[Node, Source], T]
Table = dict[str, Reader[Any]]

_NO_ARGUMENT = re.compile("[\0\ud800-\udfff]")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NUMBER = re.compile(r"0{0,20}[0-9]{1,9}")
_SUGGESTED = 100  # a suggestion takes a while to find
_AMOUNT = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


class Wrong(Exception):
    """A value that cannot be read: where, what and what to do."""

    def __init__(self, node: Node, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.where = node.mark
        self.what = what
        self.hint = hint


def fields(node: Node, table: Table, source: Source, required: Iterable[str] = ()) -> dict[str, Any]:
    """Return the values of the keys that are there and right; add a problem for everything else."""
    if type(node) is not Mapping:
        raise Wrong(node, f"wants a mapping, found {found(node)}", f"its keys are: {', '.join(table)}")
    values: dict[str, Any] = {}
    for key, value in node.entries:
        reader = table.get(key.text)
        if reader is None:
            hint = _suggestion(key.text, table) if len(source.problems) < _SUGGESTED else ""
            source.problems.append(Problem(key.mark, f"unknown key {quote(key.text)}", hint))
            continue
        try:
            values[key.text] = reader(value, source)
        except Wrong as wrong:
            source.problems.append(Problem(wrong.where, f"{key.text}: {wrong.what}", wrong.hint))
    for name in required:
        if name not in values and all(key.text != name for key, _ in node.entries):
            source.problems.append(Problem(node.mark, f"{quote(name)} is missing", f"add '{name}:'"))
    return values


def found(node: Node) -> str:
    """Return what a node is, for a message; never its text, which may be a secret in the wrong place."""
    if type(node) is Scalar:
        return "a text" if node.text or not node.plain else "nothing"
    return "a list" if type(node) is Sequence else "a mapping"


def any_text(node: Node, source: Source) -> str:
    """A text that a process can be given as an argument; "" in quotes is one."""
    value = long_text(node, source)
    fault = argspace.excess(value)
    if fault:
        raise Wrong(node, fault, argspace.HINT)
    return value


def long_text(node: Node, source: Source) -> str:
    """A text of any length; "" in quotes is one."""
    if type(node) is not Scalar:
        hint = "quote a text that starts with '{' or '['" if type(node) is Mapping else ""
        raise Wrong(node, f"wants a text, found {found(node)}", hint)
    if not node.text and node.plain:
        raise Wrong(node, "needs a value", 'write "" for an empty one')
    if _NO_ARGUMENT.search(node.text):
        raise Wrong(node, "a text may not contain NUL or half a surrogate pair", "remove the escape")
    return node.text


def text(node: Node, source: Source) -> str:
    """A text that is not empty."""
    value = any_text(node, source) if type(node) is not Scalar or node.text else ""
    if not value:
        raise Wrong(node, "needs a value", "write a text")
    return value


def name(longest: int) -> Reader[str]:
    """A name that is safe in file names, unit names and journal fields."""

    def read(node: Node, source: Source) -> str:
        value = text(node, source)
        if not _NAME.fullmatch(value):
            raise Wrong(
                node,
                f"{quote(value)} is not a name",
                "use letters, digits, '-', '_' and '.', not first '-' or '.'",
            )
        if len(value) > longest:
            raise Wrong(node, f"{quote(value)} is too long", f"use at most {longest} characters")
        return value

    return read


def is_name(value: str, longest: int) -> bool:
    """Whether `name(longest)` would take the value."""
    return len(value) <= longest and _NAME.fullmatch(value) is not None


def integer(node: Node, source: Source) -> int:
    """A whole number from 1 on."""
    value = text(node, source)
    if not _NUMBER.fullmatch(value) or not int(value):
        raise Wrong(node, f"wants a whole number from 1 on, found {quote(value)}")
    return int(value)


def amount(node: Node, source: Source) -> float:
    """A number from 0 on, perhaps with a fraction."""
    value = text(node, source)
    if not is_amount(value):
        raise Wrong(node, f"wants a number from 0 on, found {quote(value)}", "write it as in 20 or 20.50")
    return float(value)


def is_amount(value: str) -> bool:
    """Whether `amount` would take the value."""
    return _AMOUNT.fullmatch(value) is not None


def span(node: Node, source: Source) -> float:
    """A time span in seconds; not infinity."""
    value = text(node, source)
    try:
        seconds = timespan.parse(value)
    except ValueError as exc:
        what, _, hint = str(exc).partition("; ")
        raise Wrong(node, what, hint) from None
    if math.isinf(seconds):
        raise Wrong(node, "cannot be 'infinity'", "write a time span, or leave the key out")
    return seconds


def positive_span(node: Node, source: Source) -> float:
    """A time span above zero, in seconds."""
    seconds = span(node, source)
    if not seconds:
        raise Wrong(node, "must be longer than 0", "write a time span, or leave the key out")
    return seconds


def limit(node: Node, source: Source) -> float | None:
    """A time span above zero, or None for 'infinity': no limit."""
    if type(node) is Scalar and node.text.strip() == "infinity":
        return None
    return positive_span(node, source)


def size(node: Node, source: Source) -> int:
    """A number of bytes, with K, M, G or T (powers of 1024, as systemd has them) behind it or KiB, MiB, GiB, TiB."""
    value = text(node, source)
    parts = re.fullmatch(r"([0-9]{1,9})(?:([KMGT])(?:i?B)?)?", value)
    if parts is None or not int(parts[1]):
        raise Wrong(node, f"wants a size above 0, found {quote(value)}", "write 256M, say")
    power: int = " KMGT".index(parts[2] or " ")
    return int(parts[1]) << (10 * power)


def size_limit(node: Node, source: Source) -> int | None:
    """A size, or None for 'infinity': no limit."""
    if type(node) is Scalar and node.text.strip() == "infinity":
        return None
    return size(node, source)


def choice(*words: str) -> Reader[str]:
    """One of a few words."""

    def read(node: Node, source: Source) -> str:
        value = text(node, source)
        if value not in words:
            raise Wrong(node, f"cannot be {quote(value)}", f"write {' or '.join(words)}")
        return value

    return read


def list_of(reader: Reader[T]) -> Reader[tuple[T, ...]]:
    """A list that is not empty; every wrong item is reported."""

    def read(node: Node, source: Source) -> tuple[T, ...]:
        if type(node) is not Sequence:
            raise Wrong(node, f"wants a list, found {found(node)}")
        if not node.items:
            raise Wrong(node, "the list is empty", "add an item, or leave the key out")
        values = []
        for index, item in enumerate(node.items, 1):
            try:
                values.append(reader(item, source))
            except Wrong as wrong:
                source.problems.append(Problem(wrong.where, f"item {index}: {wrong.what}", wrong.hint))
        return tuple(values)

    return read


def marked(reader: Reader[T]) -> Reader[tuple[T, Mark]]:
    """What the reader reads, and where it stood."""
    return lambda node, source: (reader(node, source), node.mark)


def path(node: Node, source: Source) -> str:
    """A path, made absolute: '~' is the home folder, the rest counts from the folder of the file."""
    return _absolute(node, text(node, source), source.folder)


def pattern(node: Node, source: Source) -> str:
    """A glob pattern, made absolute like a path, with nothing special about the folder itself."""
    value = text(node, source)
    if value == "~" or value.startswith("~/"):
        return _no_glob(_home(node)) + value[1:]
    return os.path.join(_no_glob(source.folder), value)


def _absolute(node: Node, value: str, folder: str) -> str:
    if value == "~" or value.startswith("~/"):
        value = _home(node) + value[1:]
    elif value.startswith("~"):
        user = quote(value.partition("/")[0])
        raise Wrong(node, f"only '~/' is understood, not {user}", "write the path out, or put './' before the '~'")
    joined = os.path.join(folder, value)
    # '..' stays: what it leads to is up to symbolic links, which normpath() does not look at.
    return joined if ".." in joined.split("/") else os.path.normpath(joined)


def _home(node: Node) -> str:
    home = os.environ.get("HOME", "")
    if not home.startswith("/"):
        raise Wrong(node, "'~' has no meaning: HOME is not set", "write the path out")
    return home


def _no_glob(folder: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", folder)


def _suggestion(word: str, table: Table) -> str:
    import difflib  # only a mistake pays for it

    close = difflib.get_close_matches(word.lower().replace("-", "_"), table, 1)
    return f"did you mean '{close[0]}'?" if close else f"the keys here are: {', '.join(table)}"
