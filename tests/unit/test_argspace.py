"""What is longer than a program can be given: named before the run, or handed over in a file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker import config, plan
from worker.argspace import LONGEST
from worker.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
LONG = "x" * 200_000


def refused(tmp_path: Path, content: str) -> list[str]:
    (tmp_path / "list.yaml").write_text(content)
    with pytest.raises(ConfigError) as caught:
        plan.build(config.load(str(tmp_path / "list.yaml")))
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def run(tmp_path: Path, content: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "list.yaml").write_text(content)
    command = [sys.executable, "-m", "worker", "run", f"{tmp_path}/list.yaml", "--state", f"{tmp_path}/state"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


PLACES = {
    "a script": ("run: |\n      {}", "3:10: run: "),
    "an argument": ("run: [echo, {}]", "3:17: item 2: "),
    "a variable": ("run: echo\n    env: {{A: {}}}", "4:14: env: A: "),
    "an item": ("run: echo\n    foreach: [a, {}]", "4:18: item 2: "),
    "check": ("run: echo\n    check: {}", "4:12: check: "),
    "after": ("run: echo\n    after: [echo, {}]", "4:19: item 2: "),
    "expect": ("run: echo\n    expect: {{run: {}}}", "4:19: run: "),
    "a shell": ("run: echo\n    shell: [sh, {}, -c]", "4:17: item 2: "),
}


@pytest.mark.parametrize("place", PLACES)
def test_n12_a_text_that_no_program_can_be_given_is_named_with_its_line(tmp_path: Path, place: str) -> None:
    """N12: by `agentctl check`, with what to do, and without the text."""
    written, where = PLACES[place]

    said = refused(tmp_path, f"tasks:\n  - id: a\n    {written.format(LONG)}\n")

    assert len(said) == 1
    assert where in said[0] and "bytes are more than the 131071" in said[0] and "put it into a file" in said[0]
    assert len(said[0]) < 300


def test_n12_the_limit_counts_bytes_and_the_name_of_a_variable(tmp_path: Path) -> None:
    """N12: what is said to fit is really taken by the kernel; a byte more is not."""
    fits = "x" * (LONGEST - len("A="))
    done = run(tmp_path, f"tasks:\n  - id: a\n    run: '[ ${{#A}} = {len(fits)} ]'\n    env: {{A: {fits}}}\n")
    assert done.returncode == 0, done.stderr
    assert len(refused(tmp_path, f"tasks:\n  - id: a\n    run: echo\n    env: {{A: {fits}y}}\n")) == 1
    half = "ü" * (LONGEST // 2)
    assert len(refused(tmp_path, f"tasks:\n  - id: a\n    run: echo\n    env: {{A: {half}}}\n")) == 1


def test_n12_so_is_an_item_of_a_file_and_a_variable_of_one(tmp_path: Path) -> None:
    """N12: with the line of that file."""
    (tmp_path / "items").write_text(f"a\n{LONG}\nb\n")
    (tmp_path / "env").write_text(f"A=1\nSECRET={LONG}\n")
    said = refused(tmp_path, "tasks:\n  - {id: a, run: echo, foreach: {lines: items}, env_file: env}\n")
    assert [line.split(":")[:2] for line in said] == [["env", "2"], ["items", "2"]]
    assert "xxx" not in said[0]


def test_n12_an_item_counts_as_it_is_put_into_arguments_and_keys(tmp_path: Path) -> None:
    """N12: twice in one argument it is too long, once it is not."""
    item = "x" * 100_000
    task = "tasks:\n  - {{id: a, run: [echo, '{}'], key: '{}', foreach: [{}]}}\n"
    assert len(refused(tmp_path, task.format("{item}{item}", "{step}", item))) == 1
    assert len(refused(tmp_path, task.format("{item}", "{item}{item}", item))) == 1
    (tmp_path / "list.yaml").write_text(task.format("{item}", "{step}", item))
    plan.build(config.load(str(tmp_path / "list.yaml")))


def test_n12_all_of_it_together_is_named_too(tmp_path: Path) -> None:
    """N12: twenty-five variables that fit each for itself."""
    env = ", ".join(f"N{n}: {'x' * 100_000}" for n in range(25))
    said = refused(tmp_path, f"tasks:\n  - id: a\n    run: echo\n    env: {{{env}}}\n")
    assert len(said) == 1 and said[0].startswith("list.yaml:2:5: arguments and environment come to 25")


@pytest.mark.parametrize("text", [LONG, "ü" * 100_000, "\U0001f600" * 40_000])
def test_n12_arguments_of_a_function_may_be_of_any_length(tmp_path: Path, text: str) -> None:
    """N12: they travel in a file, which is gone afterwards and which nobody else may read."""
    (tmp_path / "mod.py").write_text(
        "import os, glob\n"
        "def size(text):\n"
        "    (spec,) = glob.glob(os.path.dirname(os.environ['NOTIFY_SOCKET']) + '/spec.*')\n"
        "    return [len(text), oct(os.stat(spec).st_mode & 0o777)]\n"
    )
    done = run(tmp_path, f"tasks:\n  - {{id: a, python: 'mod:size', cwd: ., args: {{text: {text}}}}}\n")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "state/out/a").read_text()) == [len(text), "0o600"]
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name.startswith("spec.")]


def test_n12_so_may_be_what_is_sent_and_what_is_looked_for(tmp_path: Path) -> None:
    """N12: a request fails for want of a server, not of room; a pattern is looked for."""
    content = f"""\
on_failure: continue
tasks:
  - {{id: sent, http: {{url: "http://127.0.0.1:1/", body: {LONG}, headers: {{x: y}}}}, retry: {{patience: 0}}}}
  - {{id: found, run: echo {"y" * 50_000}, expect: {{matches: "{"y" * 100_000}|{"y" * 31_000}"}}}}
"""
    done = run(tmp_path, content)
    assert "Argument list" not in done.stderr
    assert "127.0.0.1" in done.stderr and "found: done" in done.stderr, done.stderr[-3000:]
