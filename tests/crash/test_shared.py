"""Real workers and a server that does not let them work, or is far away.

Where it does not: one clear line, and the exit status that says what to do.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.postgres import PASSWORD, Server
from tests.proxy import Proxy
from tests.support import ROOT
from worker.errors import OUT_OF_BUDGET

STATE_UNUSABLE = 73
LEASE = 5.0
RUN = "run: shared\nledger: {address}\nlease: 5s\n"
TASKS = "tasks:\n  - {id: a, run: echo a}\n"


@pytest.fixture
def address(server: Server) -> str:
    return server.empty_database()


@pytest.fixture
def standby(server: Server) -> Iterator[Server]:
    made = Server(copy_of=server)
    try:
        yield made.start()
    finally:
        made.remove()


def test_a_server_that_is_away_at_the_start_is_waited_for(server: Server, address: str, worker: MakeWorker) -> None:
    """
    Case R13: it is said once, and the run begins when the server comes.
    """
    w = worker(RUN.format(address=address) + TASKS)
    server.stop()
    try:
        w.start()
        w.until("waiting for the server")
        assert server.port and not w.matching("run shared")
    finally:
        server.start()
    assert w.wait() == 0
    assert len(w.matching("waiting for the server")) == 1
    assert w.output("a") == b"a\n"


def test_a_stop_while_the_server_is_away(server: Server, address: str, worker: MakeWorker) -> None:
    """
    Whoever waits can be told to end: in order before anything has begun, and with a step at work.
    """
    waits = worker(RUN.format(address=address) + TASKS, folder="waits")
    works = worker(RUN.format(address=address) + "tasks:\n  - {id: a, run: exec sleep 600}\n", folder="works")
    works.start()
    works.until("a: started")
    server.stop()
    try:
        works.until("the ledger: cannot be reached")
        assert works.kill(signal.SIGTERM) == 75
        waits.start()
        waits.until("waiting for the server")
        assert waits.kill(signal.SIGTERM) in (75, -signal.SIGTERM)
    finally:
        server.start()
    assert not [line for line in (*waits.lines, *works.lines) if "Traceback" in line]
    works.config.write_text(works.config.read_text().replace("exec sleep 600", "echo a"))
    assert works.run() == 0
    assert [works.output("a"), len(works.matching("interrupted: the worker was stopped"))] == [b"a\n", 1]


@pytest.mark.parametrize(
    ("user", "password", "database", "says"),
    [
        ("postgres", "wrong horse", "postgres", "password authentication failed for user"),
        ("nobody", PASSWORD, "postgres", "password authentication failed for user"),
        ("postgres", PASSWORD, "elsewhere", 'database "elsewhere" does not exist'),
    ],
)
def test_who_is_not_let_in_is_told_so(
    server: Server, worker: MakeWorker, user: str, password: str, database: str, says: str
) -> None:
    """
    Case J8 as well: the line names the place, and not the password.
    """
    w = worker(RUN.format(address=server.dsn(database, user, password)) + TASKS)
    assert w.run() == STATE_UNUSABLE
    (line,) = w.lines
    assert f"postgresql://{user}@127.0.0.1:{server.port}/{database}: " in line and says in line
    assert "horse" not in line


def test_tables_of_a_newer_version_are_left_alone(server: Server, address: str, worker: MakeWorker) -> None:
    """
    A worker that is older than the tables changes nothing in them.
    """
    database = address.rpartition("/")[2]
    assert worker(RUN.format(address=address) + TASKS).run() == 0
    server.execute("UPDATE agent.format SET version = 99", database=database)
    before = server.execute("SELECT * FROM agent.workers", database=database)
    w = worker(RUN.format(address=address) + TASKS, folder="other")
    assert w.run() == STATE_UNUSABLE
    (line,) = w.lines
    assert "made by a newer version of the agent (format 99" in line
    assert server.execute("SELECT * FROM agent.workers", database=database) == before


def test_a_standby_is_no_place_to_work(standby: Server, worker: MakeWorker) -> None:
    """
    A server that takes no writes is named as what it is.
    """
    w = worker(RUN.format(address=standby.dsn()) + TASKS)
    assert w.run() == STATE_UNUSABLE
    (line,) = w.lines
    assert f"postgresql://postgres@127.0.0.1:{standby.port}/postgres is a read-only standby" in line


def test_two_lists_under_one_name(address: str, worker: MakeWorker, tmp_path: Path) -> None:
    """
    Whoever comes with another list while one is at work is refused, and may have the run when that one has ended.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    one = worker(RUN.format(address=address) + f"tasks:\n  - {{id: a, run: 'read -r _ < {gate}; echo a'}}\n")
    one.start()
    one.until("a: started")
    other = worker(RUN.format(address=address) + TASKS + "  - {id: b, run: echo b}\n", folder="other")
    assert other.run() == STATE_UNUSABLE
    (line,) = other.lines
    assert "run 'shared' is being worked on by 1 other worker with another task list" in line

    with open(gate, "w") as file:
        file.write("\n")
    assert one.wait() == 0
    assert other.run() == 0
    assert [other.output("a"), other.output("b")] == [b"a\n", b"b\n"]
    assert not other.matching("a: started")


