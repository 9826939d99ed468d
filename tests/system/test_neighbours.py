"""Steps of one unit against one another, and against the worker: what one of them tries, as it was seen to succeed."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import QUICK, Service

pytestmark = pytest.mark.system

# A victim that is at work until it is let go; `evil` is a program of Python.
TASKS = """
run: r
concurrency: 3
tasks:
  - {id: victim, run: 'mkfifo gate; read _ <gate; echo done'}
  - {id: evil, confine: no, run: 'exec python3 /usr/local/share/evil.py'}
"""
# What each of them begins with: the environment of another step, as /proc shows it to the same user.
COMMON = r"""
import array, ctypes, glob, os, signal, socket, struct, sys, time

def environ(name):
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            found = dict(e.split(b"=", 1) for e in open(path, "rb").read().split(b"\0") if b"=" in e)
        except OSError:
            continue
        if found.get(b"AGENT_STEP") == name.encode():
            return {k.decode(): v.decode() for k, v in found.items()}, int(path.split("/")[2])
    return None

while (seen := environ("victim")) is None:
    time.sleep(0.02)
victim, victims_pid = seen
unit = "/sys/fs/cgroup" + open("/proc/self/cgroup").read().split("::")[1].rstrip().rpartition("/")[0]
control = os.path.join(os.path.dirname(victim["NOTIFY_SOCKET"]), "control")

def say(text):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(text.encode(), victim["NOTIFY_SOCKET"])

def child(do):
    pid = os.fork()
    if not pid:
        try:
            do()
        finally:
            os._exit(0)
    return pid

def ask(**fields):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(control)
        s.sendall("\t".join(f"{k}={v}" for k, v in fields.items()).encode() + b"\n")
        s.settimeout(5)
        try:
            return s.recv(65536).decode()
        except TimeoutError:
            return "nothing"
"""

FORGED = "STATUS=forged\\nX_AGENT_PROGRESS=9/9\\nX_AGENT_SPEND=7"
FORGERIES = {
    "a sender that has gone": f"os.waitpid(child(lambda: say('{FORGED}')), 0)",
    "a sender that nobody waits for": f"child(lambda: say('{FORGED}')); time.sleep(1)",
    "from the victim's own cgroup": f"""
def enter():
    group = "/sys/fs/cgroup" + open(f"/proc/{{victims_pid}}/cgroup").read().split("::")[1].rstrip()
    open(group + "/cgroup.procs", "w").write("0")
    say('{FORGED}')
    time.sleep(1)
os.waitpid(child(enter), 0)
""",
    "from the victim's own cgroup, and gone": f"""
def enter():
    group = "/sys/fs/cgroup" + open(f"/proc/{{victims_pid}}/cgroup").read().split("::")[1].rstrip()
    open(group + "/cgroup.procs", "w").write("0")
    say('{FORGED}')
os.waitpid(child(enter), 0)
""",
    "an orphan in the victim's own cgroup": f"""
def enter():
    group = "/sys/fs/cgroup" + open(f"/proc/{{victims_pid}}/cgroup").read().split("::")[1].rstrip()
    open(group + "/cgroup.procs", "w").write("0")
    def orphan():
        os.setsid()
        while os.getppid() == parent: time.sleep(0.01)
        say('{FORGED}')
        time.sleep(1)
    parent = os.getpid()
    child(orphan)
os.waitpid(child(enter), 0)
time.sleep(1)
""",
}


@pytest.fixture
def agent(on_each: Machine) -> Machine:
    return on_each


def begin(agent: Machine, evil: str, drop_in: str = QUICK) -> Service:
    """Start a victim, and a step that is out to harm it."""
    agent.write("/usr/local/share/evil.py", COMMON + evil)
    service = Service(agent, TASKS, drop_in)
    service.start()
    return service


def output(agent: Machine, step: str = "evil") -> str:
    return agent.read(f"/var/lib/agent/out/{step}")


def let_go(service: Service) -> None:
    service.machine.run("echo >/var/lib/agent/work/gate")
    service.wait("run-done")


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES.keys())
def test_s13_no_step_says_anything_in_anothers_name(agent: Machine, forgery: str) -> None:
    """
    S13: neither a child that sends and is gone, nor one that has put itself into the other's cgroup, is believed.
    """
    service = begin(agent, forgery)
    service.wait("step-done", "evil")
    shown = agent.run("agentctl status --json").out
    assert "victim" in shown
    assert "forged" not in shown, shown
    let_go(service)
    assert "9/9" not in agent.run("agentctl list").out


def test_s13_steps_that_outlive_the_worker_are_heard_by_the_next_one(agent: Machine) -> None:
    """
    S13: /proc hides from a worker what the one before has started; what such steps say of themselves counts.
    """
    says = "mkfifo $AGENT_STEP; read _ <$AGENT_STEP; agentctl beat late-$AGENT_STEP; (agentctl spend 3); read _ <gate"
    tasks = "".join(f"  - {{id: {name}, run: '{says}'}}\n" for name in "ab")
    service = Service(agent, f"run: r\nconcurrency: 3\ntasks:\n  - {{id: gate, run: mkfifo gate}}\n{tasks}")
    service.start()
    for name in ("gate", "a", "b"):
        service.wait("step-started", name)
    agent.run("until test -p /var/lib/agent/work/b; do sleep 0.02; done")
    service.kill("SIGKILL")
    for _ in range(2):
        service.wait("step-adopted")
    for name in "ab":
        agent.run(f"echo >/var/lib/agent/work/{name}")
    agent.run("until agentctl status --json | grep -A6 spend | grep -q '\"used\": 6'; do sleep 0.1; done")
    shown = agent.run("agentctl status --json").out
    assert "late-a" in shown
    assert "late-b" in shown


OPEN_WORKER = """
worker = int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])  # above the leader, a shell
for name in ("mem", "environ", "fd/0", "maps", "root/etc"):
    try:
        os.close(os.open(f"/proc/{worker}/{name}", os.O_RDONLY))
        print("opened", name)
    except OSError:
        pass
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(0x4206, worker, 0, 0) == 0:  # PTRACE_SEIZE
    print("traced")
