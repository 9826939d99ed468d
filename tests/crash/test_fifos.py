"""A step may put a FIFO where a file of the state folder was: nobody waits for who should write to it."""

import os
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.crash.test_standard_streams import agentctl

TASKS = "tasks: [{{id: a, run: 'seq 1 40000; seq 1 20000 >&2'}}, {{id: b, run: {0}}}]\nkeep_awake: {1}/awake\n"
NAMES = [
    "checkpoint.json", "ledger.db", "ledger.db.mark", "lock", "ended", "alert.json", "alerted", "last-words",
    "keep-awake", "paused", "log/.part-0", "log/.part-0.of", "log/a.1", "out/.part-0", "out/a", "run/control",
    "run/memo.0", "run/seen", "awake",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_fifo_in_the_state_folder_holds_nothing_up(worker: MakeWorker, tmp_path: Path, name: str) -> None:
    """
    Case N13: the next worker does its work, or names the file and how to go on; no command hangs.
    """
    w = worker(TASKS.format("exit 1", tmp_path / "state"))
    w.config.write_text(w.config.read_text().replace("run: exit 1", "run: exit 1, retry: {attempts: 1}"))
    assert w.run() == 70
    path = w.state / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    w.config.write_text(TASKS.format("'true'", tmp_path / "state"))
    for words in (("status",), ("list",), ("log", "a", "--output"), ("log", "a"), ("export",)):
        assert b"Traceback" not in agentctl(*words, "--state", str(w.state)).stderr
    code = w.run()
    assert not w.matching("Traceback")
    assert (
        (code, w.lines[-1]) == (73, f"{path}: is no plain file; remove it: rm {path}") if name == "lock" else code == 0
    )
