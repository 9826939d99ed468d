"""The time limit of a test."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, ends

pytestmark = pytest.mark.programs

HANGS = """
import os, subprocess, sys
import pytest
from pathlib import Path

@pytest.fixture
def slow_to_clean(tmp_path):
    yield
    os.mkfifo(tmp_path / "never")
    (tmp_path / "never").read_text()

def test_blocked_in_open_and_then_in_its_clean_up(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(["sleep", "1000"]) as started:
        Path("pid").write_text(str(started.pid))
        (tmp_path / "fifo").read_text()

def test_blocked_after_a_failure(slow_to_clean):
    assert not "sound"

def test_sound():
    pass
"""


def test_what_is_blocked_in_the_kernel_is_ended_at_its_limit(tmp_path: Path) -> None:
    """
    In open() of a FIFO, in the wait for a process, in a fixture after a failure; the next test runs.
    """
    (tmp_path / "test_it.py").write_text(HANGS)
    options = [f"--rootdir={tmp_path}", f"--config-file={ROOT}/pyproject.toml", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--timeout=1", "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert "2 failed, 1 passed, 1 error in" in done.stdout, done.stdout
    assert ends(int((tmp_path / "pid").read_text()))
