"""A run ends when its budget is spent, and no crash buys it a new one."""

import json
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.postgres import Server
from tests.support import ROOT, Worker
from worker import atlimit, cli, outside
from worker.errors import OUT_OF_BUDGET

SPEND = f"PYTHONPATH={ROOT} {sys.executable} -m worker spend"
# While that file is there, the ledger's disk is full; what a step leaves behind has all the time to end.
HOOK = """
import contextlib, os, sys

if "worker" in sys.orig_argv and "run" in sys.orig_argv:
    from worker import execution
    from worker.ledger import StorageFull, sqlite
    execution._LEFTOVER_GRACE = 60.0
    transaction = sqlite.transaction

    @contextlib.contextmanager
    def hooked(*args, **options):
        if os.path.exists(os.environ["FULL"]):
            raise StorageFull("database or disk is full")
        with transaction(*args, **options):
            yield

    sqlite.transaction = hooked
"""
PAYING = f"""
budget: {{spend: 1.00}}
tasks:
  - id: pay
    foreach: {{range: 1-30}}
    run: '{SPEND} 0.1; {SPEND} 0.1'
"""


def used(w: Worker, capsys: pytest.CaptureFixture[str], name: str) -> float:
    """Return what `agentctl status` says is used."""
    capsys.readouterr()
    cli.main(["status", "--json", "--state", str(w.state)])
    return float(json.loads(capsys.readouterr().out)["budget"][name]["used"])


def add(w: Worker, words: str, *more: str) -> int:
    return cli.main(["budget", "--add", words, *more, "--state", str(w.state)])


