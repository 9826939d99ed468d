"""Several machines share one run: each step is done by exactly one of them, whatever happens to the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import network
from tests.system.machine import Machine
from tests.system.network import Computer, Lan, Site, fields

pytestmark = pytest.mark.system

LEASE = 5.0
NAMES = ["w1", "w2", "w3", "w4"]

# One write each, at the end of the file: who began which step, and who came to its end.  A step that has a gate
# waits there; one that has something BEFORE it wants its result.
WORK = """#!/bin/sh
computer=${AGENT_OUT%/out}
computer=${computer##*/}
echo "begin $AGENT_STEP $AGENT_ATTEMPT $computer" >> /srv/log
test -z "$BEFORE" || read -r _ < "$AGENT_OUT/$BEFORE@$AGENT_ITEM" || exit
gate=/srv/gate/$AGENT_STEP.$AGENT_ATTEMPT
if [ -p "$gate" ]; then read -r _ < "$gate"; fi
echo "$AGENT_STEP, attempt $AGENT_ATTEMPT"
echo "end $AGENT_STEP $AGENT_ATTEMPT $computer" >> /srv/log
"""
HEAD = f"ledger: {Lan.address}\nlease: {LEASE:.0f}s\ndefaults: {{retry: {{delay: 100ms}}}}\n"
# Five times eighty steps.  In the middle of each eighty there is one at which something happens.
FOUR_HUNDRED = f"""{HEAD}run: shared
concurrency: 2
tasks:
  - {{id: killed, foreach: {{range: 01-80}}, run: [/srv/work]}}
  - {{id: cut, needs: [killed], env: {{BEFORE: killed}}, foreach: {{range: 01-80}}, run: [/srv/work]}}
  - {{id: frozen, needs: [cut], env: {{BEFORE: cut}}, foreach: {{range: 01-80}}, run: [/srv/work]}}
  - {{id: restart, needs: [frozen], env: {{BEFORE: frozen}}, foreach: {{range: 01-80}}, run: [/srv/work]}}
  - {{id: crash, needs: [restart], env: {{BEFORE: restart}}, foreach: {{range: 01-80}}, run: [/srv/work]}}
"""
GATES = ["killed@40.1", "cut@40.1", "cut@40.2", "frozen@40.1", "frozen@40.2", "restart@40.1", "crash@40.1"]


@pytest.fixture
def shared(installed_image: Path) -> Iterator[Machine]:
    """A machine with the agent installed and PostgreSQL's programs; nothing runs."""
    network.require()
    with Machine(layers=[installed_image]) as machine:
        machine.write("/srv/work", WORK, mode=0o755)
        yield machine


class History:
    """What the steps have written down, and what the ledger says."""

    def __init__(self, site: Site) -> None:
        names = {computer.id: name for name, computer in site.computers.items()}
        query = "SELECT step, number, worker, outcome FROM agent.attempts ORDER BY seq"
        rows = [(step, int(number), names[id], outcome) for step, number, id, outcome in site.database.query(query)]
        self.done = {step: (number, computer) for step, number, computer, outcome in rows if outcome == "done"}
        self.lost = [(step, number, computer) for step, number, computer, outcome in rows if outcome != "done"]
        self._log = site.machine.read("/srv/log")
        self._site = site

    def check(self, steps: int) -> None:
        """So many steps are done; every attempt that began is the ledger's; what is done came to its end, once."""
        done = [f"{step} {number} {computer}" for step, (number, computer) in self.done.items()]
        lost = {f"{step} {number} {computer}" for step, number, computer in self.lost}
        began, ended = self._said("begin"), self._said("end")
        assert len(done) == steps
        assert len(set(began)) == len(began)
        assert set(done) <= set(began) <= {*done, *lost}
        assert sorted(line for line in ended if line not in lost) == sorted(done)
        self._check_results()

    def _check_results(self) -> None:
        """Every computer has the results of all, as the attempts that were committed have made them."""
        whole = {f"{step}:{step}, attempt {number}" for step, (number, _computer) in self.done.items()}
        for computer in self._site.computers.values():
            lines = self._site.machine.run(f"cd {computer.state}/out && grep '' *").out.splitlines()
            assert sorted(lines) == sorted(whole), computer.name

    def _said(self, word: str) -> list[str]:
        return [line.removeprefix(f"{word} ") for line in self._log.splitlines() if line.startswith(f"{word} ")]


def test_four_machines_share_four_hundred_steps(shared: Machine) -> None:
    """
    Cases S8, S11, W1: kill -9 of a worker, one cut off, one frozen, the server restarted and killed: each step is
    committed once, begun once, and once more for each event that it was in the middle of.
    """
    site = Site(shared, dict.fromkeys(NAMES, FOUR_HUNDRED))
    site.make_gates(*GATES)
    site.start()
    victims = {"killed": _kill_one(site), "cut": _cut_one_off(site), "frozen": _freeze_one(site)}
    _shake_the_server(site)
    for computer in site.computers.values():
        computer.wait("run-done")
        computer.wait_ended()
        assert computer.exit_status == "0"
        found = computer.status()
        assert (found["status"], found["steps"]["done"], found["steps"]["total"]) == ("done", 400, 400)

    history = History(site)
    history.check(400)
    lost = {(step.split("@")[0], computer) for step, _number, computer in history.lost}
    assert lost == {(task, computer.name) for task, computer in victims.items()}
    for task in victims:
        steps = [step for step, _number, _computer in history.lost if step.startswith(task)]
        assert f"{task}@40" in steps and len(steps) == len(set(steps)) <= 2, steps  # two at a time
    assert shared.run(["pgrep", "-f", "/srv/work"], check=False).out == "", "what was killed, or frozen, left a process"
    its = [step for step, (_number, computer) in history.done.items() if computer == victims["cut"].name]
    assert [step for step in its if not step.startswith(("killed", "cut"))], "who was cut off did not go on"


def _kill_one(site: Site) -> Computer:
    """Kill a worker in the middle of a step: that step is at once its own again, and nobody else's."""
    killed = site.begun("killed@40")
    killed.kill()
    assert "the worker died with it" in killed.wait("step-interrupted", "killed@40")["MESSAGE"]
    return killed


def _cut_one_off(site: Site) -> Computer:
    """Let a step end of which nobody hears; when its computer is back, another one is at it and stays at it."""
    cut = site.begun("cut@40")
    site.lan.cut(cut.name)
    site.open_gate("cut@40.1")  # what is said of its end is on its way until the cable is back
    assert site.begun("cut@40", attempt=2) is not cut
    site.lan.mend(cut.name)
    assert "not recorded" in cut.wait("step-lost", "cut@40")["MESSAGE"]
    site.open_gate("cut@40.2")
    return cut


def _freeze_one(site: Site) -> Computer:
    """Freeze a worker and its step until another one has taken that over; thawed, it ends its own."""
    frozen = site.begun("frozen@40")
    frozen.freeze()
    assert site.begun("frozen@40", attempt=2) is not frozen
    frozen.thaw()
    assert "its claim has run out" in frozen.wait("step-lost", "frozen@40")["MESSAGE"]
    site.open_gate("frozen@40.2")
    return frozen


def _shake_the_server(site: Site) -> None:
    """Restart it, then kill it, while steps are at work."""
    site.begun("restart@40")
    site.database.restart()
    site.open_gate("restart@40.1")
    site.begun("crash@40")
    site.database.kill()
    site.database.start()
    site.open_gate("crash@40.1")


def test_an_outage_longer_than_a_lease_costs_no_step(shared: Machine) -> None:
    """
    Nobody is robbed of a claim that nobody could renew: steps go on while the server is away, those that end
    meanwhile are recorded when it is back, and the others are still their workers' own.
    """
    tasks = f"{HEAD}run: away\ntasks:\n  - {{id: s, foreach: {{range: 1-4}}, run: [/srv/work]}}\n"
    site = Site(shared, dict.fromkeys(NAMES, tasks))
    site.make_gates("s@1.1", "s@2.1", "s@3.1", "s@4.1")
    site.start()
    assert {site.begun(f"s@{n}").name for n in range(1, 5)} == set(NAMES)
    site.database.stop()
    for computer in site.computers.values():
        computer.wait("waiting")
    site.open_gate("s@1.1")
    time.sleep(LEASE + 1)  # the outage
    site.database.start()
    shared.wait_journal(*fields("step-done", "s@1"))
    time.sleep(1.5 * LEASE + 2)  # whoever wants to take over has had the time
    assert not shared.journal(*fields("step-lost"))
    for n in range(2, 5):
        site.open_gate(f"s@{n}.1")
    for computer in site.computers.values():
        computer.wait("run-done")
        assert len(computer.said("waiting")) == 2, "said once that it waits, and once that it goes on"
    history = History(site)
    history.check(4)
    assert history.lost == []


def test_a_clock_that_is_an_hour_off_changes_nothing(shared: Machine) -> None:
    """
    Case D7: an hour ahead or behind, as holder of a claim and as one who looks at it: nobody's claim is taken from
    it, no step runs twice, and no wait is an hour longer.
    """
    hours = {"exact1": 0, "ahead1": 1, "behind1": -1, "exact2": 0, "ahead2": 1, "behind2": -1}
    names = list(hours)
    tasks = f"""{HEAD}run: clocks
tasks:
  - {{id: held, foreach: {{range: 1-3}}, run: [/srv/work]}}
  - {{id: again, needs: [held], foreach: {{range: 01-12}}, run: '/srv/work && test "$AGENT_ATTEMPT" = 2'}}
  - {{id: after, needs: [again], foreach: {{range: 01-48}}, run: [/srv/work]}}
"""
    site = Site(shared, dict.fromkeys(names, tasks), {name: hour * 3600 for name, hour in hours.items()})
    site.make_gates("held@1.1", "held@2.1", "held@3.1")
    site.start(*names[:3])
    assert {site.begun(f"held@{n}").name for n in range(1, 4)} == set(names[:3])
    site.start(*names[3:])  # these have nothing to do but to look
    for name in names[3:]:
        site.computers[name].wait("run-started")
    time.sleep(1.5 * LEASE + 2)  # long enough for a claim that is not renewed, or thought to be
    assert not shared.journal(*fields("step-lost"), *fields("step-interrupted"))
    for n in range(1, 4):
        site.open_gate(f"held@{n}.1")
    for computer in site.computers.values():
        computer.wait("run-done")

    history = History(site)
    history.check(63)
    assert {(step, number) for step, number, _computer in history.lost} == {(f"again@{n:02}", 1) for n in range(1, 13)}
    query = "SELECT DISTINCT worker, round((started - extract(epoch FROM now())) / 3600) FROM agent.attempts"
    seen = {worker: float(hour) for worker, hour in site.database.query(query)}
    expected = {computer.id: hours[name] for name, computer in site.computers.items()}
    assert {worker: expected[worker] for worker in seen} == seen, "the clocks were not bent"
    odd = "SELECT count(*) FROM agent.attempts WHERE took < 0 OR took > 300 OR delay NOT IN (0, 0.1)"
    assert site.database.query(odd) == [["0"]]


# -- one effect, two machines

EFFECT = """#!/bin/sh
echo "by $AGENT_STEP" >> /srv/effects
read -r _ < /srv/gate/effect
echo "receipt 17"
"""
FOUND = "grep -q by /srv/effects && echo receipt 17"


def _two_that_want_the_same(machine: Machine, option: str) -> tuple[Site, Computer, Computer]:
    """Start two computers whose steps ask for one effect; return the one that is at it, then the one that waits."""
    tasks = f"""{HEAD}run: pay
on_unknown: continue
tasks:
  - {{id: pay, foreach: [1, 2], run: agentctl once charge --lease {LEASE:.0f}s {option} -- /srv/effect}}
"""
    site = Site(machine, dict.fromkeys(NAMES[:2], tasks))
    machine.write("/srv/effect", EFFECT, mode=0o755)
    site.make_gates("effect")
    site.start()
    logs = ["SYSLOG_IDENTIFIER=pay@1", "SYSLOG_IDENTIFIER=pay@2"]
    second = site.of(machine.wait_journal(*logs, when=lambda entry: "waiting for step" in entry["MESSAGE"]))
    (first,) = (computer for computer in site.computers.values() if computer is not second)
    return site, first, second


def _check_effect(machine: Machine, *computers: Computer) -> None:
    """It has happened once, and its result is that of both steps on these computers."""
    assert len(machine.read("/srv/effects").splitlines()) == 1
    for computer in computers:
        assert machine.run(f"cat {computer.state}/out/pay@*").out == "receipt 17\n" * 2


def test_two_machines_want_one_effect_at_the_same_moment(shared: Machine) -> None:
    """
    One of them does it, the other waits for it, and both have its result.
    """
    site, first, second = _two_that_want_the_same(shared, "")
    site.open_gate("effect")
    for computer, outcome in ((first, "executed"), (second, "awaited")):
        computer.wait("run-done")
        assert [entry["AGENT_OUTCOME"] for entry in computer.said("effect")] == [outcome]
    _check_effect(shared, first, second)


def test_a_machine_cut_off_in_an_effect_with_a_check(shared: Machine) -> None:
    """
    Case S9: the other one finds that it has happened; whoever comes back finds that it is known.
    """
    site, first, second = _two_that_want_the_same(shared, f"--check {FOUND!r}")
    site.lan.cut(first.name)
    assert second.wait("effect")["AGENT_OUTCOME"] == "found"
    site.open_gate("effect")
    site.lan.mend(first.name)
    for computer in (first, second):
        computer.wait("run-done")
    _check_effect(shared, first, second)


def test_a_machine_cut_off_in_an_effect_that_nobody_can_check(shared: Machine) -> None:
    """
    Case S9: it is not done again but unknown, for both steps, until whoever did it is back and has told.
    """
    site, first, second = _two_that_want_the_same(shared, "")
    site.lan.cut(first.name)
    second.wait("run-failed")
    assert [entry["AGENT_OUTCOME"] for entry in second.said("effect")] == ["unknown"] * 2
    assert second.status()["steps"]["unknown"] == 2
    assert site.database.query("SELECT key, state FROM agent.effects") == [["charge", "unknown"]]

    site.open_gate("effect")
    site.lan.mend(first.name)
    first.wait("run-failed")
    assert site.database.query("SELECT key, state FROM agent.effects") == [["charge", "committed"]]
    for computer in (first, second):
        computer.wait_ended()
        assert computer.exit_status == "70"
    for step in ("pay@1", "pay@2"):
        second.agentctl("settle", step, "--redo")
    second.start()
    second.wait("run-done")
    _check_effect(shared, second)
