"""Orders come from people: a step may neither raise its budget nor settle what is unknown (S8)."""

import sys

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT
from worker import cli

AGENTCTL = f"env PYTHONPATH={ROOT} {sys.executable} -m worker"
REFUSED = "a step cannot say this"
TASKS = f"""
budget: {{spend: 5}}
on_unknown: continue
tasks:
  - id: greedy
    run: |
      {AGENTCTL} budget --add spend=100 --state "$STATE" 2>&1
      {AGENTCTL} settle other --done mine --state "$STATE" 2>&1
      (setsid {AGENTCTL} budget --add spend=100 --state "$STATE" 2>&1 &) | cat
"""


def test_s8_a_step_raises_no_budget_and_settles_nothing(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Not even from a process that has left its session and its parent; what it asked for is refused with a clear word.
    """
    w = worker("")
    w.config.write_text(TASKS.replace("$STATE", str(w.state)))
    assert w.run() == 0
    said = (w.state / "out" / "greedy").read_text()
    assert said.count(REFUSED) == 3, said
    capsys.readouterr()
    cli.main(["budget", "--state", str(w.state)])
    assert "0 of 5" in capsys.readouterr().out


def test_a_person_raises_the_budget_of_a_run_at_work(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    w = worker("budget: {spend: 5}\ntasks: [{id: a, run: 'echo up >&2; while ! [ -e ../go ]; do sleep 0.02; done'}]")
    w.start().until("up$")
    assert cli.main(["budget", "--add", "spend=3", "--state", str(w.state)]) == 0
    (w.state / "go").touch()
    assert w.wait() == 0
    capsys.readouterr()
    cli.main(["budget", "--state", str(w.state)])
    assert "0 of 8" in capsys.readouterr().out
