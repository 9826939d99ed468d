"""The state folder, or the ledger in it, is taken from under a worker at work: it notices, and nothing is lost."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import Worker

# Three steps, one after the other; the second is at work until "go" is there.
LIST = """run: moved
tasks:
  - {id: a, run: 'echo a >> %(effects)s; echo result of a'}
  - {id: b, run: 'echo b >> %(effects)s; echo up >&2; until test -e %(effects)s.go; do sleep 0.02; done'}
  - {id: c, run: 'echo c >> %(effects)s'}
"""


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    made = tmp_path / "effects"
    made.touch()
    return made


def at_work(worker: MakeWorker, effects: Path) -> Worker:
    """Return a worker that is at the second step."""
    w = worker(LIST % {"effects": effects}, "here")
    w.start().until("b: up")
    return w


def go(effects: Path) -> None:
    effects.with_name("effects.go").touch()


def test_a_moved_state_folder_is_noticed_and_goes_on_where_it_was_moved(worker: MakeWorker, effects: Path) -> None:
    """
    The worker ends its step, says where the folder is now, and ends with 73; there the run goes on, done once.
    """
    w = at_work(worker, effects)
    there = w.state.with_name("there")
    w.state.rename(there)
    assert w.wait() == 73
    (said,) = w.matching(f"was moved to {there}")
    assert f"--state {there}" in said
    assert not w.state.exists()
    go(effects)
    w.state = there
    assert w.run() == 0
    assert effects.read_text() == "a\nb\nb\nc\n"
    assert [row.outcome for row in w.rows()] == ["done", "interrupted", "done", "done"]
    assert not w.rows()[1].counted, "a step that we have ended is no step that has failed"
    assert w.output("a") == b"result of a\n"


def test_a_second_worker_at_the_old_path_is_not_disturbed(
    worker: MakeWorker, effects: Path, request: pytest.FixtureRequest
) -> None:
    """
    The first one ends with 77, begins nothing, and removes nothing of the second one's.
    """
    w = worker(LIST % {"effects": effects}, "here")
    # Not so deep that the sockets would have to lie elsewhere, at a place for each path.
    short = Path(tempfile.mkdtemp(prefix="agent-moved-", dir="/tmp"))
    request.addfinalizer(lambda: shutil.rmtree(short))
    w.state = short / "state"
    w.start().until("b: up")
    os.kill(w.pid, 19)  # SIGSTOP: it looks around only when the second one is at work
    w.state.rename(w.state.with_name("there"))
    second = Worker(w.config.parent, w.config.read_text())
    second.state = w.state
    second.start().until("b: up")
    os.kill(w.pid, 18)
    assert w.wait() == 77
    assert w.matching("another worker, process [0-9]+, is at work at that path")
    assert (second.state / "run/control").exists()
    go(effects)
    assert second.wait() == 0
    assert second.done() == ["a", "b", "c"]
    assert effects.read_text() == "a\nb\na\nb\nc\n"


def test_a_state_folder_that_was_removed_is_named(worker: MakeWorker, effects: Path) -> None:
    """
    Nothing is made at its path, and no step is begun in it.
    """
    w = at_work(worker, effects)
    shutil.rmtree(w.state, ignore_errors=True)
    shutil.rmtree(w.state, ignore_errors=True)
    assert w.wait() == 73
    assert w.matching("was removed while the worker was at work")
    assert effects.read_text() == "a\nb\n"
    assert not w.state.exists()


@pytest.mark.parametrize("what", ["the ledger", "the ledger and its log", "the log", "all files"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_ledger_that_was_removed_or_replaced_loses_nothing_done(
    worker: MakeWorker, effects: Path, what: str, replaced: bool
) -> None:
    """
    The worker says so, begins nothing, and what was done is in checkpoint.json or the ledger: it is not done again.
    """
    w = at_work(worker, effects)
    names = {
        "the ledger": ["ledger.db"],
        "the ledger and its log": ["ledger.db", "ledger.db-wal", "ledger.db-shm"],
        "the log": ["ledger.db-wal"],
        "all files": [path.name for path in w.state.iterdir() if path.is_file()],
    }[what]
    for name in names:
        path = w.state / name
        if not path.exists():
            continue
        before = path.read_bytes()
        path.rename(path.with_name(name + ".away"))  # so that no new file has its number
        if replaced and name != "lock":
            path.write_bytes(before)
    assert w.wait() == 73
    assert w.matching("ledger.db.*: was removed or replaced while the worker was at work")
    go(effects)
    assert w.run() == 0
    assert effects.read_text() == "a\nb\nb\nc\n"
    assert w.output("a") == b"result of a\n"


def test_a_ledger_that_was_removed_keeps_the_result_of_a_step_that_ends_by_itself(
    worker: MakeWorker, effects: Path
) -> None:
    """
    A step that ends well while the worker ends is done, and is not done again.
    """
    w = worker(
        (LIST % {"effects": effects}).replace("echo up >&2;", 'echo up >&2; trap "echo kept; exit 0" TERM;'), "here"
    )
    w.start().until("b: up")
    (w.state / "ledger.db").unlink()
    assert w.wait() == 73
    go(effects)
    assert w.run() == 0
    assert effects.read_text().count("a\n") == 1
