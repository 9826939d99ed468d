"""What people see of a unit that is frozen, may ask as members of its group, and do to the whole machine."""

from __future__ import annotations

from tests.system.machine import Machine
from tests.system.service import Service

LONG = "tasks: [{id: a, run: 'echo up; until [ -e go ]; do sleep 0.05; done'}]\n"


def test_a_member_of_the_group_may_ask_and_not_steer(agent: Machine) -> None:
    """
    Case J7: a healthy worker is "working" for him; what steers is refused with the way to do it.
    """
    agent.run("useradd -m bob; usermod -aG agent bob; useradd -m eve")
    service = Service(agent, f"budget: {{spend: 1}}\n{LONG}")
    service.start()
    service.wait("step-started", "a")
    assert "worker: working" in agent.run("runuser -u bob -- agentctl status").out
    for words in ("budget --add spend=5", "settle a --redo"):
        refused = agent.run(f"runuser -u bob -- agentctl {words}", check=False)
        assert refused.rc and "this user may ask how the run stands, and no more; use sudo" in refused.err
    closed = agent.run("runuser -u eve -- agentctl status", check=False)
    assert closed.rc and "use sudo" in closed.err
    assert service.status()["budget"]["spend"]["limit"] == 1


def test_a_worker_that_may_not_be_asked_is_not_called_hanging(agent: Machine) -> None:
    """
    Case J7: where the socket is closed to him (an older worker), the ledger's word is shown as such.
    """
    agent.run("useradd -m bob; usermod -aG agent bob")
    service = Service(agent, LONG)
    service.start()
    service.wait("step-started", "a")
    agent.run("chmod 750 /run/agent/control")
    said = agent.run("runuser -u bob -- agentctl status").out
    assert "worker: cannot be asked by this user (use sudo); this is what the ledger knows" in said


def test_a_frozen_unit_is_named_with_the_command_that_works(agent: Machine) -> None:
    """
    Cases C9, F14: before the watchdog fires it is thawed by systemd, after that on systemd 252 by the kernel alone.
    """
    service = Service(agent, LONG, "[Service]\nWatchdogSec=3s\nTimeoutAbortSec=1s\nTimeoutStopSec=60s\n")
    service.start()
    service.wait("step-started", "a")
    agent.run("systemctl freeze agent")
    assert (
        "frozen, as by 'systemctl freeze'; let it go on with: sudo systemctl thaw agent"
        in agent.run("agentctl status").out
    )
    agent.run("until [ $(systemctl show agent -P SubState) != running ]; do sleep 0.1; done", timeout=60)
    agent.run("until [ $(systemctl show agent -P SubState) != stop-watchdog ]; do sleep 0.1; done", timeout=60)
    hint = next((line for line in agent.run("agentctl status").out.splitlines() if line.startswith("unit: ")), "")
    if "frozen while systemd ends it" in hint:  # later releases thaw a unit that they end, and so does agent-thaw@
        agent.run(hint.partition("go on with: ")[2].replace("sudo ", ""))
    service.wait("step-adopted", "a")
    agent.run("touch /var/lib/agent/work/go")
    service.wait("step-done", "a")
    assert service.per_step("step-started") == {"a": 1}


def test_isolating_another_target_is_a_stop(agent: Machine) -> None:
    """
    Case C10: neither worker nor leader nor sentinel is left, and the attempt costs the step nothing.
    """
    service = Service(agent, "tasks: [{id: a, run: 'trap \"\" TERM; echo up; while :; do sleep 0.05; done'}]\n")
    agent.run("systemctl enable --now agent.path")
    service.start()
    service.wait("step-started", "a")
    agent.run("systemctl isolate rescue.target", timeout=100)
    service.wait_ended()
    assert service.processes() == []
    assert "interrupted in 3" in (said := agent.run("agentctl log a").out) and "the worker was stopped" in said


def test_the_steps_tmp_is_open_inside_and_closed_outside(agent: Machine) -> None:
    """
    Case F10: programs that give up their rights find a /tmp with its usual mode; nobody outside gets at it.
    """
    service = Service(agent, "tasks: [{id: a, run: 'stat -c %a /tmp /var/tmp; echo mine > /tmp/file'}]\n")
    service.start()
    service.wait("step-done", "a")
    service.wait_ended()
    assert agent.read("/var/lib/agent/out/a").split() == ["1777", "1777"]
    assert agent.run("stat -c %a /var/cache/agent; cat /var/cache/agent/tmp/file").out.split() == ["700", "mine"]
