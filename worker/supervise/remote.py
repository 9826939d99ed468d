"""The agent on a machine, as far as a script for sh can reach it: look, prepare, start, start again, stop.

Each script prints a line of its own only when it got to its end, so that a connection that breaks is told from a worker
that does not work, and a greeting or an advertisement from an answer.  All of them may be run again.

STAGE/holder on the machine names the supervision that has it.  Nothing is done on a machine that another one holds.
"""

import hashlib
import os
import shlex
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

from worker.signs import printable
from worker.supervise.command import Answer
from worker.supervise.judge import Look
from worker.supervise.looks import read
from worker.supervise.provider import Hand
from worker.supervise.record import Machine

Given = Iterable[tuple[str, str, str]]  # paths there, paths here, SHA-256 as far as one is known

CONFIG = "/etc/agent/config.yaml"
CHECKPOINT = "/var/lib/agent/checkpoint.json"
_LAST_WORDS = "/var/lib/agent/last-words"
STAGE = "/var/lib/agent-supervise"  # not in a folder where others could have put one of that name
_LAST = "so far, so good"
_SHOWN_MAX = 100
_PATH = "PATH=$PATH:/usr/local/bin:/usr/sbin:/sbin; export PATH\n"

# A PID 1 that does not answer is a machine that does not.
_LOOK = """\
unit=$(timeout 10 systemctl show agent -p ActiveState -p ExecMainStatus) || exit 1
echo "$unit"
[ ! -e "$checkpoint" ] || echo Checkpoint=there
case $unit in *=failed*) printf 'LastWords=%s\\n' "$(head -c 65536 "$words" 2>/dev/null | tr '\\n' ' ')" ;; esac
timeout 10 agentctl status --json | head -c 131072
"""
# The first supervision that comes has the machine until it lets go of it.
_HOLD = """\
(umask 077; mkdir -p "$stage") || exit 1
find "$stage/holder" -size 0 -delete 2>/dev/null
echo "$me" >"$stage/holder.$$" && ln "$stage/holder.$$" "$stage/holder" 2>/dev/null
rm -f "$stage/holder.$$"
"""
_HELD = """\
holder=$(head -c 100 "$stage/holder" 2>/dev/null)
[ -z "$holder" ] || [ "$holder" = "$me" ] || { printf '\\n%s: held by %s\\n' "$mark" "$holder"; exit 0; }
"""
_RELEASE = 'rm -f "$stage"/copy.* "$stage"/result.*; [ "$holder" != "$me" ] || rm -f "$stage/holder"\n'
_READY = """\
command -v agentctl >/dev/null || { echo 'the agent is not installed there' >&2; exit 1; }
systemctl stop agent.path agent || exit 1
"""
# Nothing is used that is not, to the last byte, what was sent: some command lines end with 0 half-way.
_SAME = """\
same() {
    [ "$(sha256sum <"$1" | cut -c-64)" = "$2" ] || { echo "what came of $3 is not what was sent" >&2; exit 1; }
}
"""
AS = """\
user=$(systemctl show -P User agent) || exit 1
user=${user:-root}
as() { if [ "$(id -un)" = "$user" ]; then "$@"; else runuser -u "$user" -- "$@"; fi; }
"""
# The worker reads its files and does not write them.  Where its user may change anything on the way to one, he places
# it himself: a link that one of his programs has made there leads nowhere that he may not go.
_PLACE = f"""\
{AS}group=$(id -gn "$user") || exit 1
find='
    for way; do
        while [ -n "$way" ]; do
            if [ -w "$way" ] || [ -O "$way" ]; then echo his; exit; fi
            case $way in */*) way=${{way%/*}} ;; *) way= ;; esac
        done
    done
    echo ours
'
his='umask 027; mkdir -p "${{1%/*}}" && cat >"$1.new" && mv -fT "$1.new" "$1"'
place() {{
    whose=ours
    [ "$user" = root ] || whose=$(as sh -c "$find" sh "${{2%/*}}" "$(readlink -m "${{2%/*}}")")
    case $whose in
        his) as sh -c "$his" sh "$2" <"$1" && rm -f "$1" ;;
        ours) mkdir -p "${{2%/*}}" && chgrp "$group" "$1" && chmod 640 "$1" && mv -fT "$1" "$2" ;;
        *) return 1 ;;
    esac
}}
"""
_START = """\
systemctl --quiet enable agent
systemctl reset-failed agent 2>/dev/null
systemctl start agent
"""
# Where it is not installed there is none at work.
_STOP = 'systemctl stop agent || [ "$(systemctl show -P LoadState agent)" = not-found ] || exit 1\n'
_RELOAD = "systemctl reload agent 2>/dev/null\n"  # one that is not at work has only to be started
_KILL = "systemctl kill --kill-whom=main --signal=KILL agent\n"


