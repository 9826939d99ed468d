"""A ledger on a server's local socket, which knows its clients by their users (peer authentication)."""

from __future__ import annotations

import pytest

from tests.system import network
from tests.system.machine import Machine
from tests.system.network import FOLDER, SERVER, Database
from tests.system.service import Service

pytestmark = pytest.mark.system

SOCKET = "/run/postgres-test"


def test_e2_the_server_knows_the_worker_its_steps_and_who_asks_for_them(agent: Machine) -> None:
    """
    E2: the user namespace of the service changes nobody's name; and when no worker lives, root is told how the run
    stands, and gives orders, as the unit's user.
    """
    network.require()
    Database(agent)
    agent.write(f"{FOLDER}/data/pg_hba.conf", "local all postgres trust\nlocal all all peer\n")
    agent.run(["systemctl", "restart", SERVER])
    tasks = f"""
run: r
ledger: postgresql:///agent?host={SOCKET}
budget: {{spend: 5}}
tasks:
  - {{id: a, run: "psql -h {SOCKET} -d agent -Atc 'SELECT current_user'"}}
  - {{id: b, run: exit 3, retry: {{attempts: 1}}}}
"""
    service = Service(agent, tasks)
    service.start()
    service.wait("run-failed")
    service.wait_ended()
    assert agent.read("/var/lib/agent/out/a") == "agent\n"
    assert "1/2 done" in agent.run("agentctl status").out
    assert "failed" in agent.run("agentctl list").out
    assert "3 more spend" in agent.run("agentctl budget --add spend=3").out
    assert "exited with status 3" in agent.run("agentctl log b").out
    refused = agent.run("agentctl status", user="nobody", check=False)
    assert refused.rc != 0 and "Traceback" not in refused.err
    settled = agent.run("agentctl settle b --done; agentctl status").out
    assert "2/2 done" in settled
