"""Errands: commands of the worker's own run beside the loop, and nothing of them outlives what it is for."""

import os
from pathlib import Path

import pytest

from tests.loop import ENV, Loop
from tests.support import alive, ends
from worker import errands, process


def test_a_report_has_the_status_and_the_end_of_what_was_printed(loop: Loop) -> None:
    loop.send("/bin/sh", "-c", "seq 100000; echo last >&2; exit 3")
    report = loop.finish()
    assert (report.status, report.timed_out) == (3, False)
    assert report.output.endswith(b"100000\nlast\n")
    assert len(report.output) <= 4096
    assert report.fault == "exited with status 3: last"


def test_one_that_went_well_has_no_fault(loop: Loop) -> None:
    loop.send("true")
    assert loop.finish().fault == ""


def test_one_that_takes_too_long_is_ended_with_what_it_started(loop: Loop, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    loop.send("/bin/sh", "-c", f"setsid sh -c 'echo $$ > \"{pid_file}\"; exec sleep 600' & sleep 600", timeout=0.5)
    report = loop.finish()
    assert report.timed_out
    assert "took longer" in report.fault
    assert ends(int(pid_file.read_text()))


def test_what_an_errand_leaves_behind_ends_with_it(loop: Loop) -> None:
    loop.send("/bin/sh", "-c", "sleep 600 & echo $!")
    left = int(loop.finish().output)
    assert ends(left)


def test_a_program_that_is_not_there_is_said_so_and_leaves_nothing_open(loop: Loop) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(process.SpawnError, match="not found"):
        loop.send("no-such-program")
    assert os.listdir("/proc/self/fd") == before
    assert not loop.errands.busy("copy")


def test_a_worker_that_ends_takes_its_errands_with_it(loop: Loop) -> None:
    pid = loop.send("sleep", "600")
    loop.errands.close()
    os.waitpid(pid, 0)
    assert not loop.reports


def test_what_a_dead_worker_left_is_ended_before_the_next_errand(loop: Loop, tmp_path: Path) -> None:
    left = loop.send("sleep", "600")
    heir = Loop(tmp_path)
    try:
        heir.send("true")
        heir.finish()
        assert ends(left)
    finally:
        heir.close()


def test_where_there_is_no_loop_an_errand_ends_with_its_time_as_well(tmp_path: Path) -> None:
    """
    With what it started in its session; what it printed is ours unless it is kept.
    """
    pid_file = tmp_path / "pid"
    argv = ["/bin/sh", "-c", f'sleep 600 & echo $! > "{pid_file}"; wait']
    report = errands.run(argv, ENV, "/", 0.5, keep_output=False)
    assert report.timed_out and report.fault.startswith("took longer than")
    assert ends(int(pid_file.read_text()))
    report = errands.run(["/bin/sh", "-c", "pwd; echo last >&2; exit 3"], ENV, str(tmp_path), 60.0, keep_output=True)
    assert report.output == f"{tmp_path}\nlast\n".encode()
    assert report.fault == "exited with status 3: last"
    with pytest.raises(process.SpawnError, match="cannot be started: No such file"):
        errands.run(["./missing"], ENV, "/", 60.0, keep_output=False)


def test_who_knows_that_nothing_is_left_does_not_look(loop: Loop, tmp_path: Path) -> None:
    """
    A look at every process of the machine is what a start under systemd does not pay for.
    """
    left = loop.send("sleep", "600")
    heir = Loop(tmp_path, leftovers=False)
    try:
        heir.errands.begin()
        assert alive(left)
    finally:
        heir.close()


def test_errands_of_another_state_folder_are_let_be(loop: Loop, tmp_path: Path) -> None:
    left = loop.send("sleep", "600")
    other = Loop(tmp_path / "other")
    try:
        other.send("true")
        other.finish()
        assert alive(left)
    finally:
        other.close()
