"""The supervisor and its machines, for real: containers inside a machine, with the provider's file as it is shipped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.machine import Entry, Machine

pytestmark = pytest.mark.system

NAME = "forty"
STATE = f"/var/lib/agent-supervisor/{NAME}"
STORE = "/var/lib/agent-machines"
SHARED = "/srv/shared"

# Each step counts its starts and asks a server that honours keys for its effect; those that are to meet an event say
# so, and do not end by themselves.
JOB = f"""
run: forty
defaults: {{retry: {{attempts: 3, delay: 100ms}}, confine: {{write: [{SHARED}]}}}}
tasks:
  - id: s
    foreach: {{range: 01-40}}
    run: |
      echo "$AGENT_STEP" >>{SHARED}/started
      if mkdir "{SHARED}/keys/$AGENT_KEY" 2>/dev/null; then echo "$AGENT_KEY" >>{SHARED}/effects; fi
      if mv "{SHARED}/long/$AGENT_STEP" {SHARED}/met/ 2>/dev/null; then sleep 600; fi
      seq 1000
"""
SANDBOX = f"""
config: job.yaml
provider: nspawn
variables: {{BASE: /, STORE: {STORE}, OPTIONS: "--bind={SHARED}"}}
timeouts: {{look: 3s, state: 5s, exec: 30s}}
poll: 1s
copy_every: 1s
stale: STALE
fence: 1min
"""


class Host:
    """The machine on which the supervisor runs and the containers are."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.mark = machine.cursor()

    def configure(self, more: str = "", stale: str = "6s") -> None:
        self.machine.write(f"/etc/agent/supervisor/{NAME}.yaml", SANDBOX.replace("STALE", stale) + more)

    def start(self) -> None:
        self.machine.run(f"systemctl start agent-supervisor@{NAME}")

    def kill(self) -> None:
        self.machine.run(f"systemctl kill --kill-whom=main --signal=KILL agent-supervisor@{NAME}")

    def wait(self, event: str, timeout: float = 60) -> Entry:
        """Return the first entry of this kind that comes after the last one that was waited for."""
        entry = self.machine.wait_journal(
            f"AGENT_EVENT={event}", f"_SYSTEMD_UNIT=agent-supervisor@{NAME}.service", after=self.mark, timeout=timeout
        )
        self.mark = entry["__CURSOR"]
        return entry

    def meet(self, step: int) -> str:
        """Return the container that runs this step, once it does and a copy of all before it is here."""
        done = f'grep -c \'"outcome": "done"\' {STATE}/checkpoint.json 2>/dev/null'
        self.until(f'[ -e {SHARED}/met/s@{step:02} ] && [ "$({done})" -ge {step - 1} ]')
        return str(self.status()["machines"][-1]["id"])

    def until(self, condition: str) -> None:
        self.machine.run(f"until {condition}; do sleep 0.02; done", timeout=90)

    def inside(self, container: str, command: str) -> str:
        unit = f"agent-machine-{container}"
        enter = f"pid=$(systemctl show -P MainPID {unit}); nsenter -t $(cat /proc/$pid/task/$pid/children) --all "
        return self.machine.run(["sh", "-c", f'{enter} sh -c "$0"', command]).out

    def status(self) -> dict[str, Any]:
        command = f"agentctl supervise --status --json /etc/agent/supervisor/{NAME}.yaml"
        return dict(json.loads(self.machine.run(command).out))

    def lines(self, name: str) -> Counter[str]:
        return Counter(self.machine.read(f"{SHARED}/{name}").split())


@pytest.fixture(scope="module")
def installed(needs_machine: None) -> Iterator[Machine]:
    """A machine that can hold containers: on no layers, since overlays may be stacked only twice."""
    with Machine(size="4g", network=True) as machine:
        machine.run("make -C /src install", timeout=300)
        machine.run("systemctl disable --now agent.service agent.path")
        # It has done something else already, of which the containers do not know.
        machine.write("/root/other.yaml", "run: other\ntasks:\n  - {id: a, run: 'true'}\n")
        machine.run("agentctl run /root/other.yaml --state /var/lib/agent")
        machine.run(f"mkdir -p {STORE} && mount -t tmpfs store {STORE}")
        if machine.run(
            f"cd {STORE} && mkdir u w r && mount -t overlay -o lowerdir=/,upperdir=u,workdir=w x r", check=False
        ).rc:
            pytest.skip("containers in a machine need an overlay on an overlay, which this host does not have room for")
        machine.run(f"cd {STORE} && umount r && rm -r u w r")
        yield machine


@pytest.fixture
def host(installed: Machine) -> Iterator[Host]:
    machine = installed
    machine.run(f"mkdir -p -m 777 {SHARED} {SHARED}/keys {SHARED}/long {SHARED}/met")
    machine.write("/etc/systemd/system/agent.service.d/90-test.conf", f"[Service]\nReadWritePaths={SHARED}\n")
    machine.write("/etc/agent/supervisor/job.yaml", JOB)
    yield Host(machine)
    machine.run(f"systemctl stop 'agent-supervisor@*' 'agent-machine-*'; rm -rf {SHARED} {STATE} {STORE}/*")


def at(entry: Entry) -> float:
    return int(entry["__REALTIME_TIMESTAMP"]) / 1e6


