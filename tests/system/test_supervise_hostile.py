"""A container that is out to hurt the machine that keeps its run alive, and a user of that machine who helps it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.system.machine import Machine
from tests.system.supervisor import HOST
from tests.system.tree import base_tree, why_not_build

pytestmark = pytest.mark.system

STORE = "/var/lib/agent-machines"
NAME = "box-1f-1"
# The provider's own commands, as the supervisor runs them.
CALL = """
import json, os, sys
sys.path.insert(0, "/src")
from worker.supervise import sandbox
from worker.supervise.command import Runner
from worker.supervise.provider import Hand
from worker.supervise.record import Machine, Moment
kind, words = sys.argv[1], json.loads(sys.argv[2])
hand = Hand(sandbox.load("/root/sandbox.yaml").provider, Runner("/root/command", lambda: None), os.environ)
now = Moment(0.0, 0.0, "b")
machine = Machine(1, NAME, NAME, "working", now, now)
if kind == "fetch":
    from worker.supervise import transfer
    (fault,) = [*transfer.fetch(hand, machine, [("/root/fetched", words["path"])], "/root", 2**20), ""][:1]
    print(json.dumps([bool(fault), "", fault]))
else:
    print(json.dumps(hand._run(kind, machine, **words)))
""".replace("NAME", repr(NAME))
# A program of the container that says what it can do to the machine on which it is called.
HOSTILE = """#!/bin/bash
PATH=/usr/real
exec 8>&1 9>&2
{
    echo "cwd $(cat root/secret etc/host-secret 2>/dev/null | tr '\\n' ' ')"
    echo "environment $(tr '\\0' ' ' </proc/self/environ)"
    echo "users $(cat /proc/self/uid_map)"
    sed -n 's/^CapEff:/rights/p; s/^CapBnd:/bounds/p' /proc/self/status
    for fd in 0 8 9; do
        [ -f /proc/self/fd/$fd ] && [ ! -e "$(readlink /proc/self/fd/$fd)" ] || continue  # its own
        echo pwned >>/proc/self/fd/$fd && echo "wrote to $fd"
    done
} >>/tmp/loot-NAME 2>&1
PATH=/usr/bin:/bin
exec 8>&- 9>&-
exec /usr/real/REAL "$@"
"""


class Host:
    """A machine with one container, which is asked and told things as the supervisor does it."""

    def __init__(self, machine: Machine, base: str, users: str) -> None:
        self.machine = machine
        machine.write("/root/call.py", CALL)
        machine.write("/root/job.yaml", "run: job\ntasks:\n  - {id: a, run: 'true'}\n")
        variables = f"{{BASE: {base}, STORE: {STORE}, USERS: {users}}}"
        machine.write("/root/sandbox.yaml", f"config: job.yaml\nprovider: nspawn\nvariables: {variables}\n")

    def call(self, kind: str, secret: str = "", **words: str) -> tuple[int | None, str, str]:
        environment = ["--setenv", f"TOKEN={secret}"] if secret else []
        unit = ["systemd-run", "--quiet", "--pipe", "--wait", "--collect", "--unit=supervisor", *environment]
        said = self.machine.run([*unit, "python3", "/root/call.py", kind, json.dumps(words)]).out
        status, output, fault = json.loads(said)
        return status, output, fault

    def inside(self, script: str) -> str:
        status, output, fault = self.call("exec", script=script)
        assert status == 0, fault
        return str(output)

    def plant(self, name: str, real: str) -> None:
        """Put a hostile program in the place of one of the container's own."""
        text = HOSTILE.replace("NAME", name).replace("REAL", real)
        self.inside(f"cat >/usr/bin/new <<'END'\n{text}END\nchmod 755 /usr/bin/new; mv /usr/bin/new /usr/bin/{name}")

    def loot(self, name: str) -> str:
        return self.inside(f"cat /tmp/loot-{name} 2>/dev/null; rm -f /tmp/loot-{name}")


