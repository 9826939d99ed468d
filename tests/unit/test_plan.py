"""The plan: every step, by an id and a digest that outlive the process."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import config, plan, sandbox
from worker.errors import ConfigError
from worker.plan import Plan


def build(tmp_path: Path, tasks: str) -> Plan:
    file = tmp_path / "config.yaml"
    file.write_text(f"tasks:\n{tasks}\n")
    return plan.build(config.load(str(file)))


def refused(tmp_path: Path, tasks: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, tasks)
    return str(caught.value).replace(f"{tmp_path}/", "").split("\n")


def ids(built: Plan) -> list[str]:
    return [step.id for step in built.steps]


def test_a_task_is_a_step_and_items_make_many(tmp_path: Path) -> None:
    """
    In the order of the file; ids are escaped, items are not.
    """
    built = build(tmp_path, "- {id: a, run: x}\n- {id: b, run: x, foreach: [x/y, a b]}")
    assert ids(built) == ["a", "b@x-y", "b@a\\x20b"]
    assert [step.item for step in built.steps] == [None, "x/y", "a b"]
    assert built.by_id["b@x-y"] is built.steps[1]


def test_the_item_goes_into_arguments_and_never_into_shell_text(tmp_path: Path) -> None:
    """
    Only `{item}` itself is replaced, and what the item holds is not looked at again.
    """
    built = build(
        tmp_path,
        "- {id: a, run: [p, '--f={item}', '{{item}}', '{ item }'], foreach: ['{item}', $x]}\n"
        "- {id: b, run: 'echo {item}', foreach: [x], shell: [bash, -euc]}\n"
        "- {id: c, run: [p, '{}']}",
    )
    assert [step.argv() for step in built.steps] == [
        ["p", "--f={item}", "{{item}}", "{ item }"],
        ["p", "--f=$x", "{$x}", "{ item }"],
        ["bash", "-euc", "echo {item}"],
        ["p", "{}"],
    ]


@pytest.mark.parametrize(
    "written, items",
    [
        ("1-3", ["1", "2", "3"]),
        ("08-10", ["08", "09", "10"]),
        ("1-003", ["001", "002", "003"]),
        ("9-10", ["9", "10"]),
    ],
)
def test_a_range_counts_and_keeps_its_zeros(tmp_path: Path, written: str, items: list[str]) -> None:
    """
    Y4 for ranges.
    """
    built = build(tmp_path, f"- {{id: a, run: x, foreach: {{range: {written}}}}}")
    assert [step.item for step in built.steps] == items


def test_lines_of_a_file(tmp_path: Path) -> None:
    """
    Y7: CRLF and BOM are no part of an item; blank lines are none; spaces in a name stay.
    """
    (tmp_path / "l.txt").write_bytes(b"\xef\xbb\xbfa\r\n\r\n  \n b c \nlast")
    built = build(tmp_path, "- {id: a, run: x, foreach: {lines: l.txt}}")
    assert [step.item for step in built.steps] == ["a", " b c ", "last"]


def test_paths_that_match_in_order(tmp_path: Path) -> None:
    """
    Sorted, absolute, and a folder named [x] is a folder.
    """
    folder = tmp_path / "[x]"
    folder.mkdir()
    for name in ("x.txt", *(f"{letter}.csv" for letter in "hgfedcba")):
        (folder / name).touch()
    built = build(folder, "- {id: a, run: x, foreach: {glob: '*.csv'}}")
    assert [step.item for step in built.steps] == [f"{folder}/{letter}.csv" for letter in "abcdefgh"]


def test_every_obstacle_is_told_at_once(tmp_path: Path) -> None:
    """
    R4: missing and broken files, bad and repeated items, folders that are not there, each at its place.
    """
    (tmp_path / "twice.txt").write_text("a\n\nb\na\n")
    (tmp_path / "latin.txt").write_bytes(b"ok\ncaf\xe9\n")
    (tmp_path / "bad.env").write_text("A=1\nnothing\n")
    lines = refused(
        tmp_path,
        """\
