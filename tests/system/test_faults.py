"""The faults of the README on a real systemd, each in the middle of a step, counted in the journal."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from tests.system.machine import Machine
from tests.system.service import QUICK, Service

pytestmark = pytest.mark.system

# Forty steps.  Those that will meet a fault are long the first time, the one that meets a freeze is always;
# "beats" beats, and says so before it may be stopped.
FORTY = """
run: forty
defaults: {retry: {attempts: 3, delay: 100ms}}
tasks:
  - id: s
    foreach: {range: 01-24}
    run: |
      case $AGENT_STEP.$AGENT_ATTEMPT in
        s@08.1 | s@12.1) sleep 60 ;;
        s@04.1 | s@16.1) sleep 4 ;;
        s@20.*) sleep 5 ;;
      esac
      seq 1000
  - id: beats
    watchdog: 1s
    run:
      - python3
      - -c
      - |
        import os, socket, time
        worker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        worker.connect(os.environ["NOTIFY_SOCKET"])
        for n in range(20):
            worker.send(b"WATCHDOG=1\\nSTATUS=%d of 20" % n)
            if n == 1: print("beating", flush=True)
            time.sleep(0.1 if n < 2 else 0.5 / int(os.environ["AGENT_ATTEMPT"]))
  - {id: t, foreach: {range: 26-40}, run: 'test $AGENT_STEP.$AGENT_ATTEMPT != t@34.1 || sleep 60; seq 1000'}
