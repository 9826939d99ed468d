"""A provider of machines: commands with a time limit each, and what stands for what in them.

    state    prints running, stopped or gone; anything else, or a failure, is "unknown"
    create   makes machine {name}, or takes the one of that name that is there: it may be run again after it, or
             the supervisor, was killed.  What it prints last is the machine's id; its name if it prints nothing
    exec     runs a program there: `sh` is added to it, which gets a script on standard input; or the script
             stands where {script} stands
    put get  copy {local} to {remote} and back, as the machine's root would; one `get` may run beside other commands
    resume   starts a stopped machine again; extend: lets it live longer; pause: stops it, with its disk kept

A list is a program and its arguments, in which {id} stands for the id; text is for /bin/sh, which finds it in $id.
The other words are in PLACES; a variable BASE is {BASE} and $BASE.
"""

import os
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from worker.events import Events
from worker.supervise.command import Answer, Runner, Running
from worker.supervise.judge import ABSENT, RUNNING, STOPPED, UNSURE
from worker.supervise.record import Machine
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

    def __init__(self, provider: Provider, runner: Runner, environ: Mapping[str, str]) -> None:
        self._provider = provider
        self._runner = runner
        self._env = passed_on(environ)

    def state(self, machine: Machine) -> str:
        """Return what the provider says of the machine."""
        answer = self._run("state", machine)
        words = answer.output.split() if answer.ok else []
        return words[-1] if words and words[-1] in (RUNNING, STOPPED, ABSENT) else UNSURE

    def script(self, machine: Machine, script: str, timeout: str = "exec") -> Answer:
        """Return how a script for sh ended on the machine."""
        return self._run("exec", machine, timeout, script=script)

    def put(self, machine: Machine, local: str, remote: str) -> Answer:
        return self._run("put", machine, local=local, remote=remote)

    def get(self, machine: Machine, remote: str, local: str) -> Answer:
        return self._run("get", machine, local=local, remote=remote)

    def get_beside(
        self, machine: Machine, remote: str, local: str, runner: Runner, events: Events, then: Callable[[], object]
    ) -> Running:
        """Begin to get a file, beside what else is done; `then` is called when the command has ended by itself."""
        argv, env = self._words("get", machine, local=local, remote=remote)
        return runner.start(argv, env, self._provider.timeouts["get"], "", events, then)

    def do(self, kind: str, machine: Machine) -> Answer:
        """Return how `create`, `resume`, `extend` or `pause` ended; one that is not offered has nothing to do."""
        return self._run(kind, machine) if self._provider.offers(kind) else Answer(0, "", "")

    def offers(self, kind: str) -> bool:
        return self._provider.offers(kind)

    def _run(self, kind: str, machine: Machine, timeout: str = "", **words: str) -> Answer:
        argv, env = self._words(kind, machine, **words)
        if kind == "exec" and not _takes_script(self._provider.commands[kind]):
            argv = [*argv, "sh"]
        return self._runner.run(argv, env, self._provider.timeouts[timeout or kind], words.get("script", ""))

    def _words(self, kind: str, machine: Machine, **words: str) -> tuple[list[str], dict[str, str]]:
        places = {"id": machine.id, "name": machine.name, "number": str(machine.number)} | words
        return fill(self._provider.commands[kind], places, self._provider.variables, self._env)


def fill(
    command: Command, places: Mapping[str, str], variables: Mapping[str, str], env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of a command.  Nothing is spliced into a shell's text."""
    known = {**variables, **places}
    if isinstance(command, str):
        return arguments(command), {"PATH": os.defpath, **env, **known}
    return [PLACE.sub(lambda found: known.get(found[1], found[0]), word) for word in command], dict(env)


def _takes_script(command: Command) -> bool:
    return isinstance(command, str) or any("{script}" in word for word in command)
