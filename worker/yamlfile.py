"""A YAML file as a tree of nodes that know where they stand, with every scalar as the text that was typed.

No value is given a type here: `no`, `1:30`, `0644` and `1.10` are texts, and whoever reads the tree says what
they mean.  Built on the parser's events: PyYAML's own trees take several times as long, and convert.
"""

import sys
from collections.abc import Callable
from typing import Any

import yaml
from yaml import events
from yaml.reader import Reader

from worker import textfile
from worker.errors import ConfigError, Mark, Problem, quote

_LOADER: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_DEEPEST = 100
_A_HANDFUL = "a task list needs a handful"
_LARGEST = 16 * textfile.MEGABYTE
_MOST = 800_000  # values and keys: some 60,000 tasks with all that belongs to them
# What the aliases of a file repeat, as if it had been written out: bytes of the texts, and so many for each value.
_REPEATED, _EACH = 16 * textfile.MEGABYTE, 32


class Node:
    """A part of a YAML file; lines and columns count from 1."""

    __slots__ = ("column", "file", "line")

    def __init__(self, file: str, line: int, column: int) -> None:
        self.file = file
        self.line = line
        self.column = column

    @property
    def mark(self) -> Mark:
        """Where it begins."""
        return Mark(self.file, self.line, self.column)


class Scalar(Node):
    """A text; `plain` when it was typed without quotes, so that `key:` can be told from `key: ""`."""

    __slots__ = ("plain", "text")

    def __init__(self, file: str, line: int, column: int, text: str, plain: bool) -> None:
        self.file = file  # no super().__init__(): it costs a tenth of the load of a large file
        self.line = line
        self.column = column
        self.text = text
        self.plain = plain


class Sequence(Node):
    """A list."""

    __slots__ = ("items",)

    items: list[Node]


class Mapping(Node):
    """A mapping, in the order of the file; no key stands in it twice."""

    __slots__ = ("entries",)

    entries: list[tuple[Scalar, Node]]


class Size:
    """How much has been read: of one list, several files together."""

    __slots__ = ("repeated", "values")

    def __init__(self) -> None:
        self.values = 0
        self.repeated = 0


def load(path: str, problems: list[Problem], size: Size | None = None) -> Node | None:
    """Return the tree of the one document in the file, or None when there is none to be had.

    What is wrong is added to `problems`; a tree returned all the same is good enough to look for more.  `size` counts
    on from the files before.
    """
    try:
        text = textfile.read(path, _LARGEST)
    except ConfigError as exc:
        problems += exc.problems
        return None
    try:
        return _Builder(path, problems, size or Size()).stream(_LOADER(text).get_event)
    except yaml.YAMLError as exc:
        problems.append(_syntax(path, text, exc))
    except _TooLarge as exc:
        problems.append(exc.problem)
    except (ValueError, OverflowError):  # PyYAML's Python parser hands an escape out of range to chr()
        problems.append(Problem(Mark(path), "an escape like '\\U...' names no character", "look for backslashes"))
    return None


class _TooLarge(Exception):
    """A limit was passed: nobody means this, and reading on would take minutes, or all memory."""

    def __init__(self, where: Mark, what: str, hint: str) -> None:
        super().__init__(what)
        self.problem = Problem(where, what, hint)


