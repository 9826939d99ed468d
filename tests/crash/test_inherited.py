"""What a worker was started with: processes that are no step's, signals, limits, a folder."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT, alive

# What the worker's own process was before it called exec: a shell that has started others.

SHELL = "sh", "-c"


@contextmanager
def ended(*files: Path) -> Iterator[None]:
    """End the processes whose pids are in these files."""
    try:
        yield
    finally:
        for file in files:
            if file.exists() and alive(pid := int(file.read_text())):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "before",
    [
        "sleep 600 2>&- & echo $! > {0}",
        "setsid sleep 600 2>&- & echo $! > {0}",
        # A subreaper hears of the orphans of those it has inherited, too, whenever they become such.
        "(sleep 600 2>&- & echo $! > {0}; read -r _ < {1}) &",
        "(env -i setsid sleep 600 2>&- & echo $! > {0}; read -r _ < {1}) &",
    ],
    ids=["child", "session", "orphan-later", "orphan-without-a-trace"],
)
def test_a_child_that_was_there_before_the_first_step_lives(worker: MakeWorker, tmp_path: Path, before: str) -> None:
    """
    Case N4: the shell that becomes the worker by exec has started others; they are nobody's.
    """
    pid, gate = tmp_path / "pid", tmp_path / "gate"
    os.mkfifo(gate)
    w = worker(f"""
tasks:
  - {{id: first, run: 'echo > {gate}; echo 1'}}
  - {{id: second, run: echo 2}}
""")
    if "{1}" not in before:
        w.config.write_text(w.config.read_text().replace(f"echo > {gate}; ", ""))
    with ended(pid):
        code = w.start(*SHELL, f'{before.format(pid, gate)}\nexec "$@"', "sh").wait()
        assert code == 0
        assert alive(int(pid.read_text()))
    assert w.matching("left processes behind") == []


def test_what_a_step_leaves_is_ended_beside_an_inherited_child(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Cases N4, P5: its session, and what has gone to another one, by the mark in its environment.
    """
    pid, near, far = tmp_path / "pid", tmp_path / "near", tmp_path / "far"
    w = worker(f"""
tasks:
  - id: leaves
    run: |
      sleep 601 & echo $! > {near}
      (setsid sleep 602 & echo $! > {far})
""")
    with ended(pid, near, far):
        assert w.start(*SHELL, f'sleep 600 2>&- & echo $! > {pid}; exec "$@"', "sh").wait() == 0
        assert [alive(int(file.read_text())) for file in (pid, near, far)] == [True, False, False]


