"""Last words: what is known of an attempt that was cut off with its worker."""

import contextlib
import json
import time
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import PATIENCE, ROOT, Worker
from tests.unit.test_fromcopy import AGENTCTL, agentctl
from worker.ledger.sqlite import SqliteLedger

LIST = f"""
tasks:
  - id: a
    env: {{PYTHONPATH: '{ROOT}'}}
    run: |
      test -e ../go && {{ cp "$AGENT_NOTE" ../note; exit; }}
      %s
      echo a word; echo a line >&2
      {AGENTCTL} progress 3/10
      echo said
      sleep 600
"""


def cut_off(worker: MakeWorker, more: str = "") -> Path:
    """Let the worker be killed after the step has spoken, and the step begin again; return the state folder."""
    w = worker(LIST % more)
    w.start()
    w.until("a: said$")
    gives_up = time.monotonic() + PATIENCE
    while w.rows()[-1].progress != 3.0:  # it is durable a moment after it was said
        assert time.monotonic() < gives_up
    w.kill()
    (w.state / "go").touch()
    assert w.run() == 0
    return w.state


def test_the_next_attempt_is_told_what_the_last_one_said(worker: MakeWorker) -> None:
    """
    Findings N28 and F4: progress, time and lines as last known, whoever died.
    """
    state = cut_off(worker)
    note = json.loads((state / "note").read_text())
    assert note["progress"] == 3.0
    assert note["log"] == ["a line"]
    assert note["output"] == ["a word", "said"]
    assert note["elapsed"] is None or note["elapsed"] > 0
    done = agentctl("log", "a", "--state", state)
    assert "a line" in done.stdout
    assert "interrupted in 0s" not in done.stdout


def test_a_long_log_of_an_attempt_that_was_cut_off_is_kept(worker: MakeWorker) -> None:
    """
    Finding F4: all of it is in `agentctl log`, the end of it in the note.
    """
    state = cut_off(worker, "seq 1 30000 >&2")
    assert json.loads((state / "note").read_text())["log"][-2:] == ["30000", "a line"]
    done = agentctl("log", "a", "--state", state)
    assert "\n1\n2\n3\n" in done.stdout
    assert "30000\na line\n" in done.stdout


def test_the_words_of_another_attempt_are_not_its_last(worker: MakeWorker) -> None:
    """
    A slot is used again: what the step before has written there is not this one's.
    """
    w = worker(
        "tasks:\n  - {id: a, run: 'echo mine >&2; exit 1', retry: {attempts: 1}}\n"
        "  - {id: b, run: 'test -e ../go && cp $AGENT_NOTE ../note && exit; sleep 600'}\non_failure: continue\n"
    )
    w.start()
    w.until("b: started")
    w.kill()
    (w.state / "go").touch()
    w.run()
    note = json.loads((w.state / "note").read_text())
    assert (note["log"], note["output"], note["progress"]) == ([], [], None)


SAVE = f"""
run: demo
tasks:
  - id: a
    env: {{PYTHONPATH: '{ROOT}'}}
    run: |
      test -e ../go && {{ ls "$STATE_DIRECTORY"; {AGENTCTL} load; exit; }}
      echo twenty | {AGENTCTL} save
      head -c 70000 /dev/zero > "$STATE_DIRECTORY/weights"; chmod 640 "$STATE_DIRECTORY/weights"
      (umask 077; echo secret > "$STATE_DIRECTORY/token")
      sleep 600
"""


@pytest.mark.parametrize("name", ["checkpoint.json", "ledger.db"])
def test_what_a_step_has_saved_travels(worker: MakeWorker, tmp_path: Path, name: str) -> None:
    """
    Finding F3: a small file is there on the other machine, a large one is named, one of its owner alone stays.
    """
    w = worker(SAVE)
    w.start()
    w.until("a: started")
    gives_up = time.monotonic() + PATIENCE
    while len(saved(w)) < 2:
        assert time.monotonic() < gives_up
    assert agentctl("export", tmp_path / name, "--state", w.state).returncode == 0
    w.kill()
    other = worker(SAVE, "other")
    assert agentctl("restore", tmp_path / name, "--state", other.state).returncode == 0
    (other.state / "go").touch()
    assert other.run() == 0
    assert other.output("a") == b"state\ntwenty\n"
    assert other.matching(r"a: what it has saved is not here, .*: weights \(70000 bytes\)")


def saved(w: Worker) -> list[str]:
    with contextlib.closing(SqliteLedger.open(str(w.state / "ledger.db"), read_only=True)) as store:
        return [one.name for one in store.saved()]
