"""Lists and inboxes that change under a service: what was begun goes on, what comes next is begun."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import Service

pytestmark = pytest.mark.system

GATED = "run: old\ntasks:\n  - {id: a, run: 'until test -e go; do sleep 0.02; done', cwd: /var/lib/agent/work}\n"


def test_another_run_that_is_written_while_one_works_is_begun_when_that_has_ended(agent: Machine) -> None:
    """
    F13: systemd starts the next worker by itself; nobody has to say start again.
    """
    service = Service(agent, GATED)
    service.start()
    service.wait("step-started", "a")
    agent.write("/etc/agent/config.yaml", "run: next\ntasks:\n  - {id: b, run: 'true'}\n", mode=0o644)
    agent.run("systemctl start agent")
    agent.run("touch /var/lib/agent/work/go")
    assert service.wait("run-done")["AGENT_RUN"] == "old"
    assert service.wait("run-done")["AGENT_RUN"] == "next"
    service.wait_ended()
    assert agent.show("agent", "Result", "ActiveState") == {"Result": "success", "ActiveState": "inactive"}
    assert service.status()["run"] == "next"


def test_a_list_that_is_wrong_when_the_run_ends_is_told(agent: Machine) -> None:
    """
    F13: the unit has failed with 78, and `alert:` is run.
    """
    service = Service(agent, GATED.replace("tasks:", "alert: 'echo \"$AGENT_ALERT\" > /var/lib/agent/told'\ntasks:"))
    service.start()
    service.wait("step-started", "a")
    agent.write("/etc/agent/config.d/more.yaml", "tasks:\n  - {id: b, rum: 'true'}\n", mode=0o644)
    agent.run("touch /var/lib/agent/work/go")
    assert service.wait("run-done")["AGENT_RUN"] == "old"
    service.wait_ended()
    assert agent.show("agent", "ExecMainStatus") == {"ExecMainStatus": "78"}
    assert agent.run("cat /var/lib/agent/told").out == "gave-up\n"


def test_a_step_whose_item_has_left_outlives_the_worker(agent: Machine) -> None:
    """
    N6: it moved its input away; the worker is killed, and the next one goes on with it, not without it.
    """
    tasks = """run: inbox
tasks:
  - id: load
    cwd: /var/lib/agent/work
    foreach: {glob: "/srv/in/*"}
    run: 'echo "$AGENT_ITEM" >> moved; until test -e go; do sleep 0.02; done'
  - {id: report, needs: [load], run: 'true'}
"""
    agent.run("mkdir -p /srv/in && touch /srv/in/a /srv/in/b && chmod -R a+rwX /srv")
    service = Service(agent, tasks)
    service.start()
    service.wait("step-started", "load@-srv-in-a")
    agent.run("while ! test -s /var/lib/agent/work/moved; do sleep 0.02; done; rm /srv/in/a")
    service.kill("SIGKILL")
    service.wait("step-adopted", "load@-srv-in-a")
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    assert agent.run("cat /var/lib/agent/work/moved").out == "/srv/in/a\n/srv/in/b\n"
    assert service.status()["steps"]["done"] == service.status()["steps"]["total"]