"""
ENDED_WELL = {"ActiveState": "inactive", "Result": "success"}
STEPS = [f"s@{n:02}" for n in range(1, 25)] + ["beats"] + [f"t@{n}" for n in range(26, 41)]


def test_five_faults_and_a_power_cut_cost_one_step_each(agent: Machine) -> None:
    """
    Stop, reboot, a hanging step, a crash: forty steps are started forty times and once more for each event that
    lost the process; kill -9 of the worker, a hanging worker and a frozen machine lose none; none is done twice.
    """
    service = Service(agent, FORTY)
    service.start()

    service.wait("step-started", "s@04")
    before = service.pid
    service.kill("SIGKILL")
    service.wait("step-adopted", "s@04")
    assert service.pid != before

    service.wait("step-started", "s@08")
    agent.run("systemctl stop agent")
    assert service.processes() == []
    assert agent.show("agent", "ActiveState", "Result") == ENDED_WELL
    service.start()
    service.wait("step-started", "s@08", attempt=2)

    service.wait("step-started", "s@12")
    agent.reboot()
    service.wait("step-started", "s@12", attempt=2)

    service.wait("step-started", "s@16")
    service.kill("SIGSTOP")
    service.wait("step-adopted", "s@16")
    assert agent.journal("--grep=Watchdog timeout", "-u", "agent")

    service.wait("step-started", "s@20")
    _freeze(agent, 1.5)
    service.wait("step-done", "s@20")

    agent.wait_journal("SYSLOG_IDENTIFIER=beats", "MESSAGE=beating", after=service.mark)
    (step,) = service.status()["current"]
    agent.run(["kill", "-STOP", str(step["pid"])])
    service.wait("step-ending", "beats")
    service.wait("step-started", "beats", attempt=2)

    service.wait("step-started", "t@34")
    agent.crash()
    service.wait("step-started", "t@34", attempt=2)

    service.wait("run-done")
    starts, done = service.per_step("step-started"), service.per_step("step-done")
    lost = ["s@08", "s@12", "beats", "t@34"]
    assert starts == {step: 2 if step in lost else 1 for step in STEPS}
    assert done == dict.fromkeys(STEPS, 1)
    whole = "".join(f"{n}\n" for n in range(1, 1001))
    assert agent.read("/var/lib/agent/out/s@04") == whole

    service.wait_ended()
    for again in (lambda: agent.run("systemctl restart agent"), agent.reboot):
        again()
        service.wait("nothing-to-do")
        service.wait_ended()
        assert agent.show("agent", "ActiveState", "Result") == {
            "ActiveState": "inactive",
            "Result": "success",
        }
    assert sum(service.per_step("step-started").values()) == 44


def test_a_pause_longer_than_every_limit_is_not_charged_to_a_step(agent: Machine) -> None:
    """
    Case W1: both clocks run on while the machine is frozen.  systemd may kill the worker at the thaw, which the step
    outlives; no limit of its own ends it either, and nothing is done again.
    """
    beats = FORTY[FORTY.index("  - id: beats") : FORTY.index("  - {id: t")]
    service = Service(agent, f"tasks:\n  - {{id: first, run: 'true'}}\n{beats}")
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=beats", "MESSAGE=beating", after=service.mark)
    _freeze(agent, 5)
    service.wait("run-done")
    assert service.events("step-ending") == []
    assert service.per_step("step-started") == {"first": 1, "beats": 1}


def test_work_dropped_in_after_the_end_is_all_that_runs(agent: Machine) -> None:
    """
    Three more tasks in config.d start the agent by themselves (agent.path), and only they run.
    """
    service = Service(agent, "tasks:\n  - {id: s, foreach: {range: 1-5}, run: 'true'}\n")
    service.start()
    service.wait("run-done")
    service.wait_ended()
    agent.run("systemctl start agent.path")  # as it is after an installation or a boot
    more = "".join(f"  - {{id: more-{n}, run: 'true'}}\n" for n in (1, 2, 3))
    agent.write("/etc/agent/config.d/50-more.yaml", f"tasks:\n{more}")
    service.wait("run-done")
    assert service.per_step("step-started") == {
        **{f"s@{n}": 1 for n in range(1, 6)},
        **{f"more-{n}": 1 for n in (1, 2, 3)},
    }


def test_work_may_be_dropped_in_as_often_as_one_likes(agent: Machine) -> None:
    """
    Starts that come to a good end do not count against the start limit.
    """
    service = Service(agent, "tasks:\n  - {id: s, run: 'true'}\n")
    agent.run("systemctl start agent.path")
    service.start()
    service.wait("run-done")
    for n in range(12):
        service.wait_ended()
        agent.write(f"/etc/agent/config.d/{n:02}.yaml", f"tasks:\n  - {{id: more-{n}, run: 'true'}}\n")
        service.wait("step-done", f"more-{n}")
    service.wait_ended()
    assert agent.show("agent.path", "ActiveState")["ActiveState"] == "active"


def test_work_dropped_in_while_the_worker_ends_is_not_forgotten(agent: Machine) -> None:
    """
    Between its last look and the end of its unit nobody watches the folder; here that is made long.
    """
    service = Service(
        agent,
        "tasks:\n  - {id: s, run: 'true'}\n",
        drop_in=f"{QUICK}ExecStopPost=\nExecStopPost=+/bin/sleep 2\n"
        + "".join(line for line in _stop_post(agent.read("/usr/local/lib/systemd/system/agent.service"))),
    )
    agent.run("systemctl start agent.path")
    service.start()
    service.wait("run-done")
    agent.wait_journal("-u", "agent", when=lambda _: agent.show("agent", "SubState")["SubState"] == "stop-post")
    agent.write("/etc/agent/config.d/late.yaml", "tasks:\n  - {id: late, run: 'true'}\n")
    service.wait("step-done", "late")


def _stop_post(unit: str) -> list[str]:
    """Return the lines of the unit's ExecStopPost=."""
    return [line for line in unit.splitlines(keepends=True) if line.startswith("ExecStopPost=")]


