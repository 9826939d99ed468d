"""Live restore on a real systemd: a worker that dies, hangs or is replaced takes no step with it."""

from __future__ import annotations

import os
import random
import re

import pytest

from tests.system.machine import Machine
from tests.system.service import Service, deadly

pytestmark = pytest.mark.system

# How often the worker is killed; each of them costs half a second.
KILLS = int(os.environ.get("AGENT_KILLS", "4"))
NO_LIMIT = "[Unit]\nStartLimitBurst=1000\n[Service]\nWatchdogSec=2s\nTimeoutAbortSec=1s\n"

# Each step writes down that it was started, and prints its lines in one to five seconds.  The last one is there for as
# long as a test wants, however slow the machine.
STEPS = max(9, 2 * KILLS)
RUN = f"""
run: restored
concurrency: 3
defaults: {{retry: {{attempts: 1}}}}
tasks:
  - id: s
    foreach: {{range: 101-{100 + STEPS}}}
    before: 'true'
    run: |
      echo "$AGENT_STEP" >>started
      for line in $(seq 100); do echo "$AGENT_STEP $line"; sleep 0.0$((AGENT_ITEM % 5 + 1)); done
      echo "$AGENT_STEP said this" >&2
    after: echo "$AGENT_STEP" >>after
  - {{id: last, needs: [s], run: 'until [ -e enough ]; do sleep 0.02; done'}}
"""


def check_run(service: Service) -> None:
    """Let the run come to its end; each step was started, ended and committed once, none of its lines is missing."""
    m = service.machine
    m.write("/var/lib/agent/work/enough", "")
    service.wait("run-done")
    every = [f"s@{n}" for n in range(101, 101 + STEPS)]
    assert sorted(m.read("/var/lib/agent/work/started").split()) == every
    assert sorted(m.read("/var/lib/agent/work/after").split()) == every
    assert service.per_step("step-done") == dict.fromkeys([*every, "last"], 1)
    assert service.events("step-interrupted") == []
    for step in every:
        assert m.read(f"/var/lib/agent/out/{step}") == "".join(f"{step} {n}\n" for n in range(1, 101))


def test_killed_again_and_again_no_step_is_done_twice(agent: Machine) -> None:
    """
    kill -9 of the worker at any moment costs no step and no line.
    """
    service = Service(agent, RUN, NO_LIMIT)
    service.start()
    dice = random.Random(5)
    for _ in range(KILLS):
        service.wait("run-started")
        agent.run(f"sleep {dice.uniform(0, 0.3):.3f}")
        service.kill("SIGKILL")
    check_run(service)


# Where the worker is killed, one place after the other; each step has a line of them.
PLACES = """
program-announced
program-started
program-ended
attempt-over
result-published
ledger-written
ledger-committed
attempt-dismissed
program-announced adopting
program-started adopting adopted
program-ended adopted program-announced
attempt-over adopting adopted attempt-over
result-published adopting result-published
ledger-written adopted result-published ledger-written
""".strip().splitlines()


def test_killed_between_any_two_system_calls_no_step_is_done_twice(agent: Machine) -> None:
    """
    Before and after each thing that is written down about an attempt; also while it is taken over.
    """
    deadly(agent)
    tasks = "".join(
        f"  - id: s{n:02}\n    before: 'echo {places} >places; echo $AGENT_STEP >>before'\n"
        "    run: 'echo $AGENT_STEP >>started; seq 1000'\n    after: echo $AGENT_STEP >>after\n"
        for n, places in enumerate(PLACES)
    )
    service = Service(agent, f"defaults: {{retry: {{attempts: 1}}}}\ntasks:\n{tasks}", NO_LIMIT)
    service.start()
    service.wait("run-done")
    every = [f"s{n:02}" for n in range(len(PLACES))]
    for name in ("before", "started", "after"):
        assert agent.read(f"/var/lib/agent/work/{name}").split() == every, name
    whole = "".join(f"{n}\n" for n in range(1, 1001))
    assert all(agent.read(f"/var/lib/agent/out/{step}") == whole for step in every)
    assert service.per_step("step-done").keys() <= set(every)
    assert service.events("step-interrupted") == service.events("step-retry") == []
    assert agent.read("/var/lib/agent/work/places") == ""
    deaths = [e for e in agent.journal("-u", "agent") if "Main process exited, code=killed" in e["MESSAGE"]]
    assert len(deaths) == sum(len(places.split()) for places in PLACES)


