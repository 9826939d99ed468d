"""Decisions are plain data in, plain data out."""

import pytest

from tests.plans import plan_of
from worker import board as boards
from worker import decide
from worker.board import Board, Progress
from worker.config import Retry
from worker.decide import End, Verdict

RETRY = Retry(attempts=3, delay=10.0)


def choose(board: Board, slots: int = 1, stop: bool = True, now: float = 100.0) -> decide.Next:
    return decide.next_steps(board, slots, now, stop)


def started(chosen: decide.Next) -> list[str]:
    return [step.id for step in chosen.start]


def test_the_order_of_the_list_decides() -> None:
    """
    The first step that is neither done nor failed comes next, and only one at a time.
    """
    board = Board(plan_of("a", "b", "c"))
    assert started(choose(board)) == ["a"]
    board.set("a", boards.RUNNING)
    assert started(choose(board)) == []
    board.set("a", boards.DONE)
    assert started(choose(board)) == ["b"]
    board.set("b", boards.DONE)
    board.set("c", boards.DONE)
    assert choose(board).finished == "done"


def test_a_step_that_waits_for_its_next_attempt_is_not_overtaken() -> None:
    """
    With one slot the list is a strict sequence: later steps may build on earlier ones.
    """
    board = Board(plan_of("a", "b"))
    board.set_progress("a", Progress(1, 1, retry_at=130.0))
    waiting = choose(board, now=100.0)
    assert started(waiting) == [] and waiting.wake_at == 130.0 and waiting.finished is None
    assert started(choose(board, now=130.0)) == ["a"]


def test_after_a_failure_nothing_new_starts_unless_told_to() -> None:
    """
    on_failure: stop ends the run once the running steps are over; continue goes on, and fails at the end.
    """
    board = Board(plan_of("a", "b"))
    board.set("a", boards.FAILED)
    assert choose(board, stop=True).finished == "failed"
    assert started(choose(board, stop=False)) == ["b"]
    board.set("b", boards.DONE)
    assert choose(board, stop=False).finished == "failed"


def test_more_slots_start_more_steps() -> None:
    """
    A step in back-off keeps its slot.
    """
    board = Board(plan_of("a", "b", "c", "d"))
    board.set_progress("b", Progress(1, 1, retry_at=500.0))
    assert started(choose(board, slots=3)) == ["a", "c"]


@pytest.mark.parametrize(
    ("end", "failures", "expected"),
    [
        (End(0), 0, Verdict("done", "", False, False, 0.0)),
        (End(3), 0, Verdict("failed", "exited with status 3", True, False, 10.0)),
        (End(3), 2, Verdict("failed", "exited with status 3", True, True, 0.0)),
        (End(-9), 0, Verdict("failed", "killed by SIGKILL", True, False, 10.0)),
        (
            End(-15, limit="timeout", why="took too long"),
            0,
            Verdict("stalled", "took too long", True, False, 10.0),
        ),
        (End(0, limit="watchdog", why="silent"), 0, Verdict("stalled", "silent", True, False, 10.0)),
        (End(None, why="no such program"), 0, Verdict("failed", "no such program", True, False, 10.0)),
        (
            End(0, interrupted_by="stop"),
            0,
            Verdict("interrupted", "the worker was stopped", False, False, 0.0),
        ),
        (
            End(None, interrupted_by="reboot"),
            2,
            Verdict("interrupted", "the machine went down", False, False, 0.0),
        ),
        (
            End(None, interrupted_by="worker"),
            0,
            Verdict("interrupted", "the worker died with it", True, False, 0.0),
        ),
        (
            End(None, interrupted_by="worker"),
            2,
            Verdict("failed", "the worker died with it", True, True, 0.0),
        ),
    ],
)
def test_how_an_attempt_ended_says_what_follows(end: End, failures: int, expected: Verdict) -> None:
    """
    The table of the design: what counts, what is final, and how long to wait.
    """
    assert decide.judge(end, failures, RETRY) == expected