def test_a_stop_while_the_disk_is_full_costs_no_attempt(agent: Machine) -> None:
    """
    What cannot be recorded then is known all the same: the worker ended in order.  The other step has its
    time to end.
    """
    service = Service(
        agent,
        """
concurrency: 2
defaults: {retry: {attempts: 1}}
tasks:
  - id: tidy
    run: |
      test "$AGENT_ATTEMPT" = 1 || exit 0
      trap 'sleep 1; echo tidied; exit 0' TERM
      while :; do sleep 0.1; done
  - {id: a, run: 'dd if=/dev/zero of=fill bs=4k 2>/dev/null; head -c 60000 /dev/zero; test -e more || sleep 0'}
""",
    )
    agent.run("mkdir -p /var/lib/agent; mount -t tmpfs -o size=2m tmpfs /var/lib/agent")
    agent.run("chown agent: /var/lib/agent; chmod 750 /var/lib/agent")
    service.start()
    service.wait("waiting")
    agent.run("systemctl stop agent")
    agent.wait_journal("SYSLOG_IDENTIFIER=tidy", "MESSAGE=tidied", after=service.mark)
    agent.run("mount -o remount,size=64m /var/lib/agent; rm /var/lib/agent/work/fill")
    agent.run("sed -i s,if=/dev/zero,if=/dev/null, /etc/agent/config.yaml")
    service.start()
    service.wait("step-interrupted", "a")
    service.wait("run-done")


def test_stop_leaves_no_process_of_a_step(agent: Machine) -> None:
    """
    Also not a double-forked one with a session of its own that does not hear SIGTERM.
    """
    service = Service(
        agent,
        """
tasks:
  - id: a
    run: |
      (setsid sh -c 'trap "" TERM; echo up; while :; do sleep 1; done' &)
      sleep 600
""",
    )
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    agent.run("systemctl stop agent")
    assert service.processes() == []
    assert agent.show("agent", "Result")["Result"] == "success"


def test_a_stray_sigterm_is_answered_and_the_agent_comes_back(agent: Machine) -> None:
    """
    Case R9: kill -TERM is restarted, systemctl stop is not.
    """
    service = Service(agent, "tasks:\n  - {id: a, run: 'test $AGENT_ATTEMPT -gt 1 || sleep 600'}\n")
    service.start()
    service.wait("step-started", "a")
    service.kill("SIGTERM")
    service.wait("run-stopped")
    service.wait("run-done")
    assert [entry["AGENT_ATTEMPT"] for entry in service.events("step-started")] == ["1", "2"]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("tasks: [", "config.yaml:"),
        ("tasks:\n  - {id: a, run: x, tiemout: 3}\n", "config.yaml:2:21: unknown key 'tiemout'"),
        (
            "tasks:\n  - {id: a, run: x, cwd: /usr/bin}\n",
            "config.yaml:2:26: cwd: '/usr/bin' is on",
        ),
        ("tasks:\n  - {id: a, run: x, cwd: /root}\n", "config.yaml:2:26: cwd: '/root'"),
    ],
)
def test_a_mistake_in_the_yaml_is_one_line_and_no_restart(agent: Machine, tasks: str, message: str) -> None:
    """
    Case R4: exit 78, once, with the place; also for a folder that the sandbox keeps closed.
    """
    service = Service(agent, tasks)
    started = agent.run("systemctl start agent", check=False)
    assert started.rc != 0
    shown = agent.show("agent", "ExecMainStatus", "NRestarts", "ActiveState")
    assert shown == {"ExecMainStatus": "78", "NRestarts": "0", "ActiveState": "failed"}
    lines = [entry["MESSAGE"] for entry in agent.journal("-u", "agent", "-p", "err", after=service.mark)]
    assert len([line for line in lines if message in line]) == 1, lines
    assert agent.run("ls /var/lib/agent/ledger.db", check=False).rc != 0


def test_a_step_that_takes_the_worker_down_is_not_tried_for_ever(agent: Machine) -> None:
    """
    Case R2: a step that outlives ten workers is taken for the cause, ended, and that counts; then 70, and the
    others never started.
    """
    # Each worker is killed once it has granted an effect: it has taken the step over by then, however slow the machine.
    tasks = """
tasks:
  - id: a
    run: |
      while n=$((n + 1)); do
          until agentctl once "$AGENT_ATTEMPT-$n" -- true; do :; done
          kill -9 $(cat /sys/fs/cgroup/system.slice/agent.service/cgroup.procs)
      done
    retry: {attempts: 2, delay: 0s}
    confine: no  # else it could not, from Linux 6.12 on
  - {id: b, run: 'true'}
"""
    service = Service(agent, tasks, "[Unit]\nStartLimitBurst=1000\n")
    service.start()
    service.wait("run-failed")
    service.wait_ended()
    assert agent.show("agent", "ExecMainStatus", "NRestarts") == {"ExecMainStatus": "70", "NRestarts": "20"}
    assert service.per_step("step-started") == {"a": 2}
    (failed,) = service.events("step-failed")
    assert "10 workers died while it ran" in failed["MESSAGE"]
    assert service.processes() == []