@pytest.fixture(scope="module", params=["host", "trixie"])
def outer(request: pytest.FixtureRequest, needs_machine: None) -> Iterator[Machine]:
    """A machine that can hold containers, and a tree for them that is no overlay."""
    base = HOST
    if request.param != "host":
        if reason := why_not_build():
            pytest.skip(reason)
        base = str(base_tree(request.param))
    tree = base_tree("trixie" if request.param != "host" else "bookworm")
    with Machine(base, size="4g", network=True, binds=[f"{tree}:/srv/tree:ro"]) as machine:
        if request.param != "host":
            machine.run("apt-get -q update && apt-get -qy install systemd-container python3-yaml", timeout=300)
        machine.run(f"mkdir -p {STORE} && mount -t tmpfs store {STORE}")
        machine.write("/root/secret", "secret-of-the-host\n", mode=0o600)
        machine.write("/etc/host-secret", "secret-of-the-host\n", mode=0o600)
        machine.write("/etc/agent/token", "secret-of-the-host\n", mode=0o600)
        machine.write("/home/ann/key", "secret-of-the-host\n", mode=0o600)
        yield machine


@pytest.fixture(params=["own", "host"])
def host(outer: Machine, request: pytest.FixtureRequest) -> Iterator[Host]:
    """A container with users of its own, and one with the machine's."""
    made = Host(outer, "/srv/tree", request.param)
    status, _output, said = made.call("create")
    assert status == 0, said + outer.run(f"journalctl -b --no-pager -u agent-machine-{NAME}").out
    yield made
    outer.run(f"systemctl stop 'agent-machine-*'; rm -rf {STORE}/{NAME} /root/local")


def test_no_program_of_a_container_has_rights_files_or_secrets_of_the_machine(host: Host) -> None:
    """
    S6: `sh`, `cat` and `env` are the container's own; called from here they have its rights, from its own / on, and
    neither the supervisor's environment nor a file that could be opened again to write.
    """
    machine = host.machine
    host.inside("mkdir -p /usr/real; cd /usr/bin; cp cat tr sed dash env readlink /usr/real")
    for name in ("env", "cat", "sh"):
        host.plant(name, "dash" if name == "sh" else name)
    machine.write("/root/local", "what is sent\n", mode=0o644)
    host.call("exec", "of-the-supervisor", script="true\n")
    assert host.call("put", "of-the-supervisor", local="/root/local", remote="/root/file")[0] == 0
    assert host.call("get", "of-the-supervisor", local="/root/come", remote="/root/file")[0] == 0
    assert machine.read("/root/come") == machine.read("/root/local") == "what is sent\n"
    leader = f"pid=$(systemctl show -P MainPID agent-machine-{NAME}); leader=$(cat /proc/$pid/task/$pid/children)"
    bounds = machine.run(f"{leader}; sed -n 's/^CapBnd:[^0-9a-f]*//p' /proc/${{leader%% *}}/status").out.strip()
    own = machine.run(f"cat {STORE}/{NAME}/users", check=False).out.strip()
    seen = "".join(map(host.loot, ("env", "cat", "sh")))
    assert seen.count("cwd ") >= 3, seen
    for loot in seen.split("cwd ")[1:]:
        assert "secret-of-the-host" not in loot and "of-the-supervisor" not in loot, loot
        assert "wrote to" not in loot, loot
        rights = int(next(line for line in loot.splitlines() if line.startswith("bounds")).split()[1], 16)
        users = next(line for line in loot.splitlines() if line.startswith("users")).split()[1:]
        if users == ["0", "0", "4294967295"]:
            assert rights & ~int(bounds, 16) == 0 and not rights >> 27 & 1, loot
        else:
            assert users == ["0", own, "65536"], loot


def test_another_user_cannot_run_what_a_container_has_left(host: Host) -> None:
    """
    S5: a set-user-id shell on a container's disk is reached by nobody, and with users of its own is nobody's.
    """
    machine = host.machine
    host.inside("cp /bin/bash /usr/local/bin/x; chmod 4755 /usr/local/bin/x")
    upper = f"{STORE}/{NAME}/upper/usr/local/bin/x"
    tried = machine.run(f"{upper} -p -c id", user="nobody", check=False)
    assert tried.rc != 0 and "euid=0" not in tried.out, tried
    owner = machine.run(["stat", "-c", "%u %a", upper]).out.split()
    users = machine.read(f"{STORE}/{NAME}/users").strip()
    assert owner == ["0" if users == "host" else users, "4755"]
    assert machine.run(["stat", "-c", "%a", STORE, f"{STORE}/{NAME}"]).out.split() == ["700", "700"]


