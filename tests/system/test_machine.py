"""The throw-away machine keeps its own promises: the other tests of this folder stand on them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.machine import PROJECT, Machine, MachineError
from tests.system.tree import base_tree, why_not_build

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("needs_machine")]

# Counts its starts on disk, and is enabled.
COUNTER = """
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=sh -c 'echo start >>/var/lib/starts'
[Install]
WantedBy=multi-user.target
"""


def test_a_machine_boots_clean_and_runs_commands(machine: Machine) -> None:
    """
    It is up, nothing has failed, the project can be read but not changed, and the host is not seen.
    """
    assert machine.run("systemctl is-system-running").out == "running\n"
    assert machine.run("cat /proc/1/comm").out == "systemd\n"
    assert machine.run("ls -A /home").out == ""
    assert machine.run("test -e /src/pyproject.toml && ! touch /src/x").rc == 0
    assert machine.run("cat; exit 3", input="typed", check=False).out == "typed"
    home = machine.run("getent passwd daemon | cut -d: -f6").out
    assert machine.run("id -un; echo $HOME", user="daemon").out == f"daemon\n{home}"
    assert machine.show("dbus.socket", "ActiveState", "Id") == {"ActiveState": "active", "Id": "dbus.socket"}
    with pytest.raises(MachineError, match=r"exited with status 4\nwhy"):
        machine.run("echo why >&2; exit 4")
    with pytest.raises(MachineError, match=r"did not end within 0\.1 s"):
        machine.run("sleep 60", timeout=0.1)


def test_an_enabled_unit_comes_back_after_a_reboot_a_crash_and_a_poweroff(machine: Machine) -> None:
    machine.write("/etc/systemd/system/counter.service", COUNTER)
    machine.run("systemctl enable counter")

    for starts, again in enumerate([machine.reboot, machine.crash, machine.poweroff], start=1):
        again()
        if again == machine.poweroff:
            with pytest.raises(MachineError, match="is off"):
                machine.run("true")
            machine.boot()
        assert machine.boots == starts + 1
        assert machine.read("/var/lib/starts") == "start\n" * starts
        assert machine.show("counter", "ActiveState") == {"ActiveState": "active"}

    entries = machine.journal("--unit=counter", "JOB_TYPE=start", "JOB_RESULT=done")
    assert len({entry["_BOOT_ID"] for entry in entries}) == starts, "the journal of a boot is missing"


def test_the_journal_is_waited_for_and_read_without_loss(machine: Machine) -> None:
    machine.run("logger -t word early; logger -t other between")
    place = machine.cursor()
    machine.run(["sh", "-c", "printf 'a\\001\\377%05000d' 7 | systemd-cat -t word"])

    new = machine.wait_journal("-t", "word", after=place)
    assert new["MESSAGE"] == "a\x01\\xff" + "7".zfill(5000)
    assert [entry["__CURSOR"] for entry in machine.journal("-t", "word", after=place)] == [new["__CURSOR"]]
    assert machine.journal("-t", "other", after=place) == []
    assert machine.wait_journal("-t", "word")["MESSAGE"] == "early"
    with pytest.raises(MachineError, match=r"after 0\.2 s; it gave 2 entries"):
        machine.wait_journal("-t", "word", when=lambda entry: entry["MESSAGE"] == "never", timeout=0.2)


def test_no_process_runs_while_the_machine_is_frozen(machine: Machine) -> None:
    """
    Commands of run() are not frozen, so one can watch a service that writes as fast as it can.
    """
    busy = "while :; do echo x; done >/run/ticks"
    machine.run(["systemd-run", "--unit=busy", "sh", "-c", busy])
    wait_for_growth = "import os; n = os.stat('/run/ticks').st_size\nwhile os.stat('/run/ticks').st_size == n: pass"
    size = "stat -c %s /run/ticks"
    machine.run("until test -s /run/ticks; do sleep 0.02; done")

    with machine.frozen():
        before = machine.run(size).out
        with pytest.raises(MachineError, match="did not end"):
            machine.run(["/usr/bin/python3", "-c", wait_for_growth], timeout=0.5)
        assert machine.run(size).out == before
    machine.run(["/usr/bin/python3", "-c", wait_for_growth], timeout=10)


def test_what_one_machine_saves_the_next_one_sees_and_cannot_spoil(tmp_path: Path) -> None:
    with Machine(upper=tmp_path) as m:
        m.write("/etc/mark", "first")
        m.write("/root/mark", "first")
        m.poweroff()
    for _ in range(2):
        with Machine(layers=[tmp_path]) as m:
            assert m.read("/etc/mark") + m.read("/root/mark") == "firstfirst"
            m.write("/etc/mark", "second")
            m.run("rm /root/mark")


@pytest.mark.parametrize("state", ["running", "frozen"])
def test_a_machine_dies_with_its_maker_and_leaves_nothing(state: str) -> None:
    """
    Even if the maker is killed, and the machine cannot run: no process, mount, cgroup or folder.
    """
    code = (
        "import json\nfrom tests.system import machine\n"
        "m = machine.Machine()\n"
        "m.start()\n"
        f"if {state == 'frozen'}: machine.freeze(m.cgroup, '1')\n"
        "print(json.dumps([m.name, m.leader, m._supervisor.pid, str(m.cgroup)]), flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-B", "-c", code],
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as maker:
        assert maker.stdout is not None
        name, leader, supervisor, cgroup = json.loads(maker.stdout.readline())
        ends = [os.pidfd_open(pid) for pid in (leader, supervisor)]
        assert Path(cgroup).exists()
        maker.kill()

    for end in ends:
        assert select.select([end], [], [], 10)[0], "a process outlived the maker by 10 s"
        os.close(end)
    assert maker.returncode == -signal.SIGKILL
    assert name not in Path("/proc/self/mountinfo").read_text()
    assert not list(Path("/run").glob(f"**/*{name}*"))
    assert not [folder for folder, _folders, _files in os.walk("/sys/fs/cgroup") if name in folder]


def test_a_machine_that_cannot_boot_says_why() -> None:
    with pytest.raises(MachineError, match=r"(?s)did not boot: it is off.*no-such-folder"):
        Machine(binds=["/no-such-folder:/mnt"]).start()


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_a_fresh_debian_reaches_the_network_it_is_given(suite: str) -> None:
    if why_not_build():
        pytest.skip(str(why_not_build()))
    with Machine(base_tree(suite), network=True) as m:
        assert f"VERSION_CODENAME={suite}\n" in m.read("/etc/os-release")
        assert m.run("systemctl is-system-running").out == "running\n"
        assert m.run("python3 -c 'import ensurepip'", check=False).rc, "a newcomer has no venv"
        m.run("apt-get -q update && apt-get -qy install --no-install-recommends python3-venv", timeout=300)
