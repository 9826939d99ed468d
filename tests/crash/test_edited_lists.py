"""The list is edited while something that it began has not ended well: that stays in sight until it is settled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT, Worker
from worker import report, settle

HEAD = (
    "run: edited\nconcurrency: 2\non_failure: continue\non_unknown: continue\ndefaults: {retry: {delay: 0s}}\ntasks:\n"
)
MANY = "  - {id: load, foreach: [x, y], redo: %s, run: 'echo at $AGENT_STEP >&2; %s'}\n"
ONE = "  - {id: load, redo: %s, run: 'echo at $AGENT_STEP >&2; %s'}\n"
NEEDS = "  - {id: last, needs: [load], run: 'echo last'}\n"


def told(w: Worker, *command: str) -> subprocess.CompletedProcess[str]:
    """Return what agentctl says of the worker's folder."""
    argv = [sys.executable, "-m", "worker", *command, "--state", str(w.state)]
    return subprocess.run(argv, env=w.environ, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("redo", ["never", "always"])
@pytest.mark.parametrize("before, after", [(MANY, ONE), (ONE, MANY)], ids=["many to one", "one to many"])
def test_a_begun_step_whose_task_changed_its_shape_holds_what_needs_it(
    worker: MakeWorker, before: str, after: str, redo: str
) -> None:
    """
    It may have happened, so what needs its task waits, the run is not done, and status counts it, until it is settled.
    """
    w = worker(HEAD + before % (redo, "sleep 300") + NEEDS)
    w.start().until("at load")
    w.kill()
    begun = sorted({row.step for row in w.rows()})
    w.config.write_text(HEAD + after % (redo, "true") + NEEDS)
    for _ in range(2):
        assert w.run() == 70
    assert "last" not in w.done()
    assert w.matching("load: .*begun steps? stays? in the plan although the task is (one step|many steps) now")
    found = report.look(str(w.state), None)
    assert found["steps"]["unknown"] == len(begun) and found["status"] == "failed"
    for name in begun:
        assert told(w, "settle", name, "--done").returncode == 0
    assert w.run() == 0
    assert w.done()[-1] == "last"
    found = report.look(str(w.state), None)["steps"]
    assert found["done"] == found["total"]


def test_a_step_of_the_old_shape_that_was_settled_as_not_done_leaves_the_plan(worker: MakeWorker) -> None:
    """
    Nothing had happened, and its task does the work anew in its new shape.
    """
    w = worker(HEAD + MANY % ("never", "sleep 300") + NEEDS)
    w.start().until("at load")
    w.kill()
    begun = sorted({row.step for row in w.rows()})
    w.config.write_text(HEAD + ONE % ("never", "true") + NEEDS)
    assert w.run() == 70
    for name in begun:
        settle.from_outside(str(w.state), None, name, None, "priya")
    assert w.run() == 0
    assert w.done() == ["load", "last"]


@pytest.mark.parametrize("ends", ["exit 0", "exit 3", "exit 75"])
def test_a_running_step_whose_task_changes_its_shape_runs_to_its_end(
    worker: MakeWorker, tmp_path: Path, ends: str
) -> None:
    """
    A reload lets it end; what needs it waits for that; it is never begun as what its task is now.
    """
    import signal

    wait = f"until test -e {tmp_path}/go; do sleep 0.02; done; {ends}"
    w = worker(HEAD + ONE % ("always", wait) + NEEDS, environ={"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    w.start().until("at load")
    w.config.write_text(HEAD + MANY % ("always", "true") + NEEDS)
    w.process.send_signal(signal.SIGHUP)
    w.until("load: 1 begun step stays in the plan")
    w.until("load@y: done")
    assert "last" not in w.done()
    (tmp_path / "go").touch()
    assert w.wait() == (0 if ends == "exit 0" else 70)
    assert len([row for row in w.rows() if row.step == "load"]) == 1
    assert ("last" in w.done()) == (ends == "exit 0")


@pytest.mark.parametrize("edit", ["removed", "renamed"])
@pytest.mark.parametrize("how", ["unknown", "killed", "stopped"])
def test_a_run_is_not_done_before_what_was_taken_out_of_it_is_settled(worker: MakeWorker, edit: str, how: str) -> None:
    """
    A step that must not be redone, and may have happened, is removed or renamed: 70 until it is settled, then 0.
    """
    keep = "  - {id: keep, run: echo kept}\n"
    old = "  - {id: old, redo: never, run: 'echo at old >&2; %s'}\n"
    w = worker(HEAD + keep + old % "sleep 300")
    w.start().until("at old")
    if how == "stopped":
        w.kill(15)
    else:
        w.kill()
    if how == "unknown":
        assert w.run() == 70
    w.config.write_text(HEAD + keep + (old % "true" if edit == "renamed" else "").replace("id: old", "id: new"))
    assert w.run() == 70
    assert w.matching("run edited: failed.*not settled: old")
    shown = told(w, "status", "--json")
    assert json.loads(shown.stdout)["status"] == "failed"
    assert told(w, "settle", "old", "--done").returncode == 0
    assert w.run() == 0
    found = json.loads(told(w, "status", "--json").stdout)
    total = 2 if edit == "renamed" else 1
    assert (found["status"], found["steps"]["done"], found["steps"]["total"]) == ("done", total, total)


KEYED = "  - {id: pay, %s redo: %s, run: 'echo $AGENT_KEY >> %s/keys; echo at pay >&2; %s'}\n"


@pytest.mark.parametrize("before, after", [("key: k-1,", "key: k-2,"), ("key: k-1,", ""), ("", "key: k-2,")])
@pytest.mark.parametrize("number", [9, 15])
@pytest.mark.parametrize("redo", ["always", "check, check: 'echo $AGENT_KEY >> asked; false'"])
def test_a_step_that_was_cut_off_keeps_its_key(
    worker: MakeWorker, tmp_path: Path, before: str, after: str, number: int, redo: str
) -> None:
    """
    The key in the list is another one at the next start: what has happened is known by the old one, and a line says so.
    """
    w = worker(HEAD + KEYED % (before, redo, tmp_path, "sleep 300"))
    w.start().until("at pay")
    w.kill(number)
    w.config.write_text(HEAD + KEYED % (after, redo, tmp_path, "true"))
    assert w.run() == 0
    keys = (tmp_path / "keys").read_text().split()
    assert len(keys) == 2 and keys[0] == keys[1], "an effect that may have happened was begun under another key"
    if "check" in redo:
        assert (w.state / "work/asked").read_text().split() == keys[:1]
    assert w.matching(f"pay: begun again under the key '{keys[0]}' of the attempt that was cut off")
    assert {row.key or "edited:pay" for row in w.rows()} == {keys[0]}


def test_a_step_that_failed_takes_the_key_of_the_list(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Its program has said that nothing is in doubt; so has a person who says --redo.
    """
    w = worker(HEAD + KEYED % ("key: k-1,", "never", tmp_path, "exit 3"))
    assert w.run() == 70
    w.config.write_text(HEAD + KEYED % ("key: k-2,", "never", tmp_path, "sleep 300"))
    w.start().until("pay: attempt [0-9]+ started|at pay")
    w.kill()
    w.config.write_text(HEAD + KEYED % ("key: k-3,", "never", tmp_path, "true"))
    assert w.run() == 70
    settle.from_outside(str(w.state), None, "pay", None, "priya")
    assert w.run() == 0
    keys = (tmp_path / "keys").read_text().split()
    assert set(keys) == {"k-1", "k-2", "k-3"} and keys[-1] == "k-3"


def test_a_key_that_changes_in_a_reload_counts_for_no_attempt_after_one_that_was_cut_off(
    worker: MakeWorker, tmp_path: Path
) -> None:
    """
    The step is ended by its limit, which leaves a doubt; the reload came while it ran.
    """
    import signal

    limit = "timeout: 1s, retry: {attempts: 2, delay: 0s},"
    w = worker(
        HEAD + KEYED % (f"key: k-1, {limit}", "always", tmp_path, "sleep 300"),
        environ={"NOTIFY_SOCKET": str(tmp_path / "nobody")},
    )
    w.start().until("at pay")
    w.config.write_text(HEAD + KEYED % (f"key: k-2, {limit}", "always", tmp_path, "sleep 300"))
    w.process.send_signal(signal.SIGHUP)
    assert w.wait() == 70
    assert set((tmp_path / "keys").read_text().split()) == {"k-1"}


@pytest.mark.parametrize("word", ["--done", "--redo"])
@pytest.mark.parametrize("redo", ["never", "always"])
def test_a_step_whose_worker_was_killed_can_be_settled_before_the_next_start(
    worker: MakeWorker, word: str, redo: str
) -> None:
    """
    It is not running: no worker lives.  What is left of its processes is ended first.
    """
    w = worker(HEAD + ONE % (redo, "sleep 300") + NEEDS)
    w.start().until("at load")
    w.kill()
    said = told(w, "settle", "load", word)
    assert said.returncode == 0, said.stderr
    w.config.write_text(HEAD + ONE % (redo, "true") + NEEDS)
    lines = len(w.lines)
    assert w.run() == 0
    assert len([line for line in w.lines[lines:] if "load: at load" in line]) == (word == "--redo")
    assert [row.outcome for row in w.rows() if row.step == "load"] == ["done" if word == "--done" else "redo", "done"][
        : 1 + (word == "--redo")
    ]


def test_a_step_that_runs_is_not_settled(worker: MakeWorker) -> None:
    """
    Its worker lives, and says so.
    """
    w = worker(HEAD + ONE % ("never", "sleep 300") + NEEDS)
    w.start().until("at load")
    said = told(w, "settle", "load", "--done")
    assert said.returncode != 0 and "this step is running" in said.stderr


@pytest.mark.parametrize("readable", [True, False])
def test_a_settled_step_that_was_renamed_counts_for_none_of_the_list(worker: MakeWorker, readable: bool) -> None:
    """
    Three tasks are three, right after the settlement and while the list cannot be read.
    """
    tasks = "  - {id: one, run: 'true'}\n  - {id: two, run: 'true'}\n"
    w = worker(HEAD + tasks + ONE % ("never", "sleep 300"))
    w.start().until("at load")
    w.kill()
    fails = "exit 3" if not readable else "true"
    w.config.write_text(HEAD + tasks + (ONE % ("never", fails)).replace("id: load", "id: fetch"))
    assert w.run() == 70
    assert told(w, "settle", "load", "--done").returncode == 0
    if not readable:
        w.config.write_text("tasks: wrong\n")
    found = json.loads(told(w, "status", "--json").stdout)["steps"]
    assert (found["total"], found["done"]) == (3, 3 if readable else 2)


@pytest.mark.parametrize("word, times", [("--done", 1), ("--redo", 2)])
def test_what_another_run_has_begun_is_named_until_it_is_settled(
    worker: MakeWorker, tmp_path: Path, word: str, times: int
) -> None:
    """
    The list has another name after kill -9: each start and status name the step, with a command that works as printed.
    """
    import shlex

    before = HEAD + KEYED % ("", "never", tmp_path, "sleep 300")
    w = worker(before)
    w.start().until("at pay")
    w.kill()
    w.config.write_text("run: other\ntasks: [{id: a, run: 'true'}]\n")
    command = f"agentctl settle pay --done --state {w.state}/runs/edited"
    for _ in range(2):
        lines = len(w.lines)
        w.run()
        assert [line for line in w.lines[lines:] if "run edited" in line and "'pay'" in line and command in line]
    shown = told(w, "status")
    assert command in shown.stdout
    assert json.loads(told(w, "status", "--json").stdout)["other_runs"][0]["step"] == "pay"
    argv = [sys.executable, "-m", "worker", *shlex.split(command.replace("--done", word))[1:]]
    done = subprocess.run(argv, env=w.environ, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "edited" not in told(w, "status").stdout
    w.config.write_text(before.replace("sleep 300", "true"))
    assert w.run() == 0, "the run that comes back cannot be taken out of the shelf"
    assert len((tmp_path / "keys").read_text().split()) == times