def test_hung_again_and_again_no_step_is_done_twice(agent: Machine) -> None:
    """
    A worker that systemd's watchdog kills costs no step either.
    """
    service = Service(agent, RUN, NO_LIMIT)
    service.start()
    for _ in range(2):
        service.wait("step-started")
        service.kill("SIGSTOP")
        service.wait("step-adopted")
    check_run(service)
    assert len([e for e in agent.journal("-u", "agent") if "Watchdog timeout" in e["MESSAGE"]]) == 2


def test_restarted_again_and_again_no_step_is_done_twice(agent: Machine) -> None:
    """
    `systemctl restart` hands the steps over, and counts against no limit of starts.
    """
    service = Service(agent, RUN)
    service.start()
    service.wait("step-started")
    for _ in range(11):
        agent.run("systemctl restart agent")
        service.wait("step-adopted")
    check_run(service)
    assert len(service.events("run-left")) == 11


def test_a_step_that_ends_while_no_worker_lives_has_its_true_end(agent: Machine) -> None:
    """
    The next worker commits what has succeeded, and tries again what has failed, each with its exit status.
    """
    tasks = """
run: alone
concurrency: 5
defaults: {retry: {attempts: 2, delay: 0s}}
tasks:
  - {id: good, run: 'until [ -e go ]; do sleep 0.02; done; seq 5', after: echo after >&2}
  - {id: bad, run: 'test $AGENT_ATTEMPT = 2 && exit; until [ -e go ]; do sleep 0.02; done; exit 3'}
  - {id: big, run: 'test $AGENT_ATTEMPT = 2 && exit; until [ -e go ]; do sleep 0.02; done; exit 137'}
  - {id: shot, run: 'test $AGENT_ATTEMPT = 2 && exit; until [ -e go ]; do sleep 0.02; done; kill -9 $$'}
  - {id: later, run: 'until [ -e go ]; do sleep 0.02; done; exit 75', retry: {delay: 1min}}
"""
    service = Service(agent, tasks, "[Service]\nRestartSec=1s\n")
    service.start()
    for name in ("good", "bad", "big", "shot", "later"):
        service.wait("step-started", name)
    service.kill("SIGKILL")
    agent.run("until [ $(systemctl is-active agent) = activating ]; do sleep 0.02; done; touch /var/lib/agent/work/go")
    agent.run("while ls /sys/fs/cgroup/system.slice/agent.service/slot-*/cgroup.events | xargs grep -q 'populated 1'; "
              "do sleep 0.01; done; test $(systemctl is-active agent) = activating")  # fmt: skip
    service.wait("step-done", "good")
    assert agent.read("/var/lib/agent/out/good") == "1\n2\n3\n4\n5\n"
    causes = {step: service.machine.wait_journal(f"AGENT_STEP={step}", "AGENT_EVENT=step-retry")["MESSAGE"]
              for step in ("bad", "big", "shot")}  # fmt: skip
    assert causes == {
        "bad": "bad: attempt 1 exited with status 3; next at once",
        "big": "big: attempt 1 exited with status 137; next at once",
        "shot": "shot: attempt 1 killed by SIGKILL; next at once",
    }
    agent.wait_journal("AGENT_STEP=later", "AGENT_EVENT=step-deferred")
    assert service.per_step("step-started")["good"] == 1


HARD_TO_END = """
tasks:
  - id: a
    run: |
      setsid sh -c 'trap "" TERM; (trap "" TERM; sleep 1000 & wait) & exec sleep 1001' &
      (setsid sh -c 'trap "" TERM; exec sleep 1002' &)
      trap '' TERM
      echo up
      sleep 1003
"""


