"""A run that goes on from a copy: what may have happened after the copy was made is asked about, and not done twice."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT, Worker

AGENTCTL = f"'{sys.executable}' -m worker"
# The world keeps what was paid; `a` is done before the copy is made, the rest after it.
LIST = """
run: demo
tasks:
  - {id: a, run: echo a}
"""
PAY = """
  - {id: pay, run: 'echo paid >> ../world; echo receipt', redo: check, check: 'cat ../world'}
"""
NEVER = """
  - {id: pay, run: 'echo paid >> ../world', redo: never}
  - {id: z, run: echo z}
"""
ONCE = f"""
  - id: pay
    env: {{PYTHONPATH: '{ROOT}'}}
    run: |
      {AGENTCTL} once bill %s -- sh -c 'echo paid >> ../world; echo receipt'
"""

Lose = Callable[[Worker, Path], None]


def agentctl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "worker", *map(str, arguments)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def files_of(state: Path) -> list[Path]:
    return sorted(state.glob("ledger.db*"))


def lost(w: Worker, copy: Path) -> None:
    """The ledger is gone, and the checkpoint is older than it was."""
    for file in files_of(w.state):
        file.unlink()
    shutil.copy(copy / "checkpoint.json", w.state / "checkpoint.json")


def unreadable(w: Worker, copy: Path) -> None:
    (w.state / "ledger.db").write_bytes(b"no ledger" * 1000)
    shutil.copy(copy / "checkpoint.json", w.state / "checkpoint.json")


def restored(w: Worker, copy: Path) -> None:
    done = agentctl("restore", copy / "checkpoint.json", "--state", w.state, "--force")
    assert done.returncode == 0, done.stderr


def restored_ledger(w: Worker, copy: Path) -> None:
    done = agentctl("restore", copy / "ledger.db", "--state", w.state, "--force")
    assert done.returncode == 0, done.stderr


def elsewhere(w: Worker, copy: Path) -> None:
    """Only the checkpoint comes to another machine, by hand."""
    shutil.rmtree(w.state)
    w.state.mkdir()
    shutil.copy(copy / "checkpoint.json", w.state / "checkpoint.json")


WAYS = [lost, unreadable, restored, restored_ledger, elsewhere]


def after_the_copy(w: Worker, more: str, lose: Lose) -> Worker:
    """Let `more` be done after the copy was made, and then be lost."""
    text = w.config.read_text()
    assert w.run() == 0
    copy = w.state.parent / "copy"
    copy.mkdir()
    for name in ("checkpoint.json", "ledger.db"):
        done = agentctl("export", copy / name, "--state", w.state)
        assert done.returncode == 0, done.stderr
    w.config.write_text(text + more)
    assert w.run() == 0
    lose(w, copy)
    w.lines.clear()
    return w


def world(w: Worker) -> list[str]:
    path = w.state / "world"
    return path.read_text().split() if path.exists() else []


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def lose(request: pytest.FixtureRequest) -> Lose:
    way: Lose = request.param
    return way


def keep_world(lose: Lose) -> Lose:
    """The world is elsewhere: it stays whatever becomes of the state."""

    def act(w: Worker, copy: Path) -> None:
        kept = (w.state / "world").read_bytes()
        lose(w, copy)
        (w.state / "world").write_bytes(kept)

    return act


def test_a_step_with_a_look_up_is_asked_first(worker: MakeWorker, lose: Lose) -> None:
    """
    Finding C1: it is not known to have begun, so it may have; the line at the start says so, and how old the copy is.
    """
    w = after_the_copy(worker(LIST), PAY, keep_world(lose))
    assert w.run() == 0
    assert world(w) == ["paid"]
    assert w.output("pay") == b"paid\n", "what the check found is the result"
    (line,) = w.matching("a copy made at .* ago")
    assert "are asked before they begin" in line
    assert w.run() == 0
    assert len(w.matching("a copy made at")) == 1, "the run is done, and nothing of it is in doubt"


@pytest.mark.parametrize(("option", "status"), [("--check 'grep -q paid ../world'", 0), ("", 70)])
def test_an_effect_is_asked_about_first(worker: MakeWorker, lose: Lose, option: str, status: int) -> None:
    """
    Finding C1: `once --check` finds it; without a look-up it is unknown, and a person says what it came to.
    """
    w = after_the_copy(worker(LIST), ONCE % option, keep_world(lose))
    assert w.run() == status
    assert world(w) == ["paid"]
    if status:
        done = agentctl("settle", "bill", "--redo", "--state", w.state)
        assert done.returncode == 0, done.stderr
        assert w.run() == 0
        assert world(w) == ["paid", "paid"], "that is what the person said"


def test_what_nothing_can_tell_is_unknown(worker: MakeWorker, lose: Lose) -> None:
    """
    Finding C1: a step with `redo: never` is not guessed about; what comes before it is done.
    """
    more = "  - {id: b, run: echo b}\n" + NEVER
    w = after_the_copy(worker(LIST), more, keep_world(lose))
    assert w.run() == 70
    assert world(w) == ["paid"]
    assert w.done() == ["a", "b"]
    assert w.matching("pay: .*it may have happened after the copy made at .* ago")
    done = agentctl("settle", "pay", "--done", "--state", w.state)
    assert done.returncode == 0, done.stderr
    assert w.run() == 0
    assert w.done() == ["a", "b", "pay", "z"]
    assert world(w) == ["paid"]


@pytest.mark.parametrize("more", [NEVER, ONCE % ""])
def test_the_list_may_say_that_it_goes_on(worker: MakeWorker, more: str) -> None:
    """
    `after_restore: go`: what is not known to have begun is begun, as if there were no copy.
    """
    w = after_the_copy(worker("after_restore: go" + LIST), more, keep_world(restored))
    assert w.run() == 0
    assert world(w) == ["paid", "paid"]


def test_the_doubt_outlives_a_worker(worker: MakeWorker) -> None:
    """
    One that dies between the claim and the look-up has settled nothing.
    """
    slow = PAY.replace("'cat ../world'", "'echo asked; test -e ../go || sleep 600; cat ../world'")
    w = after_the_copy(worker(LIST), slow.replace("test -e ../go || sleep 600;", ""), keep_world(restored))
    w.config.write_text(LIST + slow)
    w.start()
    w.until("pay: asked")
    w.kill()
    (w.state / "go").touch()
    assert w.run() == 0
    assert world(w) == ["paid"]


def test_a_run_that_comes_from_no_copy_asks_nothing(worker: MakeWorker) -> None:
    w = worker(LIST + PAY.replace("cat ../world", "echo asked >> ../world"))
    assert w.run() == 0
    assert world(w) == ["paid"]