buffer = ctypes.create_string_buffer(8)
if libc.syscall(438, os.pidfd_open(worker), 0, 0) >= 0:  # pidfd_getfd
    print("took a descriptor")
print("tried")
"""


def test_s12_no_step_looks_into_the_worker(agent: Machine) -> None:
    """
    S12: not its memory, with the passwords in it, nor its environment or descriptors; and nobody traces it.
    """
    service = begin(agent, OPEN_WORKER)
    service.wait("step-done", "evil")
    assert output(agent) == "tried\n"
    let_go(service)


# Each leaves a process behind that is to live on.
HIDES = {
    "beside the sentinel": "unit + '/sentinel'",
    "beside the worker": "unit",
    "in a cgroup of its own": "made(unit + '/hidden')",
    "below one of its own": "made(unit + '/hidden/below')",
    "in a slot that is none": "made(unit + '/slot-99')",
    "below its slot": "made(unit + '/slot-1/below')",
    "where systemd runs hooks": "made(unit + '/.control')",
}
HIDE = """
def made(path):
    os.makedirs(path, exist_ok=True)
    return path

def hide():
    os.setsid()
    group = {group}
    os.close(0), os.close(1), os.close(2)
    open(group + "/cgroup.procs", "w").write("0")
    os.execve("/bin/sleep", ["sleep", "3210"], {environ})
child(hide)
while b"3210" not in b"".join(open(p, "rb").read() for p in glob.glob("/proc/[0-9]*/cmdline") if os.path.exists(p)):
    time.sleep(0.02)
"""


@pytest.mark.parametrize("environ", ["os.environ", "{}"], ids=["its environment", "none"])
@pytest.mark.parametrize("group", HIDES.values(), ids=HIDES.keys())
def test_s25_what_hides_in_another_cgroup_of_the_unit_ends_with_its_step(
    agent: Machine, group: str, environ: str
) -> None:
    """
    S25: beside the sentinel, beside the worker, in a cgroup that the step has made: all of it is ended.
    """
    service = begin(agent, HIDE.format(group=group, environ=environ))
    service.wait("step-done", "evil")
    agent.run("while pgrep -u agent -x sleep; do sleep 0.02; done", timeout=20)
    assert any("read _ <gate" in line for line in service.processes())
    assert any("sentinel.sh" in line for line in service.processes())
    let_go(service)


def test_s30_cgroups_that_a_step_has_made_cost_the_worker_little(agent: Machine) -> None:
    """
    S30: they have a limit; where the step lifts that, the worker answers all the same, and they are gone after it.
    """
    evil = """
mine = "/sys/fs/cgroup" + open("/proc/self/cgroup").read().split("::")[1].rstrip()
print(open(mine + "/cgroup.max.descendants").read().strip(), open(mine + "/cgroup.max.depth").read().strip())
for name in ("descendants", "depth"):
    open(f"{mine}/cgroup.max.{name}", "w").write("max")
for n in range(20000):
    os.mkdir(f"{mine}/c{n}")
deep = mine
for n in range(300):
    deep += "/d"
    os.mkdir(deep)
"""
    service = begin(agent, evil, "[Service]\nWatchdogSec=3s\n")
    service.wait("step-done", "evil")
    assert output(agent).split() == ["256", "16"]
    agent.run("timeout 2 agentctl status")
    agent.run("while ls -d /sys/fs/cgroup/system.slice/agent.service/slot-1/*/; do sleep 0.05; done", timeout=60)
    let_go(service)
    assert agent.show("agent", "NRestarts")["NRestarts"] == "0"