def stop(service: Service) -> None:
    """Stop the service; a worker that lives is told twice, so that it does not wait for who ignores SIGTERM."""
    service.machine.run("""
        systemctl stop --no-block agent
        until systemctl show --property=StatusText --value agent | grep -q '^stopping: '; do sleep 0.02; done
        systemctl kill --kill-whom=main --signal=TERM agent
    """)
    service.wait_ended()


@pytest.mark.parametrize("how", ["healthy", "hung", "dead", "given up"])
def test_a_stop_leaves_no_process_of_a_step(agent: Machine, how: str) -> None:
    """
    Whatever state the worker is in, and whatever its step has forked and ignores.
    """
    drop_in = "[Service]\nRestartSec=30s\n" if how != "given up" else (
        "[Unit]\nStartLimitBurst=1\n[Service]\nRestartSec=100ms\n"
    )  # fmt: skip
    service = Service(agent, HARD_TO_END, drop_in)
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    assert len([line for line in service.processes() if "sleep 100" in line]) >= 4
    if how == "hung":
        service.kill("SIGSTOP")
    elif how != "healthy":
        service.kill("SIGKILL")
    if how == "dead":
        agent.run("until [ $(systemctl is-active agent) = activating ]; do sleep 0.02; done")
        assert len([line for line in service.processes() if "sleep 100" in line]) >= 4
    if how == "given up":
        agent.run("until [ $(systemctl is-active agent) = failed ]; do sleep 0.02; done")
    elif how == "dead":
        agent.run("systemctl stop agent")
    else:
        stop(service)
    # In these cases it is the sentinel that ends them, at the same moment.
    agent.run("timeout 20 sh -c 'while pgrep -u agent; do sleep 0.01; done'" if how in ("dead", "given up") else "true")
    # Who tells of it, agent-alert@, may be starting at that moment.
    assert [line for line in service.processes() if "agentctl" not in line] == []


def test_a_thousand_lines_a_second_are_whole_and_unhindered(agent: Machine) -> None:
    """
    kill -9 while a step prints: every line once, in order, no gap in the step's own time, driven again within a second.
    """
    tasks = """
tasks:
  - id: a
    run:
      - python3
      - -c
      - |
        import itertools, os, time
        began = last = time.monotonic()
        worst = 0
        for n in itertools.count():
            if n % 1000 == 0 and os.path.exists("enough"):
                break
            print(f"{n} {'x' * 60}", flush=True)
            now = time.monotonic()
            worst, last = max(worst, now - last), now
            time.sleep(max(0, began + (n + 1) / 1000 - now))
            last = time.monotonic()
        print(f"worst {worst * 1000:.1f} ms")
"""
    service = Service(agent, tasks, NO_LIMIT)
    service.start()
    service.wait("step-started", "a")
    gaps = []
    for _ in range(3):
        agent.run("sleep 0.7")
        service.kill("SIGKILL")
        entry = service.wait("step-adopted", "a")
        died = [e for e in agent.journal("-u", "agent") if "Main process exited" in e["MESSAGE"]][-1]
        gaps.append((int(entry["__REALTIME_TIMESTAMP"]) - int(died["__REALTIME_TIMESTAMP"])) / 1e6)
    agent.write("/var/lib/agent/work/enough", "")
    service.wait("step-done", "a")
    *lines, last = agent.read("/var/lib/agent/out/a").splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(len(lines)))
    found = re.fullmatch(r"worst ([0-9.]+) ms", last)
    assert found is not None
    print(f"{last}; driven again after {', '.join(f'{gap:.2f}' for gap in gaps)} s")
    assert float(found[1]) < 500, last  # as long as no worker lived: that it was held up would show


