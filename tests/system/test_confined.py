"""Steps of one unit against one another, against the worker and against other units: each exploit is a real step."""

from __future__ import annotations

import pytest

from tests.system.machine import Machine
from tests.system.service import QUICK, Service

pytestmark = pytest.mark.system

SECRETS = "[Service]\nLoadCredential=one:/root/one\nLoadCredential=two:/root/two\n"

# Tries everything, and prints what it got.
SPY = r"""
import ctypes, glob, os, signal, sys
S, R = "/var/lib/agent", "/run/agent"
libc = ctypes.CDLL(None, use_errno=True)

def tried(what, action):
    try:
        found = action()
    except OSError:
        return
    print("GOT", what, found if isinstance(found, (bool, int)) else "", flush=True)

def read(path):
    with open(path, "rb") as file:
        return len(file.read(1))

def write(path):
    with open(path, "ab") as file:
        file.write(b"x")

for name in ("ledger.db", "ledger.db-wal", "checkpoint.json", "lock", "ledger.db.mark", "worker.json", "alert.json"):
    if os.path.exists(f"{S}/{name}"):
        tried(f"read {name}", lambda: read(f"{S}/{name}"))
        tried(f"write {name}", lambda: write(f"{S}/{name}"))
        tried(f"rename {name}", lambda: os.rename(f"{S}/{name}", f"{S}/{name}.x"))
        tried(f"link {name}", lambda: os.link(f"{S}/{name}", f"/tmp/{name}"))
for path in (f"{S}/alerted", f"{S}/.gitconfig", f"{S}/ended", f"{S}/paused", f"{S}/out/planted", f"{S}/log/planted"):
    tried(f"make {path}", lambda: write(path))
for folder in (S, R, f"{S}/home", "/run/credentials", f"{R}/given.0", f"{R}/given.1"):
    if folder != os.environ.get("MINE"):
        tried(f"list {folder}", lambda: len(os.listdir(folder)) or True)
for name in ("memo.0", "memo.1", "seen"):
    tried(f"read {name}", lambda: read(f"{R}/{name}"))
    tried(f"write {name}", lambda: write(f"{R}/{name}"))
for path in ("/run/credentials/agent.service/one", "/run/credentials/agent.service/two", *sys.argv[1:]):
    tried(f"read {path}", lambda: read(path))
tried("write the victim's folder", lambda: write(f"{S}/steps/victim/x"))
tried("write the victim's home", lambda: write(f"{S}/home/victim/x"))
tried("write another's checkout", lambda: write("/srv/other/x"))
tried("read another agent's ledger", lambda: read("/var/lib/agent@b/ledger.db"))
tried("enter a cgroup", lambda: write(glob.glob("/sys/fs/cgroup/system.slice/agent.service/slot-*/cgroup.procs")[0]))
own = {os.getpid(), os.getppid()}
for entry in os.listdir("/proc"):
    if not entry.isdigit() or int(entry) in own:
        continue
    pid = int(entry)
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        continue
    if os.stat(f"/proc/{pid}").st_uid not in (0, os.getuid()) or not words:
        continue
    name = words.split(b"\0")[0].decode() + f" {pid}"
    if b"spy.py" in words or b"leader.sh" in words and b"spy.py" in words:
        continue
    tried(f"environ of {name}", lambda: read(f"/proc/{pid}/environ"))
    tried(f"memory of {name}", lambda: os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY)))
    tried(f"root of {name}", lambda: len(os.listdir(f"/proc/{pid}/root/")))
    tried(f"descriptors of {name}", lambda: os.readlink(f"/proc/{pid}/fd/0"))
    for task in os.listdir(f"/proc/{pid}/task") if os.access(f"/proc/{pid}/task", os.R_OK) else ():
        tried(f"memory of task {task}", lambda: os.close(os.open(f"/proc/{pid}/task/{task}/mem", os.O_RDONLY)))
    if libc.ptrace(16, pid, 0, 0) == 0:
        print("GOT ptrace of", name, flush=True)
    if os.environ["SIGNALS"] == "no":
        tried(f"signal to {name}", lambda: os.kill(pid, 0) or True)
if os.environ["TRUNCATE"] == "no":
    tried("truncate", lambda: os.truncate(f"{S}/ledger.db", 0))
print("LOOKED", flush=True)
"""


@pytest.fixture
def agent(on_each: Machine) -> Machine:
    return on_each


def said(service: Service, step: str) -> list[str]:
    """Return what a step has printed, as its result."""
    return service.machine.read(f"/var/lib/agent/out/{step}").splitlines()


