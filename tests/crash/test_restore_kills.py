"""SIGKILL of `agentctl restore` wherever it is: the old state or the new one, never a mix, and nothing lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT

HOOK = """
import os, signal
from worker import points
left = int(os.environ["KILL_AFTER"])
def at(point):
    global left
    if point.startswith("restore-"):
        left -= 1
        if left == 0:
            os.write(1, point.encode())
            os.kill(os.getpid(), signal.SIGKILL)
points.at = at
"""
TASKS = """
run: demo
tasks:
  - {id: s, foreach: {range: 1-5}, run: 'echo $AGENT_ITEM >> ../../starts; head -c 200000 /dev/zero'}
"""


@pytest.mark.parametrize("again", ["start", "restore"])
def test_sigkill_at_every_point_of_a_restore(worker: MakeWorker, tmp_path: Path, again: str) -> None:
    """
    Until it is decided the run goes on as if nothing had been; after that as it stands in the file.  Whether the next
    one is a start or the same restore again, every step is done once, and what was there before is kept.
    """
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    seen = []
    for after in range(1, 40):
        w = worker(TASKS + "  - {id: last, run: 'true'}\n", f"{again}-{after}")
        w.start()
        w.until("s@3: done")
        w.kill()
        old = _agentctl("export", "-", "--state", w.state)
        assert w.run() == 0
        point = _agentctl("restore", "-", "--force", "--state", w.state, data=old, hook=tmp_path / "hook", after=after)
        assert w.process.returncode == 0
        if not point.startswith(b"restore-"):
            break
        seen.append(point.decode())
        if again == "restore":
            _agentctl("restore", "-", "--force", "--state", w.state, data=old)
        starts = w.config.parent / "starts"
        starts.write_text("")
        w.lines.clear()
        assert w.run() == 0
        assert w.done() and sorted(w.done()) == ["last", *(f"s@{n}" for n in range(1, 6))]
        whole = point == b"restore-prepared" and again == "start"
        redone = [] if whole else [f"{n}" for n in range(1, 6) if f"s@{n}" not in _done(old)]
        assert starts.read_text().split() == redone
        assert w.matching("not here|set aside|cannot") == []
        assert all(w.output(f"s@{n}") == bytes(200_000) for n in range(1, 6))
        kept = list(w.state.glob("before-restore-*/ledger.db"))
        assert len(kept) == (not whole) + (again == "restore" and point != b"restore-prepared")
        assert whole or not [*w.state.glob("restoring-*"), *w.state.glob(".restore")]
    assert seen[:2] == ["restore-prepared", "restore-decided"]
    assert seen.count("restore-moved") >= 5 and seen.count("restore-placed") == 5


def _done(data: bytes) -> list[str]:
    from worker import checkpoint

    return [row.step for row, _ in checkpoint.parse(data).attempts if row.outcome == "done"]


def _agentctl(*arguments: str | Path, data: bytes = b"", hook: Path | None = None, after: int = 0) -> bytes:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{hook}" if hook else str(ROOT), "KILL_AFTER": str(after)}
    command = [sys.executable, "-m", "worker", *map(str, arguments)]
    done = subprocess.run(command, env=environ, input=data, capture_output=True, check=False)
    assert done.returncode in ((0, -9) if hook else (0,)), done.stderr
    return done.stdout
