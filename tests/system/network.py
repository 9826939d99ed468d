"""Several computers in one machine: a network for each, a switch between them, a PostgreSQL server at the switch.

    site = Site(machine, {"w1": TASKS, "w2": TASKS})
    site.start()
    computer = site.begun("some-step")     # the one that has begun it
    site.lan.cut(computer.name)            # nobody is told; packets are lost

The computers share a disk and a clock, so that a test can write down in one file what all of them did.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests import postgres
from tests.system.machine import Entry, Machine, Result

SERVER = "postgres-test"  # the unit
FOLDER = "/var/lib/postgres-test"
USER = DATABASE = "agent"
PASSWORD = "correct horse"

# SIGINT is what pg_ctl calls "fast".
_SERVER_UNIT = """
[Unit]
Description=PostgreSQL for the tests

[Service]
Type=notify
User=postgres
RuntimeDirectory=postgres-test
{network}
ExecStart={programs}/postgres -D {folder}/data -k /run/postgres-test -c listen_addresses=* -c max_connections=60
KillSignal=SIGINT
TimeoutSec=60

[Install]
WantedBy=multi-user.target
"""
_FIND_PROGRAMS = """
set -- /usr/lib/postgresql/*/bin/initdb
[ -x "$1" ] || set -- "$(command -v initdb)"
dirname "$(realpath "$1")"
"""
_NEW_CLUSTER = """
set -e
install -d -o postgres {folder}
printf '%s\\n' '{password}' > {folder}/password
chown postgres {folder}/password
cd {folder}
runuser -u postgres -- {programs}/initdb -D data --no-sync -E UTF8 --locale=C --pwfile=password \
    --auth-local=trust --auth-host=scram-sha-256 >/dev/null
echo 'host all all 10.0.0.0/8 trust' >> data/pg_hba.conf
"""
# KillMode=process: what the worker leaves behind when it is killed is for its next life to end.
_COMPUTER_UNIT = """
[Unit]
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
NetworkNamespacePath=/run/netns/%i
ExecStart=/usr/local/bin/agentctl run /etc/%i.yaml --state /var/lib/%i
Restart=on-failure
RestartSec=0
RestartPreventExitStatus=70 73 77 78
KillMode=process
"""


def require() -> None:
    """Skip the test where there are no programs for it; with AGENT_REQUIRE_SYSTEM=1 (as in CI), fail instead."""
    reason = postgres.why_not()
    if reason is None and shutil.which("ip") is None:
        reason = "networks need the program ip: apt-get install iproute2"
    if reason and os.environ.get("AGENT_REQUIRE_SYSTEM") == "1":
        pytest.fail(reason, pytrace=False)
    if reason:
        pytest.skip(reason)


def _bend_clocks(machine: Machine) -> None:
    """Let CLOCK_OFFSET in a worker's environment move its wall clock by so many seconds, and nobody else's."""
    # Python may read the file twice.
    line = "import os, time; time.real = getattr(time, 'real', time.time); "
    line += "time.time = (lambda real, by: lambda: real() + by)(time.real, float(os.environ.get('CLOCK_OFFSET', 0)))\n"
    site = "$(echo /usr/local/lib/agent/current/lib/python3*/site-packages)"
    machine.run(f"cat > {site}/bent-clock.pth", input=line)


class Site:
    """A switch, a server and several computers; the server runs, the workers do not yet."""

    def __init__(self, machine: Machine, tasks: Mapping[str, str], clocks: Mapping[str, int] | None = None) -> None:
        """`tasks`: the list of each computer; `clocks`: by how many seconds those of some are wrong."""
        self.machine = machine
        self.lan = Lan(machine, list(tasks))
        self.database = Database(machine, self.lan)
        machine.write("/etc/systemd/system/computer@.service", _COMPUTER_UNIT)
        self.computers = {}
        for name, text in tasks.items():
            machine.write(f"/etc/{name}.yaml", text)
            self.computers[name] = Computer(machine, name)
        if clocks:
            _bend_clocks(machine)
        for name, seconds in (clocks or {}).items():
            drop_in = f"[Service]\nEnvironment=CLOCK_OFFSET={seconds}\n"
            machine.write(f"/etc/systemd/system/computer@{name}.service.d/50-clock.conf", drop_in)
        machine.run("systemctl daemon-reload; mkdir -p /srv/gate")

    def start(self, *names: str) -> None:
        """Start the workers of these computers, or of all."""
        for name in names or self.computers:
            self.computers[name].start()

    def begun(self, step: str, attempt: int = 1) -> Computer:
        """Wait until an attempt at a step has begun; return whose it is."""
        return self.of(self.machine.wait_journal(*fields("step-started", step, attempt), timeout=60))

    def of(self, entry: Entry) -> Computer:
        """Return the computer whose worker has written this."""
        return self.computers[entry["_SYSTEMD_UNIT"].removeprefix("computer@").removesuffix(".service")]

    def make_gates(self, *names: str) -> None:
        """Make fifos in /srv/gate, from which steps read a line before they go on."""
        self.machine.run(["mkfifo", *(f"/srv/gate/{name}" for name in names)])

    def open_gate(self, name: str) -> None:
        """Let the step go on that waits there, or comes there."""
        self.machine.run(f"echo > /srv/gate/{name}")


