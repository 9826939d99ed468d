"""What is to be done about a machine, decided from what was seen of it.  Plain data in, plain data out."""

import math
from typing import NamedTuple

from worker import plural
from worker.errors import CONFIG, OUT_OF_BUDGET, STEP_FAILED
from worker.supervise.record import Machine, Moment, Record
from worker.timespan import show

# What a provider says of a machine.
RUNNING, STOPPED, ABSENT, UNSURE = "running", "stopped", "gone", "unknown"

# What is done about it.
WAIT, RESUME, RESTART, REPLACE, FINISH = "wait", "resume", "restart", "replace", "finish"

# A machine that stops again and again before a worker is seen on it is no good.
_RESUMES = 2
# Looks in a row at which a machine is said to be gone: a provider's list may be behind, its answer wrong.
SIGHTS = 2

_OUTCOMES = {OUT_OF_BUDGET: "out-of-budget", STEP_FAILED: "failed", CONFIG: "configuration"}
_AT_WORK = ("active", "activating", "reloading", "deactivating", "refreshing")


class Look(NamedTuple):
    """What a machine said of its worker; the machine answers, whatever the worker does."""

    worker: str = ""  # "active", "silent", "absent"; "" if agentctl could not tell
    status: str = ""  # of the run: "running", "done", "failed", "stopped", "out-of-budget"
    sign_age: float | None = None  # seconds since the newest sign of life of a step; None when none runs
    unit: str = ""  # systemd's ActiveState
    exit: int = 0  # how the unit's last process ended
    steps: dict[str, int] = {}  # noqa: RUF012 - counts by state; never changed in place
    spend: float | None = None  # what the run has spent in all
    why: str = ""  # the worker's own last words, if it ended with that status
    checkpoint: bool = False  # there is one to be copied
    run: str = ""  # the run that all this is about, "" if the machine did not say
    foreign: str = ""  # the other run that it is about: then it says nothing of ours (see `believe`)
    holder: str = ""  # the other supervision that has the machine; nothing else is known then


class Seen(NamedTuple):
    """What was seen of a machine at one look: `state` is asked for only when it did not answer."""

    look: Look | None
    state: str = RUNNING


class Limits(NamedTuple):
    """How patient to be."""

    stale: float  # no sign of life for so long: it hangs
    age: float = math.inf  # no machine is used for longer
    unanswered: int = 2  # looks in a row
    restarts: int = 1  # on one machine, without a step done in between


class Budget(NamedTuple):
    """The most that a supervision may use, whatever comes of it."""

    machines: int | None = None
    hours: float | None = None
    spend: float | None = None


class Verdict(NamedTuple):
    """What to do, why, and the machine with what is to be remembered of it."""

    action: str
    why: str
    machine: Machine
    outcome: str = ""  # with FINISH


def believe(look: Look, run: str) -> Look:
    """Return what of a look is to be believed: the status of another run, or of none, says nothing of this one."""
    if look.run == run:
        return look
    return look._replace(status="", sign_age=None, steps={}, spend=None, foreign=look.run)


def judge(machine: Machine, seen: Seen, limits: Limits, now: Moment) -> Verdict:
    """Decide about the machine that has the run."""
    if seen.look is None:
        return _unanswered(machine, seen.state, limits)
    look = seen.look
    if look.holder:
        return Verdict(REPLACE, f"the supervision '{look.holder}' has it by now", machine)
    machine = _remember(machine._replace(unanswered=0, absent=0, returned=False), look, limits, now)
    ended = look.worker != "active" and look.unit not in _AT_WORK
    outcome = _outcome(look) if ended else ""
    if outcome:
        return Verdict(FINISH, _how(look), machine, outcome)
    if look.foreign and look.worker == "active":
        return Verdict(REPLACE, f"its worker is at work on the run '{look.foreign}'", machine)
    if machine.made.until(now) > limits.age:
        return Verdict(REPLACE, f"its time of {show(limits.age)} is over", machine)
    if ended:
        return _restart(machine, f"the worker has ended ({_how(look)})", look, limits)
    silence = max(machine.well.until(now), look.sign_age or 0.0)
    if silence > limits.stale:
        return _restart(machine, f"no sign of life for {show(silence)}", look, limits)
    return Verdict(WAIT, "", machine)


def spent(budget: Budget, known: Record, now: Moment) -> str:
    """Return which part of the budget is spent, or ""; for machines, whether there may be one more."""
    if budget.hours is not None and known.started.until(now) >= budget.hours * 3600:
        return f"{plural.of(budget.hours, 'hour is', 'hours are')} over"
    spend = known.spend + known.spend_lost
    if budget.spend is not None and spend >= budget.spend:
        return f"{spend:g} of {budget.spend:g} is spent"
    if budget.machines is not None and known.machine is None and len(known.machines) >= budget.machines:
        return f"{plural.of(budget.machines, 'machine has', 'machines have')} been used"
    return ""


def _unanswered(machine: Machine, state: str, limits: Limits) -> Verdict:
    machine = machine._replace(absent=machine.absent + 1 if state == ABSENT else 0)
    if machine.absent >= SIGHTS:
        return Verdict(REPLACE, "it is gone", machine._replace(unanswered=machine.unanswered + 1))
    if state == STOPPED:
        if machine.resumes < _RESUMES:
            return Verdict(RESUME, "it is stopped", machine._replace(resumes=machine.resumes + 1, unanswered=0))
        return Verdict(REPLACE, f"it is stopped again, after {_RESUMES} times", machine)
    machine = machine._replace(unanswered=machine.unanswered + 1)
    if machine.unanswered < max(limits.unanswered, SIGHTS if machine.absent else 0):
        why = "it is said to be gone" if machine.absent else "it does not answer"
        return Verdict(WAIT, why, machine)
    return Verdict(REPLACE, f"it has not answered {plural.of(machine.unanswered, 'time')}", machine)


def _remember(machine: Machine, look: Look, limits: Limits, now: Moment) -> Machine:
    """Note what speaks for the machine: a worker at work forgives stops, a step done forgives restarts."""
    if look.worker == "active" and not look.foreign and (look.sign_age or 0.0) <= limits.stale:
        machine = machine._replace(well=now, resumes=0)
    done = look.steps.get("done", machine.done)
    if done > machine.done:
        machine = machine._replace(done=done, restarts=0, progress=True)
    return machine


def _restart(machine: Machine, why: str, look: Look, limits: Limits) -> Verdict:
    if machine.restarts >= limits.restarts:
        times = "once" if machine.restarts == 1 else f"{machine.restarts} times"
        return Verdict(REPLACE, f"{why}, though it was started again {times}", machine)
    return Verdict(RESTART, why, machine._replace(restarts=machine.restarts + 1))


def _outcome(look: Look) -> str:
    """Return how the run has ended for good, or "" if starting again is the answer."""
    if look.unit == "failed":
        # A wrong list is wrong whatever run was there before; other ends are those of the run that the status is of.
        return _OUTCOMES.get(look.exit, "") if look.exit == CONFIG or not look.foreign else ""
    if look.worker == "silent":
        return ""
    return look.status if look.status in ("done", "failed", "out-of-budget") else ""


def _how(look: Look) -> str:
    if look.unit == "failed":
        return f"exit status {look.exit}{f': {look.why}' if look.why else ''}"
    if look.foreign:
        return f"what is there is the run '{look.foreign}'"
    return look.status or f"unit {look.unit or 'unknown'}"
