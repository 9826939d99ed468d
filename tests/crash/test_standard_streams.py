"""Standard streams that are closed, fail, or are not read, and locales: none of them stops a worker or a command."""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import tracing
from tests.conftest import MakeWorker
from tests.support import PATIENCE, ROOT, Worker
from worker import report
from worker.errors import StateError

TWO = "run: two\ntasks:\n  - {id: a, run: echo 1; echo log >&2}\n  - {id: b, run: cat}\n"


def shell(text: str, *words: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run shell text in which "$@" is agentctl with these words."""
    agentctl = [sys.executable, "-m", "worker", *words]
    env = {**(os.environ if environ is None else environ), "PYTHONPATH": str(ROOT)}
    return subprocess.run(["/bin/bash", "-c", text, "sh", *agentctl], capture_output=True, env=env, cwd="/", timeout=60)


def agentctl(*words: str) -> subprocess.CompletedProcess[bytes]:
    return shell('"$@"', *words)


@pytest.mark.parametrize(
    "streams", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "<&- 2>&-", "2>/dev/full", "2</dev/null", "2> >(exit 0); wait $!"]
)
def test_a_run_needs_no_standard_stream(worker: MakeWorker, streams: str) -> None:
    """
    Cases N1, C6: closed ones, one on a full disk, one that cannot be written, one whose reader has gone.
    """
    w = worker(TWO)
    found = shell(f'"$@" {streams}', "run", str(w.config), "--state", str(w.state))
    assert found.returncode == 0 or "wait" in streams, found
    assert (w.done(), w.output("a"), w.output("b")) == (["a", "b"], b"1\n", b"")


def test_no_file_of_ours_takes_the_place_of_a_closed_stream(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case N1: what a step, or Python itself, writes to standard error would be in the ledger.
    """
    if os.geteuid() != 0:
        pytest.skip("a worker shows its descriptors to root alone")
    w = worker("tasks: [{id: a, run: 'ls -l /proc/$PPID/fd > fds', cwd: .}]")
    assert shell('"$@" <&- >&- 2>&-', "run", str(w.config), "--state", str(w.state)).returncode == 0
    links = {line.split()[-3]: line.split()[-1] for line in (tmp_path / "fds").read_text().splitlines() if "->" in line}
    assert {fd: links[fd] for fd in "012"} == dict.fromkeys("012", "/dev/null")


COMMANDS = [
    ("check", "LIST"), ("plan", "LIST"), ("status", "--state", "STATE"), ("status", "--json", "--state", "STATE"),
    ("list", "--state", "STATE"), ("log", "a", "--state", "STATE"), ("log", "--output", "a", "--state", "STATE"),
    ("budget", "--state", "STATE"), ("export", "--state", "STATE"), ("verify-copy", "STATE", "--state", "STATE"),
    ("--help",), ("--version",), ("beat",), ("note",), ("load",), ("once", "k", "--", "true"), ("nonsense",), ("run",),
    ("settle", "a", "--redo", "--state", "STATE"), ("restore", "/nowhere", "--state", "STATE"),
]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_ends_with_its_own_status_and_no_traceback(worker: MakeWorker, words: tuple[str, ...]) -> None:
    """
    Cases N1, C6: standard error is a help; where standard output is the purpose and fails, that is said, and is 1.
    """
    w = worker(TWO)
    assert w.run() == 0
    words = tuple({"LIST": str(w.config), "STATE": str(w.state)}.get(word, word) for word in words)
    well = agentctl(*words)
    for streams in ("2>&-", "2>/dev/full", "<&-", ">&-", ">&- 2>&- <&-", "| true"):
        found = shell(f'"$@" {streams}', *words)
        assert b"Traceback" not in found.stderr and b"Exception" not in found.stderr
        if streams != "| true":
            assert found.returncode == well.returncode, streams
    full, both = shell('"$@" >/dev/full', *words), shell('"$@" >/dev/full 2>&1', *words)
    assert full.returncode == both.returncode
    if well.stdout and words[0] != "export":
        assert (full.returncode, full.stderr.count(b"\n")) == (well.returncode or 1, 1 + well.stderr.count(b"\n")), full
        assert b"No space left on device" in full.stderr
    elif not well.stdout:
        assert full.returncode == well.returncode


def test_what_a_command_has_done_counts_and_not_that_it_says_so(worker: MakeWorker) -> None:
    """
    Case C6: a budget that was raised is raised.
    """
    w = worker(f"budget: {{spend: 1}}\n{TWO}")
    assert w.run() == 0
    found = shell('"$@" >/dev/full', "budget", "--add", "spend=1", "--state", str(w.state))
    assert (found.returncode, found.stderr) == (0, b"")
    assert b"2" in agentctl("budget", "--state", str(w.state)).stdout


def done_soon(worker: Worker, steps: int) -> None:
    """Wait until so many steps are done, where no line says so."""
    until = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(StateError):
            if report.look(str(worker.state), None)["steps"]["done"] >= steps:
                return
        assert time.monotonic() < until and worker.process.poll() is None


def not_read(worker: MakeWorker, kind: str, steps: int = 300) -> tuple[Worker, int]:
    """Start a worker that prints far more than what nobody reads can hold; return it and the reader's end."""
    w = worker(f"run: loud\ntasks: [{{id: a, foreach: {{range: 1-{steps}}}, run: seq 1 200}}, {{id: end, run: echo}}]")
    if kind == "pipe":
        read, write = os.pipe()
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    elif kind == "tty":
        read, write = os.openpty()
    else:
        ours, theirs = socket.socketpair()
        read, write = ours.detach(), theirs.detach()
    w.start(stderr=write)
    os.close(write)
    return w, read


@pytest.mark.parametrize("kind", ["pipe", "tty", "socket"])
def test_output_that_is_not_read_holds_nothing_up(worker: MakeWorker, kind: str) -> None:
    """
    Case N13: the run goes to its end; who reads at last finds the events, and how many lines he has missed.
    """
    w, read = not_read(worker, kind)
    try:
        assert w.process.wait(PATIENCE) == 0
        assert len(w.done()) == 301
    finally:
        os.close(read)


def test_what_was_not_read_is_counted_once_it_is(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case N13: the events come later, in order; of the steps' lines their number.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    w = worker(f"run: loud\ntasks: [{{id: a, run: seq -f %0100g 1 400}}, {{id: b, run: 'read -r _ < {gate}'}}]")
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    w.start(stderr=write)
    os.close(write)
    done_soon(w, 1)
    with open(read, "rb") as reader:
        gate.write_text("\n")
        lines = reader.read().decode().splitlines()
    assert w.process.wait(PATIENCE) == 0
    shown = [line for line in lines if line.startswith("a: ") and line[3:].isdigit()]
    (missing,) = [line for line in lines if "missing here" in line]
    assert missing == f"standard error took nothing for a while; {400 - len(shown)} lines of steps are missing here"
    lines.remove(missing)  # it comes when there is room for it, at the latest behind the last event
    assert lines.index("a: started") < lines.index("b: started") and lines[-1].startswith("run loud: done, 2 of 2")


def test_sigterm_is_heard_while_output_is_not_read(worker: MakeWorker) -> None:
    """
    Case N13: no write of the loop waits for a reader.
    """
    w, read = not_read(worker, "pipe", steps=3000)
    try:
        done_soon(w, 60)
        w.process.send_signal(signal.SIGTERM)
        assert w.process.wait(PATIENCE) == 75
    finally:
        os.close(read)


def test_a_write_that_fails_for_a_while_costs_lines_and_no_more(worker: MakeWorker) -> None:
    """
    Case C6: EMFILE, EIO or ENOSPC on write(2, ...): the line is dropped and counted.  The step ends when that is over:
    the worker's own write at a signal, to a pipe of its own, is none that can fail.
    """
    tracing.require()
    w = worker("tasks: [{id: a, run: 'seq 1 50; until [ -e go ]; do sleep 0.02; done'}, {id: b, run: echo x}]")
    inject = "inject=write:error=EIO:when=5..30"
    w.start("strace", "-f", "-o", "/dev/null", "-e", "trace=write", "-e", inject).until("a: 50$")
    (w.state / "work/go").touch()
    assert w.wait() == 0
    assert len(w.matching("standard error took nothing for a while; [0-9]+ lines of steps are missing here")) == 1
    assert w.lines[-1].startswith("run list: done, 2 of 2")


LETTERS = "tasks:\n  - {id: a, foreach: [ü, ✓], run: 'printf %s \"$AGENT_ITEM ä€\"'}\n  - {id: b, run: [printf, ü✓]}\n"


@pytest.fixture(scope="module")
def latin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a German with ISO-8859-1."""
    folder = tmp_path_factory.mktemp("locale")
    made = subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", str(folder / "de_DE")], capture_output=True, check=False
    )
    if not (folder / "de_DE").is_dir():
        pytest.skip(f"localedef cannot make de_DE here: {made.stderr!r}")
    return {"LC_ALL": "de_DE", "LOCPATH": str(folder)}


# Of bash, about a locale that it has not, in the words of its release.
_COMPLAINT = re.compile(rb"/bin/bash: warning: setlocale: LC_ALL: cannot change locale \([^)]*\)(: [\w ]+)?\n")
LOCALES: list[dict[str, str]] = [
    {},
    {"LANG": "C"},
    {"LC_ALL": "C"},
    {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "no_SUCH.UTF-8"},
    {"PYTHONIOENCODING": "ascii:strict"},
    {"PYTHONIOENCODING": "latin-1"},
]


def try_locale(worker: MakeWorker, locale: Mapping[str, str]) -> None:
    w = worker(LETTERS)
    environ = {"PATH": os.environ["PATH"], **locale}
    state = ("--state", str(w.state))
    run = shell('"$@"', "run", str(w.config), *state, environ=environ)
    assert (run.returncode, b"Traceback" in run.stderr) == (0, False), run
    results = {step: w.output(step).decode() for step in w.done()}
    assert list(results.values()) == ["ü ä€", "✓ ä€", "ü✓"]
    words = [("check", str(w.config)), ("plan", str(w.config)), ("status", *state), ("status", "--json", *state)]
    words += [("list", *state), ("log", "b", *state), ("log", "--output", "b", *state), ("export", *state)]
    for command in words:
        found = shell('"$@"', *command, environ=environ)
        assert (found.returncode, _COMPLAINT.sub(b"", found.stderr)) == (0, b""), found
        if "--json" in command or "export" in command:
            assert json.loads(found.stdout)
        if "--output" in command:
            assert found.stdout.decode() == "ü✓"


@pytest.mark.parametrize("locale", LOCALES, ids=str)
def test_a_locale_changes_nothing_about_a_step(worker: MakeWorker, locale: dict[str, str]) -> None:
    """
    Case N15: the list's bytes reach the step as they are; what is printed is escaped, never a traceback.
    """
    try_locale(worker, locale)


def test_another_character_set_changes_nothing_about_a_step(worker: MakeWorker, latin: dict[str, str]) -> None:
    """
    Case N15: the same where the locale's letters are other bytes.
    """
    try_locale(worker, latin)


@pytest.mark.parametrize("locale", LOCALES[:4], ids=str)
def test_names_of_files_are_bytes(worker: MakeWorker, tmp_path: Path, locale: dict[str, str]) -> None:
    """
    Case N15: of the list, the state folder, a `cwd`, what a step expects and what a glob finds.
    """
    odd = os.fsencode(tmp_path) + b"/\xfc\xff\xe2\x9c\x93"
    os.mkdir(odd)
    (tmp_path / "2ü.csv").write_text("2ü.csv")
    config, state = odd + b"/l\xff.yaml", odd + b"/s\xff"
    Path(os.fsdecode(config)).write_text(f"""
run: odd
tasks:
  - id: a
    foreach: {{glob: "{tmp_path}/*.csv"}}
    cwd: .
    run: 'cat "$AGENT_ITEM"; echo > made; pwd >&2'
    expect: {{file: made}}
""")
    environ = {"PATH": os.environ["PATH"], **locale}
    for words in (("run", config), ("run", config), ("check", config), ("status",), ("list",), ("log",), ("export",)):
        command = [os.fsencode(word) for word in words] + ([] if words[0] == "check" else [b"--state", state])
        if words[0] == "log":
            command.insert(1, b"a@nothing")
        found = shell('"$@"', *map(os.fsdecode, command), environ=environ)
        assert b"Traceback" not in found.stderr, found.stderr.decode(errors="replace")
        assert found.returncode == (1 if words[0] == "log" else 0), found
    outputs = Path(os.fsdecode(state), "out")
    assert "2ü.csv" in [file.read_text() for file in outputs.iterdir() if file.is_file()]
    assert Path(os.fsdecode(odd), "made").exists()


@pytest.mark.parametrize("given", [{}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "C.UTF-8"}, {"LANG": "C"}], ids=str)
def test_a_step_has_the_locale_that_the_worker_was_given(worker: MakeWorker, given: dict[str, str]) -> None:
    """
    Case N15: Python sets LC_CTYPE in its own environment where the locale is C; that is nobody else's.
    """
    w = worker("tasks: [{id: a, run: 'env | grep -E \"^(LC_|LANG)\" || :'}]")
    environ = {"PATH": os.environ["PATH"], **given}
    assert shell('"$@"', "run", str(w.config), "--state", str(w.state), environ=environ).returncode == 0
    assert dict(line.split("=", 1) for line in w.output("a").decode().splitlines()) == given


def test_a_cause_may_name_a_file_that_is_not_utf8(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case N15: what goes wrong is in the ledger, in escaped letters, and the run goes on.
    """
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    odd.mkdir()
    w = worker("", folder=".")
    w.config = odd / "list.yaml"
    w.config.write_text(
        "on_failure: continue\n"
        "tasks: [{id: a, run: 'true', cwd: ., expect: {file: f}, retry: {attempts: 1}}, {id: b, run: 'true'}]"
    )
    assert w.run() == 70
    assert [(row.step, row.outcome) for row in w.rows()] == [("a", "failed"), ("b", "done")]
    assert "\\udcff/f' is not there" in w.rows()[0].cause
