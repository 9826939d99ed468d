"""What is known of a step whose attempt was claimed and not begun, in the ledger and beside it."""

from tests.plans import plan_of
from tests.unit.test_ledger import sqlite_store
from worker import decide
from worker.decide import End
from worker.ledger.sqlite import SqliteLedger
from worker.standing import Standing

__all__ = ["sqlite_store"]  # a fixture
PLAN = plan_of("a", "b")
RETRY = PLAN.by_id["a"].task.retry


def known(store: SqliteLedger) -> Standing:
    return Standing(PLAN, store, lambda action: action())


def cut_off(store: SqliteLedger, standing: Standing) -> None:
    """Let `a` be cut off while its effect may have happened."""
    claim = standing.claim(PLAN.by_id["a"], "run", "boot")
    store.record([], [claim])
    verdict = decide.judge(End(None, interrupted_by="stop", effect="open"), standing.board.progress("a"), RETRY, 0.0)
    ending = decide.ending("a", claim.number, verdict, None, 1000.0)
    store.record([ending], [])
    standing.mark(ending, claim.definition)


def test_what_was_cut_off_is_asked_about_although_the_attempt_after_it_never_began(sqlite_store: SqliteLedger) -> None:
    """
    By this worker, if its run goes on, and by the next one: the effect would happen twice.
    """
    standing = known(sqlite_store)
    cut_off(sqlite_store, standing)
    claims = [standing.claim(step, "run", "boot") for step in PLAN.steps]
    sqlite_store.record([], claims)
    standing.give_back(claims, "the worker was stopped before it began")

    later = known(sqlite_store)
    later.read()
    for board in (standing.board, later.board):
        assert [(board.progress(step).unsure, board.progress(step).failures) for step in "ab"] == [
            (True, 0),
            (False, 0),
        ]


def test_a_run_that_goes_on_claims_the_next_attempt_of_what_was_given_back(sqlite_store: SqliteLedger) -> None:
    """
    As when its budget is raised while other steps are still being ended.
    """
    standing = known(sqlite_store)
    claims = [standing.claim(step, "run", "boot") for step in PLAN.steps]
    sqlite_store.record([], claims)
    standing.give_back(claims[1:], "the budget was spent before it began")
    (again,) = (standing.claim(step, "run", "boot") for step in standing.board.ready() if step.id == "b")
    assert again.number == 2
    assert sqlite_store.record([], [again]).claims == [again]
