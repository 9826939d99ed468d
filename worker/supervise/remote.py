"""The agent on a machine, as far as a script for sh can reach it: look, prepare, start, start again, stop.

Each script prints its last word only when it got that far, so that a line that breaks is told from a worker that
does not work.  All of them may be run again.
"""

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from worker import files
from worker.signs import printable
from worker.supervise.command import Answer
from worker.supervise.judge import Look
from worker.supervise.provider import Hand
from worker.supervise.record import Machine

Given = Iterable[tuple[str, str]]  # paths there, paths here

CONFIG = "/etc/agent/config.yaml"
CHECKPOINT = "/var/lib/agent/checkpoint.json"
_LAST_WORDS = "/var/lib/agent/last-words"
_STAGE = "/var/lib/agent-supervise"  # not in a folder where others could have put one of that name
_LAST = "so far, so good"
# What a machine says is larger than that is nonsense.
_TOO_MUCH, _DIGITS, _WORD = 1e18, 9, re.compile("[a-z-]{1,40}")
_WHY_MAX = 300
_PATH = "PATH=$PATH:/usr/local/bin:/usr/sbin:/sbin; export PATH\n"

# A PID 1 that does not answer is a machine that does not.
_LOOK = """\
unit=$(timeout 10 systemctl show agent -p ActiveState -p ExecMainStatus) || exit 1
echo "$unit"
[ ! -e "$checkpoint" ] || echo Checkpoint=there
case $unit in *=failed*) printf 'LastWords=%s\\n' "$(head -c 65536 "$words" 2>/dev/null | tr '\\n' ' ')" ;; esac
timeout 10 agentctl status --json
"""
_READY = """\
command -v agentctl >/dev/null || { echo 'the agent is not installed there' >&2; exit 1; }
systemctl stop agent.path agent || exit 1
"""
_MAKE_STAGE = '(umask 077; mkdir -p "$stage") || exit 1\n'
# The worker reads its files and does not write them.
_PLACE = """\
user=$(systemctl show -P User agent)
user=${user:-root}
group=$(id -gn "$user") || exit 1
place() {
    mkdir -p "${2%/*}" && chgrp "$group" "$1" && chmod 640 "$1" && mv -fT "$1" "$2"
}
"""
_START = """\
systemctl --quiet enable agent
systemctl reset-failed agent 2>/dev/null
systemctl start agent
"""
_STOP = "systemctl stop agent || exit 1\n"
_RELOAD = "systemctl reload agent 2>/dev/null\n"  # one that is not at work has only to be started
_KILL = "systemctl kill --kill-whom=main --signal=KILL agent\n"


def knock(hand: Hand, machine: Machine) -> str:
    """Return "" if the machine does what it is told, or why it does not."""
    answer = _run(hand, machine, "", "look")
    return "" if answer.ok else answer.fault()


def look(hand: Hand, machine: Machine) -> Look | None:
    """Return what the machine says of its worker, or None if it does not answer."""
    answer = _run(hand, machine, _define(checkpoint=CHECKPOINT, words=_LAST_WORDS) + _LOOK, "look")
    return read(answer.output) if answer.ok else None


def read(output: str) -> Look:
    """Return the look that a script has printed."""
    unit = dict(re.findall(r"^(ActiveState|ExecMainStatus|Checkpoint)=(\S*)$", output, re.MULTILINE))
    words = re.search(r"^LastWords=(.*)$", output, re.MULTILINE)
    shown = re.search(r"^\{$.*^\}$", output, re.MULTILINE | re.DOTALL)
    found: Any = None
    if shown:
        with contextlib.suppress(ValueError, RecursionError):
            found = json.loads(shown[0])
    code = unit.get("ExecMainStatus", "")
    status = int(code) if code.isdecimal() and len(code) <= _DIGITS else 0
    return Look(
        worker=_word(_in(found, "worker", "state")),
        status=_word(_in(found, "status")),
        sign_age=_number(_in(found, "last_sign_age")),
        unit=unit.get("ActiveState", ""),
        exit=status,
        why=_why(words[1] if words else "", status),
        checkpoint="Checkpoint" in unit,
        steps=_counts(_in(found, "steps")),
        spend=_number(_in(found, "budget", "spend", "used")),
    )


def _why(said: str, status: int) -> str:
    """Return the reason that a worker has left word of (worker/alert.py), if it ended with this exit status."""
    words: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        words = json.loads(said)
    if not isinstance(words, list) or len(words) < len(("status", "kind", "cause")):
        return ""
    code, _kind, cause = words[:3]
    if type(code) is not int or code != status or not isinstance(cause, str):
        return ""
    why = " ".join(cause[: 2 * _WHY_MAX].split())
    return printable(why if len(why) <= _WHY_MAX else f"{why[:_WHY_MAX]} ...")


