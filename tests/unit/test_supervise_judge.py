"""The judge: every kind of trouble, and what is done about it."""

import dataclasses
import math
from typing import Any

import pytest

from worker.supervise import judge, record
from worker.supervise.judge import Budget, Limits, Look, Seen
from worker.supervise.record import Machine, Moment, Record

LIMITS = Limits(stale=600, age=3600, unanswered=2, restarts=1)
AT_WORK = Look("active", "running", 1.0, "active", 0, {"total": 40, "done": 7})


def at(seconds: float, boot: str = "b") -> Moment:
    return Moment(1000 + seconds, seconds, boot)


def machine(**changes: Any) -> Machine:
    return Machine(1, "m-1", "m-1", record.WORKING, at(0), at(0), done=7)._replace(**changes)


def look(**changes: Any) -> Seen:
    return Seen(AT_WORK._replace(**changes))


def other(**changes: Any) -> Seen:
    return Seen(judge.believe(AT_WORK._replace(run="runb", **changes), "runa"))


def nameless(**changes: Any) -> Seen:
    return Seen(judge.believe(AT_WORK._replace(**changes), "runa"))


FAILED = {"worker": "absent", "status": "failed", "unit": "failed", "sign_age": None}
ENDED = {"worker": "absent", "unit": "inactive", "sign_age": None}


@dataclasses.dataclass
class Case:
    """What was seen of what kind of machine, and what is to come of it."""

    name: str
    seen: Seen
    action: str
    why: str = ""
    machine: Machine = machine()  # noqa: RUF009 - immutable
    now: float = 60
    outcome: str = ""


