"""What a step's own code says to the worker, from Python and from the shell, and what it keeps."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import PATIENCE, ROOT
from tests.surroundings import Surroundings
from worker import step
from worker.stepcli import COMMANDS, USAGE


def script(around: Surroundings, code: str) -> subprocess.CompletedProcess[bytes]:
    return around.run("-c", f"from worker import step\n{code}")


@pytest.mark.parametrize(
    ("shell", "python", "message"),
    [
        (["beat"], "step.beat()", "WATCHDOG=1"),
        (["beat", "half way"], "step.beat('half way')", "WATCHDOG=1\nSTATUS=half way"),
        (["progress", "3"], "step.progress(3)", "X_AGENT_PROGRESS=3"),
        (["progress", "3/10"], "step.progress(3, 10)", "X_AGENT_PROGRESS=3/10"),
        (["spend", "0.12"], "step.spend(0.12)", "X_AGENT_SPEND=0.12"),
        (["spend", "3e-7"], "step.spend(3e-7)", "X_AGENT_SPEND=0.0000003"),
        (["retry-after", "2min"], "step.retry_after(120)", "X_AGENT_RETRY_AFTER=120"),
        (None, "step.status('half way')", "STATUS=half way"),
        (None, "step.extend(2.5)", "EXTEND_TIMEOUT_USEC=2500000"),
    ],
)
def test_messages_are_those_of_sd_notify(
    around: Surroundings, shell: list[str] | None, python: str, message: str
) -> None:
    """
    From the shell and from Python the same datagrams come, each read while its sender still lives.
    """
    around.listener.read_all()
    if shell:
        done = around.agentctl(*shell)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert script(around, python).returncode == 0
    assert set(around.messages) == {message}
    assert around.listener.unbelievable == []


def test_a_status_is_one_line(around: Surroundings) -> None:
    """
    What follows a line break would be a field of its own.
    """
    around.listener.read_all()
    around.agentctl("beat", "done\nX_AGENT_SPEND=9")
    assert around.messages == ["WATCHDOG=1\nSTATUS=done X_AGENT_SPEND=9"]


@pytest.mark.parametrize("code", [["-m", "worker", "spend", "1"], ["-c", "from worker import step; step.spend(1)"]])
def test_the_sender_lives_until_its_message_is_read(around: Surroundings, code: list[str]) -> None:
    """
    The worker believes only processes that it can see in the step, so nobody leaves before he was heard.
    """
    with around.start(*code) as process:
        around.listener.wait_for_one()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        around.listener.read_all()
        assert process.wait(PATIENCE) == 0
    assert around.listener.unbelievable == []


SAID = [
    (["spend", "0.12"], "X_AGENT_SPEND=0.12"),
    (["progress", "3/10"], "X_AGENT_PROGRESS=3/10"),
    (["retry-after", "2min"], "X_AGENT_RETRY_AFTER=120"),
    (["beat", "x"], "WATCHDOG=1\nSTATUS=x"),
]


@pytest.mark.parametrize(("command", "message"), SAID)
def test_what_a_worker_did_not_acknowledge_is_said_to_the_next_one(
    around: Surroundings, command: list[str], message: str
) -> None:
    """
    A worker that dies with the message closes the socket as one that has kept it does; an answer tells them apart.
    The message is the same one each time, by its id, so that it counts once.
    """
    around.environ["AGENT_ACK"] = "1"
    around.listener.answers += [b"", b"", b"+"]
    around.listener.read_all()
    done = around.agentctl(*command)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert len(around.messages) == 3 and len(set(around.messages)) == 1
    assert re.fullmatch(rf"{re.escape(message)}\nX_AGENT_ID=[0-9a-f]{{16}}", around.messages[0])
    assert around.listener.unbelievable == []


def test_spending_that_is_not_believed_does_not_succeed(around: Surroundings) -> None:
    """
    A command that says "it is in the ledger" by its status must not say so where nobody counts it.
    """
    around.environ["AGENT_ACK"] = "1"
    around.listener.answers += [b"-"]
    around.listener.read_all()
    done = around.agentctl("spend", "1")
    assert done.returncode == 75
    assert done.stderr == b"agentctl spend: no worker has acknowledged it, so 1 may not be counted\n"
    around.listener.close()
    assert around.agentctl("spend", "1").returncode == 75, "nobody will ever read it"


def test_progress_that_was_not_waited_for_is_told_again_at_the_end(around: Surroundings) -> None:
    """
    As what was reached, which changes nothing for a worker that knows of more.
    """
    around.environ["AGENT_ACK"] = "1"
    around.listener.answers += [b"", b"+"]
    around.listener.read_all()
    assert script(around, "step.progress(3, 10); step.progress(2, 10)").returncode == 0
    first, second, *last = around.messages
    assert (first, second) == ("X_AGENT_PROGRESS=3/10", "X_AGENT_PROGRESS=2/10")
    assert len(last) == 2 and len(set(last)) == 1
    assert last[0].startswith("X_AGENT_REACHED=3/10\nX_AGENT_ID=")


def test_a_worker_that_does_not_read_holds_nobody_up(around: Surroundings) -> None:
    """
    After a second the command goes on without it.
    """
    assert around.agentctl("beat").returncode == 0


def test_without_a_worker_nothing_happens_and_nothing_fails(around: Surroundings) -> None:
    """
    A script that is run by hand, or while the worker is being restarted, works as it does in a step.
    """
    around.listener.close()
    Path(around.listener.path).unlink()
    assert around.agentctl("beat").returncode == 0
    around.forget("NOTIFY_SOCKET", "STATE_DIRECTORY", "CREDENTIALS_DIRECTORY")
    for command in (["beat", "x"], ["progress", "1/2"], ["spend", "1"], ["retry-after", "1s"], ["load"], ["note"]):
        done = around.agentctl(*command)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), command
    done = around.agentctl("save", data=b"x")
    assert (done.returncode, done.stderr.count(b"\n")) == (0, 1)
    done = script(around, "step.save('x'); step.beat(); assert step.load() is None; assert step.note() == {}")
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["progress"], b"usage: agentctl progress N[/M]"),
        (["progress", "1", "2"], b"usage: agentctl progress"),
        (["progress", "x/3"], b"'x/3' is not N or N/M"),
        (["progress", "-1"], b"'-1' is not"),
        (["progress", "3/"], b"'3/' is not"),
        (["spend", "nan"], b"'nan' is not an amount"),
        (["spend", "-0.1"], b"'-0.1' is not an amount"),
        (["retry-after", "soon"], b"'soon' is not a time span"),
        (["retry-after", "infinity"], b"not a number"),
        (["beat", "half", "way"], b"usage: agentctl beat [STATUS]"),
        (["save", "../x"], b"'../x' is not a plain name"),
        (["save", ".hidden"], b"'.hidden' is not a plain name"),
        (["save"], b"nothing on standard input"),
        (["load", "a/b"], b"'a/b' is not a plain name"),
    ],
)
def test_bad_use_is_one_line(around: Surroundings, command: list[str], words: bytes) -> None:
    """
    What cannot be understood is said in one line, sends nothing and is never a traceback.
    """
    around.listener.read_all()
    done = around.agentctl(*command)
    assert done.returncode == USAGE
    assert words in done.stderr
    assert done.stderr.count(b"\n") == 1
    assert around.messages == []


def test_the_help_names_what_a_step_may_call(around: Surroundings) -> None:
    """
    `agentctl --help` lists them, and each explains itself.
    """
    listed = around.agentctl("--help").stdout.decode()
    for name in COMMANDS:
        assert f"\n  {name} " in listed
        assert around.agentctl(name, "--help").stdout.startswith(f"usage: agentctl {name}".encode())


def test_a_beat_costs_little_more_than_the_interpreter(around: Surroundings) -> None:
    """
    The modules that would double its price are not imported.
    """
    done = around.run("-I", "-S", "-c", _beat_and_list(), str(ROOT), "beat")
    imported = set(done.stdout.decode().split())
    assert "worker.step" in imported, done.stderr
    assert imported.isdisjoint({"argparse", "socket", "typing", "re", "enum", "json", "worker.errors"})


def _beat_and_list() -> str:
    return (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from worker.__main__ import main; main(); print(*sys.modules)"
    )


def test_what_is_saved_is_there_for_the_next_attempt(around: Surroundings) -> None:
    """
    Bytes come back as they were, from either side; JSON as its value.
    """
    around.listener.read_all()
    data = bytes(range(256)) * 4000
    assert around.agentctl("load").stdout == b""
    assert around.agentctl("save", data=data).returncode == 0
    assert around.agentctl("load").stdout == data
    done = script(around, "step.save({'page': 3}, 'place'); step.save('é', 'text'); assert len(step.load()) == 1024000")
    assert done.returncode == 0, done.stderr
    assert json.loads(around.agentctl("load", "place").stdout) == {"page": 3}
    assert script(around, "assert step.load_json('place')['page'] == 3").returncode == 0
    assert around.agentctl("load", "text").stdout.decode() == "é"


def test_a_save_that_is_cut_off_leaves_the_old_state(around: Surroundings) -> None:
    """
    Killed in the middle, or fed by a program that failed, it replaces nothing.
    """
    around.agentctl("save", data=b"old")
    with around.start("-m", "worker", "save") as process:
        assert process.stdin is not None
        process.stdin.write(b"new" * 1_000_000)  # returns when most of it has been read
        process.send_signal(signal.SIGKILL)
        process.stdin = None
        assert process.wait(PATIENCE) == -signal.SIGKILL
    assert around.agentctl("save").returncode == USAGE
    assert around.agentctl("load").stdout == b"old"
    assert around.agentctl("save", data=b"newer").returncode == 0
    assert around.agentctl("load").stdout == b"newer"


def test_the_note_is_readable_from_every_side(around: Surroundings, tmp_path: Path) -> None:
    """
    Case M7: for people, as JSON, field by field and from Python; and nothing on a first attempt.
    """
    note = {"attempt": 1, "cause": "sent no WATCHDOG=1 for 45s", "last_lines": ["one", "two"], "progress": None}
    path = tmp_path / "note.json"
    around.environ["AGENT_NOTE"] = str(path)
    assert around.agentctl("note", "cause").stdout == b""

    path.write_text(json.dumps(note))
    assert around.agentctl("note").stdout.decode() == (
        "attempt: 1\ncause: sent no WATCHDOG=1 for 45s\nlast lines:\n  one\n  two\n"
    )
    assert json.loads(around.agentctl("note", "--json").stdout) == note
    assert around.agentctl("note", "last_lines").stdout == b"one\ntwo\n"
    assert around.agentctl("note", "progress").stdout == b"\n"
    unknown = around.agentctl("note", "causes")
    assert (unknown.returncode, unknown.stderr.count(b"\n")) == (USAGE, 1)
    assert b"it has attempt, cause" in unknown.stderr
    assert script(around, "assert step.note()['last_lines'] == ['one', 'two']").returncode == 0


def test_again_ends_with_75_and_its_last_words_are_heard(around: Surroundings) -> None:
    """
    A step that wants to be started afresh says why in its log; what it sent just before is believed.
    """
    around.listener.read_all()
    done = script(around, "step.progress(7, 9)\nstep.again('the context is full')")
    assert (done.returncode, done.stderr) == (step.AGAIN, b"the context is full\n")
    assert around.messages == ["X_AGENT_PROGRESS=7/9"]
    assert around.listener.unbelievable == []


def test_a_secret_comes_without_its_newline_or_not_at_all(around: Surroundings) -> None:
    """
    A file made with an editor ends in a newline, which no header can hold.
    """
    (around.secrets / "token").write_text("s3cret\n")
    assert script(around, "assert step.secret('token') == 's3cret'").returncode == 0
    missing = script(around, "step.secret('tokens')")
    assert b"there is no secret 'tokens' here; add it to the task's 'secrets'" in missing.stderr


@pytest.mark.parametrize("number", [-1.0, float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(number: float) -> None:
    """
    A program learns at once that what it counted cannot be.
    """
    for say in (step.spend, step.progress, step.retry_after, step.extend):
        with pytest.raises(ValueError, match="not a number from 0 up"):
            say(number)