def planted(agent: Machine) -> None:
    """Put secrets, another agent's state and another checkout where the exploits look for them."""
    for name in ("one", "two"):
        agent.write(f"/root/{name}", f"secret {name}\n", mode=0o600)
    agent.write("/tmp/spy.py", SPY)
    agent.run("install -m 644 /tmp/spy.py /usr/local/lib/spy.py")
    agent.run("install -d -o agent -g agent /srv/other /var/lib/agent@b; touch /var/lib/agent@b/ledger.db")
    agent.run("chown agent: /var/lib/agent@b/ledger.db")


def test_s12_s13_s14_a_step_gets_at_nothing_of_the_runs_of_the_workers_or_of_other_steps(agent: Machine) -> None:
    """
    S12, S13, S14: of ledger, checkpoint, sockets' folder, credentials, other folders, processes, cgroups: nothing.
    """
    planted(agent)
    service = Service(
        agent,
        "run: r\nconcurrency: 2\ntasks:\n"
        "  - id: victim\n    secrets: [one]\n"
        "    run: 'echo kept >$STATE_DIRECTORY/kept; echo $CREDENTIALS_DIRECTORY >/tmp/where;"
        " cat $CREDENTIALS_DIRECTORY/one; while [ ! -e /tmp/over ]; do sleep 0.1; done'\n"
        "  - id: evil\n    secrets: [two]\n"
        "    env: {SIGNALS: no, TRUNCATE: no}\n"
        "    run: |\n"
        "      while [ ! -s /tmp/where ]; do sleep 0.1; done\n"
        "      MINE=${CREDENTIALS_DIRECTORY%/*} python3 /usr/local/lib/spy.py $(cat /tmp/where)/one || exit\n"
        "      cat $CREDENTIALS_DIRECTORY/two; touch /tmp/over\n",
        drop_in=QUICK + SECRETS + "ReadWritePaths=/srv/other\n",
    )
    service.start()
    service.wait("run-done")
    assert said(service, "evil") == ["LOOKED", "secret two"]
    assert said(service, "victim") == ["secret one"]
    service.wait_ended()


def test_s12_credentials_are_copies_in_memory_that_end_with_the_attempt(agent: Machine) -> None:
    """
    S12: mode 0500 and 0400 on a tmpfs; gone after the attempt, and after a worker that was killed with its step.
    """
    planted(agent)
    look = "'cd $CREDENTIALS_DIRECTORY; stat -c %a . one; stat -fc %T .; test ! -L one; ls {}'"
    service = Service(
        agent,
        f"run: r\ntasks:\n  - {{id: a, secrets: [one], run: {look.format('')}}}\n"
        "  - {id: b, secrets: [one], run: sleep 600}\n",
        drop_in=QUICK + SECRETS,
    )
    service.start()
    service.wait("step-started", "b")
    assert said(service, "a") == ["500", "400", "tmpfs", "one"]
    assert len(agent.run("ls -d /run/agent/given.*/credentials.*").out.splitlines()) == 1
    service.kill("SIGKILL")
    service.wait("step-adopted", "b")
    assert len(agent.run("cat /run/agent/given.*/credentials.*/one").out.splitlines()) == 1
    agent.run("systemctl stop agent")
    assert agent.run("ls -d /run/agent/given.*/credentials.*", check=False).out == ""


def test_s37_what_a_step_leaves_in_its_home_runs_in_no_other(agent: Machine) -> None:
    """
    S37: a home for each step, kept between its attempts, not counted as saved, gone when it is done.
    """
    plant = "git config --global alias.x '!echo planted'; mkdir -p ~/m/ro && chmod 500 ~/m/ro"
    service = Service(
        agent,
        "run: r\ndefaults: {retry: {delay: 0s, attempts: 2}}\ntasks:\n"
        f'  - {{id: a, run: "{plant}; test $AGENT_ATTEMPT = 2 && git x"}}\n'
        "  - {id: b, run: 'git x; ls -A ~; pwd -P; echo $HOME'}\n"
        "  - {id: c, env: {HOME: /var/lib/agent}, run: 'cat ~/.gitconfig'}\n"
        "  - {id: d, run: 'echo x >~/x; exit 75', retry: {attempts: 1, patience: 0s, delay: 0s}}\n",
    )
    agent.run("install -d -o agent -g agent /var/lib/agent && echo '[alias]' >/var/lib/agent/.gitconfig")
    service.start()
    service.wait("run-failed")
    assert said(service, "a") == ["planted"]
    assert said(service, "b") == ["/var/lib/agent/work", "/var/lib/agent/home/b"]
    assert said(service, "c") == ["[alias]"]
    service.wait_ended()
    agent.run("systemctl start agent", check=False)
    service.wait_ended()
    assert agent.run("ls /var/lib/agent/home").out.split() == ["d"]