def test_a_run_outlives_its_machines_and_its_supervisor(host: Host) -> None:
    """
    A container stopped, frozen, destroyed, with a disk that is read-only, past its time, a step that hangs; the
    supervisor killed three times: steps are started forty times and once more for each event that lost a process, and
    each effect happens once.
    """
    machine = host.machine
    faults = (6, 12, 18, 24, 30, 36)
    for step in faults:
        machine.write(f"{SHARED}/long/s@{step:02}", "")
    machine.run(f"chmod -R a+rwX {SHARED}")
    host.configure()
    host.start()

    first = host.meet(6)
    machine.run(f"systemctl stop agent-machine-{first}")
    host.wait("machine-resumed")

    assert host.meet(12) == first
    group = machine.show(f"agent-machine-{first}", "ControlGroup")["ControlGroup"]
    machine.run(f"echo 1 >/sys/fs/cgroup{group}/payload/cgroup.freeze")
    host.wait("machine-left")
    host.kill()

    second = host.meet(18)
    assert second != first
    mark = host.mark
    end = f"systemctl kill --signal=KILL agent-machine-{second}; rm -r {STORE}/{second}; date +%s.%N"
    destroyed = float(machine.run(end).out)
    lost = host.wait("machine-left")
    warnings = machine.journal("AGENT_EVENT=warning", after=mark)
    missed = [entry for entry in warnings if "looking again" in entry["MESSAGE"] and at(entry) > destroyed]
    assert len(missed) <= 2, "a look that was begun before may have missed it, and gone is believed at the second"
    started = host.wait("machine-started")
    took = f"{at(lost) - destroyed:.2f} s, and the run went on {at(started) - at(lost):.2f} s after that"
    print(f"a destroyed container, with a look each second: noticed after {took}")

    third = host.meet(24)
    assert "runs" not in host.inside(third, "ls /var/lib/agent"), "the other run is not of this machine"
    host.kill()
    host.inside(third, "mount --bind /var/lib/agent /var/lib/agent && mount -o remount,bind,ro /var/lib/agent")
    host.inside(third, "systemctl kill --kill-whom=main --signal=KILL agent")
    host.wait("machine-restarted")
    host.wait("machine-left")

    fourth = host.meet(30)
    assert "no sign of life" in host.wait("machine-restarted")["MESSAGE"]

    assert host.meet(36) == fourth
    host.configure("limit: 15s\n", stale="1min")
    host.kill()
    assert "its time of 15s is over" in host.wait("machine-left")["MESSAGE"]

    assert "forty: done" in host.wait("supervision-ended")["MESSAGE"]
    status = host.status()
    assert [entry["state"] for entry in status["machines"]] == ["paused", "gone", "paused", "paused", "paused"]
    assert [entry["id"] for entry in status["machines"]][:4] == [first, second, third, fourth]
    steps = [f"s@{n:02}" for n in range(1, 41)]
    assert host.lines("started") == Counter(steps) + Counter(f"s@{n:02}" for n in faults)
    assert host.lines("effects") == Counter(f"forty:{step}" for step in steps)
    assert machine.show(f"agent-supervisor@{NAME}", "ActiveState", "Result") == {
        "ActiveState": "inactive",
        "Result": "success",
    }


def test_a_supervisor_that_hangs_is_replaced_and_one_that_is_stopped_leaves_the_run_alone(host: Host) -> None:
    """
    The watchdog ends it; the next one goes on with the same container, and in there nobody has noticed anything but a
    list that has grown.  What somebody does there to the list, in the end, is told in the worker's own words.
    """
    machine = host.machine
    machine.write(f"/run/systemd/system/agent-supervisor@{NAME}.service.d/90-test.conf", "[Service]\nWatchdogSec=2s\n")
    machine.run(f"systemctl daemon-reload; : >{SHARED}/long/s@03; chmod -R a+rwX {SHARED}")
    host.configure(stale="1min")
    host.start()
    container = host.meet(3)
    machine.write("/etc/agent/supervisor/job.yaml", JOB.replace("01-40", "01-41"))
    machine.run(f"systemctl reload agent-supervisor@{NAME}")
    assert "read again" in host.wait("reloaded")["MESSAGE"]
    assert "the changed list is there, and its worker reads it" in host.wait("reloaded")["MESSAGE"]
    host.inside(container, "until agentctl status --json | grep -q '\"total\": 41'; do sleep 0.05; done")
    machine.run(f"systemctl kill --kill-whom=main --signal=STOP agent-supervisor@{NAME}")
    machine.wait_journal("--grep=Watchdog timeout", "-u", f"agent-supervisor@{NAME}", after=host.mark)
    host.until(f"[ $(systemctl show -P NRestarts agent-supervisor@{NAME}) = 1 ]")
    host.until(f"[ $(systemctl is-active agent-supervisor@{NAME}) = active ]")
    machine.run(f"systemctl stop agent-supervisor@{NAME}")
    assert machine.show(f"agent-supervisor@{NAME}", "ActiveState", "Result") == {
        "ActiveState": "inactive",
        "Result": "success",
    }
    assert [(entry["id"], entry["state"]) for entry in host.status()["machines"]] == [(container, "working")]
    assert json.loads(host.inside(container, "agentctl status --json"))["steps"]["done"] == 2
    assert host.lines("started") == Counter(["s@01", "s@02", "s@03"])

    host.start()
    host.inside(container, "echo nonsense: 1 >/etc/agent/config.yaml; systemctl restart agent || :")
    ended = host.wait("supervision-ended")["MESSAGE"]
    assert "configuration (exit status 78: /etc/agent/config.yaml:1:1: unknown key 'nonsense'" in ended
