"""A person pauses the agent and lets it go on: nothing is lost, nothing runs meanwhile, no limit is charged."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import PATIENCE, ROOT, Worker
from worker import cli

# Writes one byte after the other, and ends once a file is there.
TICKING = "until [ -e ../go ]; do echo >>../ticks; sleep 0.02; done"
RUN = f"""
tasks:
  - {{id: a, timeout: 6s, run: 'echo up >&2; {TICKING}'}}
  - {{id: b, run: 'true'}}
"""


def say(w: Worker, *words: str) -> None:
    assert cli.main([*words, "--state", str(w.state)]) == 0


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def grows(path: Path) -> bool:
    """Return whether the file grows until we give up."""
    before, gives_up = size(path), time.monotonic() + PATIENCE
    while time.monotonic() < gives_up:
        if size(path) > before:
            return True
        time.sleep(0.01)
    return False


def stands(path: Path, seconds: float) -> bool:
    """Return whether the file is the same after so many seconds."""
    before = size(path)
    time.sleep(seconds)
    return size(path) == before


def status(w: Worker, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    capsys.readouterr()
    say(w, "status", "--json")
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_paused_step_stands_still_and_its_limits_too(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Longer than its timeout: it has used none of it.  The worker answers all the time, and says how it stands.
    """
    w = worker(RUN)
    w.start().until("up$")
    ticks = w.state / "ticks"
    assert grows(ticks)
    say(w, "pause")
    w.until("paused by")
    assert stands(ticks, 6.2)
    found = status(w, capsys)
    assert found["status"] == "running" and found["paused"]["at_work"] == "hold"  # type: ignore[index]
    say(w, "status")
    assert "agentctl resume --state" in capsys.readouterr().out
    say(w, "resume")
    assert grows(ticks)
    (w.state / "go").touch()
    assert w.wait() == 0
    assert [row.number for row in w.rows() if row.step == "a"] == [1]


def test_with_finish_the_steps_at_work_end_and_no_other_begins(worker: MakeWorker) -> None:
    w = worker(RUN)
    w.start().until("up$")
    say(w, "pause", "--finish")
    w.until("paused by")
    (w.state / "go").touch()
    w.until("a: done")
    assert stands(w.state / "ticks", 0.5) and w.done() == ["a"]
    say(w, "resume")
    assert w.wait() == 0 and w.done() == ["a", "b"]


def test_paused_is_paused_whichever_worker_comes(worker: MakeWorker) -> None:
    """
    A worker that is killed, and one that is started after the word was said, begin nothing.
    """
    w = worker(RUN)
    w.start().until("up$")
    say(w, "pause")
    w.until("paused by")
    w.kill(signal.SIGKILL)
    (w.state / "go").touch()
    w.start().until("paused by")
    assert stands(w.state / "ticks", 0.5) and w.done() == []
    say(w, "resume")
    assert w.wait() == 0 and w.done() == ["a", "b"]


def test_a_paused_agent_is_stopped_as_any_other(worker: MakeWorker) -> None:
    """
    Steps that are held still hear SIGTERM, and have their time to end.
    """
    w = worker("tasks: [{id: a, run: 'trap \"echo heard >../heard; exit 0\" TERM; echo up >&2; sleep 100 & wait'}]")
    w.start().until("up$")
    say(w, "pause")
    w.until("paused by")
    assert w.kill(signal.SIGTERM) == 75
    assert (w.state / "heard").read_text() == "heard\n"


def test_no_hours_are_used_while_everything_is_held(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    w = worker(f"budget: {{hours: 1}}\n{RUN}")
    w.start().until("up$")
    say(w, "pause")
    w.until("paused by")
    before = status(w, capsys)
    assert stands(w.state / "ticks", 1.0)
    after = status(w, capsys)
    assert before["budget"]["hours"] == after["budget"]["hours"]  # type: ignore[index]


def test_a_word_that_makes_no_sense_is_refused(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Where nothing was paused, and from a step.
    """
    w = worker(
        RUN.replace(
            "echo up", f"env PYTHONPATH={ROOT} {sys.executable} -m worker pause --state $AGENT_OUT/.. ; echo up"
        )
    )
    w.start()
    assert "a step cannot say this" in w.until("cannot say this")
    w.until("up$")
    assert cli.main(["resume", "--state", str(w.state)]) == 1
    assert "it is not paused" in capsys.readouterr().err