class Reply(NamedTuple):
    """How a script ended on a machine."""

    output: str = ""
    fault: str = ""  # why it did not get to its end
    holder: str = ""  # the other supervision that has the machine; then nothing was done, and that is the fault
    refused: bool = False  # the provider was asked too often

    @property
    def ok(self) -> bool:
        return not self.fault


class Script(NamedTuple):
    """A script for a machine, and the line by which its end is known."""

    text: str
    mark: str

    def reply(self, answer: Answer) -> Reply:
        """Return how it ended: what stands beside its own line, before or after, is somebody else's."""
        lines = [line.strip() for line in answer.output.split("\n")]
        if self.mark in lines:
            return Reply(answer.output)
        held = f"{self.mark}: held by "
        for line in lines:
            if line.startswith(held):
                name = printable(line.removeprefix(held)[:_SHOWN_MAX])
                what = f"the supervision '{name}' has it (if that is no more: rm {STAGE}/holder there)"
                return Reply(fault=what, holder=name)
        fault = answer.fault()
        if answer.status is not None and not answer.said.strip():
            shown = next((line for line in reversed(lines) if line), "")[:_SHOWN_MAX]
            fault += f": the last line was '{printable(shown)}'" if shown else ", and nothing was said"
        return Reply(fault=fault, refused=answer.refused)


def script(machine: Machine, text: str, hold: bool = False) -> Script:
    """Return what does `text` on the machine unless another supervision has it; with `hold` we have it from then on."""
    mark = f"{_LAST} {os.urandom(4).hex()}"
    head = _PATH + define(stage=STAGE, me=holder(machine), mark=mark) + (_HOLD if hold else "") + _HELD
    return Script(f"{head}{text}printf '\\n%s\\n' \"$mark\"\n", mark)


def holder(machine: Machine) -> str:
    """Return the name that its supervision has on the machine."""
    return machine.name.rpartition("-")[0] or machine.name


def knock(hand: Hand, machine: Machine) -> Reply:
    """Return whether the machine does what it is told; one whose PID 1 does not answer, frozen say, does not."""
    return _run(hand, machine, "timeout 10 systemctl show agent -p ActiveState >/dev/null || exit 1\n", "look")


def look(hand: Hand, machine: Machine) -> tuple[Look | None, Reply]:
    """Return what the machine says of its worker, or None if it does not answer.

    A machine that no supervision holds, one of an earlier version's say, is held from now on.
    """
    script = f'[ -n "$holder" ] || ({_HOLD}) 2>/dev/null\n'
    reply = _run(hand, machine, script + define(checkpoint=CHECKPOINT, words=_LAST_WORDS) + _LOOK, "look")
    if reply.holder:
        return Look(holder=reply.holder), reply
    return read(reply.output) if reply.ok else None, reply


def prepare(
    hand: Hand, machine: Machine, setup: str, given: Given, dropped: Iterable[str], checkpoint: str | None
) -> Reply:
    """Put everything on the machine that the worker needs, and start nothing.

    `given` and `dropped` as for `renew`; `checkpoint`, if there is one, is what the worker goes on from.
    """
    if setup:
        reply = _set_up(hand, machine, setup)
        if not reply.ok:
            return reply if reply.holder else reply._replace(fault=f"setup: {reply.fault}")
    reply = _run(hand, machine, _READY, hold=True)
    if not reply.ok:
        return reply
    wanted = [*given, *([(f"{STAGE}/restore.json", checkpoint, "")] if checkpoint is not None else [])]
    text, reply = _put(hand, machine, wanted, dropped)
    if not reply.ok:
        return reply
    if checkpoint is not None:
        # What is there of an earlier life of the machine is set aside: the run has been elsewhere since.
        text += 'agentctl restore --force "$stage/restore.json" && rm -f "$stage/restore.json" || exit 1\n'
    return _run(hand, machine, text)


