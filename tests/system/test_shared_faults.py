"""The faults of the README, with the ledger on a PostgreSQL server that goes down with the machine and comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import network
from tests.system.machine import Machine
from tests.system.network import PASSWORD, SERVER, USER, Database
from tests.system.service import QUICK, Service
from tests.system.test_faults import FORTY, STEPS

pytestmark = pytest.mark.system

# The lease is longer than any of this may take: what comes back at once is not taken over but its own.
LEDGER = f"ledger: postgresql://{USER}:{{secret:db}}@127.0.0.1/agent\nlease: 1h\n"
DROP_IN = f"{QUICK}LoadCredential=db:/etc/agent/db-password\n"
WATCHDOG = 3.0

# From now on the server starts only when the agent has said that it waits for it.  Not by `journalctl -f`: one that
# began before the first entry of its kind shows it never (systemd 252).
LATE = """[Service]
ExecStartPre=+/bin/sh -c 'until journalctl -b -o cat AGENT_EVENT=waiting | grep -q "waiting for the server"; do \
    sleep 0.1; done'
"""


@pytest.fixture
def agent(installed_image: Path) -> Iterator[Machine]:
    """A machine with the agent installed and enabled, but not started, and a server that runs and is enabled."""
    network.require()
    with Machine(layers=[installed_image]) as machine:
        Database(machine)
        machine.write("/etc/agent/db-password", PASSWORD + "\n", mode=0o600)
        units = (installed_image / "enabled").read_text().split()
        machine.run(["systemctl", "enable", SERVER, *units])
        yield machine


def test_the_faults_cost_no_more_with_a_server(agent: Machine) -> None:
    """
    Case R13: kill -9, stop, reboot, a hanging worker, a frozen machine, a hanging step, a crash: forty steps are
    started forty times and once more for each of the four that lost the step's process.  At boot the server comes up
    last.
    """
    service = Service(agent, f"{LEDGER}{FORTY}", DROP_IN)
    service.start()
    _end_the_worker(service)
    _stop_time_and_the_step(service)
    service.wait("step-started", "t@34")
    agent.crash()
    service.wait("step-started", "t@34", attempt=2)
    service.wait("run-done")
    starts, done = service.per_step("step-started"), service.per_step("step-done")
    lost = ["s@08", "s@12", "beats", "t@34"]
    assert starts == {step: 2 if step in lost else 1 for step in STEPS}
    assert done == dict.fromkeys(STEPS, 1)
    assert agent.read("/var/lib/agent/out/s@04") == "".join(f"{n}\n" for n in range(1, 1001))

    service.wait_ended()
    agent.reboot()
    service.wait("nothing-to-do")
    service.wait_ended()
    assert agent.show("agent", "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert sum(service.per_step("step-started").values()) == 44
    said = [e["_BOOT_ID"] for e in service.events("waiting") if "waiting for the server" in e["MESSAGE"]]
    assert len(said) == len(set(said)) == 3, "once for each boot"
    assert "40/40 done" in agent.run("agentctl status").out


def _end_the_worker(service: Service) -> None:
    """kill -9, stop and start, reboot, a worker that hangs."""
    agent = service.machine
    service.wait("step-started", "s@04")
    before = service.pid
    service.kill("SIGKILL")
    service.wait("step-adopted", "s@04")
    assert service.pid != before

    service.wait("step-started", "s@08")
    agent.run("systemctl stop agent")
    assert service.processes() == []
    service.start()
    service.wait("step-started", "s@08", attempt=2)

    agent.write(f"/etc/systemd/system/{SERVER}.service.d/50-late.conf", LATE)
    service.wait("step-started", "s@12")
    agent.reboot()
    service.wait("step-started", "s@12", attempt=2)

    service.wait("step-started", "s@16")
    service.kill("SIGSTOP")
    service.wait("step-adopted", "s@16")
    assert agent.journal("--grep=Watchdog timeout", "-u", "agent")


def _stop_time_and_the_step(service: Service) -> None:
    """A frozen machine, a step that hangs."""
    agent = service.machine
    service.wait("step-started", "s@20")
    with agent.frozen():
        time.sleep(WATCHDOG / 2)  # the pause itself
    service.wait("step-done", "s@20")

    agent.wait_journal("SYSLOG_IDENTIFIER=beats", "MESSAGE=beating", after=service.mark)
    (step,) = service.status()["current"]
    agent.run(["kill", "-STOP", str(step["pid"])])
    service.wait("step-ending", "beats")
    service.wait("step-started", "beats", attempt=2)


def test_a_server_that_is_away_is_waited_out(agent: Machine) -> None:
    """
    Steps go on and systemd is pinged; status says what is waited for; what ended meanwhile is recorded afterwards.
    """
    service = Service(
        agent,
        f"{LEDGER}run: away\nconcurrency: 2\ntasks:\n"
        "  - {id: short, run: 'read -r _ < /srv/gate/short; echo over'}\n"
        "  - {id: long, run: 'read -r _ < /srv/gate/long; echo over'}\n"
        "  - {id: last, run: 'true'}\n",
        DROP_IN,
    )
    agent.run("mkdir /srv/gate; mkfifo -m 666 /srv/gate/short /srv/gate/long")
    service.start()
    service.wait("step-started", "long")
    pid = service.pid
    agent.run(["systemctl", "stop", SERVER])
    agent.run("echo > /srv/gate/short")
    service.wait("waiting")
    found = service.status()
    assert (found["worker"]["state"], found["waiting_for"]) == ("active", "the ledger")
    time.sleep(WATCHDOG + 1)  # a worker that pinged nobody would be killed
    agent.run("echo > /srv/gate/long")
    agent.wait_journal("SYSLOG_IDENTIFIER=long", "MESSAGE=over", after=service.mark)
    assert service.pid == pid, "the watchdog killed a worker that waits"
    agent.run(["systemctl", "start", SERVER])
    service.wait("run-done")
    assert service.per_step("step-started") == service.per_step("step-done") == {"short": 1, "long": 1, "last": 1}


def test_what_ends_while_the_server_is_away_is_not_done_again_by_the_next_worker(agent: Machine) -> None:
    """
    The worker is restarted, and killed, and started again before it can be recorded.
    """
    tasks = "tasks:\n  - {id: a, run: 'echo x >>ran; read -r _ < /srv/gate/a; seq 1000', retry: {attempts: 1}}\n"
    service = Service(agent, f"{LEDGER}run: away\n{tasks}", f"{DROP_IN}[Unit]\nStartLimitBurst=1000\n")
    agent.run("mkdir /srv/gate; mkfifo -m 666 /srv/gate/a")
    service.start()
    service.wait("step-started", "a")
    agent.run("until test -s /var/lib/agent/work/ran; do sleep 0.02; done")
    agent.run(["systemctl", "stop", SERVER])
    agent.run("echo > /srv/gate/a")
    service.wait("waiting")
    agent.run(["systemctl", "restart", "--no-block", "agent"])
    service.wait("waiting")
    service.kill("SIGKILL")
    service.wait("waiting")
    agent.run(["systemctl", "start", SERVER])
    service.wait("run-done")
    assert agent.read("/var/lib/agent/work/ran") == "x\n"
    assert agent.read("/var/lib/agent/out/a") == "".join(f"{n}\n" for n in range(1, 1001))
    assert service.per_step("step-done") == service.per_step("step-started") == {"a": 1}