def test_a_run_that_only_succeeds_ends_when_its_money_is_spent(
    worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Exit 69, said with what to do about it; after the budget is raised the run goes on and nothing done is redone.
    """
    w = worker(PAYING)
    assert w.run() == OUT_OF_BUDGET == 69
    assert w.matching(r"out of budget, \d of 30 steps done; spend: 1 of 1 used; .*agentctl budget --add spend=AMOUNT")
    done = w.done()
    assert used(w, capsys, "spend") == 1.0
    assert w.run() == OUT_OF_BUDGET
    assert used(w, capsys, "spend") == 1.0
    listed = w.config.read_text()
    for text, said in ((listed, "spend     1 of 1\n"), (listed + "?", "spend     1 used\n")):
        w.config.write_text(text)
        capsys.readouterr()
        assert cli.main(["budget", "--state", str(w.state)]) == 0
        assert said in capsys.readouterr().out, "a limit that cannot be read is not no limit"
    w.config.write_text(listed)
    assert add(w, "spend=10") == 0
    assert w.run() == 0
    assert w.done()[: len(done)] == done
    assert len(w.done()) == 30


def test_m3_ten_times_killed_it_spends_at_most_one_steps_worth_too_much(
    worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    M3: whenever the worker is killed, what its steps have said by then is in the ledger.
    """
    w = worker(PAYING.replace("1.00", "2.00"))
    dice = random.Random(3)
    seen = 0.0
    for _ in range(10):
        w.start().until("started")
        for _ in range(dice.randrange(3)):
            w.until("started|out of budget|spent")
        w.kill(signal.SIGKILL)
        now = used(w, capsys, "spend")
        assert now >= seen
        seen = now
        if now >= 2.0:
            break
    assert w.run() == OUT_OF_BUDGET
    assert 2.0 <= used(w, capsys, "spend") <= 2.2 + 1e-9
    assert sum(row.spend for row in w.rows()) == pytest.approx(used(w, capsys, "spend"))


def test_what_a_step_said_before_the_worker_died_is_not_forgotten(
    worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Its attempt is closed as cut off, with what it had spent.
    """
    w = worker(f"budget: {{spend: 5}}\ntasks:\n  - id: a\n    run: '{SPEND} 3; echo said >&2; sleep 600'\n")
    w.start().until("^a: said")
    w.kill(signal.SIGKILL)
    assert used(w, capsys, "spend") == 3
    assert w.run() == OUT_OF_BUDGET
    assert [(row.outcome, row.spend) for row in w.rows()] == [("interrupted", 3.0), ("interrupted", 3.0)]


def test_more_restarts_than_allowed_end_the_run(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    """
    Two kills are allowed; after the third no step is started, and a grant lets it go on.
    """
    w = worker("budget: {restarts: 2}\ntasks:\n  - {id: a, run: sleep 600, retry: {attempts: 9}}\n")
    for _ in range(3):
        w.start().until("a: started")
        w.kill(signal.SIGKILL)
    starts = len(w.matching("a: started"))
    assert w.run() == OUT_OF_BUDGET
    assert len(w.matching("a: started")) == starts
    assert used(w, capsys, "restarts") == 3
    assert add(w, "restarts=1") == 0
    w.start().until("a: started")
    assert w.kill(signal.SIGTERM) == 75


def test_a_stop_costs_no_restart(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    w = worker("budget: {restarts: 0}\ntasks:\n  - {id: a, run: sleep 600}\n")
    for _ in range(2):
        w.start().until("a: started")
        assert w.kill(signal.SIGTERM) == 75
    assert used(w, capsys, "restarts") == 0


def test_hours_are_those_at_work_and_outlive_the_worker(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    """
    A worker that is killed has used its time; the next one ends by its own clock in the middle of a step.
    """
    w = worker("budget: {hours: 0.001}\ntasks:\n  - {id: a, run: sleep 600, retry: {attempts: 99}}\n")
    w.start().until("^a: started")
    w.kill(signal.SIGKILL)
    w.start().until("^a: started, attempt 2")
    first = used(w, capsys, "hours")
    assert 0 < first < 0.001
    assert w.wait() == OUT_OF_BUDGET
    assert used(w, capsys, "hours") >= 0.001
    assert w.run() == OUT_OF_BUDGET
    assert len(w.matching("^a: started")) == 2


def test_m3_ten_times_killed_no_second_at_work_is_given_back(
    worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    M3: what is used is never less than what was seen of the workers at work, though each died without a word.
    """
    w = worker("budget: {hours: 1}\ntasks:\n  - {id: a, run: sleep 600, retry: {attempts: 99}}\n")
    seen = 0.0
    for _ in range(10):
        w.start().until("^a: started")
        began = time.monotonic()
        w.kill(signal.SIGKILL)
        seen += time.monotonic() - began
    w.start().until("^a: started")
    assert used(w, capsys, "hours") * 3600 >= seen
    assert used(w, capsys, "restarts") == 10


def test_steps_that_run_when_the_budget_is_spent_are_asked_to_end(worker: MakeWorker) -> None:
    """
    SIGTERM, and time to save what they have; that costs none of their attempts.
    """
    w = worker(f"""
budget: {{spend: 1}}
tasks:
  - id: a
    retry: {{attempts: 1}}
    run: |
      trap 'echo saved >"$STATE_DIRECTORY/part"; kill $!; exit 1' TERM
      {SPEND} 1
      sleep 600 & wait
""")
    assert w.run() == OUT_OF_BUDGET
    assert (w.state / "steps/a/part").read_text() == "saved\n"
    assert [(row.outcome, row.counted, row.cause) for row in w.rows()] == [
        ("interrupted", 0, "the run's budget was spent")
    ]


def test_m7_the_note_says_what_is_left(worker: MakeWorker) -> None:
    w = worker(f"""
budget: {{spend: 10, restarts: 3}}
tasks:
  - id: a
    retry: {{delay: 10ms}}
    run: '{SPEND} 4; test -n "$AGENT_NOTE" && cat "$AGENT_NOTE"'
""")
    assert w.run() == 0
    assert json.loads(w.output("a"))["budget_left"] == {"restarts": 3, "spend": 6}


def test_a_living_worker_takes_a_grant(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    """
    It goes on where it would have ended.
    """
    w = worker(f"""
budget: {{spend: 1}}
tasks:
  - id: a
    run: '{SPEND} 0.9; echo waits >&2; while ! test -e go; do sleep 0.02; done; {SPEND} 0.9'
""")
    w.start().until("waits")
    assert add(w, "spend=1") == 0
    assert capsys.readouterr().out == "budget: 1 more spend, as root says\n".replace("root", outside.user())
    assert add(w, "hours=1") == 0
    assert "hours: the list sets no limit" in capsys.readouterr().out
    assert [add(w, "spend=2", "--id", "mine"), add(w, "spend=2", "--id", "mine")] == [0, 0]
    assert add(w, "spend=3", "--id", "mine") == 1
    assert "'mine' was another one: 2 more spend" in capsys.readouterr().err
    (w.state / "work/go").touch()
    assert w.wait() == 0
    assert add(w, "spend=2", "--id", "mine") == 0, "it counts already, whoever is asked"
    capsys.readouterr()
    assert cli.main(["budget", "--state", str(w.state)]) == 0
    assert "spend     1.8 of 4\n" in capsys.readouterr().out


def test_a_grant_that_comes_while_the_steps_are_being_ended_lets_the_run_go_on(worker: MakeWorker) -> None:
    """
    Nobody has to start it again, and nobody is told of a budget that is not spent.
    """
    w = worker(f"""
budget: {{spend: 1}}
alert: touch told
tasks:
  - id: a
    run: |
      test ! -e saved || exit 0
      trap 'echo ends >&2; while ! test -e go; do sleep 0.02; done; touch saved; exit 1' TERM
      {SPEND} 1
      sleep 600 & wait
  - {{id: b, run: 'true'}}
""")
    w.start().until("ends")
    assert add(w, "spend=1") == 0
    w.until("the budget has been raised; going on")
    (w.state / "work/go").touch()
    assert w.wait() == 0
    assert [row.outcome for row in w.rows()] == ["interrupted", "done", "done"]
    assert not (w.config.parent / "told").exists()


def test_a_grant_that_comes_while_the_last_copy_is_made_lets_the_run_go_on(
    worker: MakeWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    It is answered at once, not lost with a worker that only waits for a slow copy.
    """
    w = worker(f"""
budget: {{spend: 1}}
copy: {{every: 1s, command: 'test ! -e saved || while ! test -e go; do sleep 0.02; done'}}
tasks:
  - id: a
    cwd: .
    run: 'test ! -e saved || exit 0; touch saved; {SPEND} 1; sleep 600'
  - {{id: b, run: 'true'}}
""")
    w.start().until("out of budget")
    assert add(w, "spend=1") == 0
    assert capsys.readouterr().out.startswith("budget: 1 more spend")
    (w.config.parent / "go").touch()
    assert w.wait() == 0
    assert [row.outcome for row in w.rows()] == ["interrupted", "done", "done"]


def test_the_wait_for_the_last_copy_is_time_at_work(worker: MakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    w = worker("""
budget: {hours: 1}
copy: {every: 1h, command: 'while ! test -e go; do sleep 0.02; done'}
tasks: [{id: a, run: 'true'}]
""")
    w.start().until("run .*: done, 1 of 1")
    began = time.monotonic()
    w.until("waiting for the last copy")
    waited = time.monotonic() - began
    (w.config.parent / "go").touch()
    assert w.wait() == 0
    assert used(w, capsys, "hours") * 3600 >= waited


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; while it is there, the workers' disk is full."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("FULL", f"{tmp_path}/full")
    return tmp_path / "full"


def test_hours_are_not_waited_away_on_a_full_disk(worker: MakeWorker, full: Path) -> None:
    """
    The steps are ended, and the worker says what is not recorded: in the ledger, the attempt stands as it was.  It
    ended in order, so that this costs the step nothing.
    """
    w = worker(
        f"""
budget: {{hours: 0.0003}}
defaults: {{env: {{FULL: {full}}}, retry: {{attempts: 1}}}}
tasks:
  - {{id: a, run: 'test -e more && exit; touch "$FULL"; exec sleep 600'}}
""",
        environ={"PYTHONPATH": f"{ROOT}:{full.parent}/hook"},
    )
    assert w.run() == OUT_OF_BUDGET
    assert w.matching("the budget is spent, hours: .*; ending the steps")
    assert w.matching("ledger.db: not waited for any longer; how steps ended is not recorded")
    assert [row.outcome for row in w.rows()] == [None]
    full.unlink()
    (w.state / "work/more").touch()
    assert add(w, "hours=1") == 0
    assert w.run() == 0
    assert [(row.outcome, row.counted) for row in w.rows()] == [("interrupted", 0), ("done", 0)]


def test_what_is_done_is_waited_for_although_the_budget_is_spent(worker: MakeWorker, full: Path) -> None:
    """
    The other step is ended when the hours are over; the disk has space again, and what had ended well is recorded.
    """
    w = worker(
        f"""
budget: {{hours: 0.0005}}
concurrency: 2
defaults: {{env: {{FULL: {full}}}}}
tasks:
  - {{id: a, run: 'while ! test -e "$FULL"; do sleep 0.02; done; echo a'}}
  - {{id: b, run: 'touch "$FULL"; exec sleep 600'}}
""",
        environ={"PYTHONPATH": f"{ROOT}:{full.parent}/hook"},
    )
    w.start().until("the budget is spent, hours: .*; ending the steps")
    full.unlink()
    assert w.wait() == OUT_OF_BUDGET
    assert {row.step: row.outcome for row in w.rows()} == {"a": "done", "b": "interrupted"}


def test_money_is_waited_for_until_it_is_on_the_books(
    worker: MakeWorker, full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    The step that spent it is ended; the worker does not end before the ledger knows, or the next one could spend it
    again.
    """
    w = worker(
        f"""
budget: {{spend: 1}}
defaults: {{env: {{FULL: {full}}}}}
tasks:
  - {{id: a, run: 'touch "$FULL"; {SPEND} 2; exec sleep 600'}}
""",
        environ={"PYTHONPATH": f"{ROOT}:{full.parent}/hook"},
    )
    w.start().until("the budget is spent, spend: 2 of 1 used; ending the steps")
    full.unlink()
    assert w.wait() == OUT_OF_BUDGET
    assert used(w, capsys, "spend") == 2
    assert [row.outcome for row in w.rows()] == ["interrupted"]


def test_a_run_whose_last_step_ended_well_is_done_whatever_it_has_cost(worker: MakeWorker, full: Path) -> None:
    """
    What is left of the step when it has ended spends the last of the money: nothing is left for which more is needed.
    """
    w = worker(
        f"""
budget: {{spend: 1}}
tasks:
  - id: a
    run: trap '' TERM; (while ! test -e go; do sleep 0.02; done; {SPEND} 1) &
""",
        environ={"PYTHONPATH": f"{ROOT}:{full.parent}/hook"},
    )
    w.start().until("^a: ended and left processes behind")
    (w.state / "work/go").touch()
    w.until("the budget is spent")
    assert w.wait() == 0
    assert [(row.outcome, row.spend) for row in w.rows()] == [("done", 1.0)]


@pytest.mark.parametrize(
    ("policy", "amounts"), [("finish", "0.1 0.2"), ("stop", "0.1 0.2"), ("finish", "0.2 0.2"), ("finish", "0.3 0")]
)
def test_what_reached_the_limit_is_paid_for_and_comes_to_its_end(
    worker: MakeWorker, policy: str, amounts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    Spending up to the limit is not above it, whatever fractions add up to; nothing is begun after that.
    """
    w = worker(f"""
budget: {{spend: 0.3, at_limit: {policy}}}
tasks:
  - id: pay
    run: |
      for n in {amounts}; do {SPEND} $n; done
      while ! test -e go; do sleep 0.02; done; echo paid
  - {{id: next, run: 'true'}}
""")
    w.start().until("the budget is spent, spend: .*; no step is begun, those at work")
    (w.state / "work/go").touch()
    assert w.wait() == OUT_OF_BUDGET
    assert w.output("pay") == b"paid\n"
    assert [(row.step, row.outcome) for row in w.rows()] == [("pay", "done")]
    assert add(w, "spend=1") == 0
    assert w.run() == 0


def test_hours_and_restarts_let_steps_finish_too(worker: MakeWorker) -> None:
    """
    The one that is at work when the hours are over comes to its end; the next is not begun.
    """
    w = worker("""
budget: {hours: 0.0003, at_limit: finish}
tasks:
  - {id: a, run: 'while ! test -e go; do sleep 0.02; done'}
  - {id: b, run: 'true'}
""")
    w.start().until("the budget is spent, hours: .*; no step is begun, those at work go on to their own end")
    (w.state / "work/go").touch()
    assert w.wait() == OUT_OF_BUDGET
    assert w.done() == ["a"]


def test_with_stop_steps_have_a_stated_time(worker: MakeWorker) -> None:
    """
    It is said, and then they are asked to end, which costs them no attempt.
    """
    w = worker(f"""
budget: {{spend: 1, at_limit: stop}}
tasks:
  - {{id: a, retry: {{attempts: 1}}, run: '{SPEND} 1; exec sleep 600'}}
""")
    w.start().until("the budget is spent, spend: 1 of 1 used; no step is begun, those at work have 10s to come")
    began = time.monotonic()
    w.until("the budget is spent, spend: 1 of 1 used; ending the steps")
    assert time.monotonic() - began >= atlimit.GRACE - 1
    assert w.wait() == OUT_OF_BUDGET
    assert [(row.outcome, row.counted) for row in w.rows()] == [("interrupted", 0)]


def test_a_grant_while_steps_come_to_their_end_lets_others_begin(worker: MakeWorker) -> None:
    """
    The step that reached the limit is never asked to end.
    """
    w = worker(f"""
budget: {{spend: 1, at_limit: finish}}
concurrency: 2
tasks:
  - {{id: a, run: '{SPEND} 1; while ! test -e go; do sleep 0.02; done'}}
  - {{id: b, needs: [c], run: touch go}}
  - {{id: c, run: 'while ! test -e reached; do sleep 0.02; done'}}
""")
    w.start().until("the budget is spent")
    (w.state / "work/reached").touch()
    w.until("c: done")
    assert add(w, "spend=1") == 0
    w.until("the budget has been raised; going on")
    assert w.wait() == 0
    assert sorted(w.done()) == ["a", "b", "c"]
    assert {row.outcome for row in w.rows()} == {"done"}


def test_a_full_disk_at_the_limit_loses_nothing_that_was_paid_for(worker: MakeWorker, full: Path) -> None:
    """
    With finish: the step ends by itself, and what it has done is waited for until it is recorded.
    """
    w = worker(
        f"""
budget: {{hours: 0.0003, at_limit: finish}}
concurrency: 2
defaults: {{env: {{FULL: {full}}}}}
tasks:
  - {{id: a, run: 'while ! test -e go; do sleep 0.02; done; echo a'}}
  - {{id: b, run: 'touch "$FULL"'}}
  - {{id: c, run: 'true'}}
""",
        environ={"PYTHONPATH": f"{ROOT}:{full.parent}/hook"},
    )
    w.start().until("waiting for space")
    w.until("the budget is spent, hours: .*; no step is begun")
    (w.state / "work/go").touch()
    w.until("the budget is spent, hours: [^;]*$")
    full.unlink()
    assert w.wait() == OUT_OF_BUDGET
    assert sorted(w.done()) == ["a", "b"]


def test_the_limit_holds_for_every_machine_of_the_run(worker: MakeWorker, tmp_path: Path, server: Server) -> None:
    """
    One machine spends the last of it; the step of the other goes on to its end, and neither begins another.
    """
    until = f"while ! test -e {tmp_path}/FILE; do sleep 0.02; done"
    tasks = f"""
run: shared
ledger: '{server.empty_database()}'
budget: {{spend: 1, at_limit: finish}}
tasks:
  - {{id: pays, run: '{until.replace("FILE", "pay")}; {SPEND} 1; {until.replace("FILE", "go")}'}}
  - {{id: works, run: '{until.replace("FILE", "go")}'}}
  - {{id: next, run: 'true'}}
"""
    one, two = worker(tasks, "one"), worker(tasks, "two")
    one.start().until("pays: started")
    two.start().until("works: started")
    (tmp_path / "pay").touch()
    for each in (one, two):
        each.until("the budget is spent, spend: 1 of 1 used; no step is begun, those at work go on to their own end")
    (tmp_path / "go").touch()
    assert [one.wait(), two.wait()] == [OUT_OF_BUDGET] * 2
    assert sorted(one.done()) == ["pays", "works"]
