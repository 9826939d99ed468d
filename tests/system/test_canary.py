"""The canary: whatever a step leaves in the state folder, root's commands end soon, in one line, and change nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.system.machine import Machine
from tests.system.test_rights import finished

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
]
# AGENT_CANARY=1 tries every command on every file: five minutes.
SHARE = os.environ.get("AGENT_CANARY", "7")
SUMS = "find /etc /root /usr/local -xdev -type f ! -name 'run.*' -print0 | sort -z | xargs -0 sha256sum"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [FILES[:4], FILES[4:8], FILES[8:12], FILES[12:]], ids="-".join)
def test_no_file_of_the_state_folder_harms_root(agent: Machine, names: list[str]) -> None:
    """
    Each file in turn a link, a FIFO, a device, a folder, 4 GB of nothing, noise: a command ends within five seconds
    and 200 MB, says why in its own words, and nothing outside the folder has changed.
    """
    finished(agent)
    agent.run("echo secret >/root/secret; chmod 600 /root/secret; mkdir -p /var/lib/agent/copy")
    agent.run("cp -a /var/lib/agent /var/tmp/state-before")
    agent.write("/var/tmp/canary.py", Path(__file__).with_name("canary.py").read_text())
    before = agent.run(SUMS).out
    *faults, counted = agent.run(["python3", "/var/tmp/canary.py", SHARE, *names], timeout=550).out.splitlines()
    assert not faults, "\n".join(faults)
    assert json.loads(counted)["commands"] > 50
    assert agent.run(SUMS).out == before
