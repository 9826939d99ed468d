"""The installed agent: whose work, where, and what stays closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.machine import Machine
from tests.system.service import Service
from worker.errors import STATE_UNUSABLE

pytestmark = pytest.mark.system

CHECKOUT = "/home/someone/app"

# Each step edits and commits in the checkout; the last ones try what must stay closed.
EDITS = f"""
run: edits
defaults: {{cwd: {CHECKOUT}, retry: {{attempts: 1}}}}
on_failure: continue
tasks:
  - id: edit
    foreach: {{range: 1-3}}
    env:
      GIT_AUTHOR_NAME: a
      GIT_AUTHOR_EMAIL: a@localhost
      GIT_COMMITTER_NAME: a
      GIT_COMMITTER_EMAIL: a@localhost
    run: |
      test -e "change-$AGENT_ITEM" && exit 0
      echo "$AGENT_ITEM" > "change-$AGENT_ITEM"
      git add . && git commit -qm "change $AGENT_ITEM"
  - id: closed
    foreach: [/home/someone/secret, /home/other/x, /usr/x, /etc/x, /root/x, /var/x]
    run: |
      if echo x > "$AGENT_ITEM"; then echo open; exit 1; fi
      if cat /home/someone/secret /home/other/file; then echo readable; exit 1; fi
      exit 0
"""


def test_steps_work_in_somebodys_checkout_and_nowhere_else(installed_image: Path) -> None:
    """
    USER= and WORKDIR= open one folder of one person: commits are theirs, all else stays closed.
    """
    with Machine(layers=[installed_image]) as machine:
        machine.run("useradd -m someone; useradd -m other; echo s > /home/someone/secret; echo o > /home/other/file")
        machine.run(f"git init -q {CHECKOUT}", user="someone")
        service = Service(machine, EDITS)
        before = machine.run("agentctl check", check=False)
        assert before.rc == 78
        assert f"cwd: '{CHECKOUT}' is hidden from the unit (ProtectHome=)" in before.err
        assert f"sudo make install USER=someone WORKDIR={CHECKOUT}" in before.err

        machine.run(f"make -C /src install USER=someone WORKDIR={CHECKOUT}", timeout=120)
        assert machine.run("agentctl check").out.startswith("/etc/agent/config.yaml: 2 tasks, 9 steps")
        service.start()
        service.wait("run-done")

        assert machine.run(f"git -C {CHECKOUT} log --format=%s", user="someone").out.split("\n")[:3] == [
            "change 3",
            "change 2",
            "change 1",
        ]
        owners = machine.run(f"find {CHECKOUT} -printf '%u\\n' | sort -u").out.split()
        assert owners == ["someone"]
        assert set(service.per_step("step-done").values()) == {1}
        assert len(service.per_step("step-done")) == 9


def test_the_example_runs_as_installed(agent: Machine) -> None:
    """
    make install, systemctl start: forty steps without a word changed.
    """
    agent.run("cmp /etc/agent/config.yaml /src/config.example.yaml")
    mark = agent.cursor()
    agent.run("systemctl start agent")
    agent.wait_journal("AGENT_EVENT=run-done", after=mark, timeout=120)
    assert "40/40 done" in agent.run("agentctl status").out
    assert agent.run("agentctl log --output fingerprint").out.startswith("")
    assert "programs, 0 changed" in agent.run("agentctl log --output verify").out


def test_an_instance_has_a_list_and_a_state_of_its_own(agent: Machine) -> None:
    """
    agent@NAME reads /etc/agent/NAME.yaml and keeps its state beside the plain agent's.
    """
    agent.write("/etc/agent/nightly.yaml", "tasks:\n  - {id: a, run: echo nightly}\n")
    mark = agent.cursor()
    agent.run("systemctl start agent@nightly")
    agent.wait_journal("AGENT_EVENT=run-done", "AGENT_RUN=nightly", after=mark)
    assert agent.read("/var/lib/agent@nightly/out/a") == "nightly\n"
    assert "1/1 done" in agent.run("agentctl status --instance nightly").out
    assert agent.run("ls -A /var/lib/agent 2>/dev/null", check=False).out.split() in ([], ["work"])


def test_the_start_limit_triggers_and_status_says_what_brings_it_back(agent: Machine) -> None:
    """
    Cases R2 and R8: a worker that cannot even start is given up, and the way back is printed.
    """
    Service(agent, "tasks:\n  - {id: a, run: 'true'}\n")
    program = agent.run("readlink -f /usr/local/lib/agent/current").out.strip()
    package = agent.run(f"find {program} -type d -name worker").out.strip()
    agent.run(f"mv {package}/run.py {package}/run.py.away; find {package} -name 'run.*.pyc' -delete")
    agent.run("systemctl start agent", check=False)
    agent.wait_journal("-u", "agent", "--grep=Start request repeated too quickly")
    agent.run(f"mv {package}/run.py.away {package}/run.py")
    agent.run("mkdir -p /tmp/s; agentctl run /etc/agent/config.yaml --state /var/lib/agent", user="agent")
    shown = agent.run("agentctl status").out
    assert "systemctl reset-failed agent && systemctl start agent" in shown


def test_whoever_may_not_look_into_the_state_folder_is_told_to_use_sudo(agent: Machine) -> None:
    """
    Not with a traceback, and not with the advice to remove a file that is not there.
    """
    service = Service(agent, "tasks:\n  - {id: a, run: 'true'}\n")
    service.start()
    service.wait("run-done")
    service.wait_ended()
    for command in ("status", "list", "budget", "budget --add spend=1", "settle a --done", "export -", "log a"):
        done = agent.run(f"agentctl {command}", user="nobody", check=False)
        assert done.rc == STATE_UNUSABLE, done.err
        assert done.err.count("\n") == 1
        assert done.err.endswith("cannot be read: Permission denied; use sudo\n")
