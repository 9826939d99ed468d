"""Post-mortem: the unit is down, so somebody is told why.  This is `agentctl alert`, which agent-alert@.service runs.

OnFailure= starts it when the unit has failed; from systemd 254 on also each time that systemd is about to start the
worker again by itself.  What counts is what the unit is when we look: if it is not down for good there is nothing
to tell, and should it be so a moment later we are started once more: before we look we have said that we are ending,
and systemd begins a service that is ending anew instead of taking it for started.
"""

import sys
from collections.abc import Mapping

from worker import alert, awake, environment, journal, rehearsal, systemd, told, unit
from worker import folder as state
from worker.alert import Alert
from worker.errors import FAULT, OK, STATE_HELD, AgentError
from worker.journal import Journal

_WANTED = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "NRestarts",
    "ExecMainCode",
    "ExecMainStatus",
    *told.WANTED,
)
_UNKNOWN_UNIT, _SOUND_UNIT = "not-found", "loaded"  # any other LoadState is one that systemd cannot start again
_EXITED = "1"  # ExecMainCode is the si_code of waitid(2)


def tell(name: str, config_path: str, root: str, folder: str, environ: Mapping[str, str]) -> int:
    """Tell somebody if the unit `name` is down for good and that has not been told; return the exit status.

    `root` is its state folder, `folder` the one of agent-alert@.
    """
    systemd.Notifier(environ, lambda text: print(text, file=sys.stderr)).passing()
    found = unit.properties(name, *_WANTED)
    if found.get("LoadState", _UNKNOWN_UNIT) == _UNKNOWN_UNIT:
        raise AgentError(f"{name}.service: systemd does not know it here", "name the unit: agentctl alert UNIT")
    rehearsal.hold_if_asked(lambda: told.whom(config_path, folder, root), name, environ)
    if not down(found):
        return OK
    send = journal.sender(environ)
    held = False
    try:
        held = state.holder(root) is not None
        if not held:
            awake.remove(root)  # the unit did so itself, unless it was still to be started again
    except AgentError as exc:
        Journal("", send).warning(str(exc))
    contact, before = told.whom(config_path, folder, root), told.last(folder)
    due = examine(name, found, alert.last_words(root), (state.ended(root).faults or [""])[-1], held)
    if due is None or contact is None or told.was_stopped(name, found.get("InvocationID", "")):
        return OK
    record = told.record(due, contact.run, found, before)
    if not told.is_news(record, before):
        return OK
    log = Journal(contact.run, send)
    base = environment.own_anyhow(environ, contact.given, log.warning)
    if not alert.send(due, contact, f"{name}.service", base, log, alert.PAUSES):
        return FAULT
    if contact.argv or contact.ping.fail:
        told.note(folder, record)
    return OK


def down(found: Mapping[str, str]) -> bool:
    """Return whether a unit with these properties has failed and is not about to be started again."""
    return (found.get("ActiveState"), found.get("SubState")) == ("failed", "failed")


def examine(
    name: str, found: Mapping[str, str], words: alert.Words | None, last_end: str, held: bool = False
) -> Alert | None:
    """Return what there is to tell of a unit that is down with these properties; None if another one is to tell.

    `words` are the last worker's, `last_end` is how systemd saw it end, if that is known; `held`: another worker has
    the state folder now.
    """
    exited = found.get("ExecMainCode") == _EXITED
    status = int(found.get("ExecMainStatus") or 0)
    if exited and status == STATE_HELD and held:
        return None  # by another worker, which does the run's work and tells for itself
    if exited and words is not None and words.status == status:
        return words.alert
    plain = alert.of_status(status) if exited else None
    if plain is not None:
        kind, cause, *_ = plain
    elif exited and status == STATE_HELD:  # a step may have had the lock
        kind, cause = alert.GAVE_UP, "another process had the run's place, and none has it now"
    else:  # systemd starts it again after such an end, until the unit's start limit
        again = found.get("NRestarts", "0") != "0"
        kind = alert.GAVE_UP
        cause = "systemd has given up after many starts in a row" if again else "it is not started again"
        load = found.get("LoadState", _SOUND_UNIT)
        if load != _SOUND_UNIT:
            cause = f"systemd cannot use its unit file ({load}); 'systemd-analyze verify {name}.service' says where"
        cause += f"; the last worker: {last_end or _end(found.get('Result', ''), exited, status)}"
    return Alert(kind, f"{cause}; 'journalctl -u {name}' says more")


def _end(result: str, exited: bool, status: int) -> str:
    return f"{result}, {'exit status' if exited else 'signal'} {status}" if status else f"{result}"