def test_a_full_disk_is_waited_out(agent: Machine) -> None:
    """
    Case F4 on a real full file system: says what it waits for, keeps the watchdog fed, then goes on.
    """
    service = Service(
        agent,
        """
tasks:
  - {id: a, run: head -c 3000000 /dev/zero}
  - {id: b, run: 'true'}
""",
    )
    agent.run("mkdir -p /var/lib/agent; mount -t tmpfs -o size=2m tmpfs /var/lib/agent")
    agent.run("chown agent: /var/lib/agent; chmod 750 /var/lib/agent")
    service.start()
    service.wait("waiting", "a")
    pid = service.pid
    assert service.status()["worker"]["state"] == "active"
    agent.wait_journal("MESSAGE=time is up", after=_clock(agent, seconds=7))
    assert service.pid == pid, "the watchdog (3 s) killed a worker that waits"
    agent.run("mount -o remount,size=64m /var/lib/agent")
    service.wait("run-done")
    assert int(agent.run("stat -c %s /var/lib/agent/out/a").out) == 3_000_000
    assert service.per_step("step-started") == {"a": 1, "b": 1}


def _freeze(machine: Machine, seconds: float) -> None:
    with machine.frozen():
        time.sleep(seconds)  # the pause itself


def _clock(machine: Machine, seconds: int) -> str:
    """Let the machine's echo speak in its journal when the time has passed; return where it is now."""
    mark = machine.cursor()
    timer = ["systemd-run", f"--on-active={seconds}s", "--timer-property=AccuracySec=10ms"]
    machine.run([*timer, "echo", "time is up"])
    return mark


def test_a_second_worker_and_the_status_of_the_first(agent: Machine) -> None:
    """
    Case R3: exit 77 naming the holder; `agentctl status` works for root and leaves nothing of root's behind.
    """
    service = Service(agent, "tasks:\n  - {id: a, run: 'echo up; sleep 600'}\n")
    service.start()
    agent.wait_journal("SYSLOG_IDENTIFIER=a", "MESSAGE=up", after=service.mark)
    second = agent.run("agentctl run /etc/agent/config.yaml --state /var/lib/agent", user="agent", check=False)
    assert second.rc == 77
    assert f"process {service.pid}" in second.err
    assert service.status()["current"][0]["step"] == "a"
    agent.run("systemctl stop agent")
    assert service.status()["status"] == "stopped"
    assert agent.run("find /var/lib/agent ! -user agent").out == ""


def test_the_journal_has_fields_and_the_output_its_own_name(agent: Machine) -> None:
    """
    One can follow a step: its events with MESSAGE_IDs, its lines under its own identifier.
    """
    service = Service(agent, "run: r\ntasks:\n  - {id: a, run: 'echo out; echo err >&2'}\n")
    service.start()
    service.wait("run-done")
    entries = agent.journal("AGENT_STEP=a")
    assert [entry["MESSAGE"] for entry in entries if entry["SYSLOG_IDENTIFIER"] == "a"] == ["out", "err"]
    events = [entry for entry in entries if "AGENT_EVENT" in entry]
    assert [entry["AGENT_EVENT"] for entry in events] == ["step-started", "step-done"]
    assert all(len(entry["MESSAGE_ID"]) == 32 and entry["AGENT_RUN"] == "r" for entry in events)
    assert all(entry["_SYSTEMD_UNIT"] == "agent.service" for entry in entries)


