"""A systemd that is too busy to listen, as on a loaded machine."""

from __future__ import annotations

import os
import signal

import pytest

from tests.system.machine import Machine
from tests.system.service import Service

pytestmark = pytest.mark.system

# Until one that has sent nothing yet cannot.
FILL = """
import socket
sent = True
while sent:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.setblocking(False); s.connect("/run/systemd/notify")
    sent = False
    try:
        while True:
            s.send(b"X_NOBODY=1")
            sent = True
    except BlockingIOError:
        pass
"""


def test_s34_a_step_that_begins_while_systemd_hears_nothing_outlives_the_worker(agent: Machine) -> None:
    """
    S34: its descriptors are kept as soon as systemd listens again; 40 ms were all that it was given.
    """
    tasks = """
run: r
concurrency: 3
tasks:
  - {id: a, run: "until test -e end; do sleep 0.02; done"}
  - {id: x, run: "touch there; until test -e go; do sleep 0.02; done"}
  - {id: b, needs: [x], run: "touch b; until test -e end; do sleep 0.02; done"}
  - {id: c, needs: [x], run: "touch c; until test -e end; do sleep 0.02; done"}
"""
    service = Service(agent, tasks)
    service.start()
    work = "/var/lib/agent/work"
    agent.run(f"until test -e {work}/there; do sleep 0.02; done")
    agent.write("/tmp/fill.py", FILL)
    os.kill(agent.leader, signal.SIGSTOP)
    try:
        agent.run("python3 /tmp/fill.py")
        agent.run(f"touch {work}/go; until test -e {work}/b -a -e {work}/c; do sleep 0.02; done")
    finally:
        os.kill(agent.leader, signal.SIGCONT)
    # The sentinel's pipe, and three for each of the three slots.
    agent.run("until test $(systemctl show -P NFileDescriptorStore agent) = 10; do sleep 0.02; done", timeout=20)
    service.kill("SIGKILL")
    for _ in "abc":
        service.wait("step-adopted")
    agent.run(f"touch {work}/end")
    service.wait("run-done")
    assert service.per_step("step-started") == {"a": 1, "x": 1, "b": 1, "c": 1}
