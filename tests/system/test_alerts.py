"""Alerts on a real systemd: one for each change for the worse, on releases that start OnFailure= units differently."""

from __future__ import annotations

import json

import pytest

from tests.system.machine import Machine
from tests.system.service import QUICK, Service

pytestmark = pytest.mark.system

ALERT = """
alert: |
  printf '%s\\n' "ALERT $AGENT_ALERT/$AGENT_STEP/$AGENT_RUN/$AGENT_UNIT: $AGENT_CAUSE" "LINES $AGENT_LINES"
"""
# Each start is killed as soon as it has come up.
DOOMED = "[Service]\nExecStartPost=+/bin/sh -c 'kill -9 $MAINPID'\n"


@pytest.fixture
def agent(on_each: Machine) -> Machine:
    return on_each


def settled(service: Service, name: str = "agent") -> None:
    """Return once the unit is down, and whoever tells of it has ended."""
    units = f"{name}.service agent-alert@{name}.service"
    busy = "grep -qE '=(active|activating|deactivating|reloading)$|^Job=[1-9]'"
    service.machine.run(f"while systemctl show -p ActiveState,Job {units} | {busy}; do sleep 0.02; done")


def alerts(machine: Machine, name: str = "agent") -> list[str]:
    """Return what has been told, of every start."""
    said = [entry["MESSAGE"] for entry in machine.journal(f"_SYSTEMD_UNIT=agent-alert@{name}.service")]
    return [text.removeprefix("ALERT ") for text in said if text.startswith("ALERT ")]


def test_a_step_that_fails_for_good_is_told_each_time_that_it_has_been_tried_again(agent: Machine) -> None:
    """
    With its name, its cause and its last lines; once for each start, whose failed steps have new attempts.
    """
    tasks = "  - {id: a, run: 'echo out; seq 100 >&2; exit 3', retry: {attempts: 2, delay: 0s}}\n"
    service = Service(agent, f"run: r\n{ALERT}\ntasks:\n{tasks}")
    for _ in range(2):
        service.start()
        service.wait("run-failed")
        settled(service)
    failed = "failed/a/r/agent.service: a: failed for good: exited with status 3"
    assert alerts(agent) == [f"{failed} (attempt 2)", f"{failed} (attempt 4)"]
    said = [entry["MESSAGE"] for entry in agent.journal("_SYSTEMD_UNIT=agent-alert@agent.service")]
    assert said[1:51] == ["LINES 51", *(str(n) for n in range(52, 101))]
    agent.run("systemctl start agent-alert@agent")  # by hand, and nothing has changed
    settled(service)
    assert len(alerts(agent)) == 2


def test_a_mistake_in_the_yaml_is_told_once_however_often_it_is_met(agent: Machine) -> None:
    """
    By the alert of the last configuration that could be read; another mistake is told as well.
    """
    sound = f"run: r\n{ALERT}\ntasks:\n  - {{id: a, run: 'true'}}\n"
    service = Service(agent, sound)
    service.start()
    service.wait("run-done")
    service.wait_ended()
    for mistake in ("timout: 1s", "timout: 1s", "tries: 1", "tries: 1"):
        agent.write("/etc/agent/config.yaml", sound.replace("'true'", f"'true', {mistake}"))
        assert agent.run("systemctl start agent", check=False).rc != 0
        settled(service)
    told = [text.partition(";")[0] for text in alerts(agent)]
    where = "gave-up//r/agent.service: /etc/agent/config.yaml:7:26: unknown key"
    assert told == [f"{where} 'timout'", f"{where} 'tries'"]


def test_a_drop_in_that_is_wrong_when_the_worker_dies_is_told(agent: Machine) -> None:
    """
    B4: systemd cannot start the unit again, nor say that it is sound; somebody is told, with the command that says why.
    """
    service = Service(agent, f"run: r\n{ALERT}\ntasks:\n  - {{id: a, run: 'sleep 600'}}\n")
    service.start()
    service.wait("step-started")
    broken = "/etc/systemd/system/agent.service.d/96-broken.conf"
    agent.write(broken, "[Service]\nExecStart=/bin/true\n")
    agent.run("systemctl daemon-reload; systemctl kill --kill-who=main -s KILL agent")
    agent.run("until [ $(systemctl show -P ActiveState agent) = failed ]; do sleep 0.05; done")
    settled(service)
    (told,) = alerts(agent)
    assert told.startswith("gave-up//r/agent.service: systemd cannot use its unit file (bad-setting)"), told