def test_of_four_parallel_steps_the_stopped_one_is_ended_alone(agent: Machine) -> None:
    """
    Under real systemd: SIGSTOP of one step ends that one; SIGSTOP of the worker ends the worker and no step.
    """
    service = Service(
        agent,
        """
concurrency: 4
defaults: {retry: {delay: 100ms}, stall_after: 2s}
tasks:
  - id: s
    foreach: {range: 1-4}
    run: |
      test "$AGENT_ATTEMPT" = 1 || exit 0
      echo "pid $$"
      while [ ! -e "$AGENT_OUT/../work/go" ]; do echo on; sleep 0.2; done
""",
    )
    service.start()
    pids = {}
    for n in range(1, 5):
        entry = agent.wait_journal(f"SYSLOG_IDENTIFIER=s@{n}", when=lambda entry: "pid" in entry["MESSAGE"])
        pids[n] = entry["MESSAGE"].split()[1]
    agent.run(["kill", "-STOP", pids[3]])
    service.wait("step-ending", "s@3")
    service.wait("step-done", "s@3", attempt=2)
    assert service.per_step("step-started") == {"s@1": 1, "s@2": 1, "s@3": 2, "s@4": 1}

    before = service.pid
    service.kill("SIGSTOP")
    service.wait("step-adopted", "s@4")
    assert service.pid != before
    agent.run("touch /var/lib/agent/work/go")
    service.wait("run-done")
    assert service.per_step("step-started") == {"s@1": 1, "s@2": 1, "s@3": 2, "s@4": 1}
    assert service.per_step("step-done") == {f"s@{n}": 1 for n in range(1, 5)}


def test_any_program_that_speaks_to_systemd_is_a_step(agent: Machine) -> None:
    """
    systemd-notify(1) beats for a shell step, and agentctl does; a step that says nonsense changes nothing.
    """
    service = Service(
        agent,
        """
defaults: {watchdog: 2s, retry: {attempts: 1}}
tasks:
  - id: notify
    run: |
      for i in 1 2 3 4 5 6 7 8; do systemd-notify WATCHDOG=1 "--status=round $i"; sleep 0.5; done
      systemd-notify MAINPID=1 STOPPING=1 READY=0 EXIT_STATUS=3 || true
  - id: agentctl
    run: for i in 1 2 3 4 5 6 7 8; do agentctl beat "round $i"; sleep 0.5; done
""",
    )
    service.start()
    pid = service.pid
    service.wait("step-done", "notify")
    assert (service.pid, agent.show("agent", "SubState")["SubState"]) == (pid, "running")
    service.wait("step-done", "agentctl")
    service.wait("run-done")


def test_secrets_come_from_the_units_credentials(agent: Machine) -> None:
    """
    Case J8: LoadCredential= to the step that names it; nowhere in state, copy, journal or runtime folder.
    """
    agent.write("/root/token", "planted-secret-2b7e\n", mode=0o600)
    service = Service(
        agent,
        "copy: {command: cat $AGENT_CHECKPOINT $AGENT_LEDGER >/var/lib/agent/copied}\n"
        "tasks:\n  - {id: a, secrets: [token], run: 'cd $CREDENTIALS_DIRECTORY; wc -c < token; ls'}\n",
        drop_in="[Service]\nLoadCredential=token:/root/token\nLoadCredential=other:/root/token\n",
    )
    service.start()
    service.wait("run-done")
    assert agent.read("/var/lib/agent/out/a") == "20\ntoken\n"
    service.wait_ended()
    assert int(agent.run('grep -ac \'"step": "a"\' /var/lib/agent/copied').out) == 1
    assert agent.run("grep -rl planted-secret /var/lib/agent /run/agent", check=False).out == ""
    assert not [entry for entry in agent.journal() if "planted-secret" in entry.get("MESSAGE", "")]