class Far(Proxy):
    """A network in which everything takes its time."""

    def _pass_on(self, source: socket.socket) -> None:
        time.sleep(0.01)  # the distance
        super()._pass_on(source)


def test_a_claim_is_renewed_however_much_there_is_to_take_in(
    server: Server, address: str, worker: MakeWorker, tmp_path: Path
) -> None:
    """
    Hundreds of results come from other machines, over a slow network; the step that is at work here stays ours.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    tasks = f"""tasks:
  - {{id: long, run: 'read -r _ < {gate}; echo "attempt $AGENT_ATTEMPT"'}}
  - {{id: a, foreach: {{range: 1-400}}, run: echo "$AGENT_ITEM"}}
"""
    network = Far(server.port)
    try:
        far = worker(RUN.format(address=address.replace(f":{server.port}/", f":{network.port}/")) + tasks, folder="far")
        far.start()
        far.until("long: started")
        near = worker(f"concurrency: 8\n{RUN.format(address=address)}{tasks}", folder="near")
        near.start()
        near.until(r"\(400/401\)")
        time.sleep(3 * LEASE)  # it has time for taking over, and looks every second
        with open(gate, "w") as file:
            file.write("\n")
        assert (far.wait(), near.wait()) == (0, 0)
        assert far.output("long") == near.output("long") == b"attempt 1\n"
        assert far.output("a@400") == b"400\n"
    finally:
        network.close()


def test_machines_that_share_a_run_end_when_its_money_is_spent(
    server: Server, address: str, worker: MakeWorker
) -> None:
    """
    Each ends with 69, also the one whose own steps have spent less than the limit; together they are over it by at
    most one step's worth each.
    """
    spend = f"PYTHONPATH={ROOT} {sys.executable} -m worker spend 1"
    tasks = f"budget: {{spend: 6}}\ntasks:\n  - {{id: pay, foreach: {{range: 1-40}}, run: '{spend}; sleep 0.3'}}\n"
    workers = [worker(RUN.format(address=address) + tasks, folder=name) for name in ("one", "two")]
    for w in workers:
        w.start().until("started")
    assert [w.wait() for w in workers] == [OUT_OF_BUDGET, OUT_OF_BUDGET]
    assert all(w.matching("out of budget") for w in workers)
    assert 6 <= sum(row.spend for row in workers[0].rows()) <= 8


def test_a_worker_that_stood_still_between_claim_and_start_begins_nothing_that_is_done(
    address: str, worker: MakeWorker, tmp_path: Path
) -> None:
    """
    C14: it was granted a step, stood still for longer than its lease, and the step was done elsewhere meanwhile.  The
    server is asked again before the step begins, so it is neither begun nor called started.
    """
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(
        "import os, signal\n"
        "from worker import points\n"
        "def at(point):\n"
        "    if point == 'ledger-committed':\n"
        "        points.at = lambda point: None\n"
        "        os.kill(os.getpid(), signal.SIGSTOP)\n"
        "points.at = at\n"
    )
    tasks = f"concurrency: 2\n{RUN.format(address=address)}"
    tasks += f"tasks:\n  - {{id: s, foreach: {{range: 1-2}}, run: 'echo \"$AGENT_ITEM\" >> {tmp_path}/ran'}}\n"
    still = worker(tasks, folder="still", environ={"PYTHONPATH": f"{ROOT}:{hook}"})
    still.start()
    os.waitid(os.P_PID, still.pid, os.WSTOPPED)
    assert worker(tasks, folder="other").run() == 0
    assert sorted((tmp_path / "ran").read_text().split()) == ["1", "2"]
    still.process.send_signal(signal.SIGCONT)
    assert still.wait() == 0
    assert sorted((tmp_path / "ran").read_text().split()) == ["1", "2"]
    assert len(still.matching("had run out before it could begin")) == 2
    assert not still.matching(": started")


@pytest.mark.parametrize("same", [True, False])
def test_a_begun_step_whose_item_has_left_stays_with_every_machine(
    address: str, worker: MakeWorker, tmp_path: Path, same: bool
) -> None:
    """
    N6: with the ledger on a server. The machine that had it comes back, or another one that never saw the item.
    """
    inputs = tmp_path / "in"
    inputs.mkdir()
    for name in "ab":
        (inputs / name).touch()
    tasks = f"""defaults: {{retry: {{delay: 0s}}}}
