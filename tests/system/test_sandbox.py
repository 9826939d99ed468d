"""The service's sandbox, from the inside: what a step may not reach, and what it can do all the same."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import QUICK, Service

pytestmark = pytest.mark.system

CHECKOUT = "/home/ann/app"

# Goes on saying the same, from a process that lives: nobody has to guess who has sent it.
TALKER = """#!/usr/bin/python3
import os, socket, sys, time
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
while not os.path.exists("talked"):
    s.sendto(sys.argv[1].encode(), sys.argv[2] if sys.argv[2:] else os.environ["NOTIFY_SOCKET"])
    time.sleep(0.02)
"""

TRACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
print("ptrace", libc.ptrace(16, int(sys.argv[1]), None, None), os.strerror(ctypes.get_errno()))
"""

# As docker's: whoever reaches it has asked root.
DAEMON = """
import grp, os, socket, sys
folder, s = os.path.dirname(sys.argv[1]), socket.socket(socket.AF_UNIX)
os.makedirs(folder, exist_ok=True)
s.bind(sys.argv[1]); os.chown(sys.argv[1], 0, grp.getgrnam("docker").gr_gid); os.chmod(sys.argv[1], 0o660); s.listen()
print("up", flush=True)
while True: s.accept()[0].sendall(b"root's work\\n")
"""
ASK = """
import socket, sys
for path in sys.argv[1:]:
    s = socket.socket(socket.AF_UNIX)
    try:
        s.connect(path)
        print(path, s.recv(100))
    except OSError as exc:
        print(path, "closed", exc)
"""
SOCKETS = "/run/docker.sock /run/podman/podman.sock /run/libvirt/libvirt-sock /var/lib/incus/unix.socket"


@pytest.fixture
def agent(on_each: Machine) -> Machine:
    return on_each


def done(machine: Machine, tasks: str, drop_in: str = QUICK) -> Service:
    """Work through a list, and return the service when it has ended."""
    service = Service(machine, tasks, drop_in)
    service.start()
    service.wait_ended()
    return service


def output(machine: Machine, step: str) -> str:
    """Return all that a step has printed."""
    return machine.run(f"agentctl log --output {step}; agentctl log {step}", check=False).out


def ann(machine: Machine) -> int:
    """Let there be a user with a checkout, a key and a process of hers outside of the service; return its pid."""
    machine.run("useradd -m ann; groupadd docker; usermod -aG docker ann")
    machine.run(f"git init -q {CHECKOUT}; mkdir -m 700 ~/.ssh; echo PRIVATE-KEY >~/.ssh/id", user="ann")
    machine.run(["systemd-run", "--quiet", "--uid=ann", "--unit=login", "sleep", "infinity"])
    return int(machine.show("login", "MainPID")["MainPID"])


def test_s7_no_process_of_the_same_user_is_a_way_out_of_the_sandbox(agent: Machine) -> None:
    """
    S7: USER=ann, who has a shell elsewhere: through it a step reads no file, writes none, and does not trace it.
    """
    login = ann(agent)
    agent.run(f"make -C /src install USER=ann WORKDIR={CHECKOUT}", timeout=120)
    agent.write("/usr/local/bin/trace", f"#!/usr/bin/python3{TRACE}", mode=0o755)
    door = f"/proc/{login}/root/home/ann"
    step = (
        f"cat {door}/.ssh/id 2>&1; echo x >{door}/.bashrc; cat /proc/{login}/environ | wc -c; trace {login}; "
        f"id -un; git config user.email a@b; git config user.name a; "
        f"echo 1 >f; git add f; git commit -qm one; echo $?; "
        f"stat -c '%U %G' f . /etc/passwd"
    )
    done(agent, f"run: r\ntasks:\n  - id: a\n    confine: no\n    cwd: {CHECKOUT}\n    run: |\n      ({step})\n")
    said = output(agent, "a")
    assert "PRIVATE-KEY" not in said
    assert agent.run("cat /home/ann/.bashrc").out != "x\n"
    assert "ptrace -1" in said
    assert said.splitlines().count("0") >= 2, said  # no byte of the environment; the commit went well
    assert "ann\n0\nann ann\nann ann\nroot root\n" in said
    assert agent.run(f"git -C {CHECKOUT} log --format=%s", user="ann").out == "one\n"


