"""What is longer than a program can be given: named before the run, or handed over in a file."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from worker import config, plan, report
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
        "    (spec,) = glob.glob(os.environ['NOTIFY_SOCKET'].rsplit('/', 2)[0] + '/given.*/spec')\n"
        "    return [len(text), oct(os.stat(spec).st_mode & 0o777)]\n"
    )
    done = run(tmp_path, f"tasks:\n  - {{id: a, python: 'mod:size', cwd: ., args: {{text: {text}}}}}\n")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "state/out/a").read_text()) == [len(text), "0o600"]
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if name == "spec"]


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


def command_lines(marker: str) -> list[str]:
    """The command lines of this machine's processes in which `marker` stands."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if marker in line:
                found.append(line)
    return found


JOBS = """
import os, sys
def wait(gate, token):
    print("at work", file=sys.stderr, flush=True)
    open(gate).read()
    return "well"
"""


def test_s21_what_a_list_says_to_programs_of_ours_is_in_no_command_line(worker: MakeWorker, tmp_path: Path) -> None:
    """S21: neither a request with a literal token nor arguments of a function; the file is for its user alone."""
    token = f"LITERAL-{os.urandom(8).hex()}"
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "jobs.py").write_text(JOBS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        w = worker(
            f"concurrency: 2\ntasks:\n"
            f"  - id: call\n    python: jobs:wait\n    args: {{gate: {gate}, token: {token}}}\n    cwd: {tmp_path}\n"
            f"  - id: ask\n    http: {{url: '{url}', headers: {{X-Api-Key: {token}}}, json: {{pw: {token}}}}}\n"
        ).start()
        client, _ = listener.accept()
        w.until("at work")
        with client:
            request = client.recv(65536).decode()
            assert token in request, "it was sent, and the program is there"
            assert command_lines(token) == []
            assert command_lines(f"@{w.state}"), "they are, with a file each"
            specs = [path for path in w.state.rglob("spec") if path.is_file()]
            assert len(specs) == 2 and all(path.stat().st_mode & 0o777 == 0o600 for path in specs)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nwell")
        gate.write_text("go on\n")
        assert w.wait() == 0, w.lines
    assert not [path for path in w.state.rglob("spec") if path.is_file()], "and are gone with their steps"


def test_s21_what_a_step_puts_in_the_way_is_not_followed(worker: MakeWorker, tmp_path: Path) -> None:
    """S21: neither a link nor a FIFO where the next program of ours is to find what it has to do."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    w = worker(
        "tasks:\n"
        "  - id: plant\n    run: |\n"
        f"      for folder in $(find {tmp_path}/state /run -maxdepth 4 -name 'given*' 2>/dev/null); do\n"
        f"        ln -sf {victim} $folder/spec && echo planted\n"
        "      done\n"
        "  - id: ask\n    expect: {matches: x}\n    run: echo x\n"
    )
    assert w.run() == 0, w.lines
    assert b"planted" in w.output("plant")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    ("request_", "hint"),
    [
        ("headers: {Authorization: Bearer abc}", "'Authorization'"),
        ("headers: {x-API-key: abc}", "'x-API-key'"),
        ("headers: {Cookie: a=b}", "'Cookie'"),
        ("headers: {X-Auth-Token: abc}", "'X-Auth-Token'"),
        ("headers: {X-Client-Secret: abc}", "'X-Client-Secret'"),
        ("headers: {Authorization: 'Bearer {secret:t}'}", None),
        ("headers: {Idempotency-Key: abc}", None),
        ("headers: {Accept: text/plain}", None),
        ("headers: {X-Api-Key: ''}", None),
    ],
)
def test_s21_check_points_at_literal_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], request_: str, hint: str | None
) -> None:
    """S21: a hint and no mistake, with the header's name and never its value."""
    path = tmp_path / "list.yaml"
    path.write_text(f"tasks: [{{id: ask, secrets: [t], http: {{url: 'https://x.example/', {request_}}}}}]\n")
    assert report.check(str(path), "agent", installed=False) == 0
    said = capsys.readouterr().err
    assert (hint in said and "abc" not in said and "{secret:NAME}" in said) if hint else not said


def test_s21_check_points_at_a_password_in_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S21: one that is a placeholder is none."""
    path = tmp_path / "list.yaml"
    path.write_text("tasks: [{id: ask, http: {url: 'https://me:hunter2@x.example/'}}]\n")
    assert report.check(str(path), "agent", installed=False) == 0
    said = capsys.readouterr().err
    assert "its URL has a password in it" in said and "hunter2" not in said
    path.write_text("tasks: [{id: ask, secrets: [t], http: {url: 'https://me:{secret:t}@x.example/'}}]\n")
    assert report.check(str(path), "agent", installed=False) == 0
    assert not capsys.readouterr().err
