"""Effects under SIGKILL: a real counter, a worker killed at each of five points for each step, counts as promised.

AGENT_KILLS says how many steps are cut off at each point; a few by default, so that the suite stays quick.
"""

import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.postgres import Server
from tests.support import ROOT, Worker
from worker import ledger

KILLS = int(os.environ.get("AGENT_KILLS", "2"))
POINTS = ["before-claim", "after-claim", "during", "after-effect", "after-commit"]
AGENTCTL = f"'{sys.executable}' -m worker"
# Kills the worker once for each step, around the transaction that claims it or commits it.
HOOK = """
import os, signal, sys
from pathlib import Path

POINT, MARKS = os.environ.get("KILL_AT"), Path(os.environ.get("KILL_MARKS", ""))

def die(steps):
    for step in steps:
        mark = MARKS / step.replace("/", "_")
        if step.startswith("s@") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

def hook(store):
    record = store.record
    def hooked(self, endings, claims, most=None):
        ended, begun = [e.step for e in endings if e.outcome == "done"], [c.step for c in claims[:most]]
        if POINT == "before-claim":
            die(begun)
        if POINT == "after-effect":
            die(ended)
        recorded = record(self, endings, claims, most)
        if POINT == "after-claim":
            die(begun)
        if POINT == "after-commit":
            die(ended)
        return recorded
    store.record = hooked

if POINT and "worker" in sys.orig_argv and "run" in sys.orig_argv:
    from worker.ledger.sqlite import SqliteLedger
    hook(SqliteLedger)
    if os.environ.get("KILL_POSTGRES"):
        from worker.ledger.postgres import PostgresLedger
        hook(PostgresLedger)
"""
# What a step does: with "during" its first attempt kills the worker before the effect, and never comes to it.
EFFECT = """
if [ "$KILL_AT" = during ] && mkdir "$KILL_MARKS/$AGENT_STEP" 2>/dev/null; then kill -9 $PPID; sleep 600; fi
"""


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest) -> str:
    """The line of the list that says where the ledger is."""
    if request.param == "sqlite":
        return ""
    server: Server = request.getfixturevalue("server")
    return f"ledger: '{server.empty_database()}'"


class Counted:
    """A list of KILLS steps, each with one effect, under a worker that is killed once for each."""

    def __init__(self, make: MakeWorker, tmp_path: Path, point: str, task: str, head: str) -> None:
        self.effects = tmp_path / "effects"
        self.marks = tmp_path / "marks"
        self.marks.mkdir()
        self.effects.touch()
        hook = tmp_path / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        environ = {"KILL_AT": point, "KILL_MARKS": str(self.marks), "PYTHONPATH": f"{ROOT}:{hook}"}
        environ["KILL_POSTGRES"] = head
        tasks = f"""
run: effects
{head}
on_unknown: continue
defaults:
  retry: {{attempts: 50, delay: 0}}
  env: {{KILL_AT: {point}, KILL_MARKS: {self.marks}, EFFECTS: {self.effects}, PYTHONPATH: {ROOT}}}
tasks:
  - id: s
    foreach: {{range: 1-{KILLS}}}
{task}
"""
        self.worker: Worker = make(tasks, environ=environ)

    def work(self) -> int:
        """Start the worker until it ends by itself; return its exit status then."""
        self.kills = 0
        while (status := self.worker.run()) == -9:
            self.kills += 1
            assert self.kills <= KILLS, self.worker.lines[-10:]
        assert self.kills >= KILLS // 2, "the point was not reached"
        return status

    def counts(self) -> Counter[str]:
        return Counter(self.effects.read_text().split())

    def states(self) -> dict[str, str | None]:
        return {row.step: row.outcome for row in self.worker.rows()}


def all_once() -> dict[str, int]:
    return {f"effects:s@{n}": 1 for n in range(1, KILLS + 1)}


