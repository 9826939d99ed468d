"""What `make test` prints, and how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.__main__ import give_back
from tests.support import ROOT, ends, hear

pytestmark = pytest.mark.programs

DRIVER = """
import sys
from tests import __main__ as suite
def run(name):
    return suite.Run(name, 1, f"{sys.argv[1]}/test_{name}.py", "--rootdir", sys.argv[1], "-p", "no:cacheprovider")
suite.tiers = lambda *_: [run(name) for name in sys.argv[2:]]
sys.exit(suite.main([]))
"""
TESTS = {
    "good": "def test_good(): pass",
    "bad": "def test_bad(): assert not 1",
    "slow": """
import os, pathlib, subprocess
def test_slow():
    with subprocess.Popen(["sleep", "600"]) as sleeps:
        (pathlib.Path(__file__).parent / "fifo").write_text(f"{os.getpid()} {sleeps.pid}")
""",
}


def start(folder: Path, *names: str) -> subprocess.Popen[str]:
    os.mkfifo(folder / "fifo")
    for name in names:
        (folder / f"test_{name}.py").write_text(TESTS[name])
    command = [sys.executable, "-c", DRIVER, str(folder), *names]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_each_run_is_one_block_and_the_failures_are_the_last_thing_said(tmp_path: Path) -> None:
    """
    One that failed fails all; how long it takes is said first.
    """
    started = start(tmp_path, "bad", "good")
    lines = started.communicate(timeout=60)[0].splitlines()
    assert started.returncode == 1
    assert lines[0].startswith("tests: bad, good; about 1 min")
    assert len([line for line in lines if line.startswith(("-- bad, ", "-- good, "))]) == 2
    said = lines[lines.index("-- in all") + 1 :]
    assert (said[0].split(" in ")[0], said[2].split(" in ")[0]) == ("bad: 1 failed", "good: 1 passed")
    assert said[1].startswith("FAILED ") and "::test_bad" in said[1]


def test_a_signal_ends_every_run_and_what_it_has_started(tmp_path: Path) -> None:
    """
    Ctrl-C, or the end of make: exit status 130, when nothing of it is left.
    """
    started = start(tmp_path, "slow", "bad")
    pids = [int(pid) for pid in hear(tmp_path / "fifo", started).split()]
    started.send_signal(signal.SIGINT)
    said = started.communicate(timeout=60)[0]
    assert started.returncode == 130, said
    assert all(ends(pid) for pid in pids)
    assert "KeyboardInterrupt" in said and "-- in all" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_what_root_makes_in_the_folder_of_another_user_is_given_to_him(tmp_path: Path) -> None:
    """
    `sudo make test`: no file of root's stays in the checkout; a link is given, not what it points to.
    """
    (tmp_path / "ours/__pycache__").mkdir(parents=True)
    (tmp_path / "kept").touch()
    (tmp_path / "ours/link").symlink_to(tmp_path / "kept")
    os.chown(tmp_path / "ours", 1234, 1234)
    give_back(tmp_path / "ours")
    found = [os.lstat(tmp_path / name).st_uid for name in ("ours/__pycache__", "ours/link", "kept")]
    assert found == [1234, 1234, 0]