tasks:
  - id: load
    foreach: {{glob: "{inputs}/*"}}
    run: |
      test -e "$AGENT_ITEM" || exit 0
      rm "$AGENT_ITEM"
      case $AGENT_ITEM in */b) echo taken >&2; sleep 300;; esac
  - {{id: report, needs: [load], run: 'true'}}
"""
    (one, two) = (worker(RUN.format(address=address) + tasks, folder=name) for name in ("one", "two"))
    one.start().until("b: taken")
    one.kill()
    comes = one if same else two
    before = len(comes.lines)
    assert comes.run() == 0
    order = [line.split(":")[0].rpartition("-")[2] for line in comes.lines[before:] if ": done in" in line]
    assert order == ["b", "report"]


def test_a_machine_that_comes_with_another_world_has_the_steps_of_the_others(
    address: str, worker: MakeWorker, tmp_path: Path
) -> None:
    """
    N6: it is not refused for what was moved away meanwhile, begins nothing before its time, and takes up what only it
    has found when the others have ended.
    """
    inputs, gate = tmp_path / "in", tmp_path / "gate"
    for folder in (inputs, gate):
        folder.mkdir()
    for name in "ab":
        (inputs / name).touch()
    tasks = f"""tasks:
  - id: load
    foreach: {{glob: "{inputs}/*"}}
    run: 'rm "$AGENT_ITEM"; until test -e {gate}/${{AGENT_ITEM##*/}}; do sleep 0.02; done'
  - {{id: report, needs: [load], run: 'true'}}
"""
    (one, two) = (worker(RUN.format(address=address) + tasks, folder=name) for name in ("one", "two"))
    one.start().until("-a: started")
    while (inputs / "a").exists():
        time.sleep(0.01)
    (inputs / "c").touch()
    two.start().until("other workers are at this run without 1 item that")
    two.until("-b: started")
    for name in "bac":
        (gate / name).touch()
    assert [one.wait(), two.wait()] == [0, 0]
    steps = [row.step for row in one.rows() if row.outcome == "done"]
    assert [step.rpartition("-")[2] for step in steps[2:3]] == ["report"]
    assert two.run() == 0
    done = [row.step.rpartition("-")[2] for row in two.rows() if row.outcome == "done"]
    assert sorted(done) == ["a", "b", "c", "report"]


def test_the_next_program_of_a_step_that_was_lost_is_not_begun(
    address: str, worker: MakeWorker, tmp_path: Path
) -> None:
    """
    C14: the worker stood still while the program before it ended; the claim is renewed first, which is refused.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    before = f"mkdir {tmp_path}/first || exit 0; read -r _ < {gate}"
    tasks = f"{RUN.format(address=address)}tasks:\n  - {{id: s, before: '{before}', run: 'echo x >> {tmp_path}/ran'}}\n"
    still = worker(tasks, folder="still")
    still.start()
    with open(gate, "w") as file:  # when it reads
        file.write("\n")
        still.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, still.pid, os.WSTOPPED)
    assert worker(tasks, folder="other").run() == 0
    still.process.send_signal(signal.SIGCONT)
    assert still.wait() == 0
    assert (tmp_path / "ran").read_text() == "x\n"
    assert still.matching("its claim has run out and is another worker's")


def test_items_that_one_machine_has_made_are_worked_through_by_all(
    address: str, worker: MakeWorker, tmp_path: Path
) -> None:
    """
    N9: the file is on one machine alone; its lines are everybody's, once, also for one that comes later.
    """
    gate = tmp_path / "go"
    gate.mkdir()
    tasks = f"""concurrency: 2
tasks:
  - {{id: make, run: 'printf "1\\n2\\n3\\n4\\n" > ../../made.txt'}}
  - id: each
    needs: [make]
    foreach: {{lines: made.txt}}
    run: 'until test -e {gate}/$AGENT_ITEM; do sleep 0.02; done'
  - {{id: last, needs: [each], run: 'true'}}
"""
    (one, two) = (worker(RUN.format(address=address) + tasks, folder=name) for name in ("one", "two"))
    one.start().until("each@2: started")
    assert (one.config.parent / "made.txt").exists() and not (two.config.parent / "made.txt").exists()
    two.start().until("each@4: started")
    for number in "1234":
        (gate / number).touch()
    assert [one.wait(), two.wait()] == [0, 0]
    steps = [row.step for row in one.rows() if row.outcome == "done"]
    assert sorted(steps) == ["each@1", "each@2", "each@3", "each@4", "last", "make"]
