"""The file that keeps a machine awake, on a real systemd: there while there is work, and gone when there is none."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import QUICK, Service
from tests.system.test_alerts import ALERT, DOOMED, alerts, settled

pytestmark = pytest.mark.system

KEPT = "/var/lib/agent/kept/awake"


@pytest.mark.parametrize("end", ["stop", "start-limit", "failed", "restart"])
def test_the_file_that_keeps_the_machine_awake_outlives_no_unit(agent: Machine, end: str) -> None:
    """
    Gone on stop, also of a worker that hangs, when systemd gives up, and when a step failed for good; there over a
    restart and a crash.
    """
    command = "test $AGENT_ATTEMPT -gt 1 || sleep 600; exit 3" if end == "failed" else "sleep 600"
    tasks = f"tasks:\n  - {{id: a, run: '{command}', retry: {{attempts: 2, delay: 0s}}}}\n"
    service = Service(agent, f"{ALERT}\nkeep_awake: {KEPT}\n{tasks}", f"{QUICK}TimeoutStopSec=2s\n")
    service.start()
    service.wait("step-started", "a")
    agent.run(f"test -s {KEPT}")
    service.kill("SIGKILL")
    service.wait("step-adopted", "a")
    agent.run(f"test -s {KEPT}")
    if end == "restart":
        agent.run("systemctl restart agent")
        service.wait("step-adopted", "a")
        agent.run(f"test -s {KEPT}")
        return
    if end == "stop":
        service.kill("SIGSTOP")
        agent.run("systemctl stop agent")
    elif end == "failed":
        agent.run("pkill -u agent sleep")
        service.wait("run-failed")
    else:
        agent.write("/etc/systemd/system/agent.service.d/95-doomed.conf", DOOMED)
        agent.run("systemctl daemon-reload")
        service.kill("SIGKILL")
        agent.wait_journal("-u", "agent", "--grep=Start request repeated too quickly", after=service.mark)
    settled(service)
    assert agent.run(f"test -e {KEPT}", check=False).rc != 0
    assert agent.run("test -e /var/lib/agent/keep-awake", check=False).rc != 0
    assert len(alerts(agent)) == (0 if end == "stop" else 1), "who stops it need not be told"


def test_it_is_fresh_while_the_disk_is_full(agent: Machine) -> None:
    """
    Although the same disk takes no byte of it.
    """
    tasks = "tasks:\n  - {id: a, run: head -c 3000000 /dev/zero}\n"
    service = Service(agent, f"keep_awake: {KEPT}\n{tasks}")
    agent.run("mkdir -p /var/lib/agent; mount -t tmpfs -o size=2m tmpfs /var/lib/agent")
    agent.run("chown agent: /var/lib/agent; chmod 750 /var/lib/agent")
    service.start()
    service.wait("waiting", "a")
    agent.run(f"touch -d '1 hour ago' {KEPT}")
    agent.run(f'while [ -z "$(find {KEPT} -mmin -1)" ]; do sleep 0.1; done')
    agent.run("systemctl stop agent")
    settled(service)
    assert agent.run(f"test -e {KEPT}", check=False).rc != 0


def test_a_path_that_the_unit_may_not_write_is_found_before_the_run(agent: Machine) -> None:
    """
    By `agentctl check`, and by the worker in one warning, with what to do; the run goes on without.
    """
    agent.run("mkdir -p /srv/box && chown agent: /srv/box")
    service = Service(agent, "keep_awake: /srv/box/awake\ntasks:\n  - {id: a, run: 'true'}\n")
    checked = agent.run("agentctl check", check=False)
    open_it = "sudo make install USER=agent WORKDIR=/srv/box"
    assert checked.rc == 78
    assert "config.yaml:1:13: keep_awake: '/srv/box' is read-only for the unit" in checked.err
    assert open_it in checked.err
    service.start()
    service.wait("run-done")
    (warned,) = [e["MESSAGE"] for e in agent.journal("AGENT_EVENT=warning")]
    assert "keep_awake: '/srv/box/awake' cannot be written: Read-only file system; going on without" in warned
    assert "sudo make install USER=name WORKDIR=/srv/box" in warned
