"""Where a worker in the foreground keeps its state and its sockets, when the usual place cannot be had."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worker import folder
from worker.errors import CONFIG

ROOT = Path(__file__).resolve().parents[2]
LIST = "tasks:\n  - {id: a, run: 'echo \"$NOTIFY_SOCKET\"'}\n"


def run(
    tmp_path: Path, *more: str, user: int | None = None, python: str = sys.executable, **env: str
) -> subprocess.CompletedProcess[str]:
    command = [python, "-B", "-m", "worker", "run", f"{tmp_path}/list.yaml", *more]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, user=user)


def test_e7_a_state_folder_that_lies_deep_has_one_runtime_folder_for_ever(tmp_path: Path) -> None:
    """E7: the second start leaves no other one behind."""
    (tmp_path / "list.yaml").write_text(LIST)
    state = tmp_path / ("d" * 60) / ("e" * 60)

    sockets = []
    for _ in range(2):
        done = run(tmp_path, "--state", str(state))
        assert done.returncode == 0, done.stderr
        sockets.append(Path((state / "out/a").read_text().strip()))
        for name in ("ledger.db", "ledger.db.mark", "checkpoint.json", "out/a"):  # begin anew
            (state / name).unlink()

    (runtime,) = {socket.parent.parent for socket in sockets}
    assert str(runtime).startswith("/tmp/agent-") and runtime.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(runtime)


@pytest.mark.parametrize("kind", ["a link", "open to others"])
def test_e7_a_runtime_folder_that_others_may_use_is_not_used(tmp_path: Path, kind: str) -> None:
    """E7: its name can be guessed, and /tmp is everybody's."""
    state = str(tmp_path / ("d" * 60) / ("e" * 60))
    known = folder.prepare(state, None)
    os.rmdir(known)
    if kind == "a link":
        os.symlink(tmp_path, known)
    else:
        os.mkdir(known)
        os.chmod(known, 0o777)

    other = folder.prepare(state, None)

    assert other != known and os.stat(other).st_mode & 0o777 == 0o700
    os.rmdir(other)
    (os.unlink if kind == "a link" else os.rmdir)(known)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a user whom nobody knows")
def test_e12_without_a_home_the_way_out_is_named(tmp_path: Path) -> None:
    """E12: no HOME, and a user that the user database does not have: one line, and no folder called "~"."""
    (tmp_path / "list.yaml").write_text(LIST)
    for path in (*tmp_path.parents[:2], tmp_path):
        path.chmod(0o755)
    tmp_path.chmod(0o777)
    python, probe = "/usr/bin/python3", ["-Bc", "import yaml, worker.daemon"]
    if subprocess.run([python, *probe], user=54321, cwd=ROOT, capture_output=True).returncode != 0:
        pytest.skip("other users may not run a Python with our packages")

    done = run(tmp_path, user=54321, python=python)

    assert done.returncode == CONFIG
    assert done.stderr.count("\n") == 1 and "name one with --state DIR" in done.stderr
    assert not (tmp_path / "~").exists()
    done = run(tmp_path, "--state", f"{tmp_path}/state", user=54321, python=python)
    assert done.returncode == 0, done.stderr