def test_an_upgrade_leaves_steps_running(agent: Machine) -> None:
    """
    `make install` of another version replaces the worker under a step, which goes on.
    """
    service = Service(agent, "tasks:\n  - {id: a, run: 'echo up; until [ -e go ]; do sleep 0.02; done; echo same'}\n")
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    (before,) = service.status()["current"]
    agent.run(
        "mkdir /opt/new && tar -C /src --exclude=.git --exclude=.venv --exclude=.agent -cf - . | tar -C /opt/new -xf -"
    )
    agent.run("""sed -i 's/^version = .*/version = "99.0"/' /opt/new/pyproject.toml""")
    agent.run("""sed -i 's/^__version__ = .*/__version__ = "99.0"/' /opt/new/worker/__init__.py""")
    agent.run("make -C /opt/new install", timeout=300)
    service.wait("step-adopted", "a")
    after = service.status()
    assert after["worker"]["version"] == "99.0"
    assert (after["current"][0]["pid"], after["current"][0]["attempt"]) == (before["pid"], 1)
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    assert agent.read("/var/lib/agent/out/a") == "up\nsame\n"
    assert service.per_step("step-started") == {"a": 1}


def test_an_effect_in_a_step_that_outlives_its_worker_is_not_raced(agent: Machine) -> None:
    """
    Another step that asks the next worker for the same key waits for it, and gets its result.
    """
    tasks = """
concurrency: 2
tasks:
  - id: a
    run: |
      agentctl once k --parameters x -- sh -c '
        echo up >&2; until [ -e go ]; do sleep 0.02; done
        echo x >>effects; echo done'
  - {id: b, run: 'until [ -e ask ]; do sleep 0.02; done; agentctl once k --parameters x -- echo second'}
"""
    service = Service(agent, tasks)
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    service.kill("SIGKILL")
    service.wait("step-adopted", "b")
    agent.run("touch /var/lib/agent/work/ask")
    agent.wait_journal("SYSLOG_IDENTIFIER=b", "--grep=waiting for step 'a'", after=service.mark)
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    assert agent.read("/var/lib/agent/work/effects") == "x\n"
    assert agent.read("/var/lib/agent/out/b") == "done\n"
    assert "b: effect 'k': awaited" in [entry["MESSAGE"] for entry in service.events("effect")]


def test_a_step_that_the_list_defines_otherwise_by_then_is_ended_and_done_anew(agent: Machine) -> None:
    """
    A worker that is started again reads the list; what runs for an old one is ended, which costs the step nothing.
    """
    service = Service(agent, "tasks:\n  - {id: a, retry: {attempts: 1}, run: 'echo old; sleep 1000'}\n")
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=old", after=service.mark)
    agent.write("/etc/agent/config.yaml", "tasks:\n  - {id: a, retry: {attempts: 1}, run: echo new}\n")
    agent.run("systemctl restart agent")
    service.wait("run-done")
    service.wait_ended()
    assert agent.read("/var/lib/agent/out/a") == "new\n"
    assert service.processes() == []


def test_a_step_past_its_limit_is_ended_by_the_next_worker(agent: Machine) -> None:
    """
    The worker was killed before it could: time without one is not charged, but what was over before is over.
    """
    tasks = "tasks:\n  - {id: a, timeout: 1500ms, retry: {attempts: 1}, run: 'echo up; sleep 1000'}\n"
    service = Service(agent, tasks, NO_LIMIT)
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    service.kill("SIGKILL")
    service.wait("step-adopted", "a")
    service.wait("step-ending", "a")
    entry = service.wait("step-failed", "a")
    assert entry["MESSAGE"] == "a: failed for good: took longer than its timeout of 1.5s (attempt 1)"
    service.wait_ended()
    assert service.processes() == []


def test_temporary_files_stay_while_a_step_lives_and_go_with_the_service(agent: Machine) -> None:
    """
    /tmp is the service's own, on disk, and is empty when nothing can need it any more.
    """
    script = "echo mine >/tmp/file; echo up; until [ -e go ]; do sleep 0.02; done; cat /tmp/file"
    tasks = f"tasks:\n  - {{id: a, run: '{script}'}}\n"
    service = Service(agent, tasks)
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    assert agent.run("test -e /tmp/file", check=False).rc
    service.kill("SIGKILL")
    service.wait("step-adopted", "a")
    agent.run("systemctl restart agent; touch /var/lib/agent/work/go")
    service.wait("run-done")
    assert agent.read("/var/lib/agent/out/a") == "up\nmine\n"
    service.wait_ended()
    agent.write("/etc/agent/config.d/more.yaml", "tasks:\n  - {id: b, run: 'ls -A /tmp /var/tmp | sort -u'}\n")
    service.start()
    service.wait("run-done")
    assert agent.read("/var/lib/agent/out/b").split() == ["/tmp:", "/var/tmp:"]