def test_s7_one_instance_does_not_read_the_credentials_of_another(agent: Machine) -> None:
    """
    S7: a step of agent@a looks through the worker of agent@b.
    """
    agent.write("/etc/agent/secret", "of-b\n", mode=0o600)
    for name, run in (("b", "touch there; sleep 600"), ("a", "sh /tmp/look")):
        agent.write(f"/etc/agent/{name}.yaml", f"tasks:\n  - {{id: s, run: '{run}', retry: {{attempts: 1}}}}\n")
    drop_in = "[Service]\nLoadCredential=secret:/etc/agent/secret\n"
    agent.write("/etc/systemd/system/agent@b.service.d/95-test.conf", drop_in)
    agent.run("systemctl daemon-reload; systemctl start agent@b")
    agent.run("until test -e /var/lib/agent@b/work/there; do sleep 0.02; done")
    pid = int(agent.show("agent@b", "MainPID")["MainPID"])
    assert agent.run(f"cat /proc/{pid}/root/run/credentials/agent@b.service/secret").out == "of-b\n"
    look = f"cat /proc/{pid}/root/run/credentials/agent@b.service/secret 2>&1; echo looked"
    agent.write("/etc/agent/a.yaml", f"run: a\ntasks:\n  - id: s\n    confine: no\n    run: |\n      {look}\n")
    mark = agent.cursor()
    agent.run("systemctl start agent@a")
    agent.wait_journal("AGENT_EVENT=run-done", "AGENT_RUN=a", after=mark)
    said = agent.read("/var/lib/agent@a/out/s")
    assert "looked" in said and "of-b" not in said, said


def test_s7_who_is_in_the_group_of_docker_is_not_root_in_a_step(agent: Machine) -> None:
    """
    S7: the sockets of daemons that do what they are told as root are closed, unless a drop-in opens them.
    """
    ann(agent)
    agent.write("/tmp/daemon.py", DAEMON)
    for path in SOCKETS.split():
        agent.run(f"systemd-run --quiet python3 /tmp/daemon.py {path}; until test -S {path}; do sleep 0.02; done")
    agent.write("/usr/local/bin/ask", f"#!/usr/bin/python3{ASK}", mode=0o755)
    agent.run("make -C /src install USER=ann", timeout=120)
    tasks = f"run: r\ntasks:\n  - {{id: a, run: ask {SOCKETS}}}\n"
    done(agent, tasks)
    assert output(agent, "a").count("closed") == 4
    done(agent, tasks.replace("id: a", "id: b"), f"{QUICK}InaccessiblePaths=\n")
    assert output(agent, "b").count("root's work") >= 1


def test_s7_sandboxes_inside_a_step_work(agent: Machine) -> None:
    """
    User, mount, process, IPC and host name namespaces; bubblewrap, where it is installed.  No confined step may mount.
    """
    inside = "mount -t tmpfs none /mnt && echo x >/mnt/x && cat /mnt/x && cat /etc/hostname >/dev/null && id -u"
    wrap = "bwrap --ro-bind / / --dev /dev --tmpfs /tmp --unshare-user --unshare-pid --unshare-ipc --unshare-uts"
    tasks = f"""
run: r
defaults: {{confine: no}}
tasks:
  - {{id: user, run: unshare --user --map-root-user id -u}}
  - {{id: more, run: "unshare -Urmpiuf sh -c '{inside}'"}}
  - {{id: wrap, run: "if command -v bwrap; then {wrap} sh -c 'id -un; touch /tmp/x && echo ok'; else echo none ok; fi"}}
  - {{id: net, run: "unshare -Urn true || echo refused"}}
"""
    done(agent, tasks)
    assert output(agent, "user").startswith("0\n")
    assert output(agent, "more").startswith("x\n0\n")
    assert "ok" in output(agent, "wrap")
    assert "refused" in output(agent, "net")


