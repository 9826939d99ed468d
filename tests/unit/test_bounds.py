"""How large what people write may be: each limit is stated, met soon, and costs one line (`agentctl check`)."""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from worker import config, plan
from worker.errors import CONFIG, ConfigError

# Generous: a machine may be busy.  Without the limits these take minutes, or all memory.
PATIENCE, MEMORY = 30, 700 * 2**20


def check(folder: Path, content: str, name: str = "list.yaml") -> list[str]:
    """The lines that `agentctl check` says about a list, which is refused; in a process of bounded memory."""
    (folder / name).write_text(content)
    return check_file(folder / name)


def check_file(path: Path, statuses: tuple[int, ...] = (CONFIG,)) -> list[str]:
    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    done = subprocess.run(
        [sys.executable, "-m", "worker", "check", path],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "HOME": str(path.parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=bound,
    )
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.returncode in statuses, done.stdout + done.stderr
    return done.stderr.replace(f"{path.parent}/", "").splitlines()


def refused(path: Path) -> list[str]:
    """The same, here and now: where there is nothing that a limit on memory would have to stop."""
    with pytest.raises(ConfigError) as caught:
        plan.build(config.load(str(path)))
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


BOMB = """\
a0: &a0 [x, x, x, x, x, x, x, x, x]
a1: &a1 [*a0, *a0, *a0, *a0, *a0, *a0, *a0, *a0, *a0]
a2: &a2 [*a1, *a1, *a1, *a1, *a1, *a1, *a1, *a1, *a1]
a3: &a3 [*a2, *a2, *a2, *a2, *a2, *a2, *a2, *a2, *a2]
a4: &a4 [*a3, *a3, *a3, *a3, *a3, *a3, *a3, *a3, *a3]
a5: &a5 [*a4, *a4, *a4, *a4, *a4, *a4, *a4, *a4, *a4]
a6: &a6 [*a5, *a5, *a5, *a5, *a5, *a5, *a5, *a5, *a5]
a7: &a7 [*a6, *a6, *a6, *a6, *a6, *a6, *a6, *a6, *a6]
a8: &a8 [*a7, *a7, *a7, *a7, *a7, *a7, *a7, *a7, *a7]
"""
WHERE = {
    "args": "tasks:\n- id: a\n  python: json:dumps\n  args:\n{}",
    "http": "tasks:\n- id: a\n  http:\n    url: http://localhost/\n    json:\n{}",
    "expect": "tasks:\n- id: a\n  http: {{url: http://localhost/}}\n  expect:\n    json:\n{}",
    "env": "tasks:\n- id: a\n  run: echo\n  env:\n{}",
    "defaults": "defaults:\n  env:\n{}\ntasks:\n- {{id: a, run: echo}}\n",
    "foreach": "tasks:\n- id: a\n  run: echo\n  foreach:\n{}",
    "an unknown key": "{}\ntasks:\n- {{id: a, run: echo}}\n",
}


@pytest.mark.parametrize("where", WHERE)
def test_y9_aliases_that_multiply_are_refused_where_they_pass_the_limit(tmp_path: Path, where: str) -> None:
    """Y9: in a moment, with file, line and column, and the limit."""
    bomb = "".join(f"      {line}\n" for line in BOMB.splitlines())

    said = check(tmp_path, WHERE[where].format(bomb))

    assert len(said) == 1
    assert said[0].startswith("list.yaml:") and said[0].split(":")[1:3] != ["", ""]
    assert "aliases" in said[0] and "16 MB" in said[0]


def test_y9_a_long_text_that_is_repeated_counts_by_its_length(tmp_path: Path) -> None:
    """Y9: a few hundred aliases of one long text would be gigabytes of arguments."""
    text = "x" * 100_000
    said = check(tmp_path, f"tasks:\n- id: a\n  python: json:dumps\n  args: {{a: &a {text}, b: [{'*a, ' * 2000}]}}\n")
    assert len(said) == 1 and "aliases" in said[0]


def test_y9_aliases_in_ordinary_numbers_are_fine(tmp_path: Path) -> None:
    """Y9: one environment for two thousand tasks."""
    env = ", ".join(f"NAME_{n}: value" for n in range(20))
    tasks = "".join(f"- {{id: t{n}, run: echo, env: *e}}\n" for n in range(2000))
    (tmp_path / "list.yaml").write_text(f"tasks:\n- {{id: t, run: echo, env: &e {{{env}}}}}\n{tasks}")
    assert len(config.load(str(tmp_path / "list.yaml")).tasks) == 2001


def fifo(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path must be short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def random(path: Path) -> None:
    path.symlink_to("/dev/random")


def terminal(path: Path) -> None:
    path.symlink_to("/dev/ptmx")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2 * 2**30)


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"A=b\n" * 2**20)
        file.truncate(80 * 2**20)