def test_a_spent_budget_is_told_once_until_it_is_raised(agent: Machine) -> None:
    """
    Started again without more it ends at once, as before; with more it works, and what comes then is news.
    """
    step = "  - {id: a, run: 'agentctl spend 0.5; sleep 600', retry: {delay: 0s}}\n"
    service = Service(agent, f"run: r\nbudget: {{spend: 0.4}}\n{ALERT}\ntasks:\n{step}")
    for _ in range(2):
        service.start()
        service.wait("run-out-of-budget")
        settled(service)
    (told,) = alerts(agent)
    assert told.startswith("out-of-budget//r/agent.service: the budget is spent: spend, limit 0.4"), told
    agent.run("agentctl budget --add spend=0.4")
    service.start()
    service.wait("run-out-of-budget")
    settled(service)
    assert len(alerts(agent)) == 2


def test_an_alert_can_be_tried_where_a_real_one_would_be_told(agent: Machine) -> None:
    """
    By the unit that tells, with its user, sandbox and credentials; nothing is noted, and what was told stays told.
    """
    agent.write("/etc/agent/token", "a-token\n", mode=0o600)
    drop_in = "[Service]\nLoadCredential=token:/etc/agent/token\n"
    agent.write("/etc/systemd/system/agent-alert@.service.d/95-test.conf", drop_in)
    agent.run("systemctl daemon-reload")
    service = Service(agent, f"{ALERT}\ntasks:\n  - {{id: a, run: exit 3, retry: {{attempts: 1}}}}\n")
    tried = agent.run("agentctl alert --test", check=False)
    assert tried.rc == 0, tried
    assert tried.out.splitlines()[0] == "ALERT test/a-step/config/agent.service: this is a test, nothing has happened"
    assert tried.out.endswith("alert: '/bin/sh' exited with status 0\n")
    service.start()
    service.wait("run-failed")
    settled(service)
    known = agent.run("cat /var/lib/agent-alert/agent/alerted").out
    for command, rc, said in (
        ("id -nu; seq 100000; touch /home/x || exit 3", 1, "exited with status 3"),
        ("id -nu; cat $CREDENTIALS_DIRECTORY/token", 0, "a-token"),
    ):
        agent.write("/etc/agent/config.yaml", f"alert: {command}\ntasks:\n  - {{id: a, run: exit 3}}\n", mode=0o644)
        tried = agent.run("agentctl alert --test", check=False)
        assert (tried.rc, said in tried.out) == (rc, True), tried
        assert "agent" in tried.out.splitlines()[0]
    assert agent.run("cat /var/lib/agent-alert/agent/alerted; ls /run/*-alert-test 2>&1", check=False).out.startswith(
        known
    )
    assert "No such file" in agent.run("ls /run/agent-alert-test 2>&1", check=False).out
    assert len(alerts(agent)) == 1
    assert agent.show("agent-alert@agent", "Result") == {"Result": "success"}


def test_an_instance_tells_for_itself(agent: Machine) -> None:
    """
    agent@NAME is told of by the alert of its own list.
    """
    service = Service(agent, "tasks:\n  - {id: a, run: 'true'}\n")
    agent.write("/etc/agent/nightly.yaml", f"{ALERT}\ntasks:\n  - {{id: a, run: exit 3, retry: {{attempts: 1}}}}\n")
    agent.run("systemctl start agent@nightly")
    service.wait("run-failed")
    settled(service, "agent@nightly")
    (told,) = alerts(agent, "agent@nightly")
    assert told == "failed/a/nightly/agent@nightly.service: a: failed for good: exited with status 3 (attempt 1)"


def test_a_crash_loop_is_told_once_when_systemd_gives_up(agent: Machine) -> None:
    """
    Ten starts, each killed: nothing is told of nine that were followed by another.
    """
    service = Service(agent, f"{ALERT}\ntasks:\n  - {{id: a, run: sleep 600}}\n", f"{QUICK}{DOOMED}")
    agent.run("systemctl start agent", check=False)
    agent.wait_journal("-u", "agent", "--grep=Start request repeated too quickly", after=service.mark)
    settled(service)
    (told,) = alerts(agent)
    assert told.startswith("gave-up//config/agent.service: systemd has given up after many starts in a row"), told
    assert "the last worker: signal, SIGKILL" in told
    assert agent.show("agent-alert@agent", "Result") == {"Result": "success"}