def test_s7_a_step_that_has_outlived_its_worker_is_believed_and_nobody_in_its_name(agent: Machine) -> None:
    """
    Each life of the service has a user namespace of its own, and /proc hides one from another; kinship is told all
    the same, of steps from before an upgrade too.
    """
    agent.write("/usr/local/bin/talk", TALKER, mode=0o755)
    wait = "until test -e second; do sleep 0.02; done"
    tasks = f"""
run: r
concurrency: 3
tasks:
  - {{id: a, run: "{wait}; talk STATUS=of-a; echo end of a"}}
  - {{id: b, run: "echo $NOTIFY_SOCKET >b; {wait}; until test -e talked; do sleep 0.02; done"}}
  - {{id: c, run: "{wait}; talk STATUS=forged $(cat b); agentctl once key -- echo effect"}}
"""
    service = Service(agent, tasks, f"{QUICK}PrivateUsers=no\n")
    service.start()
    agent.run("until test -s /var/lib/agent/work/b; do sleep 0.02; done")
    agent.write("/etc/systemd/system/agent.service.d/90-test.conf", QUICK)  # as an upgrade would
    for _ in range(2):
        agent.run("systemctl daemon-reload; systemctl restart agent")
        for _ in "abc":
            service.wait("step-adopted")
    agent.run("touch /var/lib/agent/work/second")
    agent.run("until agentctl status | grep -q of-a; do :; done")
    for _ in range(20):
        assert "forged" not in agent.run("agentctl status").out
    agent.run("touch /var/lib/agent/work/talked")
    service.wait("run-done")
    assert agent.read("/var/lib/agent/out/c") == "effect\n"
    assert service.per_step("step-started") == {"a": 1, "b": 1, "c": 1}


def test_s7_what_a_dead_worker_has_left_in_the_units_own_cgroup_is_ended(agent: Machine) -> None:
    """
    As a step that had not come to its own cgroup when the worker died; the next one cannot see it.
    """
    service = Service(agent, "run: r\ntasks:\n  - {id: a, run: 'touch there; until test -e go; do sleep 0.02; done'}\n")
    service.start()
    agent.run("until test -e /var/lib/agent/work/there; do sleep 0.02; done")
    own = "/sys/fs/cgroup" + agent.show("agent", "ControlGroup")["ControlGroup"]
    become = "exec setpriv --reuid=$(id -u agent) --clear-groups sleep 4711 </dev/null >/dev/null 2>&1"
    agent.run(f"sh -c 'echo 0 >{own}/cgroup.procs; {become}' & until pgrep -f '^sleep 4711' >/dev/null; do :; done")
    service.kill("SIGKILL")
    service.wait("step-adopted", "a")
    assert agent.run("pgrep -f '^sleep 4711'", check=False).out == ""
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")


def test_s27_who_shares_the_users_group_reads_no_result(agent: Machine) -> None:
    """
    S27: ann's own group is dave's, too; the installer says so, and what it says of other groups that she is in.
    """
    agent.run("groupadd people; groupadd docker; useradd -m -g people -G docker,adm ann; useradd -g people dave")
    said = agent.run("make -C /src install USER=ann", timeout=120).out
    assert "ann is in docker (who is in there can become root), adm (reads all logs), and so are the steps" in said
    assert "the group people of ann has others in it (dave)" in said
    done(agent, "run: r\ntasks:\n  - {id: a, run: 'echo secret; id -un'}\n")
    assert agent.read("/var/lib/agent/out/a") == "secret\nann\n"
    for path in ("/var/lib/agent/out/a", "/var/lib/agent/ledger.db"):
        assert "denied" in agent.run(f"cat {path}", user="dave", check=False).err
    drop_in = "/etc/systemd/system/agent.service.d/50-workdir.conf"
    written = agent.read(drop_in)
    agent.run(f"sed -i '/Mode=/d; /Others/d' {drop_in}")  # as of an earlier version
    for options in ("", "USER=ann"):
        assert "careful" in agent.run(f"make -C /src install {options}", timeout=120).out
        assert agent.read(drop_in) == written