class Lan:
    """A switch, the database's computer beside it, and one computer for each name."""

    address = f"postgresql://{USER}@10.9.0.1/{DATABASE}"

    def __init__(self, machine: Machine, names: Sequence[str]) -> None:
        self.machine = machine
        lines = ["set -e", "ip netns add db", "ip -n db link add lan type bridge"]
        lines += ["ip -n db addr add 10.9.0.1/24 dev lan", "ip -n db link set lan up", "ip -n db link set lo up"]
        for number, name in enumerate(names, 11):
            lines += [
                f"ip netns add {name}",
                f"ip link add {name} netns db type veth peer name eth0 netns {name}",
                f"ip -n db link set {name} master lan up",
                f"ip -n {name} addr add 10.9.0.{number}/24 dev eth0",
                f"ip -n {name} link set eth0 up",
                f"ip -n {name} link set lo up",
            ]
        machine.run("\n".join(lines))

    def cut(self, name: str) -> None:
        """Pull a computer's cable out of the switch: connections stay open, and nothing comes through."""
        self.machine.run(["ip", "-n", "db", "link", "set", name, "down"])

    def mend(self, name: str) -> None:
        self.machine.run(["ip", "-n", "db", "link", "set", name, "up"])


class Database:
    """A server as a systemd unit, in the switch's network or in the machine's own; it runs when this is made."""

    def __init__(self, machine: Machine, lan: Lan | None = None) -> None:
        self.machine = machine
        programs = machine.run(_FIND_PROGRAMS).out.strip()
        machine.run(_NEW_CLUSTER.format(programs=programs, folder=FOLDER, password=PASSWORD))
        network = "" if lan is None else "NetworkNamespacePath=/run/netns/db"
        unit = _SERVER_UNIT.format(programs=programs, folder=FOLDER, network=network)
        machine.write(f"/etc/systemd/system/{SERVER}.service", unit)
        machine.run("systemctl daemon-reload")
        self.start()
        self.query(f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'", database="postgres")
        self.query(f"CREATE DATABASE {DATABASE} OWNER {USER}", database="postgres")

    def start(self) -> None:
        """Start it; it takes connections when this returns."""
        self.machine.run(["systemctl", "start", SERVER])

    def stop(self) -> None:
        self.machine.run(["systemctl", "stop", SERVER])

    def restart(self) -> None:
        """Restart it in fast mode: transactions are rolled back, connections closed."""
        self.machine.run(["systemctl", "restart", SERVER])

    def kill(self) -> None:
        """Kill the postmaster; the others of the server go with it."""
        self.machine.run(["systemctl", "kill", "--kill-whom=main", "--signal=KILL", SERVER])

    def query(self, statement: str, database: str = DATABASE) -> list[list[str]]:
        """Run a statement as the superuser; return the rows, as texts."""
        argv = ["psql", "-h", "/run/postgres-test", "-d", database, "-AtqX", "-F", "\t", "-v", "ON_ERROR_STOP=1", "-c"]
        out = self.machine.run(["runuser", "-u", "postgres", "--", *argv, statement]).out
        return [line.split("\t") for line in out.splitlines()]


class Computer:
    """A worker as a systemd unit, in a network and with a state folder of its own; it lives until its work is done."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.machine = machine
        self.name = name
        self.unit = f"computer@{name}"
        self.state = f"/var/lib/{name}"

    def start(self) -> None:
        """Start the worker, without waiting until it is at work."""
        self.machine.run(["systemctl", "start", "--no-block", self.unit])

    def kill(self) -> None:
        """Kill the worker alone, its steps live on; systemd starts it again."""
        self.machine.run(["systemctl", "kill", "--kill-whom=main", "--signal=KILL", self.unit])

    def freeze(self) -> None:
        """Stop the worker and its steps as they are."""
        self.machine.run(["systemctl", "freeze", self.unit])

    def thaw(self) -> None:
        self.machine.run(["systemctl", "thaw", self.unit])

    def wait(self, event: str, step: str | None = None, attempt: int | None = None, timeout: float = 60) -> Entry:
        """Return the first entry of this kind that this worker has written."""
        return self.machine.wait_journal(
            f"_SYSTEMD_UNIT={self.unit}.service", *fields(event, step, attempt), timeout=timeout
        )

    def wait_ended(self) -> None:
        """Return once the unit is no longer active; its last line was seen already."""
        states = f"case $(systemctl is-active {self.unit}) in inactive | failed) exit 0 ;; esac"
        self.machine.run(f"while :; do {states}; sleep 0.02; done")

    def said(self, event: str) -> list[Entry]:
        """Return the entries of this kind that this worker has written."""
        return self.machine.journal(f"_SYSTEMD_UNIT={self.unit}.service", *fields(event))

    @property
    def exit_status(self) -> str:
        return self.machine.show(self.unit, "ExecMainStatus")["ExecMainStatus"]

    @property
    def id(self) -> str:
        """The worker's name in the ledger."""
        return str(json.loads(self.machine.read(f"{self.state}/worker.json"))["id"])

    def agentctl(self, *arguments: str, check: bool = True) -> Result:
        """Run agentctl on this computer, for its state folder."""
        command = ["ip", "netns", "exec", self.name, "agentctl", *arguments, "--state", self.state]
        return self.machine.run(command, check=check)

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.agentctl("status", "--json").out))


def fields(event: str, step: str | None = None, attempt: int | None = None) -> list[str]:
    """Return what journalctl finds entries of this kind by."""
    found = [f"AGENT_EVENT={event}"]
    found += [f"AGENT_STEP={step}"] if step is not None else []
    return found + ([f"AGENT_ATTEMPT={attempt}"] if attempt is not None else [])
