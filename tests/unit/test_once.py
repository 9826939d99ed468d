"""`agentctl once`: what it prints, how it ends, and what it leaves in the ledger."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.keeper import Gate, Keeper, end, read_until
from tests.support import ROOT
from worker.ledger import effects
from worker.stepcli import USAGE

MIB = 1024 * 1024
CONFLICT, NO_RESULT, NOT_NOW, UNKNOWN = 65, 74, 75, 76


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    made = Keeper(tmp_path_factory.mktemp("keeper"))
    yield made
    made.close()


@pytest.fixture
def keeper(kept: Keeper, tmp_path: Path) -> Keeper:
    return kept.use(tmp_path)


@pytest.fixture
def away(tmp_path: Path) -> Iterator[Keeper]:
    """One that was not started."""
    made = Keeper(tmp_path)
    made.counter.touch()
    yield made
    made.close()


@pytest.fixture
def gate(keeper: Keeper) -> Iterator[Gate]:
    made = Gate(keeper)
    yield made
    made.close()


def until(process: subprocess.Popen[bytes], words: str) -> None:
    assert process.stderr is not None
    read_until(process, process.stderr.fileno(), words)


def cut_off(keeper: Keeper, *words: str) -> None:
    """Leave 'k' claimed by somebody who is gone, and who had begun."""
    done = keeper.once("k", *words, "--parameters", "x", "--", "sh", "-c", "kill -9 $$")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr


# -- results


@pytest.mark.parametrize("size", [0, 1, 200_000, MIB])
def test_a_result_comes_back_byte_for_byte(keeper: Keeper, size: int) -> None:
    """
    What the command printed is printed by every later call, bytes that are no text as well.
    """
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    (keeper.cwd / "data").write_bytes(data)
    for outcome in (b"executed", b"skipped"):
        done = keeper.once("k", "--", "cat", "data")
        assert (done.returncode, done.stdout == data) == (0, True)
        assert outcome in done.stderr
    assert keeper.effect("k").result == data


def test_a_result_that_is_too_large_is_printed_once_and_known_to_be_lost(keeper: Keeper) -> None:
    """
    The call that makes it prints all of it; later ones say that it was not kept, and do not make it again.
    """
    words = ["k", "--", "head", "-c", str(MIB + 1), "/dev/zero"]
    first = keeper.once(*words)
    assert (first.returncode, len(first.stdout)) == (0, MIB + 1)
    again = keeper.once(*words)
    assert (again.returncode, again.stdout) == (NO_RESULT, b"")
    assert b"its output of 1048577 bytes was too large to be kept" in again.stderr
    assert (keeper.effect("k").result, keeper.effect("k").size) == (None, MIB + 1)


def test_nothing_is_printed_before_it_is_committed(keeper: Keeper) -> None:
    """
    Whoever reads the output may rely on it: no worker, no output, and no success.
    """
    code = "from worker import once; once._PATIENCE_AFTER = 0.3; from worker.stepcli import main; import sys; "
    words = ["once", "k", "--", "sh", "-c", f"kill -9 {keeper.pid}; echo done"]
    done = end(keeper.spawn("-c", f"{code}sys.exit(main({words!r}))"))
    assert (done.returncode, done.stdout) == (NOT_NOW, b"")
    assert b"the worker cannot be reached" in done.stderr
    assert b"it has happened, and that is not recorded" in done.stderr


# -- failures


def test_a_command_that_fails_has_not_happened(keeper: Keeper) -> None:
    """
    Its exit status is ours, what it printed goes to the log, and the next caller tries again.
    """
    failed = keeper.once("k", "--parameters", "x", "--", "sh", "-c", "echo no; exit 7")
    assert (failed.returncode, failed.stdout) == (7, b"")
    assert failed.stderr == b"no\nagentctl once: 'k': failed with exit status 7, so it did not happen\n"
    assert b"executed" in keeper.once("k", "--parameters", "x", "--", "true").stderr


@pytest.mark.parametrize(("name", "status"), [("./nothing", 127), ("no-such-program", 127), ("./effects", 126)])
def test_a_command_that_cannot_be_started_has_not_happened(keeper: Keeper, name: str, status: int) -> None:
    """
    As a shell has it: 127 if it is not there, 126 if it may not be run.
    """
    done = keeper.once("k", "--", name)
    assert (done.returncode, done.stderr.count(b"\n")) == (status, 1)
    assert f"cannot start '{name}'".encode() in done.stderr
    assert b"executed" in keeper.once("k", "--", "true").stderr


def test_the_same_key_for_something_else_is_refused(keeper: Keeper) -> None:
    """
    Other arguments, or a program where there was a command: nothing is done, nothing is returned.
    """
    keeper.once("k", "--", "echo", "ann")
    other = keeper.once("k", "--", "echo", "bob", step="b")
    assert (other.returncode, other.stdout) == (CONFLICT, b"")
    assert b"'k': stands for something else, which step 'a' claimed at" in other.stderr
    assert b"Conflict" in keeper.script("step.once('k', lambda: 1)").stderr
    keeper.until("conflict b k")


def test_parameters_stand_for_arguments_that_vary_without_harm(keeper: Keeper) -> None:
    """
    With --parameters the command's own arguments do not matter.
    """
    assert keeper.once("k", "--parameters", "to ann", "--", "echo", "1").stdout == b"1\n"
    assert keeper.once("k", "--parameters=to ann", "--", "echo", "2").stdout == b"1\n"
    assert keeper.once("k", "--parameters", "to bob", "--", "echo", "3").returncode == CONFLICT


# -- cut off


def test_a_command_that_was_cut_off_is_unknown_without_a_check(keeper: Keeper) -> None:
    """
    It is not guessed: the caller is told what a person has to do, and once told so by one, goes on.
    """
    cut_off(keeper)
    for _ in range(2):
        done = keeper.once("k", "--parameters", "x", "--", "true")
        assert (done.returncode, done.stdout) == (UNKNOWN, b"")
        assert b"agentctl settle 'k' --done [RESULT], or --redo" in done.stderr
    with keeper.effects() as store:
        store.settle("k", b"said so\n")
    assert keeper.once("k", "--parameters", "x", "--", "true").stdout == b"said so\n"


def test_redo_does_it_again(keeper: Keeper) -> None:
    """
    Where the receiver knows the key, a second time is no second effect.
    """
    cut_off(keeper)
    done = keeper.once("k", "--redo", "--parameters", "x", "--", "sh", "-c", 'echo "$AGENT_KEY"')
    assert (done.returncode, done.stdout, done.stderr) == (0, b"run:k\n", b"agentctl once: 'k': taken-over\n")


@pytest.mark.parametrize(
    ("check", "status", "outcome"),
    [
        ("echo it $AGENT_KEY", 0, "found"),
        ("echo no; exit 1", 0, "taken-over"),
        ("exit 2", NOT_NOW, ""),
        ("kill -9 $$", NOT_NOW, ""),
        ("no-such-program", NOT_NOW, ""),
    ],
)
def test_the_check_says_what_has_become_of_it(keeper: Keeper, check: str, status: int, outcome: str) -> None:
    """
    It had happened, and the result is what the check prints; it had not, and is done; or the check cannot tell, and
    everything stays as it is.
    """
    cut_off(keeper)
    done = keeper.once("k", "--check", check, "--parameters", "x", "--", "echo", "done")
    assert done.returncode == status
    assert done.stdout == {"found": b"it run:k\n", "taken-over": b"done\n", "": b""}[outcome]
    if outcome:
        keeper.until(f"{outcome} a k")
    else:
        assert b"so it cannot tell" in done.stderr
        assert b"found" in keeper.once("k", "--check", "true", "--parameters", "x", "--", "false").stderr


def test_a_check_is_not_asked_when_there_is_nothing_to_find_out(keeper: Keeper) -> None:
    """
    The first caller of all does it.
    """
    done = keeper.once("k", "--check", "touch asked", "--", "true")
    assert b"executed" in done.stderr
    assert not (keeper.cwd / "asked").exists()


# -- signals, surroundings


def test_sigterm_is_the_commands_to_obey(keeper: Keeper, gate: Gate) -> None:
    """
    A stop reaches every process of the step; what the command makes of it is recorded.
    """
    script = f"trap 'echo finished; exit 0' TERM; echo started >&2; while true; do {gate.COMMAND}; done"
    caller = keeper.begin("k", "--", "sh", "-c", script)
    until(caller, "started")
    caller.terminate()
    children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    gate.open()  # a shell runs its trap after the command that it waits for
    done = end(caller)
    assert (done.returncode, done.stdout) == (0, b"finished\n")
    assert keeper.effect("k").state == effects.COMMITTED


def test_who_is_stopped_while_waiting_has_done_nothing(keeper: Keeper, gate: Gate) -> None:
    """
    It gives up its place in line, and the others get the result.
    """
    words = ["k", "--", "sh", "-c", f"echo started >&2; {gate.COMMAND}; echo done"]
    holder = keeper.begin(*words)
    until(holder, "started")
    waiting = [keeper.begin(*words), keeper.begin(*words)]
    for caller in waiting:
        until(caller, "waiting for step 'a'")
    waiting[0].terminate()
    assert end(waiting[0]).returncode == -signal.SIGTERM
    gate.open()
    assert end(holder).stdout == end(waiting[1]).stdout == b"done\n"


def test_standard_input_and_error_are_the_commands(keeper: Keeper) -> None:
    """
    Only its output is kept back.
    """
    caller = keeper.begin("k", "--quiet", "--", "sh", "-c", "cat; echo log >&2")
    out, err = caller.communicate(b"fed")
    assert (out, err) == (b"fed", b"log\n")


def test_by_hand_it_just_runs(away: Keeper) -> None:
    """
    Outside a step nothing is recorded, and a line says so.
    """
    del away.environ["NOTIFY_SOCKET"]
    environ = {name: value for name, value in away.environ.items() if name != "AGENT_STEP"}
    for command, out in (
        (["-m", "worker", "once", "k", "--check", "false", "--", "sh", "-c", "echo x >> effects; exit 3"], b""),
        (["-c", "from worker import step; print(step.once('k', lambda: (1, 2)))"], b"[1, 2]\n"),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            env=environ,
            cwd=away.cwd,
            capture_output=True,
        )
        assert done.stdout == out
        assert done.stderr.endswith(b"'k': not in a step, so nothing is recorded\n")
    assert away.happened() == 1
    # A step's own variables, and no way to the worker: the effect must not go unguarded.
    lost = away.once("k", "--", "sh", "-c", "echo x >> effects")
    assert (lost.returncode, b"NOTIFY_SOCKET" in lost.stderr) == (1, True)
    assert away.happened() == 1


def test_a_worker_that_is_being_started_is_waited_for(away: Keeper) -> None:
    """
    A restart costs a caller a moment, no attempt.
    """
    caller = away.begin("k", "--", "echo", "done")
    away.start()
    assert end(caller).stdout == b"done\n"


def test_without_a_worker_nothing_is_done(away: Keeper) -> None:
    """
    The patience has an end: the step says "not now".
    """
    code = "from worker import once; once._PATIENCE_BEFORE = 0.2\n"
    words = ["once", "k", "--", "sh", "-c", "echo x >> effects"]
    done = end(away.spawn("-c", f"{code}import sys; from worker.stepcli import main; sys.exit(main({words!r}))"))
    assert (done.returncode, done.stdout, away.happened()) == (NOT_NOW, b"", 0)
    assert b"Unreachable" in away.script(f"{code}step.once('k', happen)").stderr
    assert away.happened() == 0


def test_a_step_that_does_not_run_gets_nothing_done(keeper: Keeper) -> None:
    """
    A process that outlived its step, or was never one, has no business with the step's effects.
    """
    done = keeper.once("k", "--", "sh", "-c", "echo x >> effects", step="dead")
    assert (done.returncode, keeper.happened()) == (1, 0)
    assert b"the worker refuses: step 'dead' is not running here" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], b"usage: agentctl once KEY"),
        (["k"], b"write the command behind '--'"),
        (["k", "--"], b"needs one KEY before '--' and a command"),
        (["--", "true"], b"needs one KEY before '--' and a command"),
        (["k", "l", "--", "true"], b"needs one KEY before '--' and a command"),
        (["", "--", "true"], b"'' is no key"),
        (["a\nb", "--", "true"], b"'a\\nb' is no key"),
        (["k" * 1025, "--", "true"], b"is no key: it must be one line of printable text, of 1024 bytes"),
        (["k", "--reddo", "--", "true"], b"there is no option '--reddo'"),
        (["k", "--check", "", "--", "true"], b"--check needs a value"),
        (["k", "--lease", "--", "true"], b"--lease needs a value"),
        (["k", "--lease", "soon", "--", "true"], b"'soon' is not a time span"),
        (["k", "--lease", "infinity", "--", "true"], b"a lease of inf s is not between 1 s and 30 days"),
    ],
)
def test_bad_use_is_one_line_and_runs_nothing(away: Keeper, words: list[str], said: bytes) -> None:
    """
    It is found before the worker is asked.
    """
    done = away.once(*words)
    assert (done.returncode, done.stderr.count(b"\n")) == (USAGE, 1)
    assert said in done.stderr


def test_a_committed_key_costs_little_more_than_a_beat(keeper: Keeper) -> None:
    """
    The modules that would double its price are not imported, nor is the ledger.
    """
    code = "import sys; from worker.__main__ import main; sys.argv[1:] = sys.argv[2:]; main(); print(*sys.modules)"
    for outcome in (b"executed", b"skipped"):
        done = end(
            keeper.spawn(
                "-I", "-c", f"import sys; sys.path.insert(0, sys.argv[1]); {code}", str(ROOT), "once", "k", "--", "true"
            )
        )
        assert outcome in done.stderr
    imported = set(done.stdout.decode().split())
    assert "worker.once" in imported
    unwanted = {"argparse", "socket", "typing", "re", "enum", "json", "signal", "hashlib", "contextlib", "subprocess"}
    assert imported.isdisjoint(unwanted | {"worker.errors", "worker.ledger", "worker.control"})
