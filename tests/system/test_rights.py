"""What root runs in a state folder that a step owns: nothing there decides what root's rights are used for."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import Service
from worker.errors import OK, STATE_UNUSABLE

pytestmark = pytest.mark.system

TASKS = """
run: r1
tasks:
  - {id: a, run: echo hello}
"""

# A rollback journal may name a super-journal: SQLite deletes that file when it plays the journal back.
JOURNAL = """
import os, sqlite3, struct
db, victim = "/var/lib/agent/ledger.db", b"/etc/victim"
for end in ("", "-wal", "-shm", "-journal"):
    os.path.exists(db + end) and os.unlink(db + end)
c = sqlite3.connect(db); c.executescript("CREATE TABLE t(x); PRAGMA user_version = 2"); c.close()
pages, magic = os.path.getsize(db) // 4096, bytes.fromhex("d9d505f920a163d7")
head = (magic + struct.pack(">IIIII", 0, 7, pages, 512, 4096)).ljust(512, b"\\0")
tail = struct.pack(">I", 0x40000000 // 4096 + 1) + victim + struct.pack(">II", len(victim), sum(victim)) + magic
open(db + "-journal", "wb").write(head + tail)
"""

# Answers three opens of worker.json: where a server is named there, root's rights used to be kept; where none is,
# the card was written anew, through a link.
CARD = """
import json, os, time
S, target = "/var/lib/agent", "/etc/victim"
at = os.stat(S)
for name, server in (("a", ""), ("b", "ledger: postgresql://127.0.0.1:1/x\\n")):
    open(f"{S}/work/{name}.yaml", "w").write(f"run: r1\\n{server}tasks: [{{id: x, run: 'true'}}]\\n")
os.symlink(target, f"{S}/.worker.json.new")
os.unlink(f"{S}/lock"); open(f"{S}/lock", "w").write("at work \\n")
os.mkfifo(f"{S}/worker.json")
print("ready", flush=True)
for config in ("a.yaml", "./b.yaml", "./b.yaml"):
    with open(f"{S}/worker.json", "w") as card:
        home = f"{S} {at.st_dev}:{at.st_ino}"
        json.dump({"id": "text of the step's", "config": f"{S}/work/{config}", "home": home}, card)
    time.sleep(0.05)
"""

LOOKS = [
    "agentctl list",
    "agentctl log a",
    "agentctl log --output a",
    "agentctl export -",
    "agentctl export /root/run.json",
    "agentctl export /root/run.db",
    "agentctl budget",
    "agentctl budget --add spend=1",
    "agentctl settle a --redo",
    "agentctl verify-copy /var/lib/agent",
    "agentctl verify-copy /var/lib/agent/ledger.db",
    "agentctl restore /var/lib/agent/ledger.db",
    "agentctl status",
    "agentctl status --json",
    "agentctl alert agent",
]


@pytest.fixture
def agent(on_each: Machine) -> Machine:
    return on_each


def finished(machine: Machine) -> Service:
    """Let the agent finish a run, so that its folder is there and nobody is at work."""
    service = Service(machine, TASKS)
    service.start()
    service.wait("run-done")
    service.wait_ended()
    machine.write("/etc/victim", "precious\n")
    return service


def as_step(machine: Machine, program: str) -> None:
    machine.write("/tmp/exploit.py", program)
    machine.run("python3 /tmp/exploit.py", user="agent")


def test_s2_no_look_of_roots_deletes_what_a_journal_names(agent: Machine) -> None:
    """
    S2: a step leaves a database whose journal names root's file; whatever root looks at, the file stays.
    """
    finished(agent)
    for command in LOOKS:
        as_step(agent, JOURNAL)
        done = agent.run(f"timeout 20 {command} </dev/null", check=False)
        assert agent.run("cat /etc/victim", check=False).out == "precious\n", command
        assert "Traceback" not in done.err, f"{command}: {done.err}"
        assert done.rc != 124, command
    agent.run("rm -f /var/lib/agent/lock")  # as a step may: then status reads the ledger too
    as_step(agent, JOURNAL)
    agent.run("agentctl status", check=False)
    assert agent.run("cat /etc/victim", check=False).out == "precious\n"


def test_s1_a_card_of_the_steps_gives_root_nothing_to_write(agent: Machine) -> None:
    """
    S1: worker.json is the step's: what it says neither keeps root's rights nor has root write through a link.
    """
    finished(agent)
    for command in ("agentctl budget --add spend=1", "agentctl settle a --redo"):
        agent.run("rm -f /var/lib/agent/worker.json /var/lib/agent/.worker.json.new")
        agent.write("/tmp/exploit.py", CARD)
        agent.run(
            "cd /; setpriv --reuid=agent --regid=agent --init-groups python3 /tmp/exploit.py >/tmp/ready 2>&1 & "
            "until grep -q ready /tmp/ready; do :; done"
        )
        agent.run(f"timeout 20 {command}", check=False)
        agent.run("pkill -u agent python3; true")
        assert agent.read("/etc/victim") == "precious\n", command


def test_s10_an_export_into_a_folder_of_the_steps_follows_no_link(agent: Machine) -> None:
    """
    S10: root exports into a checkout whose owner has planted links at every name that a temporary file could have.
    """
    finished(agent)
    agent.run("useradd -m priya; mkdir /home/priya/app; chown priya:priya /home/priya/app")
    for name in (".run.json.new", ".run.json.next", "run.json", "run.db", "run.db.new", "run.db.new-journal"):
        agent.run(["ln", "-s", "/etc/victim", f"/home/priya/app/{name}"], user="priya")
    agent.run("cd /home/priya/app && agentctl export run.json; agentctl export run.db", check=False)
    assert agent.read("/etc/victim") == "precious\n"
    # Where only root may write, it is root's file, whole.
    agent.run("cd /root && agentctl export run.json && agentctl export run.db")
    assert agent.run("stat -c %U /root/run.json /root/run.db").out.split() == ["root", "root"]
    assert "1 step done" in agent.run("agentctl verify-copy /root/run.json /root/run.db").out


def test_s11_an_alert_by_hand_runs_nothing_as_root(agent: Machine) -> None:
    """
    S11: what a step leaves as the alert's command runs with the step's rights, whoever calls agentctl alert.
    """
    service = finished(agent)
    agent.write("/etc/agent/config.yaml", "tasks: [", mode=0o644)
    agent.run("systemctl start agent", check=False)
    service.wait_ended()
    told = (
        '{"run": "r1", "command": ["/bin/sh", "-c", "id -u >>/tmp/ran"], "folder": "/", '
        '"ping": {"start": null, "finish": null, "fail": null}}'
    )
    agent.run(
        ["sh", "-c", f"rm -f /var/lib/agent/alerted; cat >/var/lib/agent/alert.json <<'E'\n{told}\nE"], user="agent"
    )
    agent.run("agentctl alert agent", check=False)
    ran = agent.run("sort -u /tmp/ran").out.split()
    assert ran == agent.run("id -u agent").out.split()


def test_s16_links_in_the_state_folder_show_root_nothing(agent: Machine) -> None:
    """
    S16: links at out/, log/ and the lock lead root's look to nothing that the agent's user may not read.
    """
    finished(agent)
    agent.run("echo secret >/root/secret; chmod 600 /root/secret")
    agent.run("rm -f /var/lib/agent/out/a; ln -s /root/secret /var/lib/agent/out/a", user="agent")
    agent.run(
        "python3 -c \"import sqlite3; d = sqlite3.connect('/var/lib/agent/ledger.db');"
        " d.execute('UPDATE attempts SET output = NULL'); d.commit()\"",
        user="agent",
    )
    shown = agent.run("agentctl log --output a; agentctl log a", check=False)
    assert "secret\n" not in shown.out


# A FIFO of root's lets whoever waits to write to it go on when somebody opens it to read.
TRAP = "rm -f /root/keys /run/opened; mkfifo -m 600 /root/keys; (: >/root/keys; touch /run/opened) >/dev/null 2>&1 &"
LINKS = """
import os, pathlib, shutil
copy = pathlib.Path("/var/lib/agent/copy"); copy.mkdir(exist_ok=True)
head = bytearray((copy.parent / "ledger.db").read_bytes()); head[18:20] = b"\\2\\2"  # has a log beside it
(copy / "log.db").write_bytes(head)
for name in ("log.db-wal", "checkpoint.json", "ledger.db"): (copy / name).symlink_to("/root/keys")
"""


def test_s16_what_a_copy_of_the_steps_leads_to_is_opened_with_their_rights(agent: Machine) -> None:
    """
    S16, where root names a file in their folder: it was opened as root, and laid out where the agent may read it.
    """
    finished(agent)
    as_step(agent, LINKS)
    for command in ("verify-copy {}", "verify-copy {}/log.db", "restore {}/ledger.db", "restore {}/log.db"):
        agent.run(TRAP)
        done = agent.run(f"timeout 20 agentctl {command.format('/var/lib/agent/copy')}", check=False)
        assert agent.run("ls /run/opened", check=False).rc != 0, command
        assert done.rc in (OK, STATE_UNUSABLE), done
        assert "Traceback" not in done.err
    # What is root's, where only root may write, he may take along.
    agent.run(
        "agentctl export /root/run.db && agentctl verify-copy /root/run.db && agentctl restore /root/run.db --force"
    )


def test_root_works_in_no_folder_of_the_steps(agent: Machine) -> None:
    """
    A worker that root starts by hand would write through the steps' links (S1): it is told how to start it instead.
    """
    finished(agent)
    agent.write("/root/list.yaml", "run: r1\ntasks: [{id: a, run: 'true'}, {id: b, run: 'true'}]\n")
    names = ".writable checkpoint.json .checkpoint.json.new lock"
    agent.run(f"cd /var/lib/agent && for name in {names}; do ln -sf /etc/victim $name; done", user="agent")
    for command in ("agentctl run /root/list.yaml --state /var/lib/agent", "agentctl run"):
        done = agent.run(command, check=False)
        assert (done.rc, done.err.count("\n")) == (STATE_UNUSABLE, 1), done
        assert "belongs to agent" in done.err
        assert agent.read("/etc/victim") == "precious\n"
    agent.run(f"cd /var/lib/agent && rm {names}")
    way_out = done.err.partition("be that user: ")[2].partition(";")[0]
    agent.run(way_out.replace("sudo -u agent", "runuser -u agent --"))  # as printed, where there is no sudo
    assert agent.run("find /var/lib/agent -user root").out == ""


def test_a_person_in_her_own_right_stays_who_she_is(agent: Machine) -> None:
    """
    An operator with sudo does what he did before: who gave a grant, and whose files an order leaves.
    """
    finished(agent)
    assert "as carol says" in agent.run("SUDO_USER=carol agentctl budget --add spend=1").out
    owners = agent.run("find /var/lib/agent -printf '%u\\n' | sort -u").out.split()
    assert owners == ["agent"]


def test_s8_a_step_of_the_unit_gives_no_orders(agent: Machine) -> None:
    """
    S8: the documented command in the step's own PATH is refused; the same from outside is done.
    """
    step = (
        "agentctl budget --add spend=1000000 2>&1; agentctl settle x --done 2>&1; touch asked; "
        "until test -e /var/lib/agent/go; do sleep 0.02; done"
    )
    service = Service(agent, f"run: r1\nbudget: {{spend: 20}}\ntasks: [{{id: a, confine: no, run: '{step}'}}]\n")
    service.start()
    agent.run("until test -e /var/lib/agent/work/asked; do sleep 0.02; done")
    assert "3 more spend" in agent.run("agentctl budget --add spend=3").out
    assert "0 of 23" in agent.run("agentctl budget").out
    agent.run("touch /var/lib/agent/go")
    service.wait("run-done")
    assert agent.read("/var/lib/agent/out/a").count("a step cannot say this") == 2