def test_a_full_disk_and_a_dead_worker_lose_no_byte(agent: Machine) -> None:
    """
    Case F4: what a step prints at its end, when the disk is full, waits in its pipe for whichever worker finds space.
    """
    tasks = """
tasks:
  - {id: a, run: 'echo first; until [ -e go ]; do sleep 0.02; done; seq 3000', cwd: /run/agent-test}
"""
    agent.run("mkdir -p /var/lib/agent /run/agent-test; mount -t tmpfs -o size=2m tmpfs /var/lib/agent")
    agent.run("chown agent: /var/lib/agent /run/agent-test; chmod 750 /var/lib/agent")
    service = Service(agent, tasks, f"{NO_LIMIT}ReadWritePaths=/run/agent-test\n")
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=first", after=service.mark)
    agent.run("dd if=/dev/zero of=/var/lib/agent/fill bs=4k 2>/dev/null; touch /run/agent-test/go", check=False)
    service.wait("waiting", "a")
    service.kill("SIGKILL")
    agent.run("until ! systemctl is-active --quiet agent; do sleep 0.02; done; rm /var/lib/agent/fill")
    service.wait("run-done")
    whole = "first\n" + "".join(f"{n}\n" for n in range(1, 3001))
    assert agent.read("/var/lib/agent/out/a") == whole
    assert service.per_step("step-started") == {"a": 1}


def test_a_restart_that_a_hanging_worker_did_not_hear_hands_over_as_well(agent: Machine) -> None:
    """
    SIGUSR1 and SIGTERM wait for it together; which one was sent first, the kernel does not tell.
    """
    service = Service(agent, "tasks:\n  - {id: a, run: 'echo up; until [ -e go ]; do sleep 0.02; done'}\n")
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    service.kill("SIGSTOP")
    agent.run("systemctl restart agent")  # SIGCONT comes after SIGTERM
    service.wait("run-left")
    service.wait("step-adopted", "a")
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    assert service.per_step("step-started") == {"a": 1}


def test_what_never_began_in_another_place_is_not_taken_for_ours(agent: Machine) -> None:
    """
    A stop between two workers: on systemd 252 the runtime folder stays, and the steps are gone.  They are cut off, so
    a check is asked.
    """
    tasks = """
tasks:
  - {id: a, redo: check, check: 'echo asked >>asked; exit 1',
     run: 'echo up; test -e again || { touch again; sleep 1000; }'}
"""
    service = Service(agent, tasks, "[Service]\nRestartSec=30s\n")
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    service.kill("SIGKILL")
    agent.run("until [ $(systemctl is-active agent) = activating ]; do sleep 0.02; done; systemctl stop agent")
    service.start()
    service.wait("run-done")
    assert agent.read("/var/lib/agent/work/asked") == "asked\n"
    assert service.per_step("step-interrupted") == {"a": 1}


def test_as_many_steps_as_there_may_be_outlive_their_worker(agent: Machine) -> None:
    """
    systemd hands 769 descriptors over.
    """
    tasks = "concurrency: 256\ntasks:\n  - {id: s, foreach: {range: 1-256}, run: 'until [ -e go ]; do sleep 1; done'}\n"
    service = Service(agent, tasks, "[Service]\nWatchdogSec=30s\n")
    service.start()
    service.wait("step-started", "s@256")
    service.kill("SIGKILL")
    service.wait("run-started")
    assert len(service.events("step-adopted")) == 256
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    assert set(service.per_step("step-started").values()) == set(service.per_step("step-done").values()) == {1}