def _in(found: Any, *names: str) -> Any:
    """Return what stands there under these names, or None: a machine may say anything."""
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _word(value: Any) -> str:
    return value if isinstance(value, str) and _WORD.fullmatch(value) else ""


def _number(value: Any) -> float | None:
    number = type(value) in (int, float) and 0 <= value < _TOO_MUCH  # NaN is not
    return value if number else None


def _counts(value: Any) -> dict[str, int]:
    found = value.items() if isinstance(value, dict) else ()
    counts = {name: count for name, count in found if type(count) is int and 0 <= count < _TOO_MUCH}
    return counts if {"total", "done"} <= counts.keys() else {}  # one without the other says nothing


def prepare(
    hand: Hand, machine: Machine, setup: str, given: Given, dropped: Iterable[str], checkpoint: str | None
) -> str:
    """Put everything on the machine that the worker needs, and start nothing; return "" or what went wrong.

    `given` and `dropped` as for `renew`; `checkpoint`, if there is one, is what the worker goes on from.
    """
    if setup:
        answer = _run(hand, machine, f"(\n{setup}\n) || exit 1\n", "setup")
        if not answer.ok:
            return f"setup: {answer.fault()}"
    answer = _run(hand, machine, _define(stage=_STAGE) + _READY + _MAKE_STAGE)
    if not answer.ok:
        return answer.fault()
    script, fault = _put(hand, machine, given, dropped)
    if fault:
        return fault
    if checkpoint is not None:
        staged = f"{_STAGE}/checkpoint.json"
        answer = hand.put(machine, checkpoint, staged)
        if not answer.ok:
            return f"put {checkpoint}: {answer.fault()}"
        # What is there of an earlier life of the machine is set aside: the run has been elsewhere since.
        script += f"agentctl restore --force {staged} && rm -f {staged} || exit 1\n"
    answer = _run(hand, machine, script)
    return "" if answer.ok else answer.fault()


def renew(hand: Hand, machine: Machine, given: Given, dropped: Iterable[str]) -> str:
    """Put what is given there now in its place, beside a worker that may be at work; return "" or what went wrong.

    `given` are (path there, path here), `dropped` paths there that are to be no more.
    """
    answer = _run(hand, machine, _define(stage=_STAGE) + _MAKE_STAGE)
    if not answer.ok:
        return answer.fault()
    script, fault = _put(hand, machine, given, dropped)
    if fault:
        return fault
    answer = _run(hand, machine, script)
    return "" if answer.ok else answer.fault()


def _put(hand: Hand, machine: Machine, given: Given, dropped: Iterable[str]) -> tuple[str, str]:
    """Bring files to the machine; return a script that gives them their places, and what went wrong."""
    script = _PLACE + "".join(f"rm -f {shlex.quote(there)} || exit 1\n" for there in dropped)
    for number, (there, here) in enumerate(given):
        staged = f"{_STAGE}/{number}"
        answer = hand.put(machine, here, staged)
        if not answer.ok:
            return "", f"put {here}: {answer.fault()}"
        script += f"place {staged} {shlex.quote(there)} || exit 1\n"
    return script, ""


def start(hand: Hand, machine: Machine, reload: bool = False) -> bool:
    """Have the worker started, also at the next boot; return whether the machine did as it was told.

    With `reload` one that is at work reads its list again.  Whether it has come to work is another question: look.
    """
    return _run(hand, machine, (_RELOAD if reload else "") + _START).ok


def start_again(hand: Hand, machine: Machine, seen: Look) -> bool:
    """Have the worker started after what was seen; what hangs is ended first, its steps with it."""
    hangs = seen.worker == "silent" or seen.unit not in ("failed", "inactive")
    script = (_KILL if seen.worker == "silent" else "") + (_STOP if hangs else "") + _START
    return _run(hand, machine, script).ok


def stop(hand: Hand, machine: Machine) -> bool:
    """Have the worker end, and not come back at a boot; return whether it has."""
    return _run(hand, machine, "systemctl --quiet disable agent\n" + _STOP).ok


def fetch(hand: Hand, machine: Machine, results: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Get files from the machine, (path here, path there), each whole or not at all; yield what could not be got."""
    for here, there in results:
        incoming = f"{here}.incoming"
        answer = hand.get(machine, there, incoming)
        fault = "" if answer.ok else answer.fault()
        try:
            os.unlink(incoming) if fault else files.adopt(incoming, here)
        except OSError as exc:
            fault = fault or f"{exc.filename or here}: {exc.strerror}"
        if fault:
            yield f"{there} cannot be fetched: {fault}"


def _run(hand: Hand, machine: Machine, script: str, timeout: str = "exec") -> Answer:
    answer = hand.script(machine, f"{_PATH}{script}echo '{_LAST}'\n", timeout)
    if answer.ok and answer.output.rstrip().endswith(_LAST):
        return answer
    return answer._replace(status=answer.status or 1 if answer.status is not None else None)


def _define(**values: str) -> str:
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