KINDS: dict[Callable[[Path], None], str] = {
    fifo: "it is a pipe",
    folder: "Is a directory",
    listening: "",
    endless: "it is a device",
    random: "it is a device",
    terminal: "it is a device",
    sparse: "more than",
    large: "more than",
}
USES = {
    "env_file": "tasks:\n- {id: a, run: echo, env_file: it}\n",
    "defaults": "defaults: {env_file: [it]}\ntasks:\n- {id: a, run: echo}\n",
    "lines": "tasks:\n- {id: a, run: echo, foreach: {lines: it}}\n",
}


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("use", USES)
def test_c11_a_file_that_a_list_names_is_plain_and_of_bounded_size(
    tmp_path: Path, make: Callable[[Path], None], use: str
) -> None:
    """C11: no endless reading, no waiting, no memory: one line, at the place that names it."""
    make(tmp_path / "it")
    (tmp_path / "list.yaml").write_text(USES[use])

    said = refused(tmp_path / "list.yaml")

    assert len(said) == 1, said
    assert said[0].startswith("list.yaml:") and "it' cannot be read: " in said[0]
    assert KINDS[make] in said[0]


@pytest.mark.parametrize("make", KINDS)
def test_c11_so_is_the_list_itself_and_a_drop_in(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """C11: as what the list names."""
    make(tmp_path / "it.yaml")
    (tmp_path / "list.d").mkdir()
    make(tmp_path / "list.d/it.yaml")

    said = refused(tmp_path / "it.yaml")
    assert len(said) == 1 and said[0].startswith("it.yaml: cannot be read: ") and KINDS[make] in said[0]
    (tmp_path / "list.yaml").write_text("tasks:\n- {id: a, run: echo}\n")
    said = refused(tmp_path / "list.yaml")
    assert len(said) == 1 and said[0].startswith("list.d/it.yaml: cannot be read: ")


MANY: dict[str, Callable[[], str]] = {
    "values in a list": lambda: f"tasks:\n- {{id: a, run: [{'a,' * 2_000_000}]}}\n",
    "keys": lambda: "tasks:\n- id: a\n  run: echo\n  env:\n" + "".join(f"    N{n}: a\n" for n in range(600_000)),
    "tasks": lambda: "tasks:\n" + "".join(f"- {{id: t{n}, run: echo, timeout: 1h}}\n" for n in range(180_000)),
    "steps of ranges": lambda: (
        "tasks:\n" + "".join(f"- {{id: t{n}, run: echo, foreach: {{range: 1-1000000}}}}\n" for n in range(50))
    ),
    "documents": lambda: "tasks: []\n---\n" * 500_000,
    "bytes in a text": lambda: "tasks:\n- id: a\n  run: |\n" + "    echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n" * 600_000,
    "levels": lambda: "tasks: " + "[" * 200_000,
    "unknown keys": lambda: "tasks:\n- id: a\n  run: echo\n" + "".join(f"  tiemout{n}: a\n" for n in range(100_000)),
    "needs": lambda: (
        "tasks:\n" + "".join(f"- {{id: t{n}, run: echo, needs: [u{n}, v{n}, w{n}]}}\n" for n in range(30_000))
    ),
    "circles": lambda: "tasks:\n" + "".join(f"- {{id: t{n}, run: echo, needs: [t{n ^ 1}]}}\n" for n in range(30_000)),
}


@pytest.mark.parametrize("what", MANY)
def test_y9_a_list_of_any_size_is_read_or_refused_in_moments(tmp_path: Path, what: str) -> None:
    """Y9: every number has a limit, and what is said of a list has one, too."""
    said = check(tmp_path, MANY[what]())
    assert 1 <= len(said) <= 1001, said[:3]
    assert said[0].startswith("list.yaml:")


def test_y9_drop_ins_count_with_the_list(tmp_path: Path) -> None:
    """Y9: a list in many files is no larger than one in a single file may be."""
    (tmp_path / "list.d").mkdir()
    for name in "abcdef":
        tasks = "".join(f"- {{id: {name}{n}, run: echo, timeout: 1h}}\n" for n in range(30_000))
        (tmp_path / f"list.d/{name}.yaml").write_text(f"tasks:\n{tasks}")
    said = check(tmp_path, "tasks:\n- {id: a, run: echo}\n")
    assert all(line.startswith("list.d/") and "800000 values, drop-ins included" in line for line in said)


@pytest.mark.parametrize("line", ["junk\n", "A='\n", 'A="\n', "A=\\\n", "A='a' \n", "A='' 'b' \"\\\n", "export A=b\n"])
def test_c11_an_environment_file_of_any_content_is_read_in_moments(tmp_path: Path, line: str) -> None:
    """C11: up to its limit, whatever it is made of; reading takes no more than time in proportion."""
    (tmp_path / "it").write_text(line * (2**20 // len(line) - 1) + "junk")
    (tmp_path / "list.yaml").write_text(USES["env_file"])
    assert len(check_file(tmp_path / "list.yaml", (0, CONFIG))) <= 1001


def test_c11_lines_of_any_number(tmp_path: Path) -> None:
    """C11: more lines than steps can be are named with the limit."""
    (tmp_path / "it").write_text("a\n" * 3_000_000)
    said = check(tmp_path, USES["lines"])
    assert len(said) == 1 and "more than 2000000 steps" in said[0]


@pytest.mark.parametrize("number", ["1e400", "-1e400", "9" * 5000, "-" + "9" * 5000, "1" + "0" * 5000 + "e1"])
@pytest.mark.parametrize("place", ["json: {{a: [{}]}}", "expect: {{json: {{a: {}}}}}"])
def test_y9_a_number_that_json_cannot_carry_is_named(tmp_path: Path, number: str, place: str) -> None:
    """Y9: with its place, and no traceback; nor is it sent as `Infinity`, which no server reads."""
    written = place.format(number)
    task = (
        f"http: {{url: http://x/, {written}}}" if "json: {a: [" in written else f"http: {{url: http://x/}}, {written}"
    )
    (tmp_path / "list.yaml").write_text(f"tasks:\n- {{id: a, {task}}}\n")
    (said,) = refused(tmp_path / "list.yaml")
    assert said.startswith("list.yaml:2:") and "is a larger number than JSON can carry" in said and len(said) < 300


@pytest.mark.parametrize("number", ["9" * 5000, "0" * 5000 + "1", "1e400", "-1", "\u0663"])
@pytest.mark.parametrize(
    "line", ["concurrency: {}\n", "budget: {{spend: {}}}\n", "defaults: {{retry: {{attempts: {}, never: [{}]}}}}\n"]
)
def test_y9_a_number_of_any_length_is_a_number_or_a_mistake(tmp_path: Path, number: str, line: str) -> None:
    """Y9: Python reads no more than some thousand digits."""
    (tmp_path / "list.yaml").write_text(line.format(number, number) + "tasks:\n- {id: a, run: echo}\n")
    assert all(said.startswith("list.yaml:1:") for said in refused(tmp_path / "list.yaml"))


def test_c11_a_result_from_an_endless_pipe_is_refused(tmp_path: Path) -> None:
    """C11: `agentctl settle` reads a result from standard input, and not all memory full."""
    with open("/dev/zero", "rb") as endless_input:
        done = subprocess.run(
            [sys.executable, "-m", "worker", "settle", "a", "--done", "-", "--state", tmp_path],
            cwd=Path(__file__).resolve().parents[2],
            stdin=endless_input,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode != 0 and done.stderr.count("\n") == 1
    assert "standard input has more than 64 MB" in done.stderr
