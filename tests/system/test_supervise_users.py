"""A whole run in containers with users of their own, on systemd 252 and 257."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.conftest import install
from tests.system.machine import Machine
from tests.system.tree import base_tree, why_not_build

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]  # `make install`, and a tree that is copied

JOB = """
run: job
tasks:
  - {id: a, run: 'id -un; sleep 0.1'}
  - {id: b, needs: [a], run: 'cat "$AGENT_RESULTS/a" 2>/dev/null; echo of-b'}
"""
SANDBOX = """
config: job.yaml
provider: nspawn
variables: {BASE: /srv/store/base, STORE: /srv/store/machines, USERS: own}
poll: 500ms
copy_every: 1s
results: {b.txt: /var/lib/agent/out/b}
"""


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def keeper(
    request: pytest.FixtureRequest, needs_machine: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    """A machine with the agent, and with a copy of itself for containers, which is no overlay."""
    if reason := why_not_build():
        pytest.skip(reason)
    base = base_tree(request.param)
    layer = install(base, tmp_path_factory.mktemp(request.param))
    with Machine(base, layers=[layer], size="4g", network=True) as machine:
        machine.run("apt-get -q update && apt-get -qy install systemd-container", timeout=300)
        machine.run("mkdir -p /srv/store && mount -t tmpfs store /srv/store")
        machine.run("mkdir /srv/store/base && cp -ax /. /srv/store/base", timeout=120)
        yield machine


def test_a_run_is_done_in_a_container_whose_root_is_nobody_here(keeper: Machine) -> None:
    """
    S6: prepared, started, looked at, copied, its result fetched and its machine paused, as before.
    """
    machine = keeper
    machine.write("/root/job.yaml", JOB)
    machine.write("/root/sandbox.yaml", SANDBOX)
    done = machine.run("cd /root && agentctl supervise sandbox.yaml --state /root/state 2>&1", check=False, timeout=120)
    assert done.rc == 0, done.out
    assert "warning" not in done.out, done.out
    assert machine.read("/root/b.txt").endswith("of-b\n")
    users = int(machine.run("cat /srv/store/machines/*/users").out)
    assert users >= 0x80000 and users % 65536 == 0
    agent = int(machine.run("id -u agent").out)
    owners = machine.run("stat -c %u /srv/store/machines/*/upper /srv/store/machines/*/upper/var/lib/agent/out/b").out
    assert owners.split() == [str(users), str(users + agent)]