@pytest.mark.parametrize(
    ("mount", "message"),
    [
        ("mount --bind checkpoint.json checkpoint.json", "mount the folder /var/lib/agent instead"),
        ("mount --bind . . && mount -o remount,ro,bind .", "/var/lib/agent"),
    ],
    ids=["checkpoint is a mount", "read-only"],
)
def test_a_state_folder_that_cannot_be_written_is_named(agent: Machine, mount: str, message: str) -> None:
    """
    Cases F3 and F7: exit 73 with the path and what to do, no restart, and not a byte of the state changed.
    """
    service = Service(agent, "tasks:\n  - {id: a, run: 'true'}\n")
    service.start()
    service.wait("run-done")
    service.wait_ended()
    before = agent.read("/var/lib/agent/checkpoint.json")
    agent.write("/etc/agent/config.yaml", "tasks:\n  - {id: a, run: 'true'}\n  - {id: b, run: 'true'}\n")
    agent.run(f"cd /var/lib/agent && {mount}")
    agent.run("systemctl start agent", check=False)
    service.wait_ended()
    shown = agent.show("agent", "ExecMainStatus", "NRestarts", "ActiveState")
    assert shown == {"ExecMainStatus": "73", "NRestarts": "0", "ActiveState": "failed"}
    said = [entry["MESSAGE"] for entry in agent.journal("-u", "agent", "-p", "err", after=service.mark)]
    assert [line for line in said if message in line], said
    assert not [line for line in said if "Traceback" in line]
    assert agent.read("/var/lib/agent/checkpoint.json") == before


def test_s1_a_state_folder_that_another_program_serves_has_no_write_ahead_log(agent: Machine) -> None:
    """
    Case S1, on FUSE: a rollback journal, said in one line; killed in the middle, nothing is done twice.
    """
    if shutil.which("bindfs") is None and os.environ.get("AGENT_REQUIRE_SYSTEM") != "1":
        pytest.skip("needs the package bindfs")
    agent.run(
        "[ -e /dev/fuse ] || mknod /dev/fuse c 10 229; mkdir /var/served; chown agent:agent /var/served; "
        "mkdir -p /var/lib/agent; bindfs /var/served /var/lib/agent"
    )
    tasks = """
tasks:
  - {id: s, foreach: {range: 1-8}, run: 'echo "$AGENT_ITEM" >>ran'}
  - {id: killed, needs: [s], run: 'until [ -e go ]; do sleep 0.02; done'}
"""
    service = Service(agent, tasks, "")
    service.start()
    (said,) = [e["MESSAGE"] for e in agent.journal("-u", "agent") if "journal" in e["MESSAGE"]]
    assert said.startswith("/var/lib/agent: is on fuse")
    service.wait("step-started", "killed")
    assert service.status()["steps"]["done"] == 8
    service.kill("SIGKILL")
    service.wait("step-adopted", "killed")
    agent.write("/var/lib/agent/work/go", "")
    service.wait("run-done")
    service.wait_ended()
    assert agent.read("/var/served/work/ran").split() == [str(n) for n in range(1, 9)]
    assert "ledger.db-wal" not in agent.run("ls /var/served").out.split()
    agent.run("umount /var/lib/agent")


def test_j5_a_journald_that_is_restarted_or_hangs_stops_nobody(agent: Machine) -> None:
    """
    Case J5: the worker lives, the step's result is whole, and the journal says how many lines it lacks.
    """
    tasks = """
tasks:
  - {id: a, run: 'until [ -e go ]; do echo line; sleep 0.001; done; echo last'}
  - {id: b, run: 'until [ -e /run/on ]; do sleep 0.02; done'}
"""
    service = Service(agent, tasks, "[Service]\nWatchdogSec=2s\n")
    service.start()
    service.wait("step-started", "a")
    pid = service.pid
    agent.run("systemctl restart systemd-journald")
    journald = agent.show("systemd-journald", "MainPID")["MainPID"]
    agent.run(f"kill -STOP {journald}; sleep 5; touch /var/lib/agent/work/go")
    agent.run("until [ -s /var/lib/agent/out/a ]; do sleep 0.02; done")
    agent.run(f"kill -CONT {journald}; touch /run/on")
    service.wait("run-done")
    assert service.per_step("step-done") == {"a": 1, "b": 1}
    assert [entry["_PID"] for entry in service.events("run-done")] == [str(pid)]
    *lines, last = agent.read("/var/lib/agent/out/a").splitlines()
    assert set(lines) == {"line"} and last == "last"
    said = [entry["MESSAGE"] for entry in agent.journal("-u", "agent")]
    assert [text for text in said if "lines of steps are missing here" in text]
