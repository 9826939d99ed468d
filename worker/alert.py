"""Alerts: somebody is told, once, that the run has changed for the worse.

STATE/last-words   why the last worker that did not end well did so; written by itself
STATE/alerted      what has been told; until a worker gets on with the work again, the same is not told twice

Under systemd the unit's OnFailure= tells (worker/postmortem.py, which keeps what it has told in worker/told.py),
elsewhere the worker when it ends.
What could not be written down is told again: an alert twice is better than none.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from worker import errands, errors, files, ping
from worker.contact import Contact
from worker.journal import NOTICE, Journal
from worker.process import SpawnError
from worker.timespan import show

FAILED, OUT_OF_BUDGET, GAVE_UP = "failed", "out-of-budget", "gave-up"
# In the environment of a worker whose unit tells, by OnFailure=, so that the worker does not as well.
UNIT = "AGENT_UNIT"

TIMEOUT = 60.0
# Before a command that has failed is tried again: where nobody waits, and where somebody may.
PAUSES, SHORT_PAUSES = (5.0, 30.0), (2.0,)
_LINES, LINES_BYTES = 50, 8 * 1024
_CAUSE_MAX = 2000
_WORDS, _TOLD = "last-words", "alerted"


class Alert(NamedTuple):
    """A change for the worse: what kind, a sentence why, and the step that failed with its last lines, if one did.

    `mark` tells it from the same of another time: when the newest attempt began, empty if that is not known.
    """

    kind: str
    cause: str
    step: str = ""
    lines: str = ""
    mark: str = ""


class Words(NamedTuple):
    """What a worker has to say of its end, and the exit status with which it ends."""

    status: int
    alert: Alert


_OF_STATUS = {
    errors.STEP_FAILED: Alert(FAILED, "a step failed for good"),
    errors.OUT_OF_BUDGET: Alert(OUT_OF_BUDGET, "the budget is spent"),
    errors.STATE_UNUSABLE: Alert(GAVE_UP, "the state folder, or the ledger's server, cannot be used"),
    errors.CONFIG: Alert(GAVE_UP, "the configuration is wrong"),
}


def last_lines(data: bytes) -> str:
    """Return the end of a log, as much of it as an alert takes along."""
    lines = data[-LINES_BYTES:].decode(errors="replace").replace("\0", "").splitlines()
    if len(data) > LINES_BYTES:
        lines = lines[1:] or lines  # the first is but the end of one
    return "\n".join(lines[-_LINES:])


def say_last(root: str, words: Words) -> None:
    """Keep why this worker ends, as far as the state folder can be written."""
    data = json.dumps([words.status, *words.alert], ensure_ascii=False)
    with contextlib.suppress(OSError):
        files.replace(f"{root}/{_WORDS}", [data.encode(errors="backslashreplace")], mode=0o600)


def last_words(root: str) -> Words | None:
    """Return what the last worker has said of its end, or None if it said nothing."""
    try:
        status, *alert = files.read_json(f"{root}/{_WORDS}")
        return Words(status, Alert(*alert))
    except (OSError, ValueError, TypeError):
        return None


def of_status(status: int) -> Alert | None:
    """Return what the exit status of a worker says alone, where it could leave no word; None if nothing bad."""
    return _OF_STATUS.get(status)


def forget_words(root: str) -> None:
    """Let a worker that begins have said nothing yet."""
    _remove(f"{root}/{_WORDS}")


def forget_told(root: str, *kinds: str) -> None:
    """Let what comes next be told, even if it is the same again; `kinds`: only if it was one of these."""
    path = f"{root}/{_TOLD}"
    if not kinds or read_told(path).get("kind") in kinds:
        _remove(path)


def tell(
    alert: Alert,
    contact: Contact,
    root: str,
    unit: str,
    base: Mapping[str, str],
    journal: Journal,
    pauses: Sequence[float],
) -> bool:
    """Tell whom `contact` names of `alert`, unless that has been done; return whether it has been by now.

    `unit`: the unit that is down, empty if it is none; `base`: what a command of ours finds.  One that fails is tried
    again after each of `pauses`.
    """
    record = {"run": contact.run, "kind": alert.kind, "step": alert.step, "cause": alert.cause}
    if read_told(f"{root}/{_TOLD}") == record:
        return True
    if not send(alert, contact, unit, base, journal, pauses):
        return False
    if contact.argv or contact.ping.fail:
        with contextlib.suppress(OSError):
            files.replace(f"{root}/{_TOLD}", [json.dumps(record).encode()], mode=0o600)
    return True


def send(
    alert: Alert,
    contact: Contact,
    unit: str,
    base: Mapping[str, str],
    journal: Journal,
    pauses: Sequence[float],
) -> bool:
    """Tell whom `contact` names, if anybody, as `tell` does, whatever was told before; return whether it worked."""
    fault = ""
    if contact.argv:
        fault = _run(alert, contact, unit, base, journal, pauses)
    if contact.ping.fail:
        well, said = ping.send(contact.ping.fail, base)
        called = "" if well else said
        if called:
            journal.warning(f"ping: {called}")
        fault = fault or ("" if contact.argv else called)
    if fault:
        return False
    if contact.argv or contact.ping.fail:
        journal.event("alerted", f"run {contact.run}: {alert.kind}: {alert.cause}; told", priority=NOTICE)
    return True


def environment(alert: Alert, contact: Contact, unit: str) -> dict[str, str]:
    """Return what an alert's command is told, in its environment."""
    texts = {
        "AGENT_RUN": contact.run,
        "AGENT_ALERT": alert.kind,
        "AGENT_CAUSE": alert.cause[:_CAUSE_MAX],
        "AGENT_STEP": alert.step,
        "AGENT_LINES": alert.lines,
        UNIT: unit,
        "AGENT_HOST": os.uname().nodename,
    }
    # What no environment can hold must not be why nobody is told.
    return {name: text.replace("\0", "").encode(errors="backslashreplace").decode() for name, text in texts.items()}


def _run(
    alert: Alert, contact: Contact, unit: str, base: Mapping[str, str], journal: Journal, pauses: Sequence[float]
) -> str:
    """Run the command until it succeeds, as often as that makes sense; return why it did not, empty if it did."""
    for pause in (*pauses, None):
        fault = attempt(alert, contact, unit, base)
        if not fault:
            break
        what = f"alert: {contact.argv[0]!r} {fault}"
        journal.warning(f"{what}; giving up" if pause is None else f"{what}; again in {show(pause)}")
        time.sleep(pause or 0.0)  # the run is over: nobody is kept waiting
    return fault


def attempt(alert: Alert, contact: Contact, unit: str, base: Mapping[str, str]) -> str:
    """Run the command once; return what went wrong, empty if nothing did."""
    env = dict(base) | environment(alert, contact, unit)
    try:
        return errands.run(contact.argv, env, contact.folder, TIMEOUT, keep_output=False).fault
    except SpawnError as exc:
        return str(exc)


def read_told(path: str) -> dict[str, str]:
    """Return what a file says has been told; empty if there is none that can be read."""
    try:
        found = files.read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
