"""What agentctl shows of a run from outside."""

from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from worker import report


def test_a_list_of_another_run_says_nothing_of_this_one(worker: MakeWorker, capfd: pytest.CaptureFixture[str]) -> None:
    """
    Written but not started yet: the state is still that of the run before, with as many steps as that had.
    """
    w = worker("run: before\ntasks:\n  - {id: a, run: 'true'}\n  - {id: b, run: 'true'}\n")
    assert w.run() == 0
    w.config.write_text("run: after\nbudget: {spend: 1}\ntasks:\n  - {id: a, run: 'false'}\n")
    found = report.look(str(w.state), None)
    assert (found["run"], found["status"]) == ("before", "done")
    assert (found["steps"]["total"], found["steps"]["done"]) == (2, 2)
    assert found["budget"]["spend"]["limit"] is None
    report.show_list(str(w.state), None)
    listed = capfd.readouterr()
    assert [line.split()[:2] for line in listed.out.splitlines()] == [["done", "a"], ["done", "b"]]
    assert listed.err.endswith(f"{w.config}: is that of the run 'after' by now\n")


def test_a_plan_has_each_step_as_it_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Not as the programs of ours that requests and functions are run by.
    """
    path = tmp_path / "list.yaml"
    path.write_text(
        "tasks:\n"
        "  - {id: a, run: 'echo 1'}\n"
        "  - {id: b, run: [echo, '{item}'], foreach: [x]}\n"
        "  - {id: c, http: {method: PUT, url: 'http://h/{secret:s}'}}\n"
        "  - {id: d, http: {url: 'http://h/'}}\n"
        "  - {id: e, python: 'm:f', args: {n: 1}}\n"
    )
    report.show_plan(str(path))
    shown = capsys.readouterr().out.splitlines()
    assert shown == [
        "a\techo 1",
        "b@x\techo x",
        "c\thttp: PUT http://h/{secret:s}",
        "d\thttp: http://h/",
        "e\tpython: m:f",
    ]