def test_an_open_store_of_an_earlier_version_is_closed_and_what_is_in_it_goes_on(outer: Machine) -> None:
    """
    S5, S6: at the first look, while it runs, and again when it is started again.
    """
    machine, host = outer, Host(outer, "/srv/tree", "auto")
    old = f"{STORE}/{NAME}"
    machine.run(
        f"chmod 755 {STORE}; cd {STORE}; mkdir -p {NAME}/upper/etc {NAME}/upper/var/lib {NAME}/work {NAME}/root"
    )
    machine.run(f"echo {NAME} >{old}/upper/etc/hostname; systemd-id128 new >{old}/upper/etc/machine-id")
    try:
        assert host.call("resume")[0] == 0
        host.inside("echo kept >/root/kept")
        machine.run(f"chmod 755 {STORE} {old}")
        assert host.inside("cat /root/kept") == "kept\n"
        assert machine.run(["stat", "-c", "%a", STORE, old]).out.split() == ["700", "700"]
        assert host.call("pause")[0] == 0
        machine.run(f"chmod 755 {old}")
        assert host.call("resume")[0] == 0
        assert host.inside("cat /root/kept") == "kept\n"
        assert machine.run(["stat", "-c", "%a", old]).out.strip() == "700"
    finally:
        machine.run(f"systemctl stop 'agent-machine-*'; rm -rf {STORE}/*; chmod 755 {STORE}")


def test_a_store_that_others_may_enter_and_that_holds_more_is_refused(outer: Machine) -> None:
    """
    S5: with the command that closes it.
    """
    machine, host = outer, Host(outer, "/srv/tree", "auto")
    machine.run(f"chmod 755 {STORE}; mkdir {STORE}/theirs")
    status, _output, said = host.call("create")
    assert status == 1 and f"close it: chmod 0700 {STORE}" in said, said
    assert machine.run(["stat", "-c", "%a", STORE]).out.strip() == "755"
    machine.run(f"rmdir {STORE}/theirs")


def test_a_container_of_this_machines_files_sees_no_secrets_of_it(outer: Machine) -> None:
    """
    S6: BASE: / with homes, passwords and the agent's files hidden; its users can become each other as before.
    """
    machine, host = outer, Host(outer, "/", "own")
    status, _output, said = host.call("create")
    assert status == 1 and "the owners of '/' cannot be moved" in said and "USERS: host" in said, said
    host = Host(outer, "/", "auto")
    try:
        status, _output, said = host.call("create")
        assert status == 0, said
        assert "warning: BASE: the owners of '/' cannot be moved" in said and "it is no boundary" in said, said
        files = "/root/secret /etc/agent/token /home/ann/key /etc/shadow"
        assert "secret-of-the-host" not in host.inside(f"cat {files} 2>&1 || :")
        assert host.inside("ls -A /home; ls /root") == ""
        hashes = [line.split(":")[1] for line in host.inside("cat /etc/shadow").splitlines()]
        assert set(hashes) == {"*"}
        assert host.inside("runuser -u nobody -- id -un; runuser -u daemon -- id -un").split() == ["nobody", "daemon"]
        assert host.inside("stat -c '%a %u' / /root /home /etc").split() == [
            "755",
            "0",
            "700",
            "0",
            "755",
            "0",
            "755",
            "0",
        ]
    finally:
        machine.run(f"systemctl stop 'agent-machine-*'; rm -rf {STORE}/*")


def test_links_of_a_container_are_not_followed_when_it_is_paused(host: Host) -> None:
    """
    S6: its agent is not to start with it again, and this machine's is left alone.
    """
    machine = host.machine
    wants = "/etc/systemd/system/multi-user.target.wants"
    machine.run(f"mkdir -p {wants}; : >{wants}/agent.service")
    host.inside(f"mkdir -p {wants}; : >{wants}/agent.service")
    host.inside(
        "cp -a /etc /etc2; mv /etc/systemd/system /etc/systemd/was; ln -s /etc/systemd/system /etc/systemd/system"
    )
    try:
        assert host.call("pause")[0] == 0
        assert machine.run(f"ls {wants}/agent.service").rc == 0
    finally:
        machine.run(f"rm -f {wants}/agent.service")


def test_a_paused_container_does_not_start_its_agent(host: Host) -> None:
    """
    Another one has the run by then.
    """
    wants = "/etc/systemd/system/multi-user.target.wants"
    host.inside(f"mkdir -p {wants}; : >{wants}/agent.service")
    assert host.call("pause")[0] == 0
    assert host.call("resume")[0] == 0
    assert host.inside(f"ls {wants}/agent.service 2>/dev/null || echo none") == "none\n"


