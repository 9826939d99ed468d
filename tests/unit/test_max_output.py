"""How much a step may print: what comes of one that prints more."""

import os
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from worker import config
from worker.errors import OK, STEP_FAILED, ConfigError
from worker.files import shown_size
from worker.task import MAX_OUTPUT


def largest(folder: Path) -> int:
    """The size of the largest file below `folder`, of those that are not the ledger's."""
    return max(
        (path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.name.startswith("ledger")),
        default=0,
    )


@pytest.mark.parametrize("stream", ["", ">&2"])
def test_what_prints_without_end_is_ended(worker: MakeWorker, stream: str) -> None:
    """
    S23: result or log; a counted failure that says which key it is, and nothing more than that is on the disk.
    """
    w = worker(
        "defaults: {retry: {attempts: 2, delay: 0}, max_output: 1M}\n"
        f"tasks: [{{id: flood, run: 'exec yes {stream}'}}]\n"
    )
    assert w.run() == STEP_FAILED
    rows = [row for row in w.rows() if row.step == "flood"]
    assert [(row.outcome, row.counted) for row in rows] == [("stalled", True), ("stalled", True)]
    assert "wrote more than its max_output of 1M" in rows[-1].cause
    assert largest(w.state) <= 1 << 20
    assert not (w.state / "out" / "flood").exists()


@pytest.mark.parametrize("run", ["head -c 1048577 /dev/zero", "head -c 1048577 /dev/zero >&2"])
def test_one_byte_too_many_is_never_done(worker: MakeWorker, run: str) -> None:
    """
    S23: a program that has ended by itself, with 0, before anybody saw how much it had written.
    """
    w = worker(f"tasks: [{{id: a, run: '{run}', max_output: 1M, retry: {{attempts: 1}}}}]\n")
    assert w.run() == STEP_FAILED
    assert "wrote more than its max_output of 1M" in w.rows()[-1].cause
    assert w.done() == []


@pytest.mark.parametrize("run", ["head -c 1048576 /dev/zero", "head -c 1048576 /dev/zero >&2"])
def test_as_much_as_it_may_is_done(worker: MakeWorker, run: str) -> None:
    """
    S23: to the byte.
    """
    w = worker(f"tasks: [{{id: a, run: '{run}', max_output: 1MiB, retry: {{attempts: 1}}}}]\n")
    assert w.run() == OK
    assert w.rows()[-1].output_size + w.rows()[-1].log_size == 1 << 20


def test_the_next_attempt_begins_anew(worker: MakeWorker, tmp_path: Path) -> None:
    """
    S23: nothing of what was too much is in the result of the attempt after it.
    """
    w = worker(
        "tasks:\n  - id: a\n    max_output: 100K\n    retry: {delay: 0}\n"
        f"    run: 'if mkdir {tmp_path}/first 2>/dev/null; then exec yes; fi; echo well'\n"
    )
    assert w.run() == OK
    assert w.output("a") == b"well\n"


@pytest.mark.parametrize("key", ["before", "after", "check"])
def test_what_else_a_step_runs_is_bounded_too(worker: MakeWorker, key: str, tmp_path: Path) -> None:
    """
    S23: what is run before and after it prints into the same log, what checks it into its result.
    """
    first = f"if mkdir {tmp_path}/first; then kill -9 $$; fi; true" if key == "check" else "true"
    w = worker(
        f"tasks:\n  - id: a\n    max_output: 100K\n    retry: {{attempts: 2, delay: 0}}\n"
        f"    run: '{first}'\n    {key}: 'exec yes'\n"
    )
    assert w.run() == STEP_FAILED
    assert "max_output of 100K" in w.rows()[-1].cause
    assert largest(w.state) <= 100 * 1024


def test_a_worker_that_comes_later_ends_it_too(worker: MakeWorker, tmp_path: Path) -> None:
    """
    S23: the bound is of all that the attempt has written, whoever read it.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    w = worker(
        "tasks:\n  - id: a\n    max_output: 100K\n    retry: {attempts: 1}\n"
        f"    run: 'head -c 90000 /dev/zero; echo begun >&2; read x <{gate}; head -c 90000 /dev/zero; sleep 1000'\n"
    )
    w.start().until("begun")
    w.kill()
    w.start()
    gate.write_text("go\n")
    w.wait()
    cause = [row for row in w.rows() if row.outcome][-1].cause
    assert "max_output of 100K" in cause or "interrupted" in cause or "worker" in cause
    assert largest(w.state) <= 100 * 1024


def settings(tmp_path: Path, text: str) -> config.Config:
    (tmp_path / "list.yaml").write_text(text)
    return config.load(str(tmp_path / "list.yaml"))


@pytest.mark.parametrize(
    ("value", "size"),
    [("1000", 1000), ("1K", 1024), ("3MiB", 3 << 20), ("2GB", 2 << 30), ("1T", 1 << 40), ("infinity", None)],
)
def test_sizes(tmp_path: Path, value: str, size: int | None) -> None:
    """
    S23: as in systemd's units; without the key there is a bound all the same.
    """
    assert settings(tmp_path, f"tasks: [{{id: a, run: x, max_output: {value}}}]").tasks[0].max_output == size
    found = settings(tmp_path, f"defaults: {{max_output: {value}}}\ntasks: [{{id: a, run: x}}]")
    assert found.tasks[0].max_output == size
    assert settings(tmp_path, "tasks: [{id: a, run: x}]").tasks[0].max_output == MAX_OUTPUT


@pytest.mark.parametrize("value", ["0", "-1", "1.5G", "1P", "much", "", "99999999999999", "1 G", "\u0661K"])
def test_no_sizes(tmp_path: Path, value: str) -> None:
    """
    S23: one line says where and what.
    """
    for text in (f"max_output: '{value}'", f"http: {{url: 'http://x', max: '{value}'}}, id: b"):
        with pytest.raises(ConfigError) as caught:
            entry = f"{{id: a, run: x, {text}}}" if "http" not in text else f"{{{text}}}"
            settings(tmp_path, f"tasks: [{entry}]")
        assert len(caught.value.problems) == 1
        assert "max" in str(caught.value)


@pytest.mark.parametrize(("size", "shown"), [(1000, "1000"), (1536, "1536"), (2048, "2K"), (16 << 30, "16G"), (0, "0")])
def test_a_size_is_shown_as_a_list_may_have_it(size: int, shown: str) -> None:
    """
    S23: so that what a message says can be copied.
    """
    assert shown_size(size) == shown
