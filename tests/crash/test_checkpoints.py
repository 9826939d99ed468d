"""SIGKILL of the worker while a child writes the checkpoint of a long run: the old one or the new one, whole."""

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import Worker, alive, hear
from tests.support import ends as gone
from worker import checkpoint

TASKS = "run: long\ntasks:\n  - {id: s, foreach: {range: 1-%s}, run: echo $AGENT_ITEM}\n%s"
LAST = "  - {id: last, run: sleep 600}\n"


def hook(w: Worker, tmp_path: Path, code: str) -> None:
    """Let the worker run `code` first; every run is a long one, then."""
    folder = tmp_path / "hook"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import os, signal, sys\nfrom worker import keeper, points, process\nkeeper._LARGE = 0\n" + code
    )
    w.environ["PYTHONPATH"] += f":{folder}"


def unhook(w: Worker) -> None:
    w.environ["PYTHONPATH"] = w.environ["PYTHONPATH"].partition(":")[0]


def end(child: int) -> None:
    if alive(child):
        os.kill(child, signal.SIGKILL)


def leftovers(w: Worker) -> list[str]:
    return [entry.name for entry in w.state.glob(".checkpoint*")]


@pytest.mark.parametrize("ends", [True, False], ids=["the child ends", "the child lives on"])
@pytest.mark.parametrize("point", ["file-written", "file-synced"])
def test_a_worker_that_dies_while_its_child_writes(
    worker: MakeWorker, tmp_path: Path, request: pytest.FixtureRequest, point: str, ends: bool
) -> None:
    """
    Case F12, too: the child that it has left can have its end before or after the next worker's; it puts nothing in
    place.  After the next start nothing of it is left, neither file nor process.
    """
    w = worker(TASKS % ("2", ""))
    assert w.run() == 0
    old = (w.state / "checkpoint.json").read_bytes()
    at, go = tmp_path / "at", tmp_path / "go"
    for path in (at, go):
        os.mkfifo(path)
    held = f"""
import sys; sys.path.insert(0, sys.argv[1])
import os
from worker import points, scribe
def hold(point):
    if point == {point!r}:
        with open({str(at)!r}, 'w') as file: file.write(str(os.getpid()))
        with open({str(go)!r}) as file: file.read()
points.at = hold
scribe.main(sys.argv[2:])
"""
    hook(w, tmp_path, f"process.ours = lambda _: (sys.executable, '-c', {held!r}, {w.environ['PYTHONPATH']!r})\n")
    w.config.write_text(TASKS % ("3", LAST))
    w.start()
    child = int(hear(at, w.process))
    request.addfinalizer(lambda: end(child))
    w.kill()
    assert (w.state / "checkpoint.json").read_bytes() == old
    if ends:
        go.write_text("")
        assert gone(child)
        assert leftovers(w) == [".checkpoint.json.next"]
        assert (w.state / "checkpoint.json").read_bytes() == old

    unhook(w)
    w.config.write_text(TASKS % ("4", LAST.replace("sleep 600", "echo")))
    assert w.run() == 0
    assert not alive(child)
    assert leftovers(w) == []
    found = checkpoint.load(str(w.state / "checkpoint.json"))
    assert [row for row, _ in found.attempts] == w.rows()
    assert found.header.facts["state"] == "done"


@pytest.mark.parametrize("point", ["file-renamed", "ledger-committed"])
def test_a_worker_that_dies_at_any_point_of_a_long_run(worker: MakeWorker, tmp_path: Path, point: str) -> None:
    """
    What stands there between two workers is whole, and knows nothing that the ledger does not know.
    """
    w = worker(TASKS % ("4", ""))
    hook(
        w,
        tmp_path,
        f"""
left = int(os.environ['KILL_AFTER'])
def at(point):
    global left
    left -= point == {point!r}
    if point == {point!r} and left == 0: os.kill(os.getpid(), signal.SIGKILL)
points.at = at
""",
    )
    kills = 0
    for after in range(1, 9):
        w.environ["KILL_AFTER"] = str(after)
        status = w.run()
        assert status in (0, -9), w.lines[-5:]
        kills += status == -9
        if (w.state / "checkpoint.json").exists():
            found = checkpoint.load(str(w.state / "checkpoint.json"))
            known = {(row.seq, row.step) for row in w.rows()}
            assert {(row.seq, row.step) for row, _ in found.attempts} <= known
    w.environ["KILL_AFTER"] = "-1"
    assert w.run() == 0
    assert kills >= 1, "the point was never reached"
    assert sorted(w.done()) == ["s@1", "s@2", "s@3", "s@4"]
    found = checkpoint.load(str(w.state / "checkpoint.json"))
    assert ([row for row, _ in found.attempts], found.header.facts["state"]) == (w.rows(), "done")
    assert leftovers(w) == []
