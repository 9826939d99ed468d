"""YAML files as trees of typed-as-written texts, and the words for what is wrong with them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker import yamlfile
from worker.errors import Problem
from worker.yamlfile import Mapping, Node, Scalar, Sequence


@pytest.fixture(params=["CSafeLoader", "SafeLoader"], autouse=True)
def parser(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test holds for libyaml and for the parser that PyYAML falls back to."""
    loader = getattr(yaml, request.param, None)
    if loader is None:
        pytest.skip("this PyYAML was built without libyaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yamlfile, "_LOADER", loader)
        yield request.param


def load(tmp_path: Path, content: str | bytes) -> tuple[Node | None, list[Problem]]:
    file = tmp_path / "config.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    problems: list[Problem] = []
    return yamlfile.load(str(file), problems), problems


def plain(node: Node | None) -> object:
    """The tree as lists, dicts and texts."""
    if isinstance(node, Scalar):
        return node.text
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    assert isinstance(node, Mapping)
    return {key.text: plain(value) for key, value in node.entries}


def only(tmp_path: Path, content: str | bytes) -> str:
    """The one line that is said about a file, without its name."""
    _, problems = load(tmp_path, content)
    assert len(problems) == 1, problems
    return str(problems[0]).replace(f"{tmp_path}/config.yaml:", "")


TYPED = [
    "no",
    "off",
    "on",
    "yes",
    "y",
    "1:10",
    "08:30",
    "0644",
    "08",
    "1.10",
    "1e3",
    "2026-01-01",
    "~",
    "null",
    "=",
]


@pytest.mark.parametrize("typed", TYPED)
def test_a_scalar_is_the_text_that_was_typed(tmp_path: Path, typed: str) -> None:
    """
    Y2, Y3, Y4, Y5: nothing becomes a boolean, a number, a date or nothing at all.
    """
    tree, problems = load(tmp_path, f"env: {{A: {typed}}}\n")
    assert plain(tree) == {"env": {"A": typed}}
    assert not problems


def test_an_empty_value_differs_from_an_empty_text(tmp_path: Path) -> None:
    """
    `a:` was left out, `b: ""` was meant.
    """
    tree, _ = load(tmp_path, "a:\nb: \"\"\nc: ''\nd: |\n")
    assert isinstance(tree, Mapping)
    values = [value for _, value in tree.entries]
    assert [(v.text, v.plain) for v in values if isinstance(v, Scalar)] == [
        ("", True),
        ("", False),
        ("", False),
        ("", False),
    ]


def test_nodes_know_where_they_stand(tmp_path: Path) -> None:
    """
    Lines and columns count from 1, as editors do.
    """
    tree, _ = load(tmp_path, "a: 1\nlist:\n  - é: x\n")
    assert isinstance(tree, Mapping)
    items = tree.entries[1][1]
    assert isinstance(items, Sequence) and isinstance(items.items[0], Mapping)
    value = items.items[0].entries[0][1]
    assert (tree.line, tree.column) == (1, 1)
    assert (items.line, items.column) == (3, 3)
    assert str(value.mark) == f"{tmp_path}/config.yaml:3:8"


def test_a_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    """
    Y1: the second is where the message points, the first is in its words.
    """
    assert only(tmp_path, "run: a\nx: y\nrun: b\n") == "3:1: 'run' is already set on line 1; remove one of the two"


def test_aliases_repeat_what_their_anchor_names(tmp_path: Path) -> None:
    """
    Anchors and aliases are YAML that people use.
    """
    tree, problems = load(tmp_path, "a: &x [1, 2]\nb: *x\nc: &y text\nd: *y\n")
    assert plain(tree) == {"a": ["1", "2"], "b": ["1", "2"], "c": "text", "d": "text"}
    assert not problems


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "1:1: the file is empty"),
        ("# only a comment\n", "1:1: the file is empty"),
        ("a: 1\n---\nb: 2\n", "2:1: a second document starts here"),
        ("a: &x\n  b: *x\n", "2:6: '*x' stands inside what it repeats"),
        ("a: *nobody\n", "1:4: '*nobody' names no anchor above it"),
        ("d: &d {a: b}\nt:\n  <<: *d\n", "3:3: merge keys ('<<') are not supported"),
        ("a: !!int 3\n", "1:4: the tag 'tag:yaml.org,2002:int' has no meaning here"),
        ("a: !secret {b: c}\n", "1:4: the tag '!secret' has no meaning here"),
        ("? [a]\n: b\n", "1:3: a key must be a text"),
        ("a:\n\tb: 1\n", "2:1: a tab in the indent; use spaces"),
        ("a:\n  - x\n\t- y\n", "3:1: a tab in the indent; use spaces"),
        ("a:\n  b: |\n\tx\n", "3:1: a tab in the indent; use spaces"),
        ("a: b: c\n", "1:5: mapping values are not allowed"),
        ("a: 'x\nb: c\n", "1:4: found unexpected end of stream; close the quote"),
        ("a: @x\n", "1:4: found character"),
        ("é: x\nb: \x01\n", "2:4: the control character '\\x01'"),
    ],
)
def test_each_mistake_has_its_own_words(tmp_path: Path, content: str, said: str) -> None:
    """
    Y6, Y12 and their kind: the place, what it is, and what to do.
    """
    assert only(tmp_path, content).startswith(said)