def _set_up(hand: Hand, machine: Machine, setup: str) -> Reply:
    """Run `setup:`, which may hold secrets: where scripts stand in a command line its text goes there as a file."""
    if not hand.shows_scripts:
        return _run(hand, machine, f"(\n{setup}\n) || exit 1\n", "setup", hold=True)
    reply = _run(hand, machine, "", hold=True)
    if not reply.ok:
        return reply
    staged = f"{STAGE}/setup"
    with tempfile.NamedTemporaryFile("w", prefix="agent-setup-", encoding="utf-8", errors="surrogateescape") as file:
        file.write(f"{setup}\n")
        file.flush()
        answer = hand.put(machine, file.name, staged)
        digest = digest_of(file.name)
    if not answer.ok:
        return Reply(fault=f"put: {answer.fault()}", refused=answer.refused)
    text = f"{_SAME}same {staged} {digest} setup\n( . {staged} )\nstatus=$?\nrm -f {staged}\n"
    return _run(hand, machine, f"{text}[ $status = 0 ] || exit 1\n", "setup")


def renew(hand: Hand, machine: Machine, given: Given, dropped: Iterable[str]) -> Reply:
    """Put what is given there now in its place, beside a worker that may be at work.

    `given` are (path there, path here, SHA-256 of what was checked), `dropped` paths there that are to be no more.
    """
    reply = _run(hand, machine, "", hold=True)
    if not reply.ok:
        return reply
    text, reply = _put(hand, machine, given, dropped)
    return _run(hand, machine, text) if reply.ok else reply


def _put(hand: Hand, machine: Machine, given: Given, dropped: Iterable[str]) -> tuple[str, Reply]:
    """Bring files to the machine; return a script that gives them their places if all of them are whole."""
    check, place = _SAME, _PLACE + "".join(f"rm -f {shlex.quote(there)} || exit 1\n" for there in dropped)
    for number, (there, here, digest) in enumerate(given):
        staged = f"{STAGE}/{number}"
        try:
            digest = digest or digest_of(here)
        except OSError as exc:
            return "", Reply(fault=f"{here}: cannot be read: {exc.strerror}")
        answer = hand.put(machine, here, staged)
        if not answer.ok:
            return "", Reply(fault=f"put {here}: {answer.fault()}", refused=answer.refused)
        check += f"same {staged} {digest} {shlex.quote(there)}\n"
        place += f"place {staged} {shlex.quote(there)} || exit 1\n"
    return check + place, Reply()


def digest_of(path: str) -> str:
    """Return the SHA-256 of a file.  Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def start(hand: Hand, machine: Machine, reload: bool = False) -> Reply:
    """Have the worker started, also at the next boot.

    With `reload` one that is at work reads its list again.  Whether it has come to work is another question: look.
    """
    return _run(hand, machine, (_RELOAD if reload else "") + _START, hold=True)


def start_again(hand: Hand, machine: Machine, seen: Look) -> Reply:
    """Have the worker started after what was seen; what hangs is ended first, its steps with it."""
    hangs = seen.worker == "silent" or seen.unit not in ("failed", "inactive")
    return _run(hand, machine, (_KILL if seen.worker == "silent" else "") + (_STOP if hangs else "") + _START)


def stop(hand: Hand, machine: Machine) -> Reply:
    """Have the worker end, and not come back at a boot."""
    return _run(hand, machine, "systemctl --quiet disable agent\n" + _STOP)


def release(hand: Hand, machine: Machine) -> Reply:
    """Let another supervision have the machine."""
    return _run(hand, machine, _RELEASE, "look")


def _run(hand: Hand, machine: Machine, text: str, timeout: str = "exec", hold: bool = False) -> Reply:
    sent = script(machine, text, hold)
    return sent.reply(hand.script(machine, sent.text, timeout))


def define(**values: str) -> str:
    """Return lines of a script that give variables their values."""
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