def test_what_a_container_forks_when_it_is_looked_at_is_no_part_of_the_supervisor(host: Host) -> None:
    """
    A program that never stops to fork must not keep the supervisor from stopping its machine; it ends with that.
    """
    machine = host.machine
    host.inside("setsid sleep 987654 >/dev/null 2>&1 </dev/null &")
    pid = machine.run("pgrep -fx 'sleep 987654'").out.strip()
    group = machine.run(["cat", f"/proc/{pid}/cgroup"]).out
    assert f"/agent-enter-{NAME}-" in group and "supervisor" not in group, group
    assert host.call("pause")[0] == 0
    machine.run("while pgrep -fx 'sleep 987654' || systemctl -q is-active 'agent-enter-*'; do sleep 0.02; done")


def test_nothing_is_fetched_but_a_bounded_file_that_the_agents_user_can_read(host: Host) -> None:
    """
    S9: links of a step to what is root's there or has no end, a FIFO, a device, a folder, 4 GB of nothing, and a file
    that grows while it is read; then a plain one.
    """
    machine = host.machine
    host.inside("""
        mkdir -p /srv/out; chown nobody /srv/out; chmod 755 /srv
        printf '[Service]\\nUser=nobody\\nExecStart=/bin/true\\n' >/etc/systemd/system/agent.service
        systemctl daemon-reload
    """)
    host.inside("""runuser -u nobody -- sh -c '
        cd /srv/out; ln -s /etc/shadow shadow; ln -s /dev/zero zero; mkfifo fifo; mkdir folder
        ln -s loop loop; truncate -s 4G sparse; echo sound >sound
        head -c 2M /dev/zero >grows; (while sleep 0.01; do echo; done >>grows) & echo $! >pid'
    """)
    for name in ("shadow", "zero", "fifo", "folder", "loop", "sparse", "grows"):
        status, _output, fault = host.call("fetch", path=f"/srv/out/{name}")
        assert status and fault, name
    assert machine.run("ls /root/fetched* /root/result.incoming 2>/dev/null", check=False).out == ""
    assert host.inside("find /var/lib/agent-supervise /run/agent-supervise -name 'result.*' -size +1k") == ""
    host.inside("kill $(cat /srv/out/pid); rm /srv/out/grows")
    assert host.call("fetch", path="/srv/out/sound")[0] == 0
    assert machine.read("/root/fetched") == "sound\n"
    machine.run("rm /root/fetched")


def test_a_bind_whose_owners_are_not_spoken_of_leaves_a_container_the_machines_users(outer: Machine) -> None:
    """
    S6: its files would be nobody's there, and a run that works today would fail; with a word it has users of its own.
    """
    machine, host = outer, Host(outer, "/srv/tree", "auto")
    machine.run("mkdir -p /srv/shared; chmod 777 /srv/shared")
    text = machine.read("/root/sandbox.yaml")
    try:
        for option, users in (("--bind=/srv/shared", "0"), ("--bind=/srv/shared:/srv/shared:noidmap", None)):
            machine.write("/root/sandbox.yaml", text.replace("}", f", OPTIONS: '{option}'}}"))
            status, _output, said = host.call("create")
            assert status == 0, said
            assert (f"OPTIONS: '{option}' does not say whose its files are" in said) == (users is not None), said
            assert (host.inside("cut -c1-21 /proc/self/uid_map").split()[1] == "0") == (users is not None)
            host.inside("echo there >/srv/shared/file; rm /srv/shared/file")
            assert host.call("pause")[0] == 0
            machine.run(f"rm -r {STORE}/{NAME}")
    finally:
        machine.run(f"systemctl stop 'agent-machine-*'; rm -rf {STORE}/*")


def test_a_start_of_ones_own_finds_the_disk_as_before(outer: Machine) -> None:
    """
    S6: a sandbox that says itself how a container is started knows nothing of owners.
    """
    machine, host = outer, Host(outer, "/srv/tree", "auto")
    text = machine.read("/root/sandbox.yaml")
    machine.write("/root/sandbox.yaml", text.replace("}", f", START: 'ls -ln {STORE}/{NAME}/upper >&2'}}"))
    try:
        status, _output, said = host.call("create")
        assert status == 0 and " 0 0 " in said.splitlines()[-1], said
    finally:
        machine.run(f"rm -rf {STORE}/*")
