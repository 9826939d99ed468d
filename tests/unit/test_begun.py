"""What the ledger has begun stays in the plan, whatever the world and the list have become meanwhile."""

import json
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.plans import plan_of, row
from tests.support import Worker
from worker import begun, config, plan, report, settle
from worker import board as boards
from worker.clock import Now
from worker.errors import AgentError
from worker.ledger import Row
from worker.plan import Plan

NOW = Now(wall=2000.0, monotonic=50.0)
# The first attempt moves its input away and hangs; a later one goes on if `again` lets it.
MOVES = (
    'if mv "$AGENT_ITEM" ../done/; then '
    "case $AGENT_ITEM in */b.csv) echo moved >&2; sleep 300;; esac; fi; test -e ../again"
)
LOAD = f"""run: inbox
defaults: {{retry: {{delay: 0s}}}}
tasks:
  - id: load
    foreach: {{glob: "in/*.csv"}}
    cwd: in
    run: '{MOVES}'
%s
  - {{id: report, needs: [load], run: echo report}}
"""


def inbox(worker: MakeWorker, tmp_path: Path, more: str = "    redo: always") -> Worker:
    """Return a worker whose second step was cut off when it had moved its input away."""
    for folder in ("in", "done"):
        (tmp_path / folder).mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.csv").touch()
    (tmp_path / "again").touch()
    w = worker(LOAD % more)
    w.start().until("csv: moved")
    w.kill()
    return w


def step(tmp_path: Path, name: str) -> str:
    return plan.step_id("load", f"{tmp_path}/in/{name}.csv")


