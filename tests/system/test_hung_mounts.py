"""A file system that never answers: the steps that need it are named and fail, and the others run."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import Service

# It answers not even the first message of the kernel.
HUNG = """
import ctypes, os, signal
fd = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
assert ctypes.CDLL(None).mount(b"hung", b"/srv/hung", b"fuse", 0, options) == 0
print("mounted", flush=True)
signal.pause()
"""
TASKS = """
on_failure: continue
defaults: {retry: {attempts: 1}}
tasks:
  - {id: works-there, run: echo no, cwd: /srv/hung/work}
  - {id: through-a-link, run: echo no, cwd: /srv/link}
  - {id: reads-there, run: echo no, env_file: /srv/hung/env}
  - {id: makes-there, run: echo yes, expect: {file: /srv/hung/made}}
  - {id: elsewhere, run: echo yes}
"""


def mount(machine: Machine) -> None:
    machine.write("/root/hung.py", HUNG)
    machine.run("mknod -m 666 /dev/fuse c 10 229; mkdir -p /srv/hung; ln -s hung/work /srv/link")
    machine.run(
        "systemd-run -q -p Type=exec --unit=hung python3 -u /root/hung.py; "
        "until grep -q /srv/hung /proc/self/mountinfo; do :; done"
    )


def test_a_file_system_that_never_answers_holds_only_its_own_steps_up(agent: Machine) -> None:
    """
    Case N26: `cwd`, also behind a link, `env_file`, `expect` and `keep_awake` are looked at with a limit.
    """
    mount(agent)
    service = Service(agent, f"keep_awake: /srv/hung/awake\n{TASKS}", drop_in="[Service]\nWatchdogSec=20s\n")
    agent.run("systemctl start agent", timeout=30)
    service.wait_ended()
    causes = {entry["AGENT_STEP"]: entry["MESSAGE"] for entry in service.events("step-failed")}
    assert causes.keys() == {"works-there", "through-a-link", "reads-there", "makes-there"}
    assert all("its file system does not answer" in cause for cause in causes.values())
    assert service.per_step("step-done") == {"elsewhere": 1}
    assert agent.show("agent", "ExecMainStatus", "NRestarts") == {"ExecMainStatus": "70", "NRestarts": "0"}
    assert service.processes() == []
    found = agent.run("agentctl check", check=False, timeout=60)
    assert found.rc == 78 and "cwd: '/srv/hung/work' its file system does not answer" in found.err + found.out


@pytest.mark.parametrize("items", ['{glob: "/srv/*/in/*"}', '{glob: "/srv/hung/*"}', "{lines: /srv/hung/items}"])
def test_a_list_whose_items_lie_behind_one_is_read_once_it_answers(agent: Machine, items: str) -> None:
    """
    Case N26: that is no mistake in the list; the start says what it waits for, and goes on by itself.
    """
    mount(agent)
    tasks = f"tasks:\n  - {{id: each, foreach: {items}, run: 'true'}}\n  - {{id: other, run: echo yes}}\n"
    service = Service(agent, tasks, drop_in="[Service]\nWatchdogSec=20s\n")
    agent.run("systemctl start agent", timeout=60)
    (said,) = service.events("waiting")
    assert "its file system does not answer" in said["MESSAGE"] and "waiting for the file system" in said["MESSAGE"]
    agent.run("systemctl stop hung; umount -l /srv/hung; mkdir -p /srv/hung/in; echo one > /srv/hung/items")
    agent.run("echo > /srv/hung/in/one")
    service.wait_ended()
    assert service.per_step("step-done")["other"] == 1
    assert agent.show("agent", "ExecMainStatus", "NRestarts") == {"ExecMainStatus": "0", "NRestarts": "0"}