def test_where_there_are_no_user_namespaces_the_service_does_without(agent: Machine) -> None:
    """
    systemd would not start it (217/USER), nor tell of that.  Here it is systemd-run that says so.
    """
    refuse = '#!/bin/sh\ncase "$*" in *PrivateUsers*) exit 217 ;; esac\nexec /usr/bin/systemd-run "$@"\n'
    agent.write("/opt/none/systemd-run", refuse, mode=0o755)
    agent.run("rm -f /etc/systemd/system/agent*.d/90-test.conf")
    for _ in range(2):
        said = agent.run("PATH=/opt/none:$PATH make -C /src install", timeout=120).out
        assert "careful: there are no user namespaces here" in said
    assert "wrote" not in said
    for unit in ("agent", "agent@x", "agent-alert@agent"):
        assert agent.show(unit, "PrivateUsers") == {"PrivateUsers": "no"}
    done(agent, "run: r\ntasks:\n  - {id: a, run: cat /proc/self/uid_map}\n")
    assert agent.read("/var/lib/agent/out/a").split()[2] == "4294967295"
    assert "careful" not in agent.run("make -C /src install", timeout=120).out
    for unit in ("agent", "agent@x", "agent-alert@agent"):
        assert agent.show(unit, "PrivateUsers") == {"PrivateUsers": "yes"}


def test_a_user_of_its_own_is_not_warned_of(agent: Machine) -> None:
    assert "careful" not in agent.run("make -C /src install", timeout=120).out
    agent.run("useradd -m ann")
    assert "careful" not in agent.run("make -C /src install USER=ann", timeout=120).out


def test_s33_an_entry_in_the_workers_name_is_known_by_its_cgroup(agent: Machine) -> None:
    """
    S33: a step writes into the journal what the worker would; journald's own fields tell them apart.
    """
    agent.write("/usr/local/bin/log", """#!/usr/bin/python3
import socket
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.sendto(b"MESSAGE=b: done\\nAGENT_EVENT=step-done\\nAGENT_STEP=b\\n", "/run/systemd/journal/socket")
""", mode=0o755)  # fmt: skip
    service = Service(agent, "run: r\ntasks:\n  - {id: a, run: 'log; until test -e go; do sleep 0.02; done'}\n")
    service.start()
    service.wait("step-done", "b")
    worker = {"_PID": str(service.pid), "_SYSTEMD_CGROUP": agent.show("agent", "ControlGroup")["ControlGroup"]}
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    forged, true = service.events("step-done")
    assert {key: true[key] for key in worker} == worker
    assert forged["_SYSTEMD_CGROUP"] == f"{worker['_SYSTEMD_CGROUP']}/slot-0"
    assert forged["_PID"] != worker["_PID"]


def test_an_instance_may_have_a_user_of_its_own(agent: Machine) -> None:
    """
    As the README says it; then neither instance reads what the other has, and both work, tell and take orders.
    """
    readme = agent.read("/src/README.md")
    commands = readme[readme.index("$ sudo useradd --system --user-group agent-nightly") :].split("```")[0]
    agent.run("mkdir /tmp/bin; printf '#!/bin/sh\\nexec \"$@\"\\n' >/tmp/bin/sudo; chmod +x /tmp/bin/sudo")
    settings = "run: nightly\nalert: touch /tmp/x; id -un\ntasks:\n"
    look = "id -un; cat /var/lib/agent/out/a; cat /etc/agent/config.yaml; exit 3"
    agent.write(
        "/etc/agent/nightly.yaml", f"{settings}  - {{id: n, run: '{look}', retry: {{attempts: 1}}}}\n", mode=0o640
    )
    agent.run("PATH=/tmp/bin:$PATH\n" + "\n".join(line.removeprefix("$ ") for line in commands.strip().splitlines()))
    service = Service(agent, "run: r\ntasks:\n  - {id: a, run: 'echo secret; ls /var/lib/agent@nightly/out; :'}\n")
    agent.run(
        "chmod 640 /etc/agent/config.yaml; chgrp agent /etc/agent/config.yaml; mkdir -m 700 /var/lib/agent@nightly"
    )
    service.start()
    service.wait("run-done")
    agent.run("systemctl start agent@nightly")
    service.wait("run-failed")
    agent.run("until journalctl -u agent-alert@agent@nightly -o cat | grep -qx agent-nightly; do sleep 0.05; done")
    said = agent.run("agentctl log n --instance nightly; agentctl log --output n --instance nightly", check=False)
    assert "agent-nightly" in said.out and "secret" not in said.out, said
    assert said.out.count("Permission denied") == 2, said
    assert "Permission denied" in agent.run("agentctl log a").out
    assert "2 more spend" in agent.run("agentctl budget --instance nightly --add spend=2").out