def test_a_begun_step_whose_item_has_left_is_done_before_what_needs_it(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N6: its input is moved away when the worker dies; it is not left out, and nobody says that all is done without it.
    """
    w = inbox(worker, tmp_path)
    assert w.run() == 0
    assert w.done()[-3:] == [step(tmp_path, "b"), step(tmp_path, "c"), "report"]
    assert w.matching(r"load: 1 begun step stays in the plan although its item has left: load@")
    assert w.matching("run inbox: done, 3 of 3 steps done")


def test_a_begun_step_whose_item_has_left_fails_the_run_if_it_fails(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N6: it is not called done; a person who knows better says so, and what needs it goes on.
    """
    w = inbox(worker, tmp_path)
    (tmp_path / "again").unlink()
    assert w.run() == 70
    assert w.run() == 70, "it was forgotten at the next start"
    found = report.look(str(w.state), None)
    assert (found["status"], found["steps"]["failed"], found["steps"]["total"]) == ("failed", 1, 3)
    settle.from_outside(str(w.state), None, step(tmp_path, "b"), b"by hand", "priya")
    (tmp_path / "again").touch()
    assert w.run() == 0
    assert w.output(step(tmp_path, "b")) == b"by hand"
    assert w.done()[-1] == "report"


def test_a_begun_step_that_must_not_be_redone_is_unknown_although_its_item_has_left(
    worker: MakeWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    N6: what needs it waits for a person; totals are those of the plan.
    """
    w = inbox(worker, tmp_path, "    redo: never")
    assert w.run() == 70
    found = report.look(str(w.state), None)["steps"]
    assert (found["total"], found["done"], found["unknown"]) == (3, 0, 1)
    report.show_list(str(w.state), None)
    assert f"unknown  {step(tmp_path, 'b')}" in capsys.readouterr().out
    settle.from_outside(str(w.state), None, step(tmp_path, "b"), b"", "priya")
    assert w.run() == 0


def test_a_begun_step_is_asked_about_although_its_item_has_left(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N6: its check says that it had happened.
    """
    w = inbox(worker, tmp_path, """    check: test -e "../done/${AGENT_ITEM##*/}" && echo found""")
    assert w.run() == 0
    assert w.output(step(tmp_path, "b")) == b"found\n"


def test_a_begun_step_stays_when_the_list_is_read_again(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N6: while it runs its input is gone; a reload neither forgets it nor lets what needs it overtake.
    """
    import signal

    for folder in ("in", "done"):
        (tmp_path / folder).mkdir()
    for name in "bc":
        (tmp_path / "in" / f"{name}.csv").touch()
    w = worker((LOAD % "    redo: always").replace("sleep 300", "until test -e ../go; do sleep 0.02; done"))
    w.environ["NOTIFY_SOCKET"] = str(tmp_path / "nobody")  # SIGHUP is a reload then
    (tmp_path / "again").touch()
    w.start().until("csv: moved")
    w.process.send_signal(signal.SIGHUP)
    w.until("the configuration was read again: 3 steps")
    (tmp_path / "go").touch()
    assert w.wait() == 0
    assert w.done() == [step(tmp_path, "b"), step(tmp_path, "c"), "report"]


TWO = """run: two
defaults: {retry: {delay: 0s}}
on_failure: continue
tasks:
  - {id: keep, run: echo kept}
"""
OLD = "  - {id: old, run: 'echo begun >&2; sleep 300'}\n"


def test_a_begun_task_that_was_taken_out_is_named_until_it_is_settled(
    worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    N6: it is not run; that nobody knows whether it has happened is said at the start, at the end and by status.
    """
    w = worker(TWO + OLD)
    w.start().until("old: begun")
    w.kill()
    w.config.write_text(TWO)
    for _ in range(2):
        assert w.run() == 70, "a run is called done of which nobody knows whether all has happened"
    assert w.matching("old: no longer in the list, and nobody knows whether it has happened .attempt 1")
    assert w.matching("run two: failed, 1 of 1 step done; no longer in the list, and not settled: old")
    found = report.look(str(w.state), None)
    assert found["steps"]["total"] == found["steps"]["done"] == 1
    assert [(entry["step"], entry["attempt"], entry["doubt"]) for entry in found["unlisted"]] == [("old", 1, True)]
    report.show_status(str(w.state), None, as_json=False)
    assert "no longer in the list: old, attempt 1 interrupted" in capsys.readouterr().out
    report.show_list(str(w.state), None)
    assert "unknown  old" in capsys.readouterr().out
    settle.from_outside(str(w.state), None, "old", b"", "priya")
    assert report.look(str(w.state), None)["unlisted"] == []
    lines = len(w.lines)
    assert w.run() == 0
    assert not [line for line in w.lines[lines:] if "old" in line]


def test_a_task_that_was_taken_out_while_it_ran_is_named_at_the_end(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N6: a reload lets it run to its end; if that leaves it undone, the run says so.
    """
    import signal

    listed = TWO + "  - {id: old, run: 'echo begun >&2; until test -e ../go; do sleep 0.02; done; exit 3'}\n"
    w = worker(listed)
    w.environ["NOTIFY_SOCKET"] = str(tmp_path / "nobody")
    w.start().until("old: begun")
    w.config.write_text(TWO)
    w.process.send_signal(signal.SIGHUP)
    w.until("old: no longer in the list; it runs to its end")
    (w.state / "go").touch()
    assert w.wait() == 0
    assert w.matching("run two: done, 1 of 1 step done;")
    (left,) = report.look(str(w.state), None)["unlisted"]
    assert (left["step"], left["doubt"], left["cause"]) == ("old", False, "exited with status 3")


def test_counts_never_exceed_the_total(worker: MakeWorker, tmp_path: Path) -> None:
    """
    E3: done items have left, and the list cannot be read as it is now.
    """
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / name).touch()
    w = worker("run: e\ntasks:\n  - {id: load, foreach: {glob: 'in/*'}, run: 'true'}\n  - {id: last, run: 'true'}\n")
    assert w.run() == 0
    (tmp_path / "in" / "a").unlink()
    assert w.run() == 0
    w.config.write_text("run: e\ntasks: wrong\n")
    found = report.look(str(w.state), None)["steps"]
    assert (found["total"], found["done"], found["waiting"]) == (3, 3, 0)


def listed(folder: Path, tasks: str) -> Plan:
    (folder / "config.yaml").write_text(f"run: r\ntasks:\n{tasks}\n")
    return plan.build(config.load(str(folder / "config.yaml")))


def keep(after: Plan, *rows: Row) -> Plan:
    return begun.keep(after, boards.replay(after, rows, 0, NOW).left)


@pytest.mark.parametrize("outcome", [None, "interrupted", "failed", "stalled", "deferred", "again", "unknown", "redo"])
def test_whatever_became_of_it_a_begun_step_stays_at_its_place(tmp_path: Path, outcome: str | None) -> None:
    """
    N6: also one that has failed for good, waits for its next attempt, or that a person wants done again.
    """
    before = listed(tmp_path, "- {id: a, foreach: [x, y/z], run: 'true'}\n- {id: b, run: 'true'}")
    after = listed(tmp_path, "- {id: a, foreach: [x], run: 'true'}\n- {id: b, run: 'true'}")
    found = keep(after, row(1, "a@y-z", outcome, before))
    assert [s.id for s in found.steps] == ["a@x", "a@y-z", "b"]
    assert found.by_id["a@y-z"].item == "y/z"
    assert found.kept == {"a@y-z"}
    assert found.listing() == after.listing(), "it is no part of what other machines must have in common"


def test_what_is_done_leaves_with_its_item(tmp_path: Path) -> None:
    """
    As before: a done step is not in the way of anything.
    """
    before = listed(tmp_path, "- {id: a, foreach: [x, y], run: 'true'}")
    after = listed(tmp_path, "- {id: a, foreach: [x], run: 'true'}")
    assert keep(after, row(1, "a@y", "done", before)) is after


def test_an_item_whose_step_has_a_cut_id_is_known_from_the_ledger(tmp_path: Path) -> None:
    """
    N6: a path as item is soon too long for a file's name.
    """
    after = listed(tmp_path, "- {id: a, foreach: [x], run: 'true'}")
    name = plan.step_id("a", "y" * 300)
    assert keep(after, row(1, name, "failed", after, item="y" * 300)).by_id[name].item == "y" * 300


@pytest.mark.parametrize(
    "tasks", ["- {id: b, run: 'true'}", "- {id: a, run: 'true'}", "- {id: b, foreach: [y], run: 'true'}"]
)
def test_a_step_whose_task_was_taken_out_or_is_another_kind_is_not_run(tmp_path: Path, tasks: str) -> None:
    """
    N6: a person has done that; it is named (test_a_begun_task_that_was_taken_out...).
    """
    after = listed(tmp_path, tasks)
    found = boards.replay(after, [row(1, "a@y", "failed", after)], 0, NOW)
    assert begun.keep(after, found.left) is after
    assert [left.step for left in begun.unlisted(after, found.left, ())] == ["a@y"]


def test_a_task_that_has_items_now_does_not_run_the_step_that_had_none(tmp_path: Path) -> None:
    """
    N6: nobody knows which item it would be.
    """
    after = listed(tmp_path, "- {id: a, foreach: [x], run: 'true'}")
    found = boards.replay(after, [row(1, "a", None, plan_of("a"))], 0, NOW)
    kept = begun.keep(after, found.left)
    assert begun.misfit(kept.by_id["a"]) and kept.by_id["a"].task.redo == "never"
    assert set(begun.without_misfits(kept).by_id) == set(after.by_id)
    assert [(left.step, left.doubt) for left in begun.unlisted(after, found.left, ())] == [("a", True)]


def test_an_item_that_moved_to_another_task_with_its_key_is_that_task_s(tmp_path: Path) -> None:
    """
    N6: two steps with one key would do one effect twice.
    """
    before = listed(tmp_path, "- {id: a, foreach: [x, y], key: 'k-{item}', redo: never, run: 'true'}")
    after = listed(
        tmp_path,
        "- {id: a, foreach: [x], key: 'k-{item}', redo: never, run: 'true'}\n"
        "- {id: b, foreach: [y], key: 'k-{item}', redo: never, run: 'true'}",
    )
    assert keep(after, row(1, "a@y", None, before, key="k-y")) is after


@pytest.mark.parametrize("item", ["x", "a/b", ".hidden", "-", "ä ö", "a\\x2db", "100%", "~", "a" * 300])
def test_an_item_is_known_again_from_the_id_of_its_step_if_that_was_not_cut(item: str) -> None:
    """
    What the ledger of an older version has nothing else of.
    """
    name = plan.step_id("task", item)
    assert plan.item_of(name) == (None if len(item) > 200 else item)


def test_settling_what_is_not_begun_or_done_is_refused(worker: MakeWorker) -> None:
    """
    A person's word is for what was tried and is not done.
    """
    w = worker("run: s\ntasks:\n  - {id: a, run: 'true'}\n  - {id: b, run: 'false', retry: {attempts: 1}}\n")
    assert w.run() == 70
    for name in ("a", "c"):
        with pytest.raises(AgentError):
            settle.from_outside(str(w.state), None, name, b"", "priya")
    settle.from_outside(str(w.state), None, "b", None, "priya")
    assert json.dumps(report.look(str(w.state), None)["steps"]["waiting"]) == "1"


@pytest.mark.parametrize("waits", ["exit 75", "exit 1"])
def test_steps_that_wait_hold_no_place_when_there_are_several(worker: MakeWorker, waits: str) -> None:
    """
    N27: two that wait a minute for their next attempt do not hold up the third.
    """
    w = worker(
        "run: n27\nconcurrency: 2\ndefaults: {retry: {delay: 60s, max_delay: 60s}}\ntasks:\n"
        f"  - {{id: a, run: '{waits}'}}\n  - {{id: b, run: '{waits}'}}\n  - {{id: c, run: echo c}}\n"
    )
    w.start().until("c: done")
    assert w.kill(15) == 75
    assert w.done() == ["c"]


def test_what_is_defined_otherwise_is_said_once_and_in_one_line_a_task(worker: MakeWorker) -> None:
    """
    F15: three thousand steps are no three thousand lines, and not again at each start.
    """
    before = "run: f15\ntasks:\n  - {id: w, foreach: {range: 1-30}, run: 'true'}\n  - {id: a, run: 'true'}\n"
    w = worker(before)
    assert w.run() == 0
    w.config.write_text(before.replace("run: 'true'", "run: 'echo 2'"))
    for _ in range(2):
        assert w.run() == 0
    assert [line.partition(" than")[0] for line in w.matching("defined otherwise")] == [
        "w: 30 steps are defined otherwise",
        "a: 1 step is defined otherwise",
    ]
    w.config.write_text(
        before.replace("run: 'true'", "run: 'echo 3'", 1).replace("id: a, run: 'true'", "id: a, run: x")
    )
    assert w.run() == 0
    assert len(w.matching("defined otherwise")) == 4, "another change is news"
    w.config.write_text(before)
    assert w.run() == 0
    assert len(w.matching("defined otherwise")) == 4


def test_many_tasks_that_are_defined_otherwise_are_one_line(worker: MakeWorker) -> None:
    """
    F15: a change in `defaults:` concerns every task.
    """
    tasks = "run: f15\ntasks:\n" + "".join(f"  - {{id: t{n}, run: 'true'}}\n" for n in range(40))
    w = worker(tasks)
    assert w.run() == 0
    w.config.write_text(f"defaults: {{env: {{A: b}}}}\n{tasks}")
    for _ in range(2):
        assert w.run() == 0
    (line,) = w.matching("defined otherwise")
    assert line.startswith("t0 and 39 more tasks: 40 steps are defined otherwise")


def test_an_empty_inbox_holds_nothing_up_and_is_worked_through_when_it_is_full(
    worker: MakeWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    N8: what needs it goes on, the end is a success, and tomorrow's files are found.
    """
    (tmp_path / "in").mkdir()
    tasks = "run: inbox\ntasks:\n  - {id: load, foreach: {glob: 'in/*.csv'}, run: 'true'}\n"
    w = worker(tasks + "  - {id: report, needs: [load], run: echo report}\n")
    assert w.run() == 0
    assert w.done() == ["report"]
    assert len(w.matching("foreach: nothing matches .*; the task 'load' has no steps of its own now")) == 1
    found = report.look(str(w.state), None)["steps"]
    assert (found["total"], found["done"]) == (1, 1)
    report.check(str(w.config), "agent", installed=False)
    assert "nothing matches" in capsys.readouterr().err
    (tmp_path / "in" / "a.csv").touch()
    assert w.run() == 0
    assert w.done() == ["report", step(tmp_path, "a")]


def test_a_list_that_has_no_steps_today_has_nothing_to_do(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N8: also when nothing else is in it, and when its only item has been done and moved away.
    """
    (tmp_path / "in").mkdir()
    w = worker("run: n8\ntasks:\n  - {id: load, foreach: {glob: 'in/*'}, run: 'rm $AGENT_ITEM'}\n")
    assert w.run() == 0
    assert w.matching("run n8: nothing to do, the list has no steps now")
    found = report.look(str(w.state), None)
    assert (found["status"], found["steps"]["total"], found["steps"]["done"]) == ("done", 0, 0)
    (tmp_path / "in" / "a").touch()
    assert [w.run(), w.run()] == [0, 0]
    assert len(w.matching("nothing to do, the list has no steps now")) == 2
    assert w.done() == [step(tmp_path, "a").removesuffix(".csv")]


def test_a_step_that_failed_and_was_taken_out_is_listed_as_removed(
    worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    N6: not as failed, since it fails nothing any more.
    """
    w = worker(TWO + "  - {id: old, run: 'false', retry: {attempts: 1}}\n")
    assert w.run() == 70
    w.config.write_text(TWO)
    assert w.run() == 0
    assert w.matching("old: no longer in the list; 1 step was begun and not done: old")
    report.show_list(str(w.state), None)
    assert "removed  old  attempt 1 failed: exited with status 1 (no longer in the list)" in capsys.readouterr().out


def test_states_and_counts_without_the_list_are_those_of_the_ledger(
    worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    E3, N6: what was cut off is not called failed, nor what has failed waiting.
    """
    w = worker(TWO + OLD + "  - {id: never, run: 'echo begun >&2; sleep 300', redo: never}\n")
    w.start().until("old: begun")
    w.kill()
    w.config.write_text(w.config.read_text().replace("sleep 300'}", "exit 1', retry: {attempts: 1}}"))
    w.start().until("never: begun")
    w.kill()
    assert w.run() == 70
    w.config.write_text("wrong")
    found = report.look(str(w.state), None)["steps"]
    assert (found["total"], found["done"], found["failed"], found["unknown"], found["waiting"]) == (3, 1, 1, 1, 0)
    report.show_list(str(w.state), None)
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["done", "keep"], ["failed", "old"], ["unknown", "never"],
    ]  # fmt: skip


def test_a_begun_step_stays_on_the_machine_that_goes_on(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N6: restored elsewhere, where its item never was; its id was cut, so that the item is in the copy alone.
    """
    from worker import export, restore

    deep = tmp_path / "in" / ("d" * 200)
    deep.mkdir(parents=True)
    (deep / "b.csv").touch()
    tasks = (
        "run: moved\ndefaults: {retry: {delay: 0s}}\ntasks:\n"
        f"  - {{id: load, foreach: {{glob: '{deep}/*'}},\n"
        "     run: 'if rm $AGENT_ITEM; then echo gone >&2; sleep 300; fi'}\n"
        "  - {id: report, needs: [load], run: 'true'}\n"
    )
    w = worker(tasks, folder="one")
    w.start().until(": gone")
    w.kill()
    copy = str(tmp_path / "copy.json")
    export.export(copy, str(w.state), None)
    other = worker(tasks, folder="two")
    restore.restore(copy, str(other.state), None, force=False)
    assert other.run() == 0
    (first, last) = other.done()
    assert "~" in first and last == "report"
    assert other.matching("load: 1 begun step stays in the plan")


def test_what_another_task_does_under_the_same_key_is_not_left_behind(worker: MakeWorker) -> None:
    """
    N6: a task that was renamed goes on under its key, and nobody is asked to settle its old name.
    """
    listed = "run: renamed\ntasks:\n  - {id: %s, key: k, check: 'echo found', run: 'echo begun >&2; sleep 300'}\n"
    w = worker(listed % "old")
    w.start().until("old: begun")
    w.kill()
    w.config.write_text(listed % "new")
    assert w.run() == 0
    assert w.done() == ["new"]
    assert not w.matching("no longer in the list")
    assert report.look(str(w.state), None)["unlisted"] == []


def test_a_run_that_is_done_is_counted_as_it_ended(worker: MakeWorker, tmp_path: Path) -> None:
    """
    E3: what its steps have moved away is not found any more, and was done.
    """
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / name).touch()
    w = worker("run: e3\ntasks:\n  - {id: load, foreach: {glob: 'in/*'}, run: 'rm $AGENT_ITEM'}\n")
    assert w.run() == 0
    assert w.matching("done, 3 of 3 steps done")
    counts = report.look(str(w.state), None)["steps"]
    assert (counts["total"], counts["done"], counts["waiting"]) == (3, 3, 0)
    (tmp_path / "in" / "d").touch()
    counts = report.look(str(w.state), None)["steps"]
    assert (counts["total"], counts["done"], counts["waiting"]) == (1, 0, 1), "what a start would find"
