"""Case M5: the file that keeps the machine awake, in every state of a real worker."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.members import until
from tests.postgres import Server
from tests.support import ROOT, Worker

# The worker's own module, but for the time that a test has.
_HURRY = "import worker.awake\nworker.awake.EVERY = 0.2\n"
_OLD = 3600.0
MakeHasty = Callable[..., Worker]


@pytest.fixture
def hasty(worker: MakeWorker, tmp_path: Path) -> MakeHasty:
    """Make workers that refresh the file five times a second; it is called 'awake', beside the list."""
    hurry = tmp_path / "hurry"
    hurry.mkdir()
    (hurry / "sitecustomize.py").write_text(_HURRY)
    environ = {"PYTHONPATH": f"{hurry}:{ROOT}"}

    def make(tasks: str, folder: str = ".") -> Worker:
        return worker(f"keep_awake: awake\n{tasks}", folder, environ)

    return make


def is_kept(w: Worker) -> bool:
    """Return whether the file is there and is written again after it was made to look old."""
    path = w.config.parent / "awake"
    until(path.exists)
    then = time.time() - _OLD
    os.utime(path, (then, then))
    until(lambda: path.stat().st_mtime > then + _OLD / 2)
    said = json.loads(path.read_text())
    return bool(said["pid"] == w.pid)


def is_gone(w: Worker) -> bool:
    return not (w.config.parent / "awake").exists() and not (w.state / "keep-awake").exists()


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("tasks:\n  - {id: a, run: sleep 600}\n", "a: started"),
        ("tasks:\n  - {id: a, run: 'exit 1', retry: {delay: 1h, max_delay: 1h}}\n", "a: attempt 1 exited"),
        ("tasks:\n  - {id: a, run: 'exit 75', retry: {delay: 1h, max_delay: 1h}}\n", "a: attempt 1 .*not now"),
        (
            "tasks:\n  - {id: a, http: {url: 'http://127.0.0.1:9/'}, retry: {delay: 1h, max_delay: 1h}}\n",
            "a: attempt 1",
        ),
    ],
    ids=["running", "back-off", "not-now", "no-network"],
)
def test_it_is_fresh_while_there_is_work_and_gone_on_stop(hasty: MakeHasty, tasks: str, said: str) -> None:
    """
    Running, and in waits.
    """
    w = hasty(tasks)
    w.start().until(said)
    assert is_kept(w)
    assert w.kill(signal.SIGTERM) == 75
    assert is_gone(w)


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("exit 3", 70)])
def test_it_is_gone_at_the_end(hasty: MakeHasty, command: str, status: int) -> None:
    """
    Done or failed for good; and a start with nothing to do does not bring it back.
    """
    w = hasty(f"tasks:\n  - {{id: a, run: 'test -e ../../awake; {command}', retry: {{attempts: 1}}}}\n")
    w.start()
    w.until("a: (done|failed)")
    assert w.wait() == status
    assert is_gone(w)
    if status == 0:
        assert w.run() == 0
        assert is_gone(w)


def test_a_step_sees_it(hasty: MakeHasty) -> None:
    """
    It is there before the first step is.
    """
    w = hasty("tasks:\n  - {id: a, run: cat awake, cwd: ., retry: {attempts: 1}}\n")
    assert w.run() == 0
    assert json.loads(w.output("a"))["run"] == "list"


def test_a_worker_that_is_killed_leaves_it_to_the_next_one(hasty: MakeHasty) -> None:
    """
    Nobody keeps it fresh meanwhile.  The next worker does, and removes it at its end: also where there is nothing
    to do any more, or the list is wrong now.
    """
    w = hasty("tasks:\n  - {id: a, run: 'test $AGENT_ATTEMPT -gt 1 || sleep 600'}\n")
    w.start().until("a: started")
    until((w.config.parent / "awake").exists)
    w.kill()
    assert (w.config.parent / "awake").exists()
    assert w.run() == 0
    assert is_gone(w)

    for mistake in ("", "    cwd: nowhere\n"):
        (w.config.parent / "awake").write_text("x")
        (w.state / "keep-awake").write_text(f"{w.config.parent}/awake\n")
        w.config.write_text(f"tasks:\n  - id: a\n    run: 'true'\n{mistake}")
        assert w.run() in (0, 78)
        assert is_gone(w)


def test_another_path_is_taken_up_by_a_reload(hasty: MakeHasty) -> None:
    """
    And the file at the former one is gone.
    """
    w = hasty("tasks:\n  - {id: a, run: sleep 600}\n")
    w.environ["NOTIFY_SOCKET"] = "/nonexistent"  # SIGHUP is a reload then
    w.start().until("a: started")
    assert is_kept(w)
    w.config.write_text(w.config.read_text().replace("keep_awake: awake", "keep_awake: made/for/it/awake"))
    w.process.send_signal(signal.SIGHUP)
    w.until("the configuration was read again")
    until((w.config.parent / "made/for/it/awake").exists)
    until(lambda: not (w.config.parent / "awake").exists())
    w.kill(signal.SIGTERM)
    assert not (w.config.parent / "made/for/it/awake").exists()


def test_what_cannot_be_written_is_one_warning_and_no_hindrance(hasty: MakeHasty) -> None:
    """
    A folder in its place, and a file with something else in it, are left alone.
    """
    for folder in ("folder", "file"):
        w = hasty("tasks:\n  - {id: a, run: sleep 1}\n", folder)
        path = w.config.parent / "awake"
        if folder == "file":
            path.write_text("x" * 5000)
        else:
            path.mkdir()
        assert w.run() == 0
        assert len(w.matching("keep_awake: '.*' cannot be written: something else is there; going on")) == 1
        assert path.exists()


def test_one_that_was_there_before_is_ours(hasty: MakeHasty) -> None:
    """
    Sandboxes make it themselves sometimes: it is gone at the end like any other.
    """
    w = hasty("tasks:\n  - {id: a, run: 'true'}\n")
    (w.config.parent / "awake").touch()
    assert w.run() == 0
    assert is_gone(w)


def test_it_is_fresh_while_another_machine_has_the_step_and_while_the_server_is_away(
    hasty: MakeHasty, server: Server
) -> None:
    """
    The waits of a shared run.
    """
    tasks = f"run: awake\nledger: {server.empty_database()}\ntasks:\n  - {{id: a, run: sleep 600}}\n"
    one, other = hasty(tasks, "one"), hasty(tasks, "other")
    one.start().until("a: started")
    other.start().until("1 step,")
    assert is_kept(other)
    assert is_kept(one)
    server.stop()
    one.until("cannot be reached")
    other.until("cannot be reached")
    assert is_kept(one)
    assert is_kept(other)
    server.start()
    for w in (one, other):
        w.kill(signal.SIGTERM)
        assert is_gone(w)
