"""What agentctl shows of a run from outside."""

from pathlib import Path

import pytest

from worker import report


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
