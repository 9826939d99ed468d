"""The board is derived from the plan and the ledger's rows, whatever happened to either."""

from tests.plans import plan_of, row
from worker import board as boards
from worker.clock import Now
from worker.plan import Plan

NOW = Now(wall=2000.0, monotonic=50.0)


def test_finished_steps_are_matched_by_id_wherever_they_stand() -> None:
    """
    Case F13: steps inserted, removed and reordered; the done ones stay done.
    """
    before = plan_of("a", "b", "c")
    rows = [row(1, "a", "done", before), row(2, "b", "done", before)]
    after = plan_of("new", "c", "b")

    found = boards.replay(after, rows, 0, NOW)

    assert [step.id for step in found.board.ready()] == ["new", "c"]
    assert [entry.step for entry in found.gone] == ["a"]
    assert found.changed == []


def test_a_changed_definition_is_reported_and_not_done_again() -> None:
    """
    Case F13: done means done.
    """
    rows = [row(1, "a", "done", plan_of("a", run="old"))]
    found = boards.replay(plan_of("a", run="new"), rows, 0, NOW)
    assert found.changed == ["a"]
    assert found.board.count(boards.DONE) == 1


def test_a_mended_step_gets_all_its_attempts_anew() -> None:
    """
    Failures of another definition do not count.
    """
    old, new = plan_of("a", run="old"), plan_of("a", run="new")
    rows = [row(1, "a", "failed", old), row(2, "a", "failed", old, number=2, final=True)]
    assert boards.replay(old, rows, 0, NOW).board.count(boards.FAILED) == 1
    mended = boards.replay(new, rows, 0, NOW).board
    assert mended.count(boards.FAILED) == 0
    assert mended.progress("a") == boards.Progress(number=2, failures=0, retry_at=50.0)


def test_failures_from_before_the_last_fresh_start_do_not_count() -> None:
    """
    Attempt numbers go on, so that no two attempts of a step bear the same one.
    """
    plan = plan_of("a")
    rows = [row(1, "a", "failed", plan, final=True), row(2, "a", "failed", plan, number=2)]
    found = boards.replay(plan, rows, 1, NOW)
    assert found.board.progress("a") == boards.Progress(number=2, failures=1, retry_at=50.0)
    assert found.board.state("a") == boards.WAITING


def test_a_wait_goes_on_where_it_was() -> None:
    """
    A back-off survives the worker, on the wall clock.
    """
    plan = plan_of("a")
    found = boards.replay(plan, [row(1, "a", "failed", plan, ended=1994.0, delay=10.0)], 0, NOW)
    assert found.board.progress("a").retry_at == 54.0


def test_a_clock_that_jumped_back_makes_no_wait_longer() -> None:
    """
    Case D7: the wait is never longer than it was meant to be.
    """
    plan = plan_of("a")
    found = boards.replay(plan, [row(1, "a", "failed", plan, ended=2000.0 + 3600, delay=10.0)], 0, NOW)
    assert found.board.progress("a").retry_at == 60.0


def test_attempts_that_no_worker_closed_are_found() -> None:
    """
    Also those of steps that are no longer on the list.
    """
    plan = plan_of("a")
    rows = [row(1, "a", None, plan), row(2, "gone", None, plan)]
    found = boards.replay(plan, rows, 0, NOW)
    assert [r.step for r in found.unclosed] == ["a", "gone"]
    assert found.board.state("a") == boards.WAITING


def test_an_open_attempt_changes_nothing_of_what_is_known() -> None:
    """
    A reload while a step runs must not give its patience back.
    """
    plan = plan_of("a")
    rows = [row(n, "a", "deferred", plan, number=n, took=1.0, delay=9.0) for n in (1, 2, 3)]
    known = boards.replay(plan, rows, 0, NOW).board.progress("a")
    assert (known.deferrals, known.waited) == (3, 30.0)
    opened = boards.replay(plan, [*rows, row(4, "a", None, plan, number=4)], 0, NOW).board.progress("a")
    assert opened == known._replace(number=4, retry_at=50.0, key="")


def test_a_long_step_at_the_front_does_not_make_the_rest_slow() -> None:
    """
    What is finished behind it is not looked at again: counted in states that are read.
    """
    plan = plan_of(*(f"s{n}" for n in range(1000)))
    board = boards.Board(plan)
    board.set("s0", boards.RUNNING)
    for n in range(1, 999):
        board.set(f"s{n}", boards.DONE)
    reads = []
    state = board.state
    board.state = lambda step: reads.append(step) or state(step)  # type: ignore[func-returns-value,method-assign]
    assert [step.id for step in board.ready()] == ["s999"]
    assert len(reads) < 10


def test_what_a_person_has_settled_goes_on_even_if_it_was_the_last_of_its_task() -> None:
    """
    Unknown until somebody says so, whatever the list says by now; then all its attempts anew.
    """
    plan = plan_of("a", "b")
    rows = [row(1, "a", "unknown", plan, unsure=True), row(2, "b", "done", plan)]
    assert boards.replay(plan, rows, 0, NOW).board.state("a") == boards.UNKNOWN
    board = boards.replay(plan, [*rows, row(3, "a", "redo", plan, number=2)], 0, NOW).board
    assert (board.state("a"), board.progress("a")) == (boards.WAITING, boards.Progress(number=2))
    assert [step.id for step in board.ready()] == ["a"]


def test_what_was_cut_off_before_the_list_said_never_is_unknown() -> None:
    """
    The doubt is in the row; what to do about it is the list's to say now.
    """
    plan = plan_of("a")
    cut_off = row(1, "a", "interrupted", plan, unsure=True)
    assert boards.replay(plan, [cut_off], 0, NOW).board.state("a") == boards.WAITING
    step = plan.steps[0]._replace(task=plan.steps[0].task._replace(redo="never"))
    assert boards.replay(Plan((step,), {"a": step}), [cut_off], 0, NOW).board.state("a") == boards.UNKNOWN


def test_an_open_attempt_of_another_worker_is_elsewhere() -> None:
    """
    Ours to close are our own; the others' come back as waiting or done when they end.
    """
    plan = plan_of("a", "b")
    rows = [row(1, "a", None, plan, worker="me"), row(2, "b", None, plan, worker="other")]
    found = boards.replay(plan, rows, 0, NOW, "me")
    assert [entry.step for entry in found.unclosed] == ["a"]
    assert (found.board.state("a"), found.board.state("b")) == (boards.WAITING, boards.ELSEWHERE)
    boards.take(found.board, plan.steps[1], row(2, "b", "done", plan), plan.digest(plan.steps[1]), 0, NOW, "me")
    assert found.board.state("b") == boards.DONE