def test_a_worker_that_comes_back_is_not_told_of(agent: Machine) -> None:
    """
    Killed, and hanging: systemd starts it again, whether it starts the other unit for that or not.
    """
    service = Service(agent, f"{ALERT}\ntasks:\n  - {{id: a, run: sleep 600}}\n")
    service.start()
    service.wait("step-started", "a")
    for signal in ("SIGKILL", "SIGSTOP"):
        service.kill(signal)
        service.wait("step-adopted", "a")
    agent.run("systemctl stop agent")
    settled(service)
    assert alerts(agent) == []


def test_a_failure_that_comes_while_the_agent_is_looked_at_is_looked_at_too(agent: Machine) -> None:
    """
    The look may have come too early, as when systemd was about to start the agent once more.
    """
    wait = '[ "$AGENT_ALERT" != test ] || until [ -e /run/go ]; do sleep 0.02; done'
    tasks = "tasks:\n  - {id: a, run: exit 3, retry: {attempts: 1}}\n"
    service = Service(agent, f"{ALERT}  {wait}\n{tasks}")
    agent.run("systemd-run --quiet agentctl alert --test")  # looks at an agent that is well, and is held up
    agent.wait_journal("_SYSTEMD_UNIT=init.scope", "UNIT=agent-alert@agent.service", "--grep=^Started")
    service.start()
    service.wait("run-failed")
    agent.run("touch /run/go")
    settled(service)
    assert len(alerts(agent)) == 1


def test_a_unit_that_cannot_be_set_up_any_more_is_told_of_although_it_was_stopped_before(agent: Machine) -> None:
    """
    A folder that is not mounted after a reboot: no hook can run and say so.
    """
    service = Service(agent, f"{ALERT}\ntasks:\n  - {{id: a, run: sleep 600}}\n")
    service.start()
    service.wait("step-started", "a")
    agent.run("systemctl stop agent")
    settled(service)
    assert alerts(agent) == []
    agent.write("/etc/systemd/system/agent.service.d/95-test.conf", "[Service]\nReadWritePaths=/not-mounted\n")
    agent.run("systemctl daemon-reload; systemctl start agent", check=False)
    settled(service)
    (told,) = alerts(agent)
    assert told.startswith("gave-up//") and "exit status 226" in told


FORGE = """
import json, os
told = {"run": "r", "kind": "failed", "step": "a", "cause": "a: failed for good: exited with status 3 (attempt 1)"}
for folder in ("/var/lib/agent", "/var/lib/agent-alert/agent"):
    try:
        os.makedirs(folder, exist_ok=True)
        open(folder + "/alerted", "w").write(json.dumps(told))
    except OSError as exc:
        print(exc)
open("/var/lib/agent/ended", "w").write("exit-code exited 70\\nstop\\n")
"""


@pytest.mark.parametrize("before", ["", "echo told before; exit 3"], ids=["first", "later"])
def test_s17_a_step_cannot_keep_its_own_failure_from_being_told(agent: Machine, before: str) -> None:
    """
    S17: it writes that this has been told, and that somebody had asked for the end, and fails.
    """
    agent.write("/usr/local/bin/forge", f"#!/usr/bin/python3{FORGE}", mode=0o755)
    list_of = f"run: r\n{ALERT}\ntasks:\n  - {{id: NAME, confine: no, run: 'WORK', retry: {{attempts: 1}}}}\n"
    if before:  # then the folder of what has been told is there
        service = Service(agent, list_of.replace("NAME", "z").replace("WORK", before))
        service.start()
        service.wait("run-failed")
        settled(service)
    forge = "forge; (while :; do forge >/dev/null; done) & sleep 0.2; exit 3"
    service = Service(agent, list_of.replace("NAME", "a").replace("WORK", forge))
    service.start()
    service.wait("run-failed")
    settled(service)
    assert alerts(agent)[bool(before) :] == [
        "failed/a/r/agent.service: a: failed for good: exited with status 3 (attempt 1)"
    ]


