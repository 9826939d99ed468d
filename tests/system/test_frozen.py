"""A unit that is frozen for longer than its watchdog allows (`systemctl freeze`) comes back by itself, and soon."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import Service

pytestmark = pytest.mark.system

TASKS = """
concurrency: 3
defaults: {retry: {attempts: 1}}
tasks:
  - id: s
    foreach: {range: 1-3}
    run: 'until [ -e enough ]; do sleep 0.02; done; echo "$AGENT_STEP" >>finished'
"""


def test_c9_frozen_for_longer_than_the_watchdog_it_comes_back(agent: Machine) -> None:
    """
    C9, F14: the watchdog of systemd 252 ends a frozen unit, whose hooks hang in the frozen cgroup; nobody has to do
    anything, no step is lost, and it takes seconds where the time-outs of the unit take three minutes.
    """
    if int(agent.run("systemctl --version").out.split()[1]) > 252:
        pytest.skip("a later systemd leaves a frozen unit be")
    service = Service(agent, TASKS, "[Service]\nWatchdogSec=10s\n")
    service.start()
    for number in (1, 2, 3):
        service.wait("step-started", f"s@{number}")
    agent.run("systemctl freeze agent")
    for number in (1, 2, 3):
        service.wait("step-adopted", f"s@{number}")
    died, back = agent.journal("_PID=1", "--grep=Watchdog timeout"), service.events("step-adopted")
    took = int(back[-1]["_SOURCE_REALTIME_TIMESTAMP"]) - int(died[-1]["_SOURCE_REALTIME_TIMESTAMP"])
    assert took < 30e6, "the time-outs of the unit are 90 s each"
    assert agent.show("agent", "ActiveState", "FreezerState") == {"ActiveState": "active", "FreezerState": "running"}
    agent.write("/var/lib/agent/work/enough", "")
    service.wait("run-done")
    assert service.per_step("step-started") == {f"s@{number}": 1 for number in (1, 2, 3)}
    assert sorted(agent.read("/var/lib/agent/work/finished").split()) == ["s@1", "s@2", "s@3"]
