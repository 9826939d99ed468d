"""A provider of machines: commands with a time limit each, and what stands for what in them.

    state    prints running, stopped or gone in a line of its own; anything else, or a failure, is "unknown".  Gone is
             a machine of which its provider says, by name, that there is none; also one that was never made.  Who
             cannot be asked does not know
    create   makes machine {name}, or takes the one of that name that is there: it may be run again after it, or
             the supervisor, was killed, but not while `state` is unknown.  The last line of one word that it prints is
             the machine's id; its name if it prints nothing
    exec     runs a program there: `sh` is added to it, which gets a script on standard input; or the script
             stands where {script} stands
    put get  copy {local} to {remote} and back, as the machine's root would; one `get` may run beside other commands
    resume   starts a stopped machine again; extend: lets it live longer; pause: stops it, with its disk kept

A list is a program and its arguments, in which {id} stands for the id; text is for /bin/sh, which finds it in $id.
The other words are in PLACES; a variable BASE is {BASE} and $BASE.  Text finds a program of ours for containers
(container.py) in $container, for `eval`.  Lines "warning: ..." on the standard error of a `create` that ends well are
passed on.  The time limits of `put` and `get` grow with what is to be copied.
"""

import os
import re
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

from worker import process
from worker.events import Events
from worker.supervise.command import Answer, Runner, Running
from worker.supervise.judge import ABSENT, RUNNING, STOPPED, UNSURE
from worker.supervise.record import Machine
from worker.supervise.sound import Sound, judge
from worker.task import Command, arguments

COMMANDS = ("state", "create", "exec", "put", "get", "resume", "extend", "pause")
PLACES = ("id", "name", "number", "local", "remote", "script")
TIMEOUTS = {
    "state": 20.0,
    "look": 20.0,  # an exec that only looks
    "exec": 180.0,  # one that stops and starts the agent, which may take its TimeoutStopSec=
    "setup": 1800.0,
    "put": 120.0,
    "get": 120.0,
    "create": 600.0,
    "resume": 120.0,
    "extend": 60.0,
    "pause": 60.0,
}
_RATE = 50_000.0  # bytes a second, the least that a line is to carry
PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
# The supervisor's own line to systemd is no provider's business.
_OURS = re.compile(
    r"NOTIFY_SOCKET|WATCHDOG_.*|LISTEN_.*|INVOCATION_ID|JOURNAL_STREAM|SYSTEMD_EXEC_PID|MEMORY_PRESSURE_.*"
)


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the commands of a sandbox find of the supervisor's environment."""
    return {name: value for name, value in environ.items() if not _OURS.fullmatch(name)}


class Provider(NamedTuple):
    """What the files say."""

    file: str
    commands: dict[str, Command]
    variables: dict[str, str]
    timeouts: dict[str, float]

    def offers(self, kind: str) -> bool:
        return kind in self.commands


class Hand:
    """A provider's commands at work; whatever they do, each call ends in time and raises nothing."""

    def __init__(self, provider: Provider, runner: Runner, environ: Mapping[str, str], most: int = 2**28) -> None:
        """`most`: how many bytes a file may have that is got from a machine."""
        self._most = most
        self._provider = provider
        self._runner = runner
        self._env = passed_on(environ)

    def state(self, machine: Machine) -> str:
        """Return what the provider says of the machine."""
        answer = self._run("state", machine)
        lines = [line.strip() for line in answer.output.splitlines() if line.strip()] if answer.ok else []
        said = {line for line in lines if line in (RUNNING, STOPPED, ABSENT)}
        if said:
            return said.pop() if len(said) == 1 else UNSURE
        last = lines[-1].split()[-1] if lines else ""
        return last if last in (RUNNING, STOPPED) else UNSURE

    def script(self, machine: Machine, script: str, timeout: str = "exec") -> Answer:
        """Return how a script for sh ended on the machine."""
        return self._run("exec", machine, timeout, script=script)

    def script_beside(
        self, machine: Machine, script: str, runner: Runner, events: Events, then: Callable[[], object]
    ) -> Running:
        """Begin to run a script on the machine, as `get_beside` does."""
        argv, env = self._words("exec", machine, script=script)
        return runner.start(argv, env, self._provider.timeouts["exec"], script, events, then)

    @property
    def shows_scripts(self) -> bool:
        """Whether a script stands in a command line, where each user of this machine can read it."""
        command = self._provider.commands["exec"]
        return not isinstance(command, str) and _takes_script(command)

    def put(self, machine: Machine, local: str, remote: str) -> Answer:
        try:
            size = os.stat(local).st_size
        except OSError:
            size = 0  # the command says what is wrong with it
        return self._run("put", machine, size=size, local=local, remote=remote)

    def get(self, machine: Machine, remote: str, local: str, size: int = 0) -> Answer:
        return self._run("get", machine, size=size, local=local, remote=remote)

    def get_beside(
        self,
        machine: Machine,
        remote: str,
        local: str,
        size: int,
        runner: Runner,
        events: Events,
        then: Callable[[], object],
    ) -> Running:
        """Begin to get a file, beside what else is done; `then` is called when the command has ended by itself."""
        argv, env = self._words("get", machine, local=local, remote=remote)
        limit = self._provider.timeouts["get"] + size / _RATE
        return runner.start(argv, env, limit, "", events, then, self._most)

    def judge(self, path: str) -> Sound | str:
        """Return what a checkpoint that came from a machine says, or why it is none.  Raises FileNotFoundError."""
        return judge(path, self._runner)

    def do(self, kind: str, machine: Machine) -> Answer:
        """Return how `create`, `resume`, `extend` or `pause` ended; one that is not offered has nothing to do."""
        return self._run(kind, machine) if self._provider.offers(kind) else Answer(0, "", "")

    def offers(self, kind: str) -> bool:
        return self._provider.offers(kind)

    def _run(self, kind: str, machine: Machine, timeout: str = "", size: int = 0, **words: str) -> Answer:
        argv, env = self._words(kind, machine, **words)
        limit = self._provider.timeouts[timeout or kind] + size / _RATE
        most = self._most if kind == "get" else None
        return self._runner.run(argv, env, limit, words.get("script", ""), most)

    def _words(self, kind: str, machine: Machine, **words: str) -> tuple[list[str], dict[str, str]]:
        places = {"id": machine.id, "name": machine.name, "number": str(machine.number)} | words
        argv, env = fill(self._provider.commands[kind], places, self._provider.variables, self._env)
        takes_none = kind == "exec" and not _takes_script(self._provider.commands[kind])
        return ([*argv, "sh"] if takes_none else argv), env


def fill(
    command: Command, places: Mapping[str, str], variables: Mapping[str, str], env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a command.  Nothing is spliced into a shell's text."""
    known = {**variables, **places}
    if isinstance(command, str):
        ours = {"container": shlex.join(process.ours("supervise.container"))}
        return arguments(command), {"PATH": os.defpath, **env, **ours, **known}
    return [PLACE.sub(lambda found: known.get(found[1], found[0]), word) for word in command], dict(env)


def _takes_script(command: Command) -> bool:
    return isinstance(command, str) or any("{script}" in word for word in command)
