"""The shipped provider files, word by word, with a stand-in for ssh and for a hosted sandbox's command line.

The one for systemd-nspawn is tested with real containers (tests/system).
"""

import subprocess
from pathlib import Path

import pytest

from tests.supervision import COPIED, DONE, TWO_MACHINES, World

pytestmark = pytest.mark.programs

# As ssh does it: what follows the host is joined with spaces and given to a shell there.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
cd "ROOT/disks/$1" 2>/dev/null || { echo "ssh: connect to host $1: No route to host" >&2; exit 255; }
shift
disk=$PWD log=ROOT/log PATH=ROOT/bin:$PATH exec sh -c "$*"
"""
SUDO = """#!/bin/sh
[ "$1" = -n ] && shift && exec "$@"
"""
SANDBOX = """#!/bin/sh
command=$1 id=$2
shift 2
[ "$command" != new ] || id=$1
[ "$command" = scp ] || [ "$command" = new ] || [ -d "ROOT/disks/$id" ] || { echo "$id: not found" >&2; exit 1; }
disk=ROOT/disks/$id
case $command in
    new) echo "create $id" >>ROOT/log
        [ "$*" = "$id --image debian" ] && mkdir "$disk" && echo running >"$disk/power" ;;
    info) echo "Status: $(cat "$disk/power")" ;;
    exec) [ "$1" = -- ] && shift && [ "$(cat "$disk/power")" = running ] && cd "$disk" || exit 1
        disk=$disk log=ROOT/log PATH=ROOT/bin:$PATH exec "$@" ;;
    scp) case $id in
        *:*) cp "ROOT/disks/${id%%:*}/${id#*:}" "$1" ;;
        *) echo "put ${1%%:*}" >>ROOT/log; cp "$id" "ROOT/disks/${1%%:*}/${1#*:}" ;;
        esac ;;
    resume) echo "resume $id" >>ROOT/log; echo running >"$disk/power" ;;
    extend) echo "extend $id" >>ROOT/log; [ "$*" = 4h ] ;;
    stop) echo "pause $id" >>ROOT/log; echo stopped >"$disk/power"; rm -f "$disk/worker" ;;
esac
"""


def program(world: World, name: str, text: str) -> None:
    path = world.root / "bin" / name
    path.write_text(text.replace("ROOT", str(world.root)))
    path.chmod(0o755)


def test_hosts_over_ssh_are_used_one_after_the_other(tmp_path: Path) -> None:
    """
    The first one vanishes; nobody can say that it is dead, so the fence is waited out, and the second one goes on.
    """
    variables = "{HOSTS: one-1 two-2, SSH: ROOT/bin/ssh -o BatchMode=yes, SUDO: ROOT/bin/sudo -n}"
    world = World(
        tmp_path / "w", TWO_MACHINES, "fence: 20ms\n", provider=f"provider: ssh\nvariables: {variables}\n"
        "commands: {get: [cp, 'ROOT/disks/{id}/{remote}', '{local}']}"
    )  # fmt: skip
    program(world, "ssh", SSH)
    program(world, "sudo", SUDO)
    for host in ("one-1", "two-2"):
        (world.root / "disks" / host).mkdir()
    assert world.supervise() == 0, world.said
    assert [(machine["id"], machine["state"]) for machine in world.record()["machines"]] == [
        ("one-1", "left"),
        ("two-2", "paused"),
    ]
    assert world.words() == "start1 start2 pause2"
    assert (world.root / "disks/two-2/etc/config.yaml").read_text() == (world.root / "job.yaml").read_text()
    assert (world.root / "disks/two-2/restored.json").exists()


def test_when_no_host_is_left_it_says_so(tmp_path: Path) -> None:
    """
    And tries again, since one more may be added to the list.
    """
    world = World(tmp_path / "w", TWO_MACHINES, "fence: 20ms\n",
        provider="provider: ssh\nvariables: {HOSTS: one-1, SSH: ROOT/bin/ssh, SUDO: ''}")  # fmt: skip
    program(world, "ssh", SSH)
    (world.root / "disks/one-1").mkdir()
    said: list[str] = []
    with world.supervisor(stderr=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stderr is not None
        for line in supervisor.stderr:
            said.append(line)
            if "again in 20ms" in line:  # for the second time
                break
        supervisor.terminate()
        assert supervisor.wait() == 75
    faults = [line for line in said if "could not be made: exited with status 1: no host left: 1 are named" in line]
    assert len(faults) == 2, "".join(said)


def test_a_hosted_sandbox_is_made_resumed_extended_and_stopped(tmp_path: Path) -> None:
    """
    Every word of the provider's file is used once at least, and none of them is misunderstood.
    """
    lost = f"[ $looks != 2 ] || off; ! {{ [ $looks -ge 5 ] && {COPIED}; }} || gone"
    story = f"if [ $number = 1 ]; then {lost}; else {DONE.strip()}; fi\n"
    provider = "provider: hosted\nvariables: {CLI: ROOT/bin/sandbox, IMAGE: debian}"
    world = World(tmp_path / "w", story, provider=provider)
    program(world, "sandbox", SANDBOX)
    assert world.supervise() == 0, world.said
    assert world.words() == (
        "create1 put1 extend1 start1 resume1 extend1 start1 create2 put2 put2 extend2 start2 pause2"
    )
    assert world.machines() == [("1", "gone"), ("2", "paused")]
