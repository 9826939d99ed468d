"""A machine on which somebody else is called "agent": what installing and removing does to it."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine

pytestmark = pytest.mark.system

TREES = "/etc/agent /var/lib/agent /usr/local/bin /usr/local/lib /etc/systemd /home /etc/passwd"
UNIT = "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n"
INSTALL = "make -C /src install"


def trace(machine: Machine) -> str:
    """Every file that an installation might change, with its owner, mode, times and bytes."""
    look = f"find {TREES} -printf '%p %u %g %m %T@ %l\\n'; find {TREES} -type f -exec sha256sum {{}} +"
    return machine.run(f"{{ {look}; }} | sort; systemctl is-active agent", check=False).out


def test_n19_nothing_of_another_agent_is_touched(machine: Machine) -> None:
    """
    N19: its user, folders, program and running unit are named, and are as before after install, uninstall and purge.
    """
    machine.run("useradd -m -s /bin/bash agent && echo s > /home/agent/own")
    machine.write("/etc/agent/other.conf", "other\n")
    machine.write("/var/lib/agent/vendor.db", "vendor\n")
    machine.write("/usr/local/bin/agentctl", "#!/bin/sh\necho vendor\n", mode=0o755)
    machine.write("/etc/systemd/system/agent.service", UNIT)
    machine.run("systemctl daemon-reload; systemctl enable --now agent")
    before = trace(machine)

    done = machine.run(INSTALL, check=False, timeout=120)

    assert done.rc != 0
    assert "user agent: was not made by this installer (home /home/agent, shell /bin/bash)" in done.err
    for named in (
        "/etc/agent: other.conf",
        "/var/lib/agent: vendor.db",
        "/usr/local/bin/agentctl: is another program",
        "/etc/systemd/system/agent.service: is another program's unit",
    ):
        assert named in done.err
    assert trace(machine) == before
    for command in ("uninstall", "purge"):
        machine.run(f"make -C /src {command}")
        assert trace(machine) == before
    assert before.endswith("active\n")


def test_n19_what_the_message_says_leads_to_an_installed_agent(installed_image: object, machine: Machine) -> None:
    """
    N19: the commands it prints work; somebody's user `agent` has the steps then, and purge leaves user and files.
    """
    machine.run("useradd -m -s /bin/bash agent && echo s > /home/agent/own")
    machine.write("/var/lib/agent/vendor.db", "vendor\n")
    machine.write("/usr/local/bin/agentctl", "#!/bin/sh\n", mode=0o755)
    refused = machine.run(f"{INSTALL} USER=agent", check=False)
    assert "user agent" not in refused.err, "it was asked for by name"
    for line in refused.err.splitlines():
        if "move it:  " in line:
            machine.run(line.partition("move it:  sudo ")[2])

    machine.run(f"{INSTALL} USER=agent", timeout=120)
    machine.write("/etc/agent/config.yaml", "tasks:\n  - {id: a, run: id -un}\n")
    machine.run("systemctl start agent; while systemctl is-active --quiet agent; do sleep 0.05; done")
    assert machine.run("cat /var/lib/agent/out/a").out == "agent\n"
    assert machine.run("make -C /src install", timeout=120).out.strip() != ""

    machine.run("make -C /src purge")
    assert machine.run("cat /home/agent/own /var/lib/agent.other/vendor.db; id -un agent").out == "s\nvendor\nagent\n"
    left = machine.run("ls -d /etc/agent /var/lib/agent /var/cache/agent /usr/local/lib/agent", check=False).out
    assert left == ""


def test_n19_purge_takes_all_that_the_agent_made(agent: Machine) -> None:
    """N19: with the files that steps left in its folders, and its user."""
    agent.write("/etc/agent/config.yaml", "tasks:\n  - {id: a, run: 'echo > .dotfile; echo > /tmp/x'}\n")
    failing = "tasks:\n  - {id: a, run: 'echo > .dotfile; exit 3', retry: {attempts: 1}}\n"
    agent.write("/etc/agent/blue.yaml", f"alert: 'true'\n{failing}")
    agent.run("systemctl start agent agent@blue")
    agent.run("while systemctl is-active --quiet agent agent@blue; do sleep 0.05; done")
    agent.run("until test -e /var/lib/agent-alert/agent@blue/alerted; do sleep 0.05; done")
    assert agent.run("ls -A /var/lib/agent@blue/work").out.count(".dotfile") == 1
    agent.run("mkdir -p /etc/systemd/system/agent.service.d")
    agent.run("ln -s /usr/local/lib/agent/drop-ins/browsers.conf /etc/systemd/system/agent.service.d")

    done = agent.run("make -C /src purge")

    made = "/etc/agent* /etc/systemd/system/agent* /var/lib/agent* /var/cache/agent* /usr/local/*/agent* /run/agent*"
    assert agent.run(f"ls -d {made}", check=False).out == "", done.out
    assert agent.run("id agent", check=False).rc != 0
