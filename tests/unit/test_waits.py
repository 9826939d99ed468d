"""Waits at the start: a disk that is full or failing, a ledger that is locked; said, bounded, ended by SIGTERM."""

import contextlib
import signal
import sqlite3
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import Worker

LIST = "run: demo\ntasks:\n  - {id: a, run: echo a}\n"
# Lets a system call of the worker fail for as long as a file is there.
HOOK = """
import os, sys
from pathlib import Path
mkdir = os.mkdir
def failing(path, *args, **named):
    flag = Path(os.environ["FAIL"])
    if str(path).endswith("/work") and flag.exists():
        raise OSError(int(flag.read_text()), os.strerror(int(flag.read_text())), path)
    return mkdir(path, *args, **named)
if "worker" in sys.orig_argv:
    os.mkdir = failing
"""


@pytest.fixture
def failing(worker: MakeWorker, tmp_path: Path) -> tuple[Worker, Path]:
    """A worker whose first mkdir of work/ fails with the number in a file, while that is there."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    flag = tmp_path / "fail"
    w = worker(LIST, "w", {"FAIL": str(flag)})
    w.environ["PYTHONPATH"] += f":{tmp_path}/hook"
    return w, flag


@pytest.mark.parametrize("number", [28, 122, 5], ids=["ENOSPC", "EDQUOT", "EIO"])
def test_a_disk_that_is_full_at_the_start_is_waited_for(failing: tuple[Worker, Path], number: int) -> None:
    """
    Finding C7: a quota or an error that passes is no matter for a person.
    """
    w, flag = failing
    flag.write_text(str(number))
    w.start()
    assert "up to 6h" in w.until("waiting for (space|the disk)")
    flag.unlink()
    assert w.wait() == 0
    assert w.done() == ["a"]


def test_who_waits_obeys(failing: tuple[Worker, Path]) -> None:
    """
    Finding C8: SIGTERM ends the wait with 75 and a word, not with the signal.
    """
    w, flag = failing
    flag.write_text("28")
    w.start()
    w.until("waiting for space")
    assert w.kill(signal.SIGTERM) == 75
    assert w.matching("stopped while waiting for space")
    flag.unlink()
    assert w.run() == 0


def test_a_locked_ledger_is_called_one(worker: MakeWorker) -> None:
    """
    Finding E6: it is not space that is waited for.
    """
    w = worker(LIST)
    assert w.run() == 0
    w.config.write_text(LIST + "  - {id: b, run: echo b}\n")
    with contextlib.closing(sqlite3.connect(w.state / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        w.start()
        w.until("waiting for the program that has locked it")
        other.execute("ROLLBACK")
    assert w.wait() == 0
    assert w.done() == ["a", "b"]