CASES = [
    Case("at work", look(), judge.WAIT),
    Case("at work, with no step running", look(sign_age=None), judge.WAIT),
    Case("starting", look(worker="absent", unit="activating"), judge.WAIT),
    Case("a worker that is silent for a while", look(worker="silent"), judge.WAIT),
    Case("a step that is silent for long", look(sign_age=601.0), judge.RESTART, "no sign of life for 10min 1s"),
    Case("a worker that is silent for long", look(worker="silent"), judge.RESTART, "no sign of life for", now=700),
    Case("starting for ever", look(worker="absent", unit="activating"), judge.RESTART, "no sign", now=700),
    Case("the worker was killed", look(**FAILED, exit=9), judge.RESTART, "exit status 9"),
    Case("the disk is read-only", look(**FAILED, exit=73), judge.RESTART, "exit status 73"),
    Case(
        "the disk is still read-only",
        look(**FAILED, exit=73),
        judge.REPLACE,
        "though it was started again once",
        machine(restarts=1),
    ),
    Case("somebody stopped it", look(**ENDED, status="stopped"), judge.RESTART, "stopped"),
    Case("nothing was begun", look(worker="", status="", unit="inactive"), judge.RESTART, "unit inactive"),
    Case("done", look(**ENDED, status="done"), judge.FINISH, outcome="done"),
    Case("done, and about to end", look(worker="active", status="done", unit="deactivating"), judge.WAIT),
    Case("failed for good", look(**FAILED, exit=70), judge.FINISH, outcome="failed"),
    Case("failed, before a boot", look(**ENDED, status="failed"), judge.FINISH, outcome="failed"),
    Case("budget spent", look(**FAILED, exit=69), judge.FINISH, outcome="out-of-budget"),
    Case("wrong list", look(**FAILED, exit=78), judge.FINISH, outcome="configuration"),
    Case("done, and past its time", look(**ENDED, status="done"), judge.FINISH, now=4000, outcome="done"),
    Case("past its time", look(), judge.REPLACE, "its time of 1h is over", now=4000),
    Case("said to be gone", Seen(None, judge.ABSENT), judge.WAIT, "said to be gone"),
    Case("gone again", Seen(None, judge.ABSENT), judge.REPLACE, "it is gone", machine(absent=1, unanswered=1)),
    Case("gone after one look", Seen(None, judge.ABSENT), judge.REPLACE, "not answered 2", machine(unanswered=1)),
    Case("held by another", Seen(Look(holder="other-1f")), judge.REPLACE, "the supervision 'other-1f' has it"),
    Case("another run is done", other(**ENDED, status="done"), judge.RESTART, "what is there is the run 'runb'"),
    Case("another run has failed", other(**FAILED, exit=70), judge.RESTART, "exit status 70"),
    Case("another run is at work", other(), judge.REPLACE, "its worker is at work on the run 'runb'"),
    Case("wrong list, over another run", other(**FAILED, exit=78), judge.FINISH, outcome="configuration"),
    Case("done, of no run", nameless(**ENDED, status="done"), judge.RESTART, "unit inactive"),
    Case("stopped", Seen(None, judge.STOPPED), judge.RESUME, "stopped"),
    Case("stopped again", Seen(None, judge.STOPPED), judge.REPLACE, "stopped again", machine(resumes=2)),
    Case("one look unanswered", Seen(None, judge.RUNNING), judge.WAIT, "does not answer"),
    Case("two of them", Seen(None, judge.RUNNING), judge.REPLACE, "not answered 2 times", machine(unanswered=1)),
    Case("nobody knows", Seen(None, judge.UNSURE), judge.REPLACE, "not answered", machine(unanswered=1)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_trouble_has_its_remedy(case: Case) -> None:
    """
    Stopped: resumed. Hung or exited: started again there. No answer, gone, past its time: another machine.
    """
    verdict = judge.judge(case.machine, case.seen, LIMITS, at(case.now))
    assert (verdict.action, verdict.outcome) == (case.action, case.outcome)
    assert case.why in verdict.why


def test_a_worker_at_work_forgives_stops_and_a_step_done_forgives_restarts() -> None:
    """
    Only what happens again and again, with nothing achieved in between, counts against a machine.
    """
    tired = machine(unanswered=1, resumes=2, restarts=1)
    well = judge.judge(tired, look(), LIMITS, at(60)).machine
    assert (well.unanswered, well.resumes, well.restarts, well.progress) == (0, 0, 1, False)
    better = judge.judge(tired, look(steps={"total": 40, "done": 8}), LIMITS, at(60)).machine
    assert (better.restarts, better.done, better.progress) == (0, 8, True)


def test_a_stuck_step_does_not_make_its_worker_well() -> None:
    """
    A worker that answers while its step says nothing for too long has not been seen well.
    """
    stuck = judge.judge(machine(), look(sign_age=601.0), LIMITS, at(60)).machine
    assert stuck.well == at(0)


def test_a_reboot_and_a_clock_that_is_set_make_no_time_pass() -> None:
    """
    Case D7: ages come from the monotonic clock, over a reboot from the other one, and are never negative.
    """
    made = Moment(wall=1_000_000, monotonic=50, boot="a")
    assert made.until(Moment(wall=1, monotonic=60, boot="a")) == 10
    assert made.until(Moment(wall=9_000_000, monotonic=60, boot="a")) == 10
    assert made.until(Moment(wall=1_000_030, monotonic=1, boot="b")) == 30
    assert made.until(Moment(wall=1, monotonic=1, boot="b")) == 0


@pytest.mark.parametrize(
    "budget, why",
    [
        (Budget(), ""),
        (Budget(machines=2, hours=2, spend=10), ""),
        (Budget(hours=1), "1 hour is over"),
        (Budget(spend=5), "5 of 5 is spent"),
        (Budget(machines=1), "1 machine has been used"),
    ],
)
def test_a_budget_counts_what_lost_machines_had_spent(budget: Budget, why: str) -> None:
    """
    Hours since the first machine, spend of all of them, and no machine beyond the last one.
    """
    known = Record("n", "r", "t", at(0), (machine(state=record.GONE),), spend=2.0, spend_lost=3.0)
    assert judge.spent(budget, known, at(3600)) == why


def test_the_last_machine_may_work_on() -> None:
    """
    A budget of one machine is spent when a second one is wanted, not before.
    """
    known = Record("n", "r", "t", at(0), (machine(),))
    assert judge.spent(Budget(machines=1), known, at(60)) == ""
    assert math.isinf(Limits(stale=1).age)