WITHOUT_SANDBOXES = """
import json, os, subprocess, sys, tempfile, threading
with tempfile.TemporaryDirectory() as folder:
    open(folder + "/a.txt", "w").write("a")
    os.chmod(folder + "/a.txt", 0o600)
threading.Thread(target=print, args=("thread",)).start()
print(subprocess.run(["sh", "-c", "ulimit -n 100; exec ls /"], stdout=subprocess.DEVNULL).returncode, "python ok")
"""


def test_steps_that_build_no_sandbox_work_in_the_tightest_drop_in(agent: Machine) -> None:
    """
    git, an interpreter, and the compiler, curl, node and tar where they are installed; another namespace is refused.
    """
    agent.write("/srv/py", WITHOUT_SANDBOXES)
    tasks = """
run: r
on_failure: continue
defaults: {retry: {attempts: 1}}
tasks:
  - id: git
    run: |
      git init -q app && cd app && git config user.email a@b && git config user.name a && echo 1 >f && git add f &&
      git commit -qm one && git checkout -q -b two && git gc -q && cd .. && git clone -q app clone && git -C clone log
  - {id: python, run: python3 /srv/py}
  - {id: tar, run: "mkdir t v && echo x >t/x && cp -a t u && tar cf t.tar t u && tar xf t.tar -C v && cat v/u/x"}
  - {id: gcc, run: "command -v gcc || exit 0; echo 'int main(void){return 0;}' >m.c && gcc -O2 m.c -o m && ./m"}
  - {id: curl, run: "command -v curl || exit 0; curl -sS http://127.0.0.1:9/ 2>&1 | grep -i 'connect'"}
  - {id: node, run: "command -v node || exit 0; node -e 'setTimeout(() => console.log(1 + 1), 1)'"}
  - {id: sort, run: "seq 100000 | sort -R --parallel=2 | xargs -P 2 -n 10000 echo | wc -l"}
  - {id: outlives, run: "touch there; until test -e go; do sleep 0.02; done; agentctl once key -- echo effect"}
  - {id: sandbox, run: "unshare -Ur true"}
"""
    use(agent, "no-sandboxes")
    service = Service(agent, tasks)
    service.start()
    agent.run("until test -e /var/lib/agent/work/there; do sleep 0.05; done")
    agent.run("systemctl restart agent")
    service.wait("step-adopted", "outlives")
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-failed")
    failed = [entry["AGENT_STEP"] for entry in service.events("step-failed")]
    assert failed == ["sandbox"], agent.run("for s in git python tar gcc curl node sort; do agentctl log $s; done").out


def test_a_tracer_and_a_network_namespace_are_a_drop_in_away(agent: Machine) -> None:
    """
    What the service does without is given back by the drop-in of that name, and by no other.
    """
    agent.write("/usr/local/bin/trace", f"#!/usr/bin/python3{TRACE}", mode=0o755)
    tasks = """
run: RUN
tasks:
  - {id: net, run: "unshare -Urn true && echo has it; :"}
  - {id: trace, run: "sleep 60 & trace $!; kill $!"}
"""
    for number, (name, net, trace) in enumerate((("", "", "ptrace -1"), ("browsers", "has it", "ptrace -1"),
                                                 ("debuggers", "", "ptrace 0"))):  # fmt: skip
        use(agent, name)
        done(agent, tasks.replace("RUN", f"r{number}"))
        assert agent.read("/var/lib/agent/out/net").strip() == net
        assert agent.read("/var/lib/agent/out/trace").startswith(trace)


def use(machine: Machine, drop_in: str, unit: str = "agent") -> None:
    """Switch on one of the drop-ins that come with the agent, as the README says, and no other; none if it is empty."""
    folder = f"/etc/systemd/system/{unit}.service.d"
    machine.run(f"mkdir -p {folder} && find {folder} -type l -delete")
    if drop_in:
        machine.run(f"ln -s /usr/local/lib/agent/drop-ins/{drop_in}.conf {folder}/")
    machine.run("systemctl daemon-reload")


