"""Python steps: one function, called in a process of its own."""

import json
import signal
from pathlib import Path

import pytest

from tests.support import PATIENCE, ROOT
from tests.surroundings import Surroundings
from worker import step
from worker.steps import secrets
from worker.steps.python import problem

JOBS = """
import asyncio, os, sys
from worker import step

def echo(**args):
    return args

def loud():
    print("printed")
    os.system("echo from a child")
    return {"é": 1}

def quiet():
    print("printed")

async def later():
    await asyncio.sleep(0)
    return "later"

def fail(text="no\\n"):
    def inner():
        raise ValueError(text)
    inner()

async def fail_later():
    fail("later")

def chained():
    try:
        {}["key"]
    except KeyError as exc:
        raise RuntimeError("second") from exc

def full():
    step.progress(3, 10)
    step.again("the context is full")

def leave(code):
    sys.exit(code)

def strange():
    return {1, 2}

def not_a_number():
    return float("nan")

def blab():
    raise RuntimeError("token is " + step.secret("token"))

def hang():
    step.beat()
    os.read(0, 1)

number = 3

class Trainer:
    @staticmethod
    def train(epochs):
        return epochs
"""


@pytest.fixture(autouse=True)
def jobs(around: Surroundings) -> None:
    (around.cwd / "jobs.py").write_text(JOBS)
    (around.cwd / "broken.py").write_text("import nowhere_to_be_found\n")
    (around.cwd / "typo.py").write_text("def f(:\n")


def spec(call: str, **args: object) -> str:
    return json.dumps({"call": call, "args": args})


@pytest.mark.parametrize(
    ("call", "args", "result"),
    [
        ("jobs:echo", {"n": 3, "deep": [{"x": None}]}, {"n": 3, "deep": [{"x": None}]}),
        ("jobs:later", {}, "later"),
        ("jobs:Trainer.train", {"epochs": 3}, 3),
        ("json:dumps", {"obj": 1}, "1"),
    ],
)
def test_the_result_is_json(around: Surroundings, call: str, args: dict[str, object], result: object) -> None:
    """
    What the function returns, awaited if need be, is the step's output.
    """
    done = around.program("python", spec(call, **args))
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout) == result


def test_what_is_printed_does_not_spoil_the_result(around: Surroundings) -> None:
    """
    Prints of the function and of its children go to the log; None is no result.
    """
    done = around.program("python", spec("jobs:loud"))
    assert done.stdout.decode() == '{"é": 1}\n'
    assert done.stderr == b"printed\nfrom a child\n"
    assert around.program("python", spec("jobs:quiet")).stdout == b""


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("jobs:trian", "there is no function 'trian' in {cwd}/jobs.py"),
        ("jobs:number", "there is no function 'number' in {cwd}/jobs.py"),
        ("jibs:train", "there is no module 'jibs' in {cwd}, nor among the installed packages"),
        ("jobs.sub:train", "there is no module 'jobs.sub' in {cwd}, nor among the installed packages"),
        ("jobs", "needs {{call: 'package.module:function', args: {{NAME: VALUE}}}}"),
        ("jobs:loud", "TypeError: loud() got an unexpected keyword argument 'epohcs'"),
        ("jobs:not_a_number", "TypeError: not_a_number() got an unexpected keyword argument 'epohcs'"),
    ],
)
def test_a_wrong_name_is_one_line(around: Surroundings, call: str, line: str) -> None:
    """
    What the user mistyped is no traceback.
    """
    done = around.program("python", spec(call, epohcs=1))
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == line.format(cwd=around.cwd) + "\n"


@pytest.mark.parametrize("call", ["jobs:strange", "jobs:not_a_number"])
def test_a_result_that_is_not_json_fails(around: Surroundings, call: str) -> None:
    """
    It says which function, and nothing half written comes out.
    """
    done = around.program("python", spec(call))
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().startswith(f"{call} returned what JSON cannot hold: ")


