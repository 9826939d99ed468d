"""Decisions are plain data in, plain data out."""

import math

import pytest

from tests.plans import graph, plan_of
from worker import board as boards
from worker import decide
from worker.board import UNTRIED, Board, Progress
from worker.decide import End, Verdict
from worker.task import Redo, Retry

RETRY = Retry(attempts=3, delay=10.0, never=(4,))


def choose(board: Board, slots: int = 1, stop: bool = True, now: float = 100.0) -> decide.Next:
    return decide.next_steps(board, slots, now, [boards.FAILED] if stop else [], in_turn=slots == 1)


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
    N27: steps in back-off keep none of them, however many they are, and come first when their time has come.
    """
    board = Board(plan_of("a", "b", "c", "d", "e"))
    for name in "ab":
        board.set(name, boards.RUNNING)
        board.set_progress(name, Progress(1, 1, retry_at=500.0))
        board.set(name, boards.WAITING)
    assert started(choose(board, slots=2)) == ["c", "d"]
    board.set("c", boards.RUNNING)
    board.set("d", boards.RUNNING)
    assert (started(choose(board, slots=2)), choose(board, slots=2).wake_at) == ([], 500.0)
    board.set("c", boards.DONE)
    assert started(choose(board, slots=2, now=500.0)) == ["a"]
    board.set("b", boards.FAILED)
    assert started(choose(board, slots=2)) == [], "on_failure: stop counts steps that wait as little as before"


def test_a_place_that_a_step_off_the_list_holds_makes_no_strict_sequence() -> None:
    """
    N27: what counts is how many steps at a time the list wants.
    """
    board = Board(plan_of("a", "b"))
    board.set_progress("a", Progress(1, 1, retry_at=500.0))
    assert started(decide.next_steps(board, 1, 100.0, [], in_turn=False)) == ["b"]


def test_steps_that_became_ready_do_not_take_the_places_of_running_ones() -> None:
    """
    Earlier steps of the list may become ready after later ones were started.
    """
    board = Board(graph(a=(), b=("a",), c=("a",), d=(), e=()))
    assert started(choose(board, slots=3)) == ["a", "d", "e"]
    for step in "ade":
        board.set(step, boards.RUNNING)
    board.set("a", boards.DONE)
    assert started(choose(board, slots=3)) == ["b"]


def test_needs_hold_a_step_back_and_the_others_go_on() -> None:
    """
    List order decides who starts first, `needs` who must wait.
    """
    board = Board(graph(a=("c",), b=(), c=("b",), d=()))
    assert started(choose(board, slots=4)) == ["b", "d"]
    board.set("b", boards.DONE)
    assert started(choose(board, slots=4)) == ["c", "d"]
    board.set("c", boards.DONE)
    assert started(choose(board, slots=1)) == ["a"]


def test_what_needs_a_failed_step_is_not_started() -> None:
    """
    With on_failure: continue the rest is worked through, and the run has failed.
    """
    board = Board(graph(a=(), b=("a",), c=()))
    board.set("a", boards.FAILED)
    assert started(choose(board, stop=False)) == ["c"]
    board.set("c", boards.DONE)
    assert choose(board, stop=False).finished == "failed"
    assert board.state("b") == boards.WAITING


def judged(end: End, past: Progress = UNTRIED, chance: float = 0.5, retry: Retry = RETRY) -> Verdict:
    return decide.judge(end, past, retry, chance)


@pytest.mark.parametrize(
    ("end", "failures", "expected"),
    [
        (End(0), 0, Verdict("done", "", False, False, 0.0)),
        (End(3), 0, Verdict("failed", "exited with status 3", True, False, 10.0)),
        (End(3), 1, Verdict("failed", "exited with status 3", True, False, 20.0)),
        (End(3), 2, Verdict("failed", "exited with status 3", True, True, 0.0)),
        (End(4), 0, Verdict("failed", "exited with status 4", True, True, 0.0)),
        (End(4, limit="timeout", why="slow"), 0, Verdict("stalled", "slow", True, False, 10.0)),
        (End(-9), 0, Verdict("failed", "killed by SIGKILL", True, False, 10.0)),
        (End(-15, limit="timeout", why="took too long"), 0, Verdict("stalled", "took too long", True, False, 10.0)),
        (End(0, limit="watchdog", why="silent"), 0, Verdict("stalled", "silent", True, False, 10.0)),
        (End(75, limit="watchdog", why="silent"), 0, Verdict("stalled", "silent", True, False, 10.0)),
        (End(0, why="but no file"), 0, Verdict("failed", "but no file", True, False, 10.0)),
        (End(None, why="no such program"), 0, Verdict("failed", "no such program", True, False, 10.0)),
        (End(0, interrupted_by="stop"), 0, Verdict("interrupted", "the worker was stopped", False, False, 0.0)),
        (End(None, interrupted_by="reboot"), 2, Verdict("interrupted", "the machine went down", False, False, 0.0)),
        (End(None, interrupted_by="worker"), 0, Verdict("interrupted", "the worker died with it", True, False, 0.0)),
        (End(None, interrupted_by="worker"), 2, Verdict("failed", "the worker died with it", True, True, 0.0)),
    ],
)
def test_how_an_attempt_ended_says_what_follows(end: End, failures: int, expected: Verdict) -> None:
    """
    The table of the design: what counts, what is final, and how long to wait.
    """
    assert judged(end, Progress(failures=failures)) == expected


def test_not_now_waits_longer_each_time_and_is_not_counted() -> None:
    """
    Full jitter below a bound that doubles up to max_delay.
    """
    delays = [judged(End(75), Progress(deferrals=n), chance=0.999).delay for n in range(8)]
    assert [round(delay) for delay in delays] == [10, 20, 40, 80, 160, 300, 300, 300]
    assert judged(End(75), Progress(deferrals=3), chance=0.0).delay == 0.0
    verdict = judged(End(75), Progress(failures=2))
    assert (verdict.outcome, verdict.counted, verdict.final) == ("deferred", False, False)


def test_not_now_for_longer_than_patience_is_a_failure() -> None:
    """
    Bounded by patience, not by attempts; the last wait ends where patience does.
    """
    assert judged(End(75, took=1.0), Progress(deferrals=9, waited=7100.0), chance=0.999).delay == 99.0
    verdict = judged(End(75, took=1.0), Progress(deferrals=9, waited=7199.0))
    assert (verdict.outcome, verdict.final) == ("failed", True)
    assert "longer than its patience" in verdict.cause


@pytest.mark.parametrize(
    ("asked", "least", "most"), [(0.0, 0, 10), (120.0, 120, 120), (1e9, 3600, 3600), (None, 0, 10)]
)
def test_what_a_server_asks_for_is_done_within_reason(asked: float | None, least: float, most: float) -> None:
    """
    Case M1: Retry-After is the least wait, and capped.
    """
    assert least <= judged(End(75, retry_after=asked)).delay <= most


def test_a_step_that_got_further_is_started_again_at_once() -> None:
    """
    A full context, say: exit 75 with new progress or saved state costs nothing; without, it waits.
    """
    assert judged(End(75, progress=3.0), Progress(best=2.0)) == Verdict(
        "again", "asked to be started afresh", False, False, 0.0
    )
    assert judged(End(75, saved=True)).outcome == "again"
    assert judged(End(75, saved=True), Progress(again=20)).outcome == "deferred", "a time stamp is no progress"
    assert judged(End(75, saved=True, took=5.0), Progress(again=20)).outcome == "deferred"
    assert judged(End(75, saved=True, took=3600.0), Progress(again=20)).outcome == "again"
    assert judged(End(75, saved=True, took=3600.0), Progress(again=100)).outcome == "deferred", "there is a bound"
    assert judged(End(75, progress=2.0), Progress(best=2.0)).outcome == "deferred"


def test_an_explicit_wait_is_always_obeyed() -> None:
    """
    F1: whoever says when to come back is not begun at once, however far it got; nonsense is no wish.
    """
    for end in (End(75, saved=True, retry_after=60.0), End(75, progress=9.0, retry_after=60.0)):
        verdict = judged(end, chance=0.0)
        assert (verdict.outcome, verdict.delay) == ("deferred", 60.0)
    for wish in (0.0, -5.0, math.nan, -math.inf):
        assert judged(End(75, saved=True, retry_after=wish)).outcome == "again"
        assert judged(End(75, retry_after=wish), chance=0.0).delay == 0.0
    assert judged(End(75, retry_after=math.inf)).delay == 3600.0


def test_patience_goes_on_while_a_step_is_begun_afresh_for_little() -> None:
    """
    F1: fresh starts without progress take nothing back from the time spent on "not now"; real work does.
    """
    waits = Progress(deferrals=3, waited=100.0, best=2.0)
    little = boards.advance(waits, "again", False, 5.0, 2.0)
    assert (little.deferrals, little.waited, little.again) == (3, 100.0, 1)
    for took, progress in ((3600.0, 2.0), (5.0, 3.0)):
        after = boards.advance(waits, "again", False, took, progress)
        assert (after.deferrals, after.waited) == (0, 0.0)


def test_work_before_the_first_not_now_costs_no_patience() -> None:
    """
    Three hours of work that end with an overloaded server are no three hours of "not now".
    """
    verdict = judged(End(75, took=10800.0), chance=0.5)
    assert (verdict.outcome, verdict.delay) == ("deferred", 5.0)
    assert boards.charged(UNTRIED, 10800.0) == 0.0
    assert boards.charged(UNTRIED, 5.0) == 5.0, "a step that only looks whether it can begin has waited"
    assert boards.charged(Progress(deferrals=1), 10800.0) == 10800.0


def test_a_name_that_does_not_exist_is_not_waited_for_as_long_as_a_network() -> None:
    """
    E13: ten minutes, and the cause says why.
    """
    assert judged(End(75, hopeless=True), Progress(waited=500.0)).outcome == "deferred"
    verdict = judged(End(75, hopeless=True, reason="GET http://x: no such host"), Progress(waited=600.0))
    assert (verdict.outcome, verdict.final) == ("failed", True)
    assert verdict.cause.endswith(
        "longer than its patience of 10min with a name that does not exist; at last: GET http://x: no such host"
    )


CUT_OFF = [
    End(None, interrupted_by="worker", effect="open"),
    End(None, interrupted_by="stop", effect="open"),
    End(-9, effect="open"),
    End(-15, limit="timeout", why="took too long", effect="open"),
    End(1, why="after: ended with status 1", effect="open"),
]


@pytest.mark.parametrize("end", CUT_OFF)
def test_what_was_cut_off_is_redone_checked_or_left_to_a_person(end: End) -> None:
    """
    Case S9: as the task says; nothing is guessed where it says that redoing is not harmless.
    """
    always, check, never = (decide.judge(end, UNTRIED, RETRY, 0.5, redo) for redo in ("always", "check", "never"))
    assert always == check and always.unsure and always.outcome != "unknown"
    assert (never.outcome, never.counted, never.final) == ("unknown", False, False)
    assert never.cause == f"{always.cause}; nobody knows whether it has happened"
    last = decide.judge(end, Progress(failures=2), RETRY, 0.5, "check")
    assert last.outcome == ("interrupted" if end.interrupted_by == "stop" else "unknown")


@pytest.mark.parametrize("effect", ["refused", "failed"])
@pytest.mark.parametrize("redo", ["always", "check", "never"])
def test_a_step_that_says_itself_that_it_failed_is_tried_again(redo: Redo, effect: decide.Effect) -> None:
    """
    Its word is as good as a check: nothing has happened.
    """
    verdict = decide.judge(End(1, effect=effect), Progress(unsure=True), RETRY, 0.5, redo)
    assert (verdict.outcome, verdict.counted, verdict.unsure) == ("failed", True, False)


def test_a_doubt_lasts_until_somebody_has_an_answer() -> None:
    """
    An attempt that never came to the step's own program leaves things as unsure as they were.
    """
    doubtful = Progress(unsure=True)
    assert decide.judge(End(2, effect="none"), doubtful, RETRY, 0.5, "check").unsure
    assert not decide.judge(End(2, effect="none"), UNTRIED, RETRY, 0.5, "check").unsure
    assert (
        decide.judge(End(2, effect="none"), Progress(failures=2, unsure=True), RETRY, 0.5, "check").outcome == "unknown"
    )
    found = decide.judge(End(0, effect="none", found=True), doubtful, RETRY, 0.5, "check")
    assert (found.outcome, found.cause) == ("done", "its check found that it had happened")


def test_an_unknown_effect_inside_it_makes_a_step_unknown() -> None:
    """
    Whatever may be done about the step itself: the effect is a person's to settle.
    """
    verdict = decide.judge(End(1, effect="refused", unknown="mail"), UNTRIED, RETRY, 0.5)
    assert verdict.outcome == "unknown"
    assert verdict.cause == "exited with status 1; nobody knows whether its effect 'mail' has happened"
    assert decide.judge(End(0, effect="open", unknown="mail"), UNTRIED, RETRY, 0.5).outcome == "done"


def test_an_unknown_step_stops_the_run_or_is_left_behind() -> None:
    """
    on_unknown: stop lets nothing new begin; continue works through the rest, and the run has failed either way.
    """
    board = Board(graph(a=(), b=("a",), c=()))
    board.set("a", boards.UNKNOWN)
    assert decide.next_steps(board, 1, 100.0, [boards.UNKNOWN]) == decide.Next([], finished="failed")
    assert started(decide.next_steps(board, 1, 100.0, [])) == ["c"]
    board.set("c", boards.DONE)
    assert decide.next_steps(board, 1, 100.0, []).finished == "failed"


def test_what_others_are_at_is_waited_for() -> None:
    """
    The run is not over while another worker has a step, and steps beyond those wanted stand in for taken ones.
    """
    board = Board(plan_of("a", "b", "c", "d"))
    board.set("a", boards.ELSEWHERE)
    chosen = decide.next_steps(board, 1, 100.0, [], spare=2)
    assert (started(chosen), chosen.most) == (["b", "c", "d"], 1)
    for name in ("b", "c", "d"):
        board.set(name, boards.DONE)
    assert decide.next_steps(board, 1, 100.0, []).finished is None
    board.set("a", boards.DONE)
    assert decide.next_steps(board, 1, 100.0, []).finished == "done"


def test_a_step_that_another_worker_has_tried_keeps_no_place_and_is_not_forgotten() -> None:
    """
    Its wait is respected, others start meanwhile, and the run is not over before it is done.
    """
    board = Board(plan_of("a", "b"))
    board.set_progress("a", Progress(1, 1, retry_at=130.0), ours=False)
    assert started(decide.next_steps(board, 1, 100.0, [])) == ["b"]
    board.set("b", boards.DONE)
    waiting = decide.next_steps(board, 1, 100.0, [])
    assert (waiting.start, waiting.wake_at, waiting.finished) == ([], 130.0, None)
    assert started(decide.next_steps(board, 1, 130.0, [])) == ["a"]