@pytest.mark.parametrize("point", POINTS)
def test_with_a_check_each_effect_happens_once(worker: MakeWorker, tmp_path: Path, point: str, where: str) -> None:
    """
    Case S9: wherever the worker dies, an effect that can be asked about is there once, and its step is done.
    """
    run = Counted(
        worker,
        tmp_path,
        point,
        f"""
    run: |
      {EFFECT.strip()}
      echo "$AGENT_KEY" >> "$EFFECTS"
      echo "result of $AGENT_KEY"
    check: grep -x "$AGENT_KEY" "$EFFECTS" | sed 's/^/found /'; grep -qx "$AGENT_KEY" "$EFFECTS"
""",
        where,
    )
    assert run.work() == 0, run.worker.lines[-10:]
    assert run.counts() == all_once()
    assert set(run.states().values()) == {ledger.DONE}
    found = [row for row in run.worker.rows() if row.outcome == ledger.DONE and "check found" in row.cause]
    # The claim of a step and the commit of the one before it are one transaction.
    assert len(found) == {"after-effect": KILLS, "before-claim": KILLS - 1}.get(point, 0)
    expected = "found effects:s@1\n" if found else "result of effects:s@1\n"
    assert run.worker.output("s@1").decode() == expected


@pytest.mark.parametrize("point", POINTS)
def test_with_never_it_happens_at_most_once_and_a_person_is_asked(
    worker: MakeWorker, tmp_path: Path, point: str, where: str
) -> None:
    """
    Case S9: what was cut off is unknown, and no guess is made; once it is settled, every effect is there once.
    """
    task = f"""
    redo: never
    run: |
      {EFFECT.strip()}
      echo "$AGENT_KEY" >> "$EFFECTS"
"""
    run = Counted(worker, tmp_path, point, task, where)
    status = run.work()
    counts, states = run.counts(), run.states()
    assert max(counts.values(), default=0) <= 1
    assert set(states.values()) <= {ledger.DONE, ledger.UNKNOWN}
    assert all(counts[f"effects:{step}"] == 1 for step, outcome in states.items() if outcome == ledger.DONE)
    unknown = [step for step, outcome in states.items() if outcome == ledger.UNKNOWN]
    # The claim of a step and the commit of the one before it are one transaction.
    assert (status, len(unknown)) == (70, {"before-claim": KILLS - 1, "after-commit": KILLS // 2}.get(point, KILLS))
    for step in unknown:
        happened = counts[f"effects:{step}"] == 1
        assert happened == (point in ("after-effect", "before-claim"))
        assert settle(run.worker, step, *(["--done", "seen"] if happened else ["--redo"])).startswith(step)
    run.worker.environ["KILL_AT"] = ""
    assert run.worker.run() == 0
    assert run.counts() == all_once()
    if point == "after-effect":
        assert run.worker.output("s@1") == b"seen"


@pytest.mark.parametrize("point", [*POINTS[:3], "after-effect"])
def test_once_inside_a_step(worker: MakeWorker, tmp_path: Path, point: str, where: str) -> None:
    """
    Case S9: the step runs again, the effect inside it does not; nor does the result of it get lost.
    """
    check = 'grep -x "$AGENT_KEY" "$EFFECTS"'
    effect = 'echo "$AGENT_KEY" >> "$EFFECTS"; echo "$AGENT_KEY"'
    run = Counted(
        worker,
        tmp_path,
        point,
        f"""
    run: |
      {AGENTCTL} once "mail-$AGENT_ITEM" --check '{check}' -- sh -c '{effect}'
      {EFFECT.strip()}
""",
        where,
    )
    assert run.work() == 0, run.worker.lines[-10:]
    assert run.counts() == {f"effects:mail-{n}": 1 for n in range(1, KILLS + 1)}
    assert run.worker.output("s@1") == b"effects:mail-1\n"


@pytest.mark.parametrize("point", POINTS)
def test_a_server_that_honours_keys_sees_each_effect_once(
    worker: MakeWorker, tmp_path: Path, point: str, where: str
) -> None:
    """
    Case S9: redo: always, the default, with the same Idempotency-Key whatever the attempt.
    """
    pytest.importorskip("httpx2")
    served: Counter[str] = Counter()
    pids: list[Callable[[], int]] = []

    def handle(key: str) -> None:
        first = (run.marks / key.replace("/", "_")).exists() is False
        if point == "during" and first:
            (run.marks / key).touch()
            os.kill(pids[0](), 9)
            return
        if key not in served:
            served[key] += 1

    with counting(handle) as address:
        task = f"    http: {{method: POST, url: '{address}', json: {{a: 1}}}}"
        run = Counted(worker, tmp_path, point, task, where)
        pids.append(lambda: run.worker.pid)
        assert run.work() == 0, run.worker.lines[-10:]
    assert served == all_once()


def settle(worker: Worker, name: str, *said: str) -> str:
    """Run agentctl settle; return what it prints."""
    command = [sys.executable, "-m", "worker", "settle", name, *said, "--state", str(worker.state)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def settle_fails(worker: Worker, *said: str) -> str:
    """Run agentctl settle, which refuses; return what it says."""
    command = [sys.executable, "-m", "worker", "settle", *said, "--state", str(worker.state)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert shown.returncode == 1, shown
    return shown.stderr.strip()


class counting:
    """A server that hands each request's key to `handle`."""

    def __init__(self, handle: Callable[[str], None]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                handle(self.headers["Idempotency-Key"])
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                pass  # clients die here

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}/"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_a_person_settles_an_effect_while_the_worker_works(worker: MakeWorker, tmp_path: Path) -> None:
    """
    The step whose effect was unknown goes on at once, with the result that the person gave; the others never stop.
    """
    w = worker(
        f"""
run: effects
on_unknown: continue
concurrency: 2
defaults: {{env: {{PYTHONPATH: {ROOT}}}, cwd: {tmp_path}}}
tasks:
  - id: mail
    run: |
      {AGENTCTL} once letter -- sh -c 'mkdir begun 2>/dev/null && kill -9 $$; echo sent'
    retry: {{attempts: 5, delay: 0}}
  - {{id: other, run: 'while ! [ -e go ]; do sleep 0.05; done'}}
"""
    )
    w.start().until("mail: unknown: .*nobody knows whether its effect 'letter' has happened.*agentctl settle 'letter'")
    assert (
        settle_fails(w, "mail", "--redo") == "mail: its effect 'letter' is what is unknown; settle that, and it goes on"
    )
    listed = subprocess.run(
        [sys.executable, "-m", "worker", "list", "--state", str(w.state)], capture_output=True, text=True, cwd=ROOT
    )
    assert "unknown  mail  attempt 2" in listed.stdout
    assert "unknown  effect 'letter' of mail" in listed.stdout
    assert settle(w, "letter", "--done", "by hand\n") == f"effect 'letter': has happened, as {user()} says\n"
    w.until("mail: done in .*")
    (tmp_path / "go").touch()
    assert w.wait() == 0
    assert w.output("mail") == b"by hand\n"
    assert w.matching("mail: effect 'letter': skipped")
    assert w.matching(r"run effects: done, 2 of 2 .*executed 2, skipped 1")


def test_steps_that_call_for_the_same_effect_at_once(worker: MakeWorker, tmp_path: Path) -> None:
    """
    One executes, the others wait without being taken for dead, and all have its result.
    """
    w = worker(
        f"""
concurrency: 3
defaults: {{env: {{PYTHONPATH: {ROOT}}}, cwd: {tmp_path}, stall_after: 1s, retry: {{attempts: 1}}}}
tasks:
  - id: s
    foreach: {{range: 1-3}}
    run: |
      {AGENTCTL} once shared -- sh -c 'echo x >> ran; for i in 1 2 3 4 5 6; do sleep 0.4; echo . >&2; done; echo result'
"""
    )
    assert w.run() == 0, w.lines
    assert (tmp_path / "ran").read_text() == "x\n"
    assert {w.output(f"s@{n}") for n in (1, 2, 3)} == {b"result\n"}
    assert w.matching(r"executed 4, awaited 2\)")


def test_a_step_that_was_renamed_is_known_by_its_key(worker: MakeWorker) -> None:
    """
    Cases F13, S10: the same work under the same key is done; other work under it is a conflict, and neither is run.
    """
    task = "  - {{id: {}, key: 'pr', run: echo {} >> ran; echo {}, cwd: .}}\n"
    w = worker("run: r\ntasks:\n" + task.format("old", "made", "made"))
    assert w.run() == 0
    w.config.write_text("run: r\ntasks:\n" + task.format("new", "made", "made"))
    assert w.run() == 0
    assert w.output("new") == b"made\n"
    assert w.matching("new: done in .*; done as 'old', which had the same key")
    w.config.write_text("run: r\ntasks:\n" + task.format("third", "other", "other"))
    assert w.run() == 70
    assert w.matching("third: failed for good: its key 'pr' stands for other work, tried as 'new'; give it another key")
    assert (w.config.parent / "ran").read_text() == "made\n"


def test_after_and_expect_hold_for_what_the_check_found_as_well(worker: MakeWorker) -> None:
    """
    A check stands in for the step's own program, and for nothing else: what comes after it is still to be done.
    """
    w = worker("""
tasks:
  - id: a
    run: echo ran >> ran; kill -9 $$
    check: test -e ran && echo url
    expect: {matches: "^url$"}
    after: echo after >> after; test $(wc -l < after) = 2
    cwd: .
    retry: {attempts: 5, delay: 0}
""")
    assert w.run() == 0, w.lines
    assert (w.config.parent / "ran").read_text() == "ran\n"
    assert (w.config.parent / "after").read_text() == "after\n" * 2
    assert w.output("a") == b"url\n"


def test_a_renamed_step_is_known_while_the_worker_works_as_well(worker: MakeWorker) -> None:
    """
    Case S10: taken in at the end of the list, it is known by its key as it is after a restart.
    """
    w = worker("""
run: r
tasks:
  - {id: one, run: echo effect >> effects, key: K, cwd: .}
  - {id: edit, run: "sed -i 's/id: one/id: uno/' list.yaml", cwd: .}
""")
    assert w.run() == 0
    assert w.matching("uno: done in .*; done as 'one', which had the same key")
    assert (w.config.parent / "effects").read_text() == "effect\n"


@pytest.mark.parametrize("redo, happens", [("never", 1), ("always", 2)])
def test_a_renamed_step_that_was_cut_off_is_no_new_one(worker: MakeWorker, redo: str, happens: int) -> None:
    """
    What may have happened under its key is asked about under its new name, unless redoing it is harmless.
    """
    task = (
        f"- {{id: one, run: 'echo effect >> effects; mkdir first && kill -9 $$; true', key: K, redo: {redo}, cwd: .}}"
    )
    w = worker(f"run: r\ndefaults: {{retry: {{attempts: 1}}}}\ntasks:\n  {task}\n")
    assert w.run() == 70
    w.config.write_text(w.config.read_text().replace("id: one", "id: uno"))
    assert w.run() == (70 if redo == "never" else 0)
    assert w.done() == [] if redo == "never" else ["uno"]
    assert bool(w.matching("uno: unknown: cut off as 'one', which had the same key")) == (redo == "never")
    assert len((w.config.parent / "effects").read_text().split()) == happens


def test_what_the_list_says_at_its_end_holds_for_an_attempt(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Whoever writes redo: never while the step runs does not see it begun again.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(tmp_path / "notify"))
    run = "echo effect >> effects; echo up; while ! [ -e go ]; do sleep 0.05; done; kill -9 $$"
    w = worker(
        f"tasks:\n  - {{id: a, run: '{run}', cwd: ., redo: always}}\n",
        environ={"NOTIFY_SOCKET": listening.getsockname()},
    )
    w.start().until("a: up")
    w.config.write_text(w.config.read_text().replace("always", "never"))
    w.process.send_signal(signal.SIGHUP)
    w.until("read again")
    (w.config.parent / "go").touch()
    assert w.wait() == 70
    assert w.matching("a: unknown: killed by SIGKILL; nobody knows")
    assert settle(w, "a", "--done") == f"a: done, as {user()} says\n"
    listening.close()


def test_a_run_that_moves_between_its_own_ledger_and_a_server_takes_its_doubts_along(
    worker: MakeWorker, server: Server
) -> None:
    """
    What was cut off is unknown wherever it goes on, and nothing waits for a worker that is nobody's.
    """
    head = f"ledger: '{server.empty_database()}'\n"
    tasks = """run: moving
tasks:
  - {id: zero, run: echo zero}
  - {id: one, run: 'echo effect >> effects; kill -9 $PPID; sleep 600', cwd: ., redo: never}
"""
    w = worker(tasks)
    assert w.run() == -9
    w.config.write_text(head + tasks)
    assert w.run() == 70
    assert w.matching("3 attempts and effects taken along|2 attempts and effects taken along")
    assert w.matching("one: attempt 1 .*unknown|one: unknown: the worker died with it")
    w.config.write_text(tasks)
    assert w.run() == 70
    assert settle(w, "one", "--done") == f"one: done, as {user()} says\n"
    w.config.write_text(head + tasks)
    assert w.run() == 0
    assert (w.config.parent / "effects").read_text() == "effect\n"


def user() -> str:
    return os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
