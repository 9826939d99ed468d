"""The canary: whatever a step leaves in the state folder, root's commands end soon, in one line, and change nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.system.machine import Machine
from tests.system.test_rights import TASKS, finished

pytestmark = pytest.mark.system

FILES = [
    "ledger.db",
    "ledger.db-wal",
    "ledger.db-journal",
    "checkpoint.json",
    "lock",
    "worker.json",
    "ended",
    "last-words",
    "alerted",
    "alert.json",
    "keep-awake",
    "paused",
    "out/a",
    "out",
    "log",
    "copy/record.json",
    "restoring-20260101T000000Z.r1",
    "runs/r0/ledger.db",
    "run",
    "work/items",
    "/run/agent/control",
    "/run/agent",
    "/var/cache/agent/tmp",
    "/etc/agent/config.d/more.yaml",
]
# AGENT_CANARY=1 tries every command on every file: half an hour for each release.
SHARE = os.environ.get("AGENT_CANARY", "61")
LISTED = """
  - {id: b, foreach: {lines: /var/lib/agent/work/items}, run: "true"}
"""
SUMS = "find /etc /root /usr/local -xdev -type f ! -name 'run.*' -print0 | sort -z | xargs -0 sha256sum"


@pytest.fixture
def agent(on_each: Machine) -> Machine:
    return on_each


@pytest.mark.timeout(3600)
def test_no_file_of_a_steps_harms_root(agent: Machine) -> None:
    """
    Each file in turn a link, a FIFO, a device, a folder, 4 GB of nothing, noise, two things in turn: a command ends
    within five seconds and 200 MB, says why in its own words, and nothing outside the folder has changed.
    """
    finished(agent)
    agent.run("echo of-root-alone >/root/secret; chmod 600 /root/secret; mkdir -p /var/lib/agent/copy")
    agent.run("echo one >/var/lib/agent/work/items; cp -a /var/lib/agent /var/tmp/state-before")
    agent.write("/etc/agent/config.yaml", f"{TASKS.rstrip()}{LISTED}")
    agent.write("/var/tmp/canary.py", Path(__file__).with_name("canary.py").read_text())
    before = agent.run(SUMS).out
    *faults, counted = agent.run(["python3", "/var/tmp/canary.py", SHARE, *FILES], timeout=3500).out.splitlines()
    assert not faults, "\n".join(faults)
    assert json.loads(counted)["commands"] > 60
    assert agent.run(SUMS).out == before
