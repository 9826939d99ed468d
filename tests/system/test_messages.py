"""What steps tell the worker, on a real systemd: what was acknowledged is kept, whenever the worker is killed."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import Service, deadly

pytestmark = pytest.mark.system

NO_LIMIT = "[Unit]\nStartLimitBurst=1000\n"
# Where a worker that has a message is killed: before and after it is kept, and after it is in the ledger; again while
# it is said to the next one.
PLACES = ["message-received", "message-kept", "spend-noted"]
PLACES += [f"{first} {second}" for first in PLACES for second in PLACES]


def test_spending_that_was_acknowledged_is_in_the_ledger_once(agent: Machine) -> None:
    """
    A worker that has received the message and dies before its commit: the next one is told again, and counts it once.
    """
    deadly(agent)
    tasks = "".join(
        f"  - id: s{n:02}\n    run: |\n      echo {places} >places; agentctl spend 0.25 && echo 0.25 >>paid\n"
        "      agentctl spend 0.5 && echo 0.5 >>paid\n"
        for n, places in enumerate(PLACES)
    )
    service = Service(agent, f"defaults: {{retry: {{attempts: 1}}}}\ntasks:\n{tasks}", NO_LIMIT)
    service.start()
    service.wait("run-done")
    assert agent.read("/var/lib/agent/work/places") == "", "the worker was killed at each of them"
    assert agent.read("/var/lib/agent/work/paid") == "0.25\n0.5\n" * len(PLACES)
    assert service.status()["budget"]["spend"]["used"] == pytest.approx(0.75 * len(PLACES))
    assert service.per_step("step-started") == {f"s{n:02}": 1 for n in range(len(PLACES))}


@pytest.mark.parametrize("places", ["message-received", "message-received message-kept"])
def test_progress_and_delays_that_were_acknowledged_are_kept(agent: Machine, places: str) -> None:
    """
    They decide whether an attempt that ends with 75 is begun again at once, and when.
    """
    deadly(agent)
    again = f'test "$AGENT_ATTEMPT" = 1 || exit 0; echo {places} >places'
    tasks = f"""
concurrency: 2
tasks:
  - id: further
    retry: {{delay: 1h, max_delay: 1h}}
    run: '{again}; agentctl progress 1/2; exit 75'
  - id: by-itself
    needs: [further]
    retry: {{delay: 1h, max_delay: 1h}}
    run: |
      {again}
      /usr/local/lib/agent/current/bin/python -c 'from worker import step; step.progress(1, 2)'; exit 75
  - id: later
    needs: [by-itself]
    retry: {{delay: 0s}}
    run: '{again}; agentctl retry-after 5s; exit 75'
"""
    service = Service(agent, tasks, NO_LIMIT)
    service.start()
    service.wait("run-done")
    assert agent.read("/var/lib/agent/work/places") == ""
    assert [entry["MESSAGE"].partition("; ")[2] for entry in service.events("step-deferred")] == ["next in 5s"]
    assert service.per_step("step-started") == {"further": 2, "by-itself": 2, "later": 2}