def test_what_a_confined_step_can_still_do(agent: Machine) -> None:
    """
    Work in a checkout, a worktree and a submodule, build, use a virtual environment, and call agentctl.
    """
    agent.run(
        "cd /srv && git init -q app && cd app && git config user.name a && git config user.email a@b && "
        "git commit -q --allow-empty -m 0 && git worktree add -q ../tree && mkdir sub && chown -R agent: /srv"
    )
    tasks = r"""
run: r
tasks:
  - id: commit
    cwd: /srv/app/sub
    run: echo x >f && git add f && git commit -qm 1 && git log --format=%s -1
  - id: worktree
    cwd: /srv/tree
    run: echo y >g && git add g && git commit -qm 2 && git log --format=%s -1
  - id: tools
    run: |
      set -e
      python3 -m venv --without-pip v && v/bin/python -c 'print("venv")'
      echo kept | agentctl save; agentctl load; agentctl beat hello; agentctl progress 1/2; agentctl spend 0
      agentctl once key -- echo once; agentctl note; echo out >/dev/stdout; : >/dev/null; mktemp >/dev/null
      python3 -c 'import multiprocessing as m; m.Lock(); print("shm")'
      sh -c 'sleep 600 & kill $!' && echo signal; ls /usr >/dev/null; cat /etc/hostname >/dev/null
      test -w /dev/tty || true
  - {id: opened, confine: {write: [/srv/more]}, run: 'echo more >/srv/more/x && cat /srv/more/x'}
  - {id: free, confine: no, run: 'test -r /var/lib/agent/ledger.db && echo free'}
  - {id: expected, expect: {file: /srv/more/out}, run: 'echo x >/srv/more/out'}
"""
    agent.run("install -d -o agent -g agent /srv/more")
    service = Service(agent, tasks, drop_in=QUICK + "[Service]\nReadWritePaths=/srv\n")
    service.start()
    service.wait("run-done")
    assert said(service, "commit") == ["1"]
    assert said(service, "worktree") == ["2"]
    assert said(service, "tools") == ["venv", "kept", "once", "out", "shm", "signal"]
    assert said(service, "opened") == ["more"]
    assert said(service, "free") == ["free"]
    checked = agent.run("agentctl check").out
    assert "confine: by Landlock, version" in checked and "not confined: free" in checked


def test_a_step_that_mounts_is_told_what_to_do(agent: Machine) -> None:
    """
    By check before, and by the cause of its failure; with `confine: no` it can.
    """
    tasks = "run: r\ndefaults: {retry: {attempts: 1}}\ntasks:\n  - {id: a, run: unshare -Urm true%s}\n"
    service = Service(agent, tasks % "")
    assert "task 'a' runs unshare, which mounts" in agent.run("agentctl check").out
    service.start()
    entry = service.wait("step-failed")
    assert "no confined step can mount; if it has to, add 'confine: no' to its task" in entry["MESSAGE"]
    service.wait_ended()
    agent.write("/etc/agent/config.yaml", tasks % ", confine: no", mode=0o644)
    service.start()
    service.wait("run-done")


def test_what_is_mounted_meanwhile_can_be_read(agent: Machine) -> None:
    """
    Over a folder of `/` that was there before, and in a new one; a step that comes after that reads both.
    """
    wait = "until test -e go; do sleep 0.02; done"
    service = Service(
        agent, f"run: r\ntasks:\n  - {{id: a, run: '{wait}'}}\n  - {{id: b, run: 'cat /srv/x /data/x'}}\n"
    )
    service.start()
    service.wait("step-started", "a")
    agent.run("mkdir /data; for d in /srv /data; do mount -t tmpfs none $d; echo $d >$d/x; done")
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    assert said(service, "b") == ["/srv", "/data"]


def test_a_confined_step_outlives_its_worker(agent: Machine) -> None:
    """
    kill -9 of the worker: the step goes on, its lines are whole, and its exit status is its own.
    """
    service = Service(
        agent,
        "run: r\ndefaults: {retry: {attempts: 1}}\non_failure: continue\ntasks:\n"
        "  - {id: a, after: 'cat $STATE_DIRECTORY/x', run: 'echo 1; while [ ! -e /tmp/go ]; do sleep 0.05; done;"
        " echo 2; echo x >$STATE_DIRECTORY/x'}\n"
        "  - {id: b, run: exit 7}\n",
    )
    service.start()
    service.wait("step-started", "a")
    for _ in range(3):
        service.kill("SIGKILL")
        service.wait("step-adopted", "a")
    agent.run("touch /var/cache/agent/tmp/go")
    service.wait("run-failed")
    assert said(service, "a") == ["1", "2"]
    assert service.per_step("step-started")["a"] == 1
    assert "b: failed for good: exited with status 7" in service.events("step-failed")[-1]["MESSAGE"]