def test_what_a_step_has_said_is_known_to_the_next_worker(agent: Machine) -> None:
    """
    Its status, its progress, its spend, the time it asked for; and the journal has each of its lines once.
    """
    tasks = """
tasks:
  - id: a
    timeout: 2s
    run:
      - python3
      - -c
      - |
        import os, socket, time
        worker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        worker.connect(os.environ["NOTIFY_SOCKET"])
        worker.send(b"STATUS=counting\\nX_AGENT_PROGRESS=3/10\\nX_AGENT_SPEND=0.5\\nEXTEND_TIMEOUT_USEC=60000000")
        for n in range(5): print("line", n, flush=True)
        print("half a ", end="", flush=True)
        while not os.path.exists("go"): time.sleep(0.02)
        worker.send(b"X_AGENT_SPEND=0.25")
        print("line", flush=True)
"""
    service = Service(agent, tasks)
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=line 4", after=service.mark)
    agent.run("until agentctl status | grep -q counting; do sleep 0.05; done; sleep 2")
    service.kill("SIGKILL")
    service.wait("step-adopted", "a")
    (found,) = service.status()["current"]
    assert (found["status"], found["progress"], found["attempt"]) == ("counting", "3/10", 1)
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    script = "import sqlite3; print(*sqlite3.connect('/var/lib/agent/ledger.db').execute('SELECT spend FROM attempts'))"
    assert agent.run(["python3", "-c", script]).out == "(0.75,)\n"
    said = [entry["MESSAGE"] for entry in agent.journal("SYSLOG_IDENTIFIER=a")]
    assert said == [*(f"line {n}" for n in range(5)), "half a line"]


def test_time_without_a_worker_is_charged_to_no_limit(agent: Machine) -> None:
    """
    A step that may be silent for three seconds is so for less than that while a worker lives.
    """
    tasks = "tasks:\n  - {id: a, stall_after: 3s, retry: {attempts: 1}, run: 'echo up; sleep 4; echo over'}\n"
    service = Service(agent, tasks, "[Service]\nRestartSec=3s\n")
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    service.kill("SIGKILL")
    service.wait("step-adopted", "a")
    service.wait("run-done")
    assert agent.read("/var/lib/agent/out/a") == "up\nover\n"


def test_a_step_that_does_not_obey_is_killed_by_the_next_worker(agent: Machine) -> None:
    """
    The one that has asked it to end was killed before its time was up.
    """
    tasks = """
tasks:
  - {id: a, timeout: 1s, retry: {attempts: 1}, run: 'trap "" TERM; echo up; while :; do sleep 0.1; done'}
"""
    service = Service(agent, tasks)
    service.start()
    service.wait("step-ending", "a")
    service.kill("SIGKILL")
    service.wait("step-adopted", "a")
    assert "took longer than its timeout of 1s" in service.wait("step-failed", "a")["MESSAGE"]


def test_a_step_of_another_run_is_not_taken_for_ours(agent: Machine) -> None:
    """
    Two runs with the same step: what ran for the one when the other was started is ended, and done for its own.
    """
    task = "tasks:\n  - {id: a, run: 'echo $AGENT_RUN; until [ -e go ]; do sleep 0.02; done; echo $AGENT_RUN'}\n"
    service = Service(agent, f"run: x\n{task}")
    service.start()
    for run in ("x", "y", "x"):
        agent.write("/etc/agent/config.yaml", f"run: {run}\n{task}")
        agent.run("systemctl restart agent")
        agent.wait_journal("SYSLOG_IDENTIFIER=a", f"MESSAGE={run}", after=service.mark)
        service.mark = agent.cursor()
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    assert agent.read("/var/lib/agent/out/a") == "x\nx\n"


def test_without_a_cgroup_to_divide_a_step_ends_with_its_worker(agent: Machine) -> None:
    """
    The unit does not delegate: the worker says so; what is left of a step is ended before it is tried again, and a stop
    of a hanging worker leaves nothing.
    """
    service = Service(agent, HARD_TO_END, "[Service]\nDelegate=no\n")
    service.start()
    assert "Delegate=" in service.wait("state")["MESSAGE"]
    for _ in range(2):
        agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
        service.kill("SIGKILL")
        service.wait("step-interrupted", "a")
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    assert len([line for line in service.processes() if "sleep 100" in line]) >= 4
    service.kill("SIGSTOP")
    stop(service)
    assert service.processes() == []
