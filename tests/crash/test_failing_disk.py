"""A disk that fails for a moment when the worker starts: the list is read once more (C7)."""

import subprocess
import sys
from pathlib import Path

from tests import tracing
from tests.support import ROOT
from worker.errors import CONFIG


def run(folder: Path, when: str) -> subprocess.CompletedProcess[str]:
    """Work on a list whose reads fail with EIO, those that `when` says of strace(1)'s --inject."""
    tracing.require()
    config = folder / "list.yaml"
    config.write_text("tasks: [{id: a, run: 'true'}]\n")
    inject = ["strace", "-qq", "-o", "/dev/null", "-P", str(config), f"--inject=read:error=EIO:when={when}"]
    worker = [sys.executable, "-m", "worker", "run", str(config), "--state", str(folder / "state")]
    return subprocess.run(
        [*inject, *worker],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_c7_a_list_that_could_not_be_read_for_a_moment_is_read(tmp_path: Path) -> None:
    found = run(tmp_path, "1..3")
    assert found.returncode == 0, found.stderr
    assert "done, 1 of 1" in found.stderr


def test_c7_a_list_that_can_never_be_read_is_for_a_person(tmp_path: Path) -> None:
    found = run(tmp_path, "1+")
    assert (found.returncode, "Input/output error" in found.stderr) == (CONFIG, True), found.stderr
