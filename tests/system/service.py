"""The agent as a service in a machine, and what a test wants to know of it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tests.system.machine import Entry, Machine

# As installed, but for the time a test has.
QUICK = "[Service]\nWatchdogSec=3s\n"


# In the place of worker/points.py: dies at the first of the places in a file, which is taken off it.
DEADLY = """
import os, signal
def at(point):
    try:
        with open("/var/lib/agent/work/places") as file:
            first, *rest = file.read().split()
    except (FileNotFoundError, ValueError):
        return
    if point == first:
        with open("/var/lib/agent/work/places.new", "w") as file:
            file.write(" ".join(rest))
        os.rename("/var/lib/agent/work/places.new", "/var/lib/agent/work/places")
        os.kill(os.getpid(), signal.SIGKILL)
"""


def deadly(agent: Machine) -> None:
    """Let the agent's worker die at the places that are in /var/lib/agent/work/places, one after the other."""
    program = agent.run("readlink -f /usr/local/lib/agent/current").out.strip()
    package = agent.run(f"find {program} -type d -name worker").out.strip()
    agent.write(f"{package}/points.py", DEADLY)
    agent.run(f"find {package} -name 'points.*.pyc' -delete")


class Service:
    """agent.service in `machine`; `mark` is the place in the journal where a test began to look."""

    def __init__(self, machine: Machine, tasks: str, drop_in: str = QUICK) -> None:
        self.machine = machine
        machine.write("/etc/agent/config.yaml", tasks, mode=0o644)
        machine.write("/etc/systemd/system/agent.service.d/90-test.conf", drop_in)
        machine.run("systemctl daemon-reload")
        self.mark = machine.cursor()

    def start(self) -> None:
        self.machine.run("systemctl start agent")

    @property
    def pid(self) -> int:
        """The worker's pid, as the machine counts."""
        return int(self.machine.show("agent", "MainPID")["MainPID"])

    def kill(self, signal: str) -> None:
        self.machine.run(["systemctl", "kill", "--kill-whom=main", f"--signal={signal}", "agent"])

    def wait(self, event: str, step: str | None = None, attempt: int | None = None) -> Entry:
        """Return the first entry of this kind that comes after the last one that was waited for."""
        wanted = [f"AGENT_EVENT={event}"]
        if step is not None:
            wanted.append(f"AGENT_STEP={step}")
        if attempt is not None:
            wanted.append(f"AGENT_ATTEMPT={attempt}")
        entry = self.machine.wait_journal(*wanted, after=self.mark, timeout=60)
        self.mark = entry["__CURSOR"]
        return entry

    def wait_ended(self) -> None:
        """Return once the unit is no longer active, and whoever tells of that has ended; its last line was seen."""
        for unit in ("agent", "agent-alert@agent"):
            ended = f"case $(systemctl is-active {unit}) in inactive | failed) exit 0 ;; esac"
            self.machine.run(f"while :; do {ended}; sleep 0.02; done")

    def events(self, event: str) -> list[Entry]:
        """Return every entry of this kind, of every boot."""
        return self.machine.journal(f"AGENT_EVENT={event}")

    def per_step(self, event: str) -> Counter[str]:
        """Return how many entries of this kind each step has."""
        return Counter(entry["AGENT_STEP"] for entry in self.events(event))

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.machine.run("agentctl status --json").out))

    def processes(self, user: str = "agent") -> list[str]:
        """Return the command lines of a user's processes; of those that have ended nothing runs any more."""
        listed = self.machine.run(["ps", "-o", "stat=,args=", "-u", user], check=False).out.splitlines()
        return [args for state, args in (line.split(maxsplit=1) for line in listed) if not state.startswith("Z")]
