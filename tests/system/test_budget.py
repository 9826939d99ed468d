"""The budget on a real systemd: no death of the worker buys a new one, and reasons are told apart."""

from __future__ import annotations

import random
import re

import pytest

from tests.system.machine import Machine
from tests.system.service import Service

pytestmark = pytest.mark.system

MANY = "[Unit]\nStartLimitBurst=1000\n[Service]\nWatchdogSec=2s\nTimeoutAbortSec=1s\n"
CAP, EACH = 6.0, 0.2
# What is spent is written down before it is said.
PAYING = f"""
budget: {{spend: {CAP}, restarts: 30}}
tasks:
  - id: pay
    foreach: {{range: 1-40}}
    run: |
      for part in 1 2; do echo {EACH / 2} >>paid; agentctl spend {EACH / 2}; sleep 0.05; done
"""


NEWEST_END = """
import sqlite3
with sqlite3.connect("/var/lib/agent/ledger.db") as db:
    print(*db.execute("SELECT value FROM facts WHERE name = 'counted_end'").fetchone())
"""


def paid(m: Machine) -> float:
    return sum(map(float, m.read("/var/lib/agent/work/paid").split()))


def budget(service: Service, name: str) -> float:
    return float(service.status()["budget"][name]["used"])


def test_m3_killed_ten_times_it_pays_at_most_one_steps_worth_too_much(agent: Machine) -> None:
    """
    M3: what the steps have really paid, by their own book, is never more than one step's above the cap; exit 69 and
    no restart; after the budget was raised the run goes on, and no step that was done is paid for again.
    """
    service = Service(agent, PAYING, MANY)
    service.start()
    dice = random.Random(7)
    for _ in range(10):
        service.wait("run-started")
        agent.run(f"sleep {dice.uniform(0, 0.1):.3f}")
        service.kill("SIGKILL")
    service.wait("run-out-of-budget")
    service.wait_ended()
    shown = agent.show("agent", "ActiveState", "ExecMainStatus")
    assert (shown["ActiveState"], shown["ExecMainStatus"]) == ("failed", "69")
    assert CAP - 1e-9 <= paid(agent) <= CAP + EACH + 1e-9
    assert budget(service, "spend") == pytest.approx(paid(agent))
    assert budget(service, "restarts") == 10
    assert service.status()["status"] == "out-of-budget"
    assert "bring it back with: agentctl budget --add NAME=AMOUNT && " in agent.run("agentctl status").out
    assert agent.run(["agentctl", "budget", "--add", "spend=20"]).out.startswith("budget: 20 more spend")
    done = service.status()["steps"]["done"]
    service.start()
    service.wait("run-done")
    assert service.status()["steps"]["done"] == 40
    assert max(service.per_step("step-done").values()) == 1
    # The step that was ended for the budget was begun again.
    assert 40 * EACH - 1e-9 <= paid(agent) <= 41 * EACH + 1e-9
    assert done < 40


def test_restarts_are_told_apart(agent: Machine) -> None:
    """
    A crash and the watchdog count; a restart by a person, a stop, a stray SIGTERM, a reboot and a power cut do not.
    """
    tasks = "budget: {restarts: 2}\ntasks:\n  - {id: a, retry: {attempts: 99}, run: sleep 600}\n"
    service = Service(agent, tasks, MANY)
    service.start()
    service.wait("step-started")
    service.kill("SIGKILL")
    service.wait("step-adopted")
    assert budget(service, "restarts") == 1
    assert re.fullmatch(r"[0-9a-f]{32}\n", agent.run(["python3", "-c", NEWEST_END]).out), "the id of that start"
    service.kill("SIGSTOP")  # the watchdog's
    service.wait("step-adopted")
    assert budget(service, "restarts") == 2
    service.kill("SIGTERM")
    service.wait("step-started")
    agent.run("systemctl restart agent")
    service.wait("step-adopted")
    agent.run("systemctl stop agent; systemctl start agent")
    service.wait("step-started")
    agent.reboot()
    service.wait("step-started")
    agent.crash()
    service.wait("step-started")
    assert budget(service, "restarts") == 2
    service.kill("SIGKILL")
    service.wait("budget-spent")
    service.wait("run-out-of-budget")
    service.wait_ended()
    assert agent.show("agent", "ExecMainStatus")["ExecMainStatus"] == "69"
    assert service.processes() == []
