"""A run moves to another machine, which has the program, the task list and one file of the run, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.machine import Machine
from tests.system.service import Service

pytestmark = pytest.mark.system

TASKS = """
run: release-7
after_restore: go  # nothing has happened after the copy: the first machine stands still
tasks:
  - id: s
    foreach: {range: 1-4}
    run: |
      agentctl once "effect-$AGENT_ITEM" -- sh -c 'echo "of $AGENT_KEY"'
      test "$AGENT_ITEM.$(hostname)" != 3.first || sleep 600
  - id: again
    run: |
      agentctl once effect-3 -- sh -c 'echo "of $AGENT_KEY"'
"""


@pytest.fixture
def fresh(installed_image: Path) -> Iterator[Machine]:
    """Another machine on which the agent is installed and was never started."""
    with Machine(layers=[installed_image]) as m:
        yield m


@pytest.mark.parametrize("how", ["restore", "checkpoint.json", "ledger.db"])
def test_a_fresh_machine_goes_on_with_the_next_step(agent: Machine, fresh: Machine, how: str) -> None:
    """
    `agentctl restore`, or root puts the file into the state folder of a service that cannot even write it: done
    steps are not run again, keys are the same, effects that had happened are not repeated, nothing is counted.
    """
    agent.run("hostname first")
    fresh.run("hostname second")
    old = Service(agent, TASKS)
    old.start()
    agent.wait_journal("AGENT_EVENT=effect", "AGENT_STEP=s@3", after=old.mark)
    name = "ledger.db" if how == "ledger.db" else "checkpoint.json"
    agent.run(f"agentctl export /root/{name}")
    data = agent.run(f"base64 /root/{name}").out

    new = Service(fresh, TASKS)
    fresh.write("/root/copy.base64", data, mode=0o600)
    fresh.run(f"umask 077; base64 -d /root/copy.base64 >/root/{name}")
    if how == "restore":
        said = fresh.run(f"agentctl restore /root/{name}").out
        assert "run release-7: restored" in said and "2 steps done" in said
        assert said.rstrip().endswith("go on with: systemctl start agent")
    else:
        fresh.run(f"install -d -o agent -g agent -m 750 /var/lib/agent; install -m 644 /root/{name} /var/lib/agent/")
    new.start()
    new.wait("run-done")

    assert new.per_step("step-started") == {"s@3": 1, "s@4": 1, "again": 1}
    assert [entry["AGENT_ATTEMPT"] for entry in new.events("step-started")] == ["2", "1", "1"]
    results = [fresh.read(f"/var/lib/agent/out/{step}") for step in ("s@1", "s@2", "s@3", "s@4", "again")]
    effects = [f"of release-7:effect-{n}\n" for n in range(1, 5)]
    assert results == [*effects, effects[2]]
    assert fresh.run("find /var/lib/agent ! -user agent").out == ""


def test_what_a_service_cannot_read_is_one_line(fresh: Machine) -> None:
    """
    A file that is root's alone: exit 73 with the command that mends it, and it is as it was.
    """
    service = Service(fresh, TASKS)
    fresh.run("install -d -o agent -g agent -m 750 /var/lib/agent; umask 077; echo x >/var/lib/agent/checkpoint.json")
    fresh.run("systemctl start agent", check=False)
    service.wait_ended()
    assert fresh.show("agent", "ExecMainStatus", "NRestarts") == {"ExecMainStatus": "73", "NRestarts": "0"}
    said = [entry["MESSAGE"] for entry in fresh.journal("-u", "agent", "-p", "err", after=service.mark)]
    assert [line for line in said if "chown --reference=/var/lib/agent /var/lib/agent/checkpoint.json" in line], said
    assert fresh.run("ls /var/lib/agent/checkpoint.json").rc == 0


def test_restoring_is_refused_while_the_service_is_at_work(agent: Machine) -> None:
    """
    Also between two workers: 77 with the command that stops it.  After that it works, also while there is no step.
    """
    service = Service(agent, "run: r\ntasks:\n  - {id: a, run: sleep 600}\n", "[Service]\nRestartSec=600\n")
    service.start()
    service.wait("step-started", "a")
    agent.run("agentctl export /root/checkpoint.json")
    service.kill("SIGKILL")
    agent.wait_journal("-u", "agent", when=lambda _: agent.show("agent", "SubState")["SubState"] == "auto-restart")
    refused = agent.run("agentctl restore /root/checkpoint.json --force", check=False)
    assert (refused.rc, "first: systemctl stop agent" in refused.err) == (77, True)
    agent.run("systemctl stop agent")
    agent.run("agentctl restore /root/checkpoint.json")
    assert agent.run("find /var/lib/agent ! -user agent").out == ""
    assert service.processes() == []


COPIED = """
run: release-7
copy: {every: 1s, command: 'test -e taken/go || sleep 600; cp -r "$AGENT_CHECKPOINT" "$AGENT_LEDGER" taken/'}
tasks:
  - {id: s, foreach: {range: 1-3}, run: 'echo $AGENT_ITEM'}
"""


def test_a_last_copy_may_take_longer_than_the_watchdog(agent: Machine) -> None:
    """
    The run is done, the worker waits and pings; a stop does not wait with it.  The next start makes the copy that is
    missing, and another machine could go on from that.
    """
    service = Service(agent, COPIED.replace("taken/", "/var/lib/agent/work/taken/"))
    service.start()
    service.wait("run-done")
    entry = agent.wait_journal("AGENT_EVENT=copy", after=service.mark)
    assert entry["MESSAGE"].startswith("waiting for the last copy, at most ")
    agent.wait_journal("MESSAGE=time is up", after=_clock(agent, seconds=5))
    assert service.status()["worker"]["state"] == "active"
    agent.run("systemctl stop agent")
    assert agent.show("agent", "Result", "NRestarts") == {"Result": "success", "NRestarts": "0"}
    assert service.processes() == []

    agent.run("install -d -o agent /var/lib/agent/work/taken; touch /var/lib/agent/work/taken/go")
    service.start()
    service.wait("nothing-to-do")
    service.wait_ended()
    said = agent.run("agentctl verify-copy /var/lib/agent/work/taken")
    assert "3 steps done" in said.out and "both are of one moment" in said.out
    assert agent.run("find /var/lib/agent ! -user agent ! -name go").out == ""


def _clock(machine: Machine, seconds: int) -> str:
    """Let the machine's echo speak in its journal when the time has passed; return where it is now."""
    mark = machine.cursor()
    timer = ["systemd-run", f"--on-active={seconds}s", "--timer-property=AccuracySec=10ms"]
    machine.run([*timer, "echo", "time is up"])
    return mark