def test_a_leftover_that_was_inherited_is_ended_and_a_bystander_lives(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Cases N4, S11: the parent of the dead worker, a subreaper, has inherited its step and becomes the next worker.
    """
    step, other = tmp_path / "step", tmp_path / "other"
    w = worker(
        f"tasks: [{{id: long, run: 'echo $$ > {step}.1; mv {step}.1 {step}; [ $AGENT_ATTEMPT = 2 ] || sleep 600'}}]"
    )
    script = f"""
import ctypes, os, signal, subprocess, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
first = subprocess.Popen(sys.argv[1:])
with open({str(other)!r}, "w") as file:
    file.write(str(subprocess.Popen(["sleep", "600"], start_new_session=True, stderr=-3).pid))
while not os.path.exists({str(step)!r}):
    assert first.poll() is None
    time.sleep(0.01)
os.rename({str(step)!r}, {str(step)!r} + ".first")
first.kill()
first.wait()
os.execv(sys.argv[1], sys.argv[1:])
"""
    first = Path(f"{step}.first")
    with ended(other, first):
        assert w.start(sys.executable, "-c", script).wait() == 0
        assert alive(int(other.read_text()))
        assert not alive(int(first.read_text()))
    assert w.rows()[0].step == "long"


def test_neither_the_shell_of_the_worker_nor_its_jobs_are_a_leftover(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case N4: somebody looks into a step with its environment, and starts the worker again from there.
    """
    w = worker("tasks: [{id: long, run: 'echo up; [ $AGENT_ATTEMPT = 2 ] || sleep 600'}]")
    w.start().until("long: up")
    assert w.kill() == -signal.SIGKILL
    w.environ["STATE_DIRECTORY"] = f"{w.state}/steps/long"
    code = w.start(*SHELL, 'sleep 600 2>&- & "$@"; echo "ended $?" >&2; kill $! && echo job lived >&2', "sh").wait()
    assert (code, w.lines[-2:]) == (0, ["ended 0", "job lived"])


def test_what_a_copy_command_leaves_is_no_steps(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case N4: a command of the worker's own, which has ended, and a process that it took out of its session.
    """
    pid, gate = tmp_path / "pid", tmp_path / "gate"
    os.mkfifo(gate)
    w = worker(f"""
tasks:
  - {{id: first, run: 'sleep 0'}}
  - {{id: second, run: 'read -r _ < {gate}'}}
copy: {{command: [sh, -c, '[ -e {pid} ] || {{ (setsid sleep 600 2>&- & echo $! > {pid}); echo > {gate}; }}']}}
""")
    with ended(pid):
        assert w.run() == 0
    assert w.matching("second.*left processes behind") == []


IGNORING = """
import os, resource, signal, sys
numbers = [getattr(signal, name) for name in sys.argv[2].split(",")]
if sys.argv[1] == "ignored":
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
os.execv(sys.argv[3], sys.argv[3:])
"""
ALL = "SIGCHLD,SIGTERM,SIGINT,SIGPIPE,SIGUSR1,SIGABRT,SIGQUIT,SIGALRM,SIGTTOU"


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_signals_are_a_daemons_own_whatever_its_parent_made_of_them(worker: MakeWorker, how: str) -> None:
    """
    Cases N2, E10: the first step's end is heard, with its true status; SIGTERM ends the worker in order.
    """
    w = worker(
        "on_failure: continue\n"
        "tasks: [{id: a, run: exit 3, retry: {attempts: 2, delay: 0s}}, {id: b, run: echo up; sleep 600}]"
    )
    w.start(sys.executable, "-c", IGNORING, how, ALL).until("b: up")
    assert w.kill(signal.SIGTERM) == 75
    assert [(row.step, row.status) for row in w.rows()][:2] == [("a", 3), ("a", 3)]


@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_a_step_starts_with_default_signals(worker: MakeWorker, how: str) -> None:
    """
    Case N2: as a service does, also where the worker's own parent ignored or blocked them, `nohup` included.
    """
    w = worker("tasks: [{id: a, run: [grep, -E, 'Sig(Blk|Ign)', /proc/self/status]}]")
    assert w.start(sys.executable, "-c", IGNORING, how, f"{ALL},SIGHUP,SIGXFSZ").wait() == 0
    masks = [int(line.split()[1], 16) for line in w.output("a").splitlines()]
    usual = sum(1 << (number - 1) for number in signal.valid_signals())
    assert [mask & usual for mask in masks] == [0, 0]


def test_a_command_hears_of_its_children_where_sigchld_is_ignored(worker: MakeWorker) -> None:
    """
    Case N2: `agentctl once` by hand has the exit status of its command.
    """
    words = [sys.executable, "-c", IGNORING, "ignored", ALL, sys.executable, "-m", "worker", "once", "k", "--"]
    found = subprocess.run([*words, "sh", "-c", "exit 3"], cwd=ROOT, capture_output=True)
    assert found.returncode == 3, found.stderr


@pytest.mark.parametrize(("mask", "seen"), [("0777", "0077"), ("0277", "0077"), ("0000", "0000"), ("0027", "0027")])
def test_a_mask_that_takes_our_own_rights_is_none(worker: MakeWorker, mask: str, seen: str) -> None:
    """
    Case N2: what we make is ours to use; nothing is everybody's that was not meant to be.
    """
    w = worker("tasks: [{id: a, run: umask}]")
    assert w.start(*SHELL, f'umask {mask}; exec "$@"', "sh").wait() == 0
    assert w.output("a").decode().split() == [seen]
    assert (w.state / "ledger.db").stat().st_mode & 0o600 == 0o600
    assert not w.state.stat().st_mode & 0o007


def test_a_folder_that_has_gone_is_no_hindrance(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case N2: the folder in which the worker is started may be removed, or closed to it.
    """
    w = worker("tasks: [{id: a, run: pwd}]")
    w.config = w.config.rename(tmp_path / "named.yaml")
    assert w.start(*SHELL, 'mkdir gone; cd gone; rmdir ../gone; exec "$@"', "sh", cwd=tmp_path).wait() == 0
    assert w.output("a").decode().strip() == str(w.state / "work")
    found = subprocess.run(
        [*SHELL, f'mkdir gone; cd gone; rmdir ../gone; exec "{sys.executable}" -m worker run list.yaml'],
        cwd=tmp_path, env=w.environ, capture_output=True, text=True,
    )  # fmt: skip
    assert (found.returncode, found.stderr.count("\n")) == (78, 1), found.stderr


def test_few_descriptors_are_made_more(worker: MakeWorker) -> None:
    """
    Case N2: a soft limit is raised as far as the list needs, not further than the hard one.
    """
    steps = "sh -c 'sleep 0.5'"
    w = worker(f"concurrency: 20\ntasks: [{{id: a, foreach: {{range: 1-40}}, run: {steps}}}]")
    assert w.start(*SHELL, 'ulimit -Sn 32; exec "$@"', "sh").wait() == 0
    assert len(w.done()) == 40