- {id: a, run: x, foreach: {lines: missing.txt}}
- {id: b, run: x, foreach: {lines: twice.txt}}
- {id: c, run: x, foreach: {lines: latin.txt}}
- {id: d, run: x, foreach: {glob: "none/*.csv"}}
- {id: e, run: x, foreach: {glob: "bad.env/*"}}
- {id: f, run: x, foreach: [a, "", "b\\nc", a]}
- {id: g, run: x, env_file: [missing.env, bad.env]}
- {id: h, run: x, env_file: missing.env}""",
    )
    assert [line.partition("; ")[0] for line in lines] == [
        "bad.env:2:1: a line without '='",
        "config.yaml:2:28: 'missing.txt' cannot be read: No such file or directory",
        "config.yaml:5:28: foreach: nothing can match 'none/*.csv': "
        "'none' cannot be looked into (No such file or directory)",
        "config.yaml:6:28: foreach: nothing can match 'bad.env/*': 'bad.env' cannot be looked into (Not a directory)",
        "config.yaml:7:32: foreach: an item is empty",
        "config.yaml:7:36: foreach: the item 'b\\nc' has a newline or NUL in it",
        "config.yaml:7:44: foreach: the item 'a' is there twice",
        "config.yaml:8:30: 'missing.env' cannot be read: No such file or directory",
        "latin.txt:2:4: byte 6 (0xe9) is not UTF-8",
        "twice.txt:4:1: foreach: the item 'a' is there twice",
    ]


def test_an_inbox_that_is_empty_today_is_no_mistake(tmp_path: Path) -> None:
    """
    N8: no steps, and one word for each; the folder is there, whatever it is called.
    """
    folder = tmp_path / "[in]*"
    (folder / "deep").mkdir(parents=True)
    (folder / "blank.txt").write_text("\n \n")
    built = build(
        folder,
        "- {id: a, run: x, foreach: {glob: '*.csv'}}\n"
        "- {id: b, run: x, foreach: {glob: 'd*/**/x'}}\n"
        "- {id: c, run: x, foreach: {lines: blank.txt}}\n"
        "- {id: d, run: x, needs: [a, b, c]}",
    )
    assert ids(built) == ["d"]
    assert [str(problem.where).rpartition("/")[2] for problem in built.empty] == [
        f"config.yaml:{line}:28" for line in (2, 3, 4)
    ]


def test_a_list_that_is_a_link_is_told_where_its_files_are(tmp_path: Path) -> None:
    """
    E9: paths count from the folder of the link; what is beside the list itself is named.
    """
    there, here = tmp_path / "project", tmp_path / "etc"
    for folder in (there, there / "src", here):
        folder.mkdir()
    for name in ("l.txt", "a.env", "x.csv", "src/y.csv"):
        (there / name).touch()
    (there / "list.yaml").write_text(
        "run: r\ntasks:\n"
        "- {id: a, run: x, foreach: {lines: l.txt}}\n"
        "- {id: b, run: x, foreach: {glob: 'src/*.csv'}}\n"
        "- {id: c, run: x, env_file: a.env}\n"
    )
    (here / "config.yaml").symlink_to(there / "list.yaml")
    with pytest.raises(ConfigError) as caught:
        plan.build(config.load(str(here / "config.yaml")))
    assert [str(problem).rpartition("write ")[2] for problem in caught.value.problems] == [
        str(there / name) for name in ("l.txt", "src/*.csv", "a.env")
    ]
    (there / "list.yaml").write_text("run: r\ntasks:\n- {id: a, run: x, cwd: src, foreach: {glob: '*.csv'}}\n")
    built = plan.build(config.load(str(here / "config.yaml")))
    (nothing,) = built.empty
    assert str(nothing).endswith(f"write {there}/*.csv")
    (cwd,) = sandbox.folder_problems(built)
    assert str(cwd).endswith(f"write {there}/src")


def test_a_file_name_that_is_not_text_is_refused(tmp_path: Path) -> None:
    """
    Ledger and journal hold text.
    """
    (tmp_path / "ok.csv").touch()
    with open(bytes(tmp_path) + b"/caf\xe9.csv", "w"):
        pass
    (only,) = refused(tmp_path, "- {id: a, run: x, foreach: {glob: '*.csv'}}")
    assert "is not UTF-8; rename the file" in only
    only.encode()


def test_a_key_is_the_steps_own_for_good(tmp_path: Path) -> None:
    """
    RUN:STEP, or what the task says; it is no part of the work, so that who changes it redoes nothing.
    """
    built = build(tmp_path, "- {id: a, run: x}\n- {id: b, run: x, foreach: [1], key: '{run}/{step}/{item}/pr'}")
    assert [step.key("r") for step in built.steps] == ["r:a", "r/b@1/1/pr"]
    other = build(tmp_path, "- {id: a, run: x, key: mine}\n- {id: b, run: x, foreach: [1]}")
    assert [built.digest(step) for step in built.steps] == [other.digest(step) for step in other.steps]


def test_two_steps_with_one_key_are_refused(tmp_path: Path) -> None:
    """
    Case S10: an effect of one would be taken for the other's.
    """
    lines = refused(
        tmp_path, "- {id: a, run: x, foreach: [1, 2], key: pr}\n- {id: b, run: x, key: 'config:c'}\n- {id: c, run: x}"
    )
    assert [line.partition(": ")[2] for line in lines] == [
        "key: the steps 'a@1' and 'a@2' would both have the key 'pr'; use {step} or {item} in it, or another text",
        "key: the steps 'b' and 'c' would both have the key 'config:c'; use {step} or {item} in it, or another text",
    ]


def test_the_digest_follows_the_work_and_nothing_else(tmp_path: Path) -> None:
    """
    F13: what changes the work changes the digest; limits, retries, order and neighbours do not.
    """

    def digest(task: str, step: str = "a") -> str:
        built = build(tmp_path, task)
        return built.digest(built.by_id[step])

    same = digest("- {id: a, run: x, env: {A: 1, B: 2}}")
    assert same == digest("- {id: z, run: y}\n- {id: a, env: {B: 2, A: 1}, run: x, timeout: 1h, retry: {attempts: 9}}")
    others = {
        digest("- {id: a, run: x}"),
        digest("- {id: a, run: y, env: {A: 1, B: 2}}"),
        digest("- {id: a, run: [x], env: {A: 1, B: 2}}"),
        digest("- {id: a, run: x, env: {A: 1, B: 3}}"),
        digest("- {id: a, run: x, env: {A: 1, B: 2}, shell: bash}"),
        digest("- {id: a, run: x, env: {A: 1, B: 2}, cwd: /tmp}"),
        digest("- {id: a, run: x, env: {A: 1, B: 2}, env_file: /dev/null}"),
        digest("- {id: a, run: x, env: {A: 1, B: 2}, foreach: [i, j]}", "a@i"),
        digest("- {id: a, run: x, env: {A: 1, B: 2}, foreach: [i, j]}", "a@j"),
    }
    assert len(others | {same}) == 10
    assert digest("- {id: a, run: [x], shell: bash}") == digest("- {id: a, run: [x]}"), "a list has no shell"


def test_the_digest_of_today_is_the_digest_of_tomorrow(tmp_path: Path) -> None:
    """
    A new version that computes another one would run finished work again.
    """
    built = build(tmp_path, "- {id: a, run: [echo, é, '{item}'], env: {B: no}, cwd: /srv, foreach: [1]}")
    assert built.digest(built.steps[0]) == "16593abfa290c737"


ITEMS = [
    "a/b",
    ".hidden",
    "..",
    "a.b",
    "a b",
    "-x",
    "é",
    "a\\b",
    "a:b_c",
    "x@y",
    "/",
    "/etc/passwd",
    "~",
    "100%",
    "a'b",
]


@pytest.mark.skipif(not shutil.which("systemd-escape"), reason="no systemd-escape to compare with")
@pytest.mark.parametrize("item", ITEMS)
def test_systemd_escapes_the_same(item: str) -> None:
    """
    The real systemd-escape is the judge.
    """
    output = subprocess.run(["systemd-escape", "--", item], capture_output=True, text=True, check=True).stdout
    assert plan.escape(item) == output.removesuffix("\n")


@given(st.text(min_size=1), st.text(min_size=1))
def test_different_items_have_different_ids_that_are_file_names(one: str, other: str) -> None:
    """
    Whatever the items are, long ones included.
    """
    for longer in ("", "x" * 300):
        first, second = plan.step_id("a", longer + one), plan.step_id("a", longer + other)
        assert (first == second) == (one == other)
        assert first.isascii() and "/" not in first and len(first) <= 200


def test_a_long_item_is_cut_and_told_apart() -> None:
    """
    File systems stop at 255 bytes.
    """
    name = plan.step_id("a", "x" * 199)
    assert len(name) == 200
    assert name[187] == "~"
    assert plan.step_id("a", "x" * 198) == "a@" + "x" * 198