def exposure(machine: Machine, unit: str) -> float:
    table = machine.run(f"systemd-analyze security --no-pager {unit}").out.splitlines()
    return float(table[-1].split(":")[1].split()[0])


EXPOSURE = {"": 2.4, "browsers": 2.5, "debuggers": 2.6, "no-sandboxes": 1.5}


@pytest.mark.parametrize("drop_in", EXPOSURE)
def test_the_sandbox_is_as_tight_as_promised(agent: Machine, drop_in: str) -> None:
    """
    systemd-analyze security, of the unit as installed and with each of the drop-ins that come with it.
    """
    use(agent, drop_in)
    assert exposure(agent, "agent.service") <= EXPOSURE[drop_in]


SANDBOX_FILE = """
config: job.yaml
provider: ssh
variables: {HOSTS: here, SUDO: "", SSH: /usr/local/bin/not-ssh}
poll: 1s
"""
NOT_SSH = """#!/bin/sh
shift
{ id -un; sed -n 's/^CapEff:.//p' /proc/self/status; } >>/var/lib/agent-supervisor/far/seen
exec sh -c "$*"
"""


def test_a_supervisor_of_machines_elsewhere_needs_no_root(agent: Machine) -> None:
    """
    With the drop-in and the three commands that stand in it: a user of its own, no capability, and it looks.
    """
    agent.write("/usr/local/bin/not-ssh", NOT_SSH, mode=0o755)
    agent.write("/etc/agent/supervisor/far.yaml", SANDBOX_FILE, mode=0o640)
    agent.write("/etc/agent/supervisor/job.yaml", "run: far\ntasks:\n  - {id: a, run: 'true'}\n", mode=0o640)
    use(agent, "supervisor-without-root", "agent-supervisor@")
    commands = agent.run("sed -n 's/^# \\{5\\}//p' /usr/local/lib/agent/drop-ins/supervisor-without-root.conf").out
    assert commands.count("\n") == 2
    agent.run(commands)
    agent.run("systemctl start agent-supervisor@far", check=False)
    try:
        agent.run("until test -s /var/lib/agent-supervisor/far/seen; do sleep 0.05; done", timeout=30)
    finally:
        said = agent.run("journalctl -u agent-supervisor@far -o cat").out
        agent.run("systemctl stop agent-supervisor@far")
    assert set(agent.read("/var/lib/agent-supervisor/far/seen").split()) == {"agent-supervisor", "0" * 16}, said
    assert exposure(agent, "agent-supervisor@far.service") <= 1.5
    assert exposure(agent, "agent-alert@agent.service") <= 1.5


def test_a_step_does_not_choose_what_the_next_start_has_for_its_tmp(agent: Machine) -> None:
    """
    A link in the place of the folder that is the service's /tmp opened what it led to, past ProtectHome= and
    ProtectSystem=, to the steps of the next start.
    """
    agent.run("install -d -m 1777 /home/open; mkdir -p /var/lib/other; chmod 1777 /var/lib/other")
    cache = "/var/cache/agent"
    tried = (
        f"mv {cache}/tmp {cache}/old; rm -rf {cache}/tmp; ln -sfT /home/open {cache}/tmp; ln -s / {cache}/x; "
        f"unshare -Urm mount -o remount,bind,rw {cache}; touch /tmp/mine; stat -c %a /tmp; ls -A {cache}"
    )
    done(agent, f"run: r1\ntasks: [{{id: a, confine: no, run: '({tried}) 2>&1'}}]\n")
    assert agent.read("/var/lib/agent/out/a").splitlines()[-2:] == ["1777", "tmp"]
    done(agent, "run: r2\ntasks: [{id: b, confine: no, run: 'touch /tmp/planted /var/tmp/planted; ls -A /tmp'}]\n")
    assert agent.run("ls -A /home/open").out == ""
    assert agent.run(f"ls -A {cache}/tmp").out == "planted\n"
