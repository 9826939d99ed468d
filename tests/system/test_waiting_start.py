"""A start that waits for its server, and what an admin does meanwhile."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import Service

pytestmark = pytest.mark.system

LIST = "run: waits\nledger: postgresql://nobody@127.0.0.1:1/none\ntasks:\n  - {id: a, run: echo a}\n"
SHORT = "[Service]\nTimeoutStartSec=2s\n"


def test_e1_a_reload_of_systemd_does_not_end_a_start_that_waits(agent: Machine) -> None:
    """
    E1: systemd forgets with it what a start was granted beyond TimeoutStartSec=; the wait goes on, with the watchdog.
    """
    if agent.run("/usr/local/lib/agent/current/bin/python -c 'import psycopg'", check=False).rc:
        pytest.skip("no psycopg in the machine")
    service = Service(agent, LIST, SHORT)
    service.start()
    service.wait("waiting")
    pid = service.pid
    assert "waiting for the server" in agent.show("agent", "StatusText")["StatusText"]

    agent.run("sleep 2.5; systemctl daemon-reload; systemctl daemon-reload; sleep 0.5")  # beyond TimeoutStartSec=

    assert service.pid == pid
    assert agent.show("agent", "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    agent.run("systemctl stop agent")
