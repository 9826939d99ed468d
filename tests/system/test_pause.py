"""Pausing on a real systemd: the watchdog is content, the steps stand still, and no worker that dies lets them go."""

from __future__ import annotations

import json

import pytest

from tests.system.machine import Machine
from tests.system.service import Service

pytestmark = pytest.mark.system

RUN = """
tasks:
  - {id: a, timeout: 8s, run: 'until [ -e go ]; do echo >>ticks; sleep 0.02; done'}
  - {id: b, run: 'true'}
"""
SHORT_WATCHDOG = "[Service]\nWatchdogSec=2s\n"


def ticks(agent: Machine) -> int:
    return int(agent.run("stat -c %s /var/lib/agent/work/ticks 2>/dev/null || echo 0", check=False).out)


def test_paused_beyond_every_limit_and_killed_meanwhile(agent: Machine) -> None:
    """
    C9, F14: longer than the watchdog and than the step's timeout, with kill -9 of the worker in between: the same
    attempt goes on.  Its processes stand still in their cgroup, also while no worker lives.
    """
    service = Service(agent, RUN, SHORT_WATCHDOG)
    service.start()
    service.wait("step-started")
    agent.run("until [ -s /var/lib/agent/work/ticks ]; do sleep 0.02; done")
    assert "paused" in agent.run("agentctl pause").out
    service.wait("paused")
    before = ticks(agent)
    agent.run("sleep 3")
    service.kill("SIGKILL")
    service.wait("step-adopted")
    agent.run("sleep 6")
    assert ticks(agent) == before
    found = json.loads(agent.run("agentctl status --json").out)
    assert found["worker"]["state"] == "active" and found["paused"]["at_work"] == "hold"
    assert "sudo agentctl resume" in agent.run("agentctl status").out
    assert "paused by" in agent.run("systemctl status agent").out
    assert agent.show("agent", "NRestarts")["NRestarts"] == "1"  # the kill alone
    agent.run("agentctl resume")
    service.wait("resumed")
    agent.run(f"cd /var/lib/agent/work; until [ $(stat -c %s ticks) -gt {before} ]; do sleep 0.02; done; touch go")
    service.wait("run-done")
    assert len(service.events("step-started")) == 2  # a and b, each once


def test_a_paused_agent_can_be_stopped_and_stays_paused(agent: Machine) -> None:
    service = Service(agent, RUN, SHORT_WATCHDOG)
    service.start()
    service.wait("step-started")
    agent.run("until [ -s /var/lib/agent/work/ticks ]; do sleep 0.02; done; agentctl pause")
    service.wait("paused")
    agent.run("systemctl stop agent", timeout=30)
    assert agent.run("pgrep -u agent", check=False).out == ""
    before = ticks(agent)
    agent.run("systemctl start agent; sleep 1")
    assert ticks(agent) == before
    agent.run("touch /var/lib/agent/work/go; agentctl resume")
    service.wait("run-done")
