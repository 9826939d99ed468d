"""The state folder of an installed agent is moved away while it works."""

from __future__ import annotations

from tests.system.machine import Machine
from tests.system.service import Service

TASKS = """
tasks:
  - {id: a, run: echo a}
  - {id: b, run: 'echo up >&2; until test -e /var/cache/agent/go; do sleep 0.1; done'}
  - {id: c, run: echo c}
"""


def test_a_moved_state_folder_ends_the_service_until_it_is_back(agent: Machine) -> None:
    """
    It fails with 73, in a line that says where the folder is; moved back, the run goes on, and nothing is done twice.
    """
    service = Service(agent, TASKS)
    agent.run("systemctl start agent", timeout=60)
    agent.run("timeout 60 sh -c 'until journalctl -t b | grep -q up; do sleep 0.1; done'", timeout=70)
    agent.run("mv /var/lib/agent /var/lib/elsewhere")
    service.wait_ended()
    assert agent.show("agent", "ExecMainStatus") == {"ExecMainStatus": "73"}
    assert "was moved to /var/lib/elsewhere" in agent.run("journalctl -u agent").out
    assert service.processes() == []
    agent.run("rm -rf /var/lib/agent; mv /var/lib/elsewhere /var/lib/agent; mkdir -p /var/cache/agent")
    agent.run("touch /var/cache/agent/go; systemctl reset-failed agent; systemctl start agent", timeout=60)
    service.wait_ended()
    assert service.per_step("step-done") == {"a": 1, "b": 1, "c": 1}