def test_one_file_tells_all_that_can_be_told(tmp_path: Path) -> None:
    """
    A duplicate key, a tag and a merge key do not hide each other.
    """
    tree, problems = load(tmp_path, "a: 1\na: 2\nb: !x y\n<<: {}\nc: d\n")
    assert [problem.where.line for problem in problems if problem.where] == [3, 2, 4]
    assert plain(tree) == {"a": "1", "b": "y", "c": "d"}


def test_bom_and_crlf_are_accepted(tmp_path: Path) -> None:
    """
    Y7: what an editor on Windows writes reads the same, and no text carries a carriage return.
    """
    tree, problems = load(tmp_path, b"\xef\xbb\xbfa: |\r\n  x\r\n  y\r\nb: 'p\r\n  q'\r\n")
    assert plain(tree) == {"a": "x\ny\n", "b": "p q"}
    assert not problems


@pytest.mark.parametrize("lang", ["C", "de_DE.ISO-8859-1", "C.UTF-8"])
@pytest.mark.parametrize(
    "content, said",
    [
        ("a: caf\xe9\n".encode("latin-1"), "1:7: byte 6 (0xe9) is not UTF-8"),
        ("a: é\nb: é\n".encode() + b"c: \xff\n", "3:4: byte 15 (0xff) is not UTF-8"),
        ("a: 1\n".encode("utf-16"), "1:1: byte 0 (0xff) starts a UTF-16 text"),
        ("a: 1\n".encode("utf-16-be"), "1:1: byte 0 (0x00) is NUL"),
        (b"a: 1\nb: \0\n", "2:4: byte 8 (0x00) is NUL"),
    ],
)
def test_what_is_not_utf8_is_named_by_its_byte(
    tmp_path: Path, content: bytes, said: str, lang: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Y8: whatever LANG is.
    """
    monkeypatch.setenv("LANG", lang)
    assert only(tmp_path, content).startswith(said)


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    """
    A missing file and a folder, each in one line that begins with the path.
    """
    for path, said in ((tmp_path / "no.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        problems: list[Problem] = []
        assert yamlfile.load(str(path), problems) is None
        assert str(problems[0]).startswith(f"{path}: cannot be read: {said}; ")
        assert len(problems) == 1


def test_deep_nesting_is_no_way_to_crash(tmp_path: Path, parser: str) -> None:
    """
    Ten thousand brackets are an error or a tree, never a crash.
    """
    depth = 10_000 if parser == "CSafeLoader" else 200
    load(tmp_path, "[" * depth)
    load(tmp_path, "[" * depth + "]" * depth)


_YAMLISH = st.text(st.sampled_from("ab:-{}[]&*!|>'\"#%@`,? \n\t\\xU0\r\ufeff\x85é<"), max_size=40)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.one_of(st.binary(max_size=30), _YAMLISH.map(str.encode)))
def test_any_bytes_are_a_tree_or_a_problem(tmp_path: Path, content: bytes) -> None:
    """
    No traceback for any file, and never silence without a tree.
    """
    tree, problems = load(tmp_path, content)
    assert tree is not None or problems
    assert all("\n" not in str(problem) for problem in problems)


def test_what_nobody_means_is_refused_quickly(tmp_path: Path) -> None:
    """
    Fifty thousand levels, and a pipe that nobody writes to: one line each, no wait.
    """
    deep = tmp_path / "deep.yaml"
    deep.write_text("tasks: " + "[" * 50_000)
    problems: list[Problem] = []
    assert yamlfile.load(str(deep), problems) is None
    assert problems[0].hint == "a task list needs a handful"
    fifo = tmp_path / "fifo.yaml"
    os.mkfifo(fifo)
    assert yamlfile.load(str(fifo), problems) is None
    assert "it is a pipe" in problems[1].what
