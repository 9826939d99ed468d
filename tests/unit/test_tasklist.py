"""A list that changes while it is worked on: it is taken in, or begun next, or refused aloud."""

import os
import signal
from pathlib import Path

from tests.conftest import MakeWorker
from tests.support import Worker

OLD = "run: old\ntasks:\n  - {id: a, run: 'read -r _ < %s'}\n"
NEXT = "run: next\ntasks:\n  - {id: b, run: echo b}\n"


def at_work(worker: MakeWorker, tmp_path: Path, more: str = "") -> tuple[Worker, Path]:
    """Return a worker in the middle of its only step, and the gate that lets the step end."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    w = worker(OLD % gate + more)
    w.start().until("a: started")
    return w, gate


def test_another_run_that_is_written_while_one_works_is_begun_at_its_end(worker: MakeWorker, tmp_path: Path) -> None:
    """
    F13: the worker ends with 75, at which systemd starts the next one, and says so.
    """
    w, gate = at_work(worker, tmp_path)
    w.config.write_text(NEXT)
    gate.write_text("\n")
    assert w.wait() == 75
    assert w.matching("run old: done, 1 of 1 step done")
    assert w.matching("the list is that of the run 'next' by now, which has not been begun; the next worker does")
    assert w.run() == 0
    assert w.done() == ["b"]


def test_another_run_that_a_reload_brings_is_begun_at_the_end(worker: MakeWorker, tmp_path: Path) -> None:
    """
    F13: what was said at the reload holds hours later.
    """
    w, gate = at_work(worker, tmp_path)
    w.kill()
    w.environ["NOTIFY_SOCKET"] = str(tmp_path / "nobody")  # SIGHUP is a reload then
    w.start().until("a: started, attempt 2")
    w.config.write_text(NEXT)
    w.process.send_signal(signal.SIGHUP)
    w.until("the list is that of the run 'next' by now; it is begun when this run has ended")
    gate.write_text("\n")
    assert w.wait() == 75


def test_another_run_is_not_begun_in_silence_when_the_old_one_has_failed(worker: MakeWorker, tmp_path: Path) -> None:
    """
    F13: a person has to look anyway, and hears of it.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    w = worker(f"run: old\ntasks:\n  - {{id: a, run: 'read -r _ < {gate}; exit 1', retry: {{attempts: 1}}}}\n")
    w.start().until("a: started")
    w.config.write_text(NEXT)
    gate.write_text("\n")
    assert w.wait() == 70
    assert w.matching("the list is that of the run 'next' by now, which has not been begun, since this one has failed")


def test_a_list_or_drop_in_that_is_wrong_at_the_end_is_no_success(worker: MakeWorker, tmp_path: Path) -> None:
    """
    F13: work that was dropped in with a mistake is left undone, and that is a configuration to mend (78).
    """
    w, gate = at_work(worker, tmp_path)
    folder = w.config.with_suffix(".d")
    folder.mkdir()
    (folder / "more.yaml").write_text("tasks:\n  - {id: c, rum: echo c}\n")
    gate.write_text("\n")
    assert w.wait() == 78
    assert w.matching("run old: done, 1 of 1 step done")
    assert w.matching("unknown key")
    (folder / "more.yaml").write_text("tasks:\n  - {id: c, run: echo c}\n")
    assert w.run() == 0
    assert w.done() == ["a", "c"]


def test_a_list_that_is_put_right_before_the_end_counts(worker: MakeWorker, tmp_path: Path) -> None:
    """
    F13: a mistake that was mended, or a name that was taken back, is forgotten.
    """
    w, gate = at_work(worker, tmp_path)
    right = w.config.read_text()
    w.kill()
    w.environ["NOTIFY_SOCKET"] = str(tmp_path / "nobody")
    w.start().until("a: started, attempt 2")
    for wrong, said in (("tasks: no\n", "the configuration is wrong"), (NEXT, "by now; it is begun when")):
        w.config.write_text(wrong)
        w.process.send_signal(signal.SIGHUP)
        w.until(said)
    w.config.write_text(right)
    gate.write_text("\n")
    assert w.wait() == 0


def test_work_that_comes_at_the_very_end_is_left_to_the_next_worker(worker: MakeWorker, tmp_path: Path) -> None:
    """
    F13: a drop-in that lands when the list was looked at for the last time.
    """
    w = worker("run: old\ntasks:\n  - {id: a, run: 'true'}\n")
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "from worker import folder\n"
        "leave = folder.leave\n"
        "def late(held):\n"
        "    leave(held)\n"
        f"    with open({str(w.config)!r}, 'a') as file:\n"
        "        file.write('  - {id: late, run: echo late}\\n')\n"
        "folder.leave = late\n"
    )
    path = w.environ["PYTHONPATH"]
    w.environ["PYTHONPATH"] = f"{path}:{hook}"
    assert w.run() == 75
    w.environ["PYTHONPATH"] = path
    assert w.run() == 0
    assert w.done() == ["a", "late"]
