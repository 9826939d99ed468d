"""Workers of one run: how many steps are offered to the ledger, and what is known of those that others have taken."""

import math
from typing import Any, cast

from tests.plans import plan_of, row
from worker import clock, decide
from worker.decide import Next
from worker.ledger import Claim, Recorded, Row
from worker.peers import Peers
from worker.standing import Standing

NAMES = [f"s{number:03}" for number in range(200)]
PLAN = plan_of(*NAMES)


class Silent:
    """A ledger of which nobody has heard anything."""

    worker = "one"
    replaced = False

    def __init__(self) -> None:
        self.overdue_at = math.inf

    def woken(self) -> bool:
        return False

    def renew(self, _steps: list[str]) -> list[str]:
        return []

    def orphans(self) -> list[Row]:
        return []

    def news(self, _idle: bool) -> list[Row]:
        return []


def peers(ledger: Silent | None = None) -> tuple[Peers, Standing]:
    store: Any = ledger or Silent()
    standing = Standing(PLAN, store, lambda action: action())
    busy: Any = {NAMES[-1]: Busy()}
    return Peers(store, busy, standing, cast(Any, None), lambda action: action(), cast(Any, None), 60.0), standing


class Busy:
    """An attempt within its limits."""

    def within_limits(self, _now: float) -> bool:
        return True

    def go_on(self, _now: float) -> None:
        pass


def offered(known: Peers, standing: Standing) -> tuple[Next, list[Claim]]:
    upcoming = decide.next_steps(standing.board, 1, 0.0, [], known.spare)
    return upcoming, [standing.claim(step, "run", "boot") for step in upcoming.start]


def test_steps_that_others_have_taken_are_not_offered_again() -> None:
    """
    Their numbers stay as they are, so that the news of them are news.
    """
    known, standing = peers()
    upcoming, claims = offered(known, standing)
    first, second, third = claims
    assert not known.claimed(claims, upcoming.most, Recorded([second], [], (first.step,)))
    assert [claim.step for claim in offered(known, standing)[1]][:2] == [second.step, third.step]
    assert standing.hear(row(7, first.step, "done", PLAN, worker="two"))


def test_more_steps_are_offered_the_more_others_take() -> None:
    """
    As many as will do, no matter how many workers there are; and fewer again when they are gone.
    """
    known, standing = peers()
    alone = known.spare
    for _ in range(6):
        upcoming, claims = offered(known, standing)
        assert known.claimed(claims, upcoming.most, Recorded([], [], tuple(claim.step for claim in claims)))
    most = known.spare
    assert alone < most < 100
    for _ in range(40):
        upcoming, claims = offered(known, standing)
        assert not known.claimed(claims, upcoming.most, Recorded(claims[:1], []))
    assert known.spare == alone


def test_who_is_refused_without_a_reason_looks_at_once() -> None:
    """
    The step has had another attempt of which we have not heard: claiming others would be out of order.
    """
    known, standing = peers()
    known._renew_at = known._look_at = 1000.0
    known._idle = True
    upcoming, claims = offered(known, standing)
    assert not known.claimed(claims, upcoming.most, Recorded([], []))
    assert known.due_at(idle=True) < 1000.0


def test_who_has_seen_a_claim_run_out_looks_again_in_time() -> None:
    """
    However busy he is: a dead worker's step waits no longer than it must.
    """
    ledger = Silent()
    known, _standing = peers(ledger)
    known.hear(lambda: None)
    usual = known.due_at(idle=False)
    ledger.overdue_at = clock.monotonic() + 2.5
    known._look_at = -math.inf
    known.hear(lambda: None)
    assert known.due_at(idle=False) == ledger.overdue_at < usual
