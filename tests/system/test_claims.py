"""Claims of effects on a real systemd: the worker is killed where a claim is made durable, and where it is answered."""

from __future__ import annotations

import re

import pytest

from tests import tracing
from tests.system.machine import Machine
from tests.system.service import Service

pytestmark = pytest.mark.system

NO_LIMIT = "[Unit]\nStartLimitBurst=1000\n"
# Two at a time: the other one makes the next worker take over more than the step that has asked.
TASKS = """
concurrency: 2
defaults: {retry: {attempts: 1}}
tasks:
  - {id: other, run: 'until [ -e enough ]; do sleep 0.02; done'}
  - id: pay
    foreach: {range: 0-4}
    run: |
      until [ -e "go-$AGENT_ITEM" ]; do sleep 0.02; done
      agentctl once "pay-$AGENT_ITEM" -- sh -c 'echo "$0" >>paid' "$AGENT_ITEM"
"""
TRACED = "trace=fdatasync,sendmsg"


class Trace:
    """strace(1) on the worker, in the machine."""

    def __init__(self, service: Service, number: int, inject: str = "") -> None:
        self._machine, self._path = service.machine, f"/run/trace-{number}"
        more = f"-e inject={inject}" if inject else ""
        command = f"strace -f -s 200 -o {self._path} -e {TRACED} {more} -p {service.pid}"
        self._machine.run(f"systemd-run -q --unit=trace-{number} --collect sh -c '{command} 2>{self._path}.said'")
        self._machine.run(f"until grep -q attached {self._path}.said; do sleep 0.02; done")

    def calls(self) -> list[str]:
        """Return the calls so far, each with its arguments."""
        return [
            line for line in self._machine.read(self._path).splitlines() if re.search(r"(fdatasync|sendmsg)\(", line)
        ]


def test_c13_a_claim_whose_answer_was_lost_is_granted_again(agent: Machine) -> None:
    """
    C13: kill -9 of the worker at the fdatasync of the claim's commit, and at the sendmsg of its answer.  The one who
    asked lives and has done nothing yet: the effect happens, once, and no limit of the step has to end it.
    """
    tracing.require()
    service = Service(agent, TASKS, NO_LIMIT)
    service.start()
    service.wait("step-started", "pay@0")
    trace = Trace(service, 0)
    agent.write("/var/lib/agent/work/go-0", "")
    service.wait("step-started", "pay@1")
    calls = trace.calls()
    agent.run("systemctl stop trace-0")
    answer = next(n for n, call in enumerate(calls) if "verdict=granted" in call)
    before = [re.search(r"(fdatasync|sendmsg)\(", call)[1] for call in calls[:answer]]  # type: ignore[index]
    synced, sent = before.count("fdatasync"), before.count("sendmsg") + 1
    assert synced, "the claim is durable before it is answered"
    places = [f"fdatasync:signal=KILL:when={synced}", f"sendmsg:signal=KILL:when={sent}"] * 2
    for number, place in enumerate(places, 1):
        trace = Trace(service, number, place)
        agent.write(f"/var/lib/agent/work/go-{number}", "")
        service.wait("step-adopted", f"pay@{number}")
        killed_at = trace.calls()[-1]
        assert place.partition(":")[0] in killed_at and killed_at.endswith("= ?"), trace.calls()
        assert ("verdict=granted" in killed_at) == ("sendmsg" in killed_at), trace.calls()
        service.wait("step-done", f"pay@{number}")
    agent.write("/var/lib/agent/work/enough", "")
    service.wait("run-done")
    assert agent.read("/var/lib/agent/work/paid").split() == ["0", "1", "2", "3", "4"]
    assert service.per_step("step-started") == dict.fromkeys(["other", *(f"pay@{n}" for n in range(5))], 1)
    adopted = {entry["AGENT_STEP"]: entry["_SOURCE_REALTIME_TIMESTAMP"] for entry in service.events("step-adopted")}
    done = {entry["AGENT_STEP"]: entry["_SOURCE_REALTIME_TIMESTAMP"] for entry in service.events("step-done")}
    took = [(int(done[f"pay@{n}"]) - int(adopted[f"pay@{n}"])) / 1e6 for n in range(1, 5)]
    assert max(took) < 10, "the effect was claimed again at once"
