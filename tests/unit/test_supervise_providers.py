"""The shipped provider files, word by word, with a stand-in for ssh and for a hosted sandbox's command line.

The one for systemd-nspawn is tested with real containers (tests/system).
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.supervision import COPIED, DONE, TWO_MACHINES, World
from worker.supervise import sandbox
from worker.supervise.command import Answer, Runner
from worker.supervise.provider import Hand
from worker.supervise.record import Machine, Moment

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


def test_what_setup_says_is_not_seen_in_a_hosted_sandboxs_command_line(tmp_path: Path) -> None:
    """
    S36: each user of the supervisor's machine can read that; the text goes there as a file, and is gone afterwards.
    """
    provider = "provider: hosted\nvariables: {CLI: ROOT/bin/sandbox, IMAGE: debian}"
    world = World(tmp_path / "w", DONE, "setup: 'echo token-17 >set-up; [ -d stage ]'\n", provider=provider)
    program(world, "sandbox", SANDBOX.replace("#!/bin/sh\n", '#!/bin/sh\necho "$*" >>ROOT/arguments\n'))
    assert world.supervise() == 0, world.said
    (disk,) = (world.root / "disks").iterdir()
    assert (disk / "set-up").read_text() == "token-17\n"
    assert "token-17" not in (world.root / "arguments").read_text()
    assert not (disk / "stage/setup").exists()


# What `info` prints, and with which status it ends, of the machine "nightly-running-1f-1".
NAME = "nightly-running-1f-1"
JSON = '{"name": "%s", "state": "%s", "started_at": "2026-01-01", "desired_state": "started", "exit_status": 0}'
TABLE = "NAME                   STATUS     CREATED\nnightly-running-1f-11  running    now\n%s   %s   2 h ago"
SAID = [
    (f"Name: {NAME}\nStatus: running\n", 0, "running"),
    (f"Name: {NAME}\nStatus:   Stopped (was running)\n", 0, "stopped"),
    (JSON % (NAME, "stopped"), 0, "stopped"),
    (JSON % (NAME, "archived"), 0, "stopped"),
    (JSON % (NAME, "started"), 0, "running"),
    (JSON % (NAME, "terminated"), 0, "gone"),
    (JSON % (NAME, "stopping"), 0, ""),
    (JSON.replace(", ", ",\n  ") % (NAME, "suspended"), 0, "stopped"),
    ('{"state": "stopped", "disk": {"state": "running"}}', 0, "stopped"),
    ('{"state": "deleted", "snapshot": {"state": "stopped"}}', 0, ""),
    ('{"state": "starting", "snapshot": {"state": "deleted"}}', 0, ""),
    (TABLE % (NAME, "stopped"), 0, "stopped"),
    (TABLE % (NAME, "running"), 0, "running"),
    ("STOPPED\n", 0, "stopped"),
    ("stopped (was running for 2 h)\n", 0, "stopped"),
    ("state: archived\n", 0, "stopped"),
    ("running on empty\n", 0, ""),
    (f"{NAME} is well\n", 0, ""),
    ("", 0, ""),
    (f"Error: sandbox {NAME} not found", 1, "gone"),
    (f"{NAME}: no such sandbox\n", 1, "gone"),
    (f'sandbox "{NAME}" does not exist.\n', 1, "gone"),
    (f"sandbox {NAME}1 not found", 1, ""),
    (f"sandbox {NAME} not found", 2, ""),
    (f"sandbox {NAME} not found", 127, ""),
    ("not found", 1, ""),
    ("lookup api.example: no such host", 1, ""),
    (f'Get "https://api.example/v1/{NAME}": dial tcp: lookup api.example: no such host', 1, ""),
    (f"open /root/.sandbox/{NAME}.json: no such file or directory", 1, ""),
    (f"429 too many requests for {NAME}: sandbox info not found in cache, try some other time", 1, ""),
    (f"image of {NAME} not found", 1, ""),
]


@pytest.mark.parametrize(("said", "status", "state"), SAID)
def test_a_hosted_machines_state_is_the_value_of_a_field_and_gone_is_said_by_name(
    tmp_path: Path, said: str, status: int, state: str
) -> None:
    """
    A2, A7, F5: neither a name nor another field, no error of the network and none of a file is a state.
    """
    (tmp_path / "said").write_text(said)
    cli = tmp_path / "cli"
    cli.write_text(f'#!/bin/sh\n[ "$*" = "info {NAME}" ] || exit 9\ncat {tmp_path}/said >&$((1 + ({status} > 0)))\n'
                   f"exit {status}\n")  # fmt: skip
    cli.chmod(0o755)
    assert answer(tmp_path, "state").output.strip() == state


@pytest.mark.parametrize(
    ("said", "status", "made"),
    [
        (f"sandbox {NAME} not found", 1, True),
        ("429 too many requests", 1, False),
        ("lookup api.example: no such host", 1, False),
        ("state: stopping", 0, False),
        ("state: destroyed", 0, True),
    ],
)
def test_a_hosted_machine_is_made_only_where_there_is_none_of_its_name(
    tmp_path: Path, said: str, status: int, made: bool
) -> None:
    """
    A5: names need not be unique there; whoever cannot be told whether there is one makes none.
    """
    cli = tmp_path / "cli"
    cli.write_text(f'#!/bin/sh\n[ "$1" = info ] || {{ touch {tmp_path}/made; exit; }}\n'
                   f"echo '{said}' >&2\necho '{said}'\nexit {status}\n")  # fmt: skip
    cli.chmod(0o755)
    assert answer(tmp_path, "create").ok == (made or status == 0)
    assert (tmp_path / "made").exists() == made


def answer(tmp_path: Path, kind: str) -> Answer:
    """Run a command of the hosted provider's file for the machine NAME."""
    (tmp_path / "job.yaml").write_text("run: job\ntasks:\n  - {id: a, run: 'true'}\n")
    file = tmp_path / "sandbox.yaml"
    file.write_text(f"config: job.yaml\nprovider: hosted\nvariables: {{CLI: {tmp_path}/cli, IMAGE: debian}}\n")
    now = Moment(0.0, 0.0, "b")
    runner = Runner(str(tmp_path / "command"), lambda: None)
    hand = Hand(sandbox.load(str(file)).provider, runner, {"PATH": os.environ["PATH"]})
    return hand._run(kind, Machine(1, NAME, NAME, "working", now, now))


def test_a_host_that_was_never_given_one_is_nowhere(tmp_path: Path) -> None:
    """
    A5: a host that could not be reached when it was to be taken must be asked again, and not be waited for for ever.
    """
    world = World(
        tmp_path / "w", DONE, "budget: {hours: 0.02}\n",
        provider="provider: ssh\nvariables: {HOSTS: one-1, SSH: ROOT/bin/ssh, SUDO: ''}"
    )  # fmt: skip
    program(world, "ssh", SSH.replace("{ echo", '{ [ ! -e ROOT/later ] || mkdir "ROOT/disks/$1"; >ROOT/later; echo'))
    assert world.supervise() == 0, world.said
    assert [(machine["id"], machine["state"]) for machine in world.record()["machines"]] == [("one-1", "paused")]