@pytest.mark.parametrize(
    ("call", "last", "frames"),
    [
        ("jobs:fail", "ValueError: no", ["in fail", "in inner"]),
        ("jobs:fail_later", "ValueError: later", ["in fail_later", "in fail", "in inner"]),
        ("jobs:chained", "RuntimeError: second", ["KeyError: 'key'", "in chained"]),
        ("broken:f", "ModuleNotFoundError: No module named 'nowhere_to_be_found'", ["broken.py", "line 1"]),
        ("typo:f", "SyntaxError", ["typo.py", "line 1"]),
    ],
)
def test_an_exception_is_a_short_traceback(around: Surroundings, call: str, last: str, frames: list[str]) -> None:
    """
    The user's frames and the reason; neither ours nor asyncio's.
    """
    done = around.program("python", spec(call))
    text = done.stderr.decode()
    assert (done.returncode, done.stdout) == (1, b"")
    assert last in text
    assert all(frame in text for frame in frames)
    assert str(ROOT) not in text and "asyncio" not in text


def test_a_long_traceback_is_cut_in_its_middle(around: Surroundings) -> None:
    """
    Where it began and how it ended stay.
    """
    done = around.program("python", spec("jobs:fail", text="line\n" * 500 + "the end"))
    lines = done.stderr.decode().splitlines()
    assert len(lines) <= 21
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "the end")


def test_exit_codes_pass_through(around: Surroundings) -> None:
    """
    sys.exit() in the function is the step's exit; step.again() is 75 and its message is believed.
    """
    assert around.program("python", spec("jobs:leave", code=7)).returncode == 7
    around.listener.read_all()
    done = around.program("python", spec("jobs:full"))
    assert (done.returncode, done.stderr) == (step.AGAIN, b"the context is full\n")
    assert around.messages == ["X_AGENT_PROGRESS=3/10"]
    assert around.listener.unbelievable == []


def test_placeholders_are_filled_in_the_process_and_secrets_masked(around: Surroundings) -> None:
    """
    Case J8: the command line names the secret, the function gets it, and a traceback does not tell it.
    """
    (around.secrets / "token").write_text("s3cret\n")
    wanted = spec("jobs:echo", who="{secret:token}", item="{item}/{key}", other="{nothing} {}")
    assert secrets(json.loads(wanted)) == ["token"]
    assert around.program("python", wanted).stderr == b"'{item}': this step has no item\n"
    around.environ["AGENT_ITEM"] = "a b"
    done = around.program("python", wanted)
    assert json.loads(done.stdout) == {"who": "s3cret", "item": "a b/run:step", "other": "{nothing} {}"}
    blabbed = around.program("python", spec("jobs:blab"))
    assert b"RuntimeError: token is {secret:token}" in blabbed.stderr
    assert b"s3cret" not in blabbed.stderr


def test_sigabrt_prints_where_it_hangs(around: Surroundings) -> None:
    """
    A watchdog's signal (WatchdogSignal=, systemd.service(5)) leaves a stack in the log.
    """
    with around.start(*around.command("python", spec("jobs:hang"))) as process:
        around.listener.wait_for_one()
        process.send_signal(signal.SIGABRT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGABRT
    assert b"in hang" in err


def test_the_module_can_be_started_by_its_name(around: Surroundings) -> None:
    """
    `python -m worker.steps.python SPEC`, and bad arguments are one line.
    """
    command = ("-m", "worker.steps.python")
    assert around.run(*command, spec("jobs:later")).stdout == b'"later"\n'
    done = around.run(*command, "{")
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


def test_what_can_be_known_before_the_run_is(around: Surroundings, tmp_path: Path) -> None:
    """
    Without importing the user's module: this one would fail.
    """
    cwd = str(around.cwd)
    assert problem("broken:f", cwd) is None
    assert problem("json.decoder:loads", cwd) is None
    assert problem("jobz:f", str(tmp_path / "not-yet-there")) is None
    assert problem("jobz:f", cwd) == f"there is no module 'jobz' in {cwd}, nor among the installed packages"
    for bad in ("jobs", "jobs:", ":f", "jobs:f:g", "a-b:f", "jobs:f()", "jobs/x:f", ""):
        assert "write it as 'package.module:function'" in str(problem(bad, cwd)), bad