class _Builder:
    """Turns the events of one file into nodes."""

    __slots__ = ("_weights", "anchors", "file", "open", "problems", "size")

    def __init__(self, file: str, problems: list[Problem], size: Size) -> None:
        self.file = file
        self.problems = problems
        self.size = size
        self.anchors: dict[str, Node] = {}
        self.open: list[tuple[Node, list[Node]]] = []
        self._weights: dict[int, tuple[int, int]] = {}  # of collections that an alias has repeated, by id

    def stream(self, next_event: Callable[[], Any]) -> Node | None:
        next_event()  # the start of the stream
        first = next_event()
        if isinstance(first, events.StreamEndEvent):
            self.problem(Mark(self.file, 1, 1), "the file is empty", "write at least 'tasks:' and a list")
            return None
        root = self.document(next_event)
        next_event()  # the end of the document
        extra = next_event()
        if not isinstance(extra, events.StreamEndEvent):
            self.problem(self.mark(extra), "a second document starts here", "remove the '---': one file, one document")
            return None
        return root

    def document(self, next_event: Callable[[], Any]) -> Node:
        children: list[Node] = []
        while True:
            event = next_event()
            kind = type(event)
            if kind is events.SequenceEndEvent or kind is events.MappingEndEvent:
                items = children
                node, children = self.open.pop()
                self.count(node, len(items))
                if type(node) is Mapping:
                    node.entries = self.entries(items)
                elif type(node) is Sequence:
                    node.items = items
            else:
                node = self.node(event, kind)
                children.append(node)
                if kind is events.MappingStartEvent or kind is events.SequenceStartEvent:
                    self.open.append((node, children))
                    children = []
                    if len(self.open) > _DEEPEST:  # the parser's time grows with the square of the depth
                        raise _TooLarge(node.mark, f"more than {_DEEPEST} levels deep", _A_HANDFUL)
                elif self.size.values + len(children) > _MOST:
                    self.count(node, len(children))
            if not self.open:
                return node

    def count(self, node: Node, values: int) -> None:
        """Add to the values that have been read."""
        self.size.values += values
        if self.size.values > _MOST:
            hint = "use 'foreach' with 'lines', 'glob' or 'range', or make several runs of it"
            raise _TooLarge(node.mark, f"the list has more than {_MOST} values, drop-ins included", hint)

    def node(self, event: Any, kind: type) -> Node:
        if kind is events.AliasEvent:
            return self.alias(event)
        start = event.start_mark
        node: Node
        if kind is events.ScalarEvent:
            # Quotes and block styles are a character each; the two parsers say "plain" in two ways.
            node = Scalar(self.file, start.line + 1, start.column + 1, event.value, not event.style)
        else:
            collection = Mapping if kind is events.MappingStartEvent else Sequence
            node = collection(self.file, start.line + 1, start.column + 1)
        if event.tag is not None:
            self.problem(node.mark, f"the tag {quote(event.tag)} has no meaning here", "remove it, or quote the text")
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def alias(self, event: Any) -> Node:
        node = self.anchors.get(event.anchor)
        if node is not None and all(node is not outer for outer, _ in self.open):
            weight, levels = self.weight(node)
            self.size.repeated += weight
            if len(self.open) + levels > _DEEPEST:
                raise _TooLarge(self.mark(event), f"more than {_DEEPEST} levels deep with what it repeats", _A_HANDFUL)
            if self.size.repeated > _REPEATED:
                what = f"what the aliases repeat comes to more than {_REPEATED // textfile.MEGABYTE} MB"
                raise _TooLarge(self.mark(event), what, "put it into a file that the steps read")
            return node
        name = f"*{event.anchor}"
        if node is None:
            self.problem(self.mark(event), f"{quote(name)} names no anchor above it", "quote it if it is a text")
        else:
            self.problem(self.mark(event), f"{quote(name)} stands inside what it repeats", "remove it")
        return Scalar(*self.mark(event), name, False)

    def weight(self, node: Node) -> tuple[int, int]:
        """Return what a node comes to when it is written out, aliases in it included, and its levels."""
        if type(node) is Scalar:
            return _EACH + len(node.text), 0
        known = self._weights.get(id(node))  # they live as long as the tree
        if known is None:
            inner = node.items if type(node) is Sequence else []
            if type(node) is Mapping:
                inner = [part for entry in node.entries for part in entry]
            weights = [self.weight(part) for part in inner]
            levels = 1 + max((levels for _, levels in weights), default=0)
            known = self._weights[id(node)] = _EACH + sum(weight for weight, _ in weights), levels
        return known

    def entries(self, items: list[Node]) -> list[tuple[Scalar, Node]]:
        entries: dict[str, tuple[Scalar, Node]] = {}
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not Scalar:
                self.problem(key.mark, "a key must be a text", "quote a text that starts with '{' or '['")
            elif key.text == "<<" and key.plain:
                hint = "use 'defaults', or write the keys out"
                self.problem(key.mark, "merge keys ('<<') are not supported", hint)
            elif key.text in entries:
                line = entries[key.text][0].line
                what = f"{quote(key.text)} is already set on line {line}"
                self.problem(key.mark, what, "remove one of the two")
            else:
                key.text = sys.intern(key.text)  # the same few words a hundred thousand times
                entries[key.text] = (key, value)
        return list(entries.values())

    def mark(self, event: Any) -> Mark:
        return Mark(self.file, event.start_mark.line + 1, event.start_mark.column + 1)

    def problem(self, where: Mark, what: str, hint: str) -> None:
        self.problems.append(Problem(where, what, hint))


_HINTS = {
    "exceeded maximum nesting depth": _A_HANDFUL,  # libyaml's own limit, in newer builds
    "mapping values are not allowed": "quote a text that has ': ' in it, or mend the indent",
    "did not find expected '-' indicator": "mend the indent of this line",
    "did not find expected key": "mend the indent of this line",
    "expected <block end>": "mend the indent of this line",
    "could not find expected ':'": "write 'key: value', or mend the indent",
    "block sequence entries are not allowed": "start the list on a line of its own",
    "found unexpected end of stream": "close the quote that is opened here",
    "cannot start any token": "quote a text that starts with this character",
    "did not find expected ',' or": "close the bracket, or quote a text that has one in it",
    "expected ',' or": "close the bracket, or quote a text that has one in it",
    "found unexpected ':'": "put a space after the ':', or quote the text",
    "unknown escape character": "write the backslash twice, or use single quotes",
}


def _syntax(path: str, text: str, exc: yaml.YAMLError) -> Problem:
    """Return what the parser found, in our words where it has a habit of being obscure."""
    if not isinstance(exc, yaml.MarkedYAMLError):
        bad = Reader.NON_PRINTABLE.search(text)
        position = bad.start() if bad else 0
        where = Mark(path, text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position))
        return Problem(
            where,
            f"the control character {text[position : position + 1]!r}",
            'remove it, or escape it in "..."',
        )
    what = exc.problem or "not valid YAML"
    end_of_file = "end of stream" in what
    mark = (exc.context_mark if end_of_file else exc.problem_mark) or exc.problem_mark or exc.context_mark
    if mark is None:
        return Problem(Mark(path), what)
    line = text.split("\n")[mark.line] if mark.line <= text.count("\n") else ""
    indent = line[: len(line) - len(line.lstrip(" \t"))]
    if "\t" in indent:
        return Problem(Mark(path, mark.line + 1, indent.index("\t") + 1), "a tab in the indent", "use spaces")
    hint = next((hint for part, hint in _HINTS.items() if part in what), "")
    return Problem(Mark(path, mark.line + 1, mark.column + 1), what, hint)