def test_s17_a_mistake_is_told_whatever_a_step_has_left(agent: Machine) -> None:
    """
    S17: it has replaced whom to tell, and its command would find the credentials of who tells.
    """
    sound = f"run: r\n{ALERT}\ntasks:\n  - {{id: a, run: 'true'}}\n"
    service = Service(agent, sound)
    agent.run("agentctl alert --test")
    service.start()
    service.wait("run-done")
    service.wait_ended()
    forged = '{"run": "r", "command": "touch /var/lib/agent/ran", "folder": "/", "ping": {}}'
    agent.run(f"echo '{forged}' >/var/lib/agent/alert.json", user="agent")
    agent.write("/etc/agent/config.yaml", "tasks: [")
    agent.run("systemctl start agent", check=False)
    settled(service)
    (told,) = alerts(agent)
    assert told.startswith("gave-up//r/agent.service: /etc/agent/config.yaml:"), told
    assert agent.run("test -e /var/lib/agent/ran", check=False).rc == 1
    assert agent.run("agentctl status; journalctl -u agent-alert@agent", check=False).rc == 0


USURP = """
import fcntl, os, time
lock = os.open("/var/lib/agent/lock", os.O_RDWR)
for pid in open("/sys/fs/cgroup/system.slice/agent.service/cgroup.procs"):
    os.kill(int(pid), 9)
fcntl.lockf(lock, fcntl.LOCK_EX)
time.sleep(600)
"""


def test_s17_a_step_that_takes_the_workers_place_is_told(agent: Machine) -> None:
    """
    S17: it kills the worker and holds the state folder, so that the next one leaves the say to the one who has it.
    """
    agent.write("/usr/local/bin/usurp", f"#!/usr/bin/python3{USURP}", mode=0o755)
    service = Service(agent, f"run: r\n{ALERT}\ntasks:\n  - {{id: a, confine: no, run: usurp}}\n")
    service.start()
    agent.run("until [ $(systemctl show -P ActiveState agent) = failed ]; do sleep 0.05; done")
    settled(service)
    assert agent.show("agent", "ExecMainStatus") == {"ExecMainStatus": "77"}
    (told,) = alerts(agent)
    assert told.startswith("gave-up//r/agent.service: another process had the run's place, and none has it now"), told


def test_a_stop_at_which_the_worker_had_to_be_killed_is_not_told(agent: Machine) -> None:
    """
    Somebody asked for it; how it went is in the journal.
    """
    kill = f"{QUICK}ExecStop=-+/bin/kill -9 $MAINPID\n"
    service = Service(agent, f"run: r\n{ALERT}\ntasks:\n  - {{id: a, run: 'sleep 600'}}\n", kill)
    service.start()
    service.wait("step-started")
    agent.run("systemctl stop agent", check=False)
    settled(service)
    assert agent.show("agent", "Result") == {"Result": "signal"}
    assert alerts(agent) == []


def test_what_was_told_before_an_upgrade_is_not_told_again(agent: Machine) -> None:
    """
    An earlier version wrote it down in the state folder, where a step may have left anything.
    """
    sound = f"run: r\n{ALERT}\ntasks:\n  - {{id: a, run: 'true'}}\n"
    service = Service(agent, sound.replace("'true'", "'true', tries: 1"))
    agent.run("systemctl start agent", check=False)
    settled(service)
    (cause,) = alerts(agent) or [""]
    assert cause == ""  # nobody is known yet who could be told
    agent.write("/etc/agent/config.yaml", sound)
    service.start()
    service.wait("run-done")
    service.wait_ended()
    agent.write("/etc/agent/config.yaml", sound.replace("'true'", "'true', tries: 1"))
    agent.run("systemctl start agent", check=False)
    settled(service)
    assert len(alerts(agent)) == 1
    told = json.loads(agent.read("/var/lib/agent-alert/agent/alerted"))
    told = {key: told[key] for key in ("run", "kind", "step", "cause")}
    agent.run("rm -r /var/lib/agent-alert; mkdir /var/lib/agent@x; mkfifo -m 666 /var/lib/agent@x/alerted")
    agent.write("/var/lib/agent/alerted", json.dumps(told))
    agent.run("make -C /src install", timeout=120)
    for _ in range(2):
        agent.run("systemctl start agent", check=False)
        settled(service)
    assert len(alerts(agent)) == 1
