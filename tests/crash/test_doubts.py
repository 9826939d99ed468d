"""Ends that leave a doubt: a client that gave up is no proof that its server did nothing."""

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import PATIENCE, ROOT
from worker import cli

AGENTCTL = f"'{sys.executable}' -m worker"
FAST = "delay: 10ms, max_delay: 10ms"


class Late(ThreadingHTTPServer):
    """Does what it is asked for at once, one line in `effects` each time, and answers as `answer` says."""

    daemon_threads = True

    def __init__(self, effects: Path) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.close_connection = True
                with effects.open("a") as file:
                    file.write("done\n")
                server.answer(self)

            def respond(self, status: int, body: bytes = b"", length: int | None = None, header: str = "") -> None:
                self.send_response(status)
                if header:
                    self.send_header(*header.split(": ", 1))
                self.send_header("Content-Length", str(len(body) if length is None else length))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.answer: Callable[[Handler], object] = lambda handler: handler.respond(200, b"ok")
        self.closing = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def close(self) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()


@pytest.fixture
def effects(tmp_path: Path) -> Path:
    made = tmp_path / "effects"
    made.touch()
    return made


@pytest.fixture
def late(effects: Path) -> Iterator[Late]:
    server = Late(effects)
    yield server
    server.close()


def _silence(server: Late) -> Callable[..., object]:
    return lambda handler: server.closing.wait(PATIENCE)


def _hang_up(_server: Late) -> Callable[..., object]:
    return lambda handler: handler.connection.shutdown(socket.SHUT_RDWR)


def _says(
    status: int, body: bytes = b"x", length: int | None = None, header: str = ""
) -> Callable[[Late], Callable[..., object]]:
    return lambda _server: lambda handler: handler.respond(status, body, length, header)


DOUBTFUL = {
    "no answer": (_silence, ""),
    "connection closed": (_hang_up, ""),
    "502": (_says(502), ""),
    "504": (_says(504), ""),
    "504 with Retry-After": (_says(504, header="Retry-After: 0"), ""),
    "half a body": (_says(200, b"half", 8), ""),
    "not the JSON that is expected": (_says(200, b'{"ok": false}'), "expect: {json: {ok: true}}"),
    "no JSON": (_says(200, b"ok"), "expect: {json: {ok: true}}"),
    "another success": (_says(200), "expect: {status: [201]}"),
    "the result is elsewhere": (_says(303, header="Location: /result"), ""),
    "listed": (_says(500), ""),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_a_request_that_was_sent_and_not_refused_is_not_sent_again(
    worker: MakeWorker, late: Late, effects: Path, case: str
) -> None:
    """
    F2: under redo: never nobody guesses, and under redo: check the check finds what the first attempt did.
    """
    answer, expect = DOUBTFUL[case]
    late.answer = answer(late)
    w = worker(f"""
on_unknown: continue
defaults: {{retry: {{attempts: 3, {FAST}, patience: 2s, unsure: [500]}}}}
tasks:
  - id: never
    redo: never
    http: {{method: POST, url: "{late.url()}", timeout: 300ms}}
    {expect}
  - id: check
    check: test -s {effects} && echo found
    http: {{method: POST, url: "{late.url()}", timeout: 300ms}}
    {expect}
""")
    assert w.run() == 70
    assert effects.read_text().count("done") == 2
    last = {row.step: row for row in w.rows()}
    assert (last["never"].outcome, last["check"].outcome) == ("unknown", "done")
    assert last["never"].cause.endswith("nobody knows whether it has happened")
    assert w.output("check") == b"found\n"


@pytest.mark.parametrize("status", [400, 404, 408, 425, 429, 500, 503, 529, 307])
def test_an_answer_that_says_no_leaves_no_doubt(worker: MakeWorker, late: Late, effects: Path, status: int) -> None:
    """
    F2: the server has spoken; it is asked again, and no check is.
    """
    late.answer = _says(status, header="Location: /")(late)
    w = worker(f"""
on_failure: continue
defaults: {{retry: {{attempts: 2, {FAST}, patience: 1ms}}}}
tasks:
  - {{id: never, redo: never, http: {{method: POST, url: "{late.url()}"}}}}
  - {{id: check, check: touch asked, http: {{method: POST, url: "{late.url()}"}}}}
""")
    assert w.run() == 70
    assert {row.outcome for row in w.rows()} <= {"failed", "deferred"}
    assert [row.unsure for row in w.rows()] == [False] * len(w.rows())
    assert not (w.state / "work/asked").exists()
    assert effects.read_text().count("done") >= 2


def test_a_request_that_could_not_be_sent_leaves_no_doubt(worker: MakeWorker, late: Late, effects: Path) -> None:
    """
    F2: a refused connection is "not now"; it is tried again under redo: never.
    """
    url = late.url()
    late.close()
    w = worker(f"""
tasks:
  - {{id: a, redo: never, http: {{method: POST, url: "{url}"}}, retry: {{{FAST}, patience: 1s}}}}
""")
    assert w.run() == 70
    assert [row.outcome for row in w.rows()][-1] == "failed"
    assert len(w.rows()) > 1


DOUBTFUL_PROGRAMS = {
    "a listed status": "run: 'echo done >> {effects}; exit 28'",
    "timeout(1)": "run: 'echo done >> {effects}; timeout 0.1 sleep 60'",
    "a signal below a shell": "run: 'echo done >> {effects}; sh -c ''kill -9 $$''; exit $?'",
    "a signal": "run: 'echo done >> {effects}; kill -9 $$'",
    "its timeout": "run: 'echo done >> {effects}; sleep 60', timeout: 300ms",
    "after fails": "run: 'echo done >> {effects}', after: exit 1",
    "after takes too long": "run: 'echo done >> {effects}', after: sleep 60, timeout: 300ms",
    "expect fails": "run: 'echo done >> {effects}', expect: {{matches: nothing}}",
    "expect fails for a listed success": "run: 'echo done >> {effects}; exit 3', expect: {{matches: nothing}}",
    "a TimeoutError": "python: 'late:time_out', args: {{path: '{effects}'}}, cwd: .",
    "a broken connection": "python: 'late:hang_up', args: {{path: '{effects}'}}, cwd: .",
    "no JSON to return": "python: 'late:returns', args: {{path: '{effects}'}}, cwd: .",
}
LATE = """
def _act(path):
    with open(path, "a") as file:
        file.write("done\\n")

def time_out(path):
    _act(path)
    raise TimeoutError("timed out")

def hang_up(path):
    _act(path)
    try:
        raise ConnectionResetError("reset by peer")
    except OSError as exc:
        raise RuntimeError("cannot order") from exc

def refused(path):
    _act(path)
    raise ConnectionRefusedError("refused")

def returns(path):
    _act(path)
    return object()
"""


@pytest.mark.parametrize("case", DOUBTFUL_PROGRAMS)
def test_a_program_that_did_not_say_that_it_failed_is_not_begun_again(
    worker: MakeWorker, effects: Path, case: str
) -> None:
    """
    F2: an effect is there once, whatever the client of it did, also where no attempt is left to check in.
    """
    (effects.parent / "late.py").write_text(LATE)
    task = DOUBTFUL_PROGRAMS[case].format(effects=effects)
    w = worker(f"""
on_unknown: continue
defaults: {{retry: {{attempts: 3, {FAST}, unsure: [28, 52, 56], success: [3]}}}}
tasks:
  - {{id: never, redo: never, {task}}}
  - {{id: check, check: 'test -s {effects}', {task}}}
""")
    w.run()
    assert effects.read_text().count("done") == 2
    found = [row for row in w.rows() if row.step == "check"]
    assert found[0].unsure
    assert [row for row in w.rows() if row.step == "never"][-1].outcome == "unknown"


def test_a_check_is_asked_before_every_new_attempt(worker: MakeWorker, effects: Path) -> None:
    """
    F2: an exit status is a program's word, and a check knows better; without one its word counts.
    """
    w = worker(f"""
on_failure: continue
defaults: {{retry: {{attempts: 3, {FAST}}}}}
tasks:
  - {{id: found, check: 'test -s {effects}', run: 'echo done >> {effects}; exit 1'}}
  - {{id: asked, check: 'echo asked >> {effects}.log; exit 1', run: 'exit 1'}}
  - {{id: word, redo: never, run: 'exit 1'}}
  - {{id: later, check: touch asked, run: 'test $AGENT_ATTEMPT = 2 || exit 75'}}
  - {{id: before, check: touch asked, before: 'test $AGENT_ATTEMPT = 2', run: 'true'}}
""")
    assert w.run() == 70
    assert effects.read_text() == "done\n"
    assert Path(f"{effects}.log").read_text() == "asked\n" * 2
    outcomes = {row.step: row.outcome for row in w.rows()}
    assert outcomes == {"found": "done", "asked": "failed", "word": "failed", "later": "done", "before": "done"}
    assert not (w.state / "work/asked").exists(), "one said 'not now', the other was never begun"
    w.config.write_text(w.config.read_text().replace("run: 'exit 1'}", "run: 'true'}", 1))
    assert w.run() == 70
    assert Path(f"{effects}.log").read_text() == "asked\n" * 3, "also in another run of the worker, and of another list"


def test_the_stop_of_the_worker_while_a_request_is_out_leaves_a_doubt(
    worker: MakeWorker, late: Late, effects: Path
) -> None:
    """
    F2: what was sent was sent; the next worker begins nothing under redo: never.
    """
    reached = threading.Event()

    def answer(_handler: object) -> None:
        reached.set()
        late.closing.wait(PATIENCE)

    late.answer = answer
    w = worker(f'tasks:\n  - {{id: a, redo: never, http: {{method: POST, url: "{late.url()}"}}}}\n')
    w.start().until("a: started")
    assert reached.wait(PATIENCE)
    w.kill(15)
    assert w.rows()[0].outcome == "unknown"
    assert w.run() == 70
    assert effects.read_text() == "done\n"


@pytest.mark.parametrize(
    ("options", "status", "happens", "ends"),
    [
        ("--unsure 28,52", 28, 1, 76),
        ("", 124, 1, 76),
        ("", 137, 1, 76),
        ("", 1, 2, 1),
        ("--check 'test -s {effects}'", 1, 1, 0),
        ("--unsure 28 --check 'test -s {effects}'", 28, 1, 0),
        ("--unsure 28 --redo", 28, 2, 28),
    ],
)
def test_once_asks_or_says_that_it_is_unknown(
    worker: MakeWorker, effects: Path, options: str, status: int, happens: int, ends: int
) -> None:
    """
    F2: the second call of `agentctl once` after a first whose command ended with a status.
    """
    once = f"{AGENTCTL} once k {options.format(effects=effects)} -- sh -c 'echo done >> {effects}; exit {status}'"
    w = worker(f"""
defaults: {{env: {{PYTHONPATH: {ROOT}}}, retry: {{attempts: 1}}}}
on_unknown: continue
tasks:
  - id: a
    run: |
      {once}; {once}; echo $? > {effects}.status; exit 1
""")
    assert w.run() == 70
    assert effects.read_text().count("done") == happens
    assert int(Path(f"{effects}.status").read_text()) == ends
    unsure = "so nobody knows whether it has happened" if status != 1 else "so it did not happen"
    assert w.matching(unsure if "--check" not in options or status != 1 else "the check is asked before")


def test_once_in_python_leaves_a_time_out_open(worker: MakeWorker, effects: Path) -> None:
    """
    F2: step.once() with a TimeoutError, a kind that is named, and one that says that nothing has happened.
    """
    (effects.parent / "late.py").write_text(
        LATE
        + """
from worker import step

def twice(path):
    said = []
    for key, what, unsure in (("a", time_out, ()), ("b", hang_up, (RuntimeError,)), ("c", refused, ())):
        for _ in range(2):
            try:
                step.once(key, lambda: what(path), unsure=unsure)
            except Exception as exc:
                said.append(type(exc).__name__)
    return said
"""
    )
    w = worker(f"tasks:\n  - {{id: a, python: 'late:twice', args: {{path: '{effects}'}}, cwd: .}}\n")
    assert w.run() == 0
    refused = ["ConnectionRefusedError"] * 2
    kinds = ["TimeoutError", "Unknown", "RuntimeError", "Unknown", *refused]
    assert json.loads(w.output("a")) == kinds
    assert effects.read_text().count("done") == 4


def test_a_step_that_says_when_to_come_back_is_not_begun_before(worker: MakeWorker, effects: Path) -> None:
    """
    F1: a step that logs into its own folder and asks for a wait waits; without one its log is no reason for haste.
    """
    w = worker(f"""
on_failure: continue
defaults: {{env: {{PYTHONPATH: {ROOT}}}}}
tasks:
  - id: asks
    retry: {{{FAST}, patience: 1s}}
    run: |
      date >> "$STATE_DIRECTORY/log"; {AGENTCTL} retry-after 1h; exit 75
  - id: logs
    retry: {{{FAST}, patience: 2s}}
    run: 'date >> "$STATE_DIRECTORY/log"; exit 75'
""")
    assert w.run() == 70
    asks = [row for row in w.rows() if row.step == "asks"]
    assert [row.outcome for row in asks] == ["deferred", "failed"], "patience has the last word"
    assert asks[0].delay == pytest.approx(1.0, abs=0.9)
    logs = [row.outcome for row in w.rows() if row.step == "logs"]
    assert logs[0] == "again", "a new file may be a summary"
    assert set(logs[1:-1]) == {"deferred"}
    assert logs[-1] == "failed"


def test_the_cause_of_a_step_that_waits_is_what_the_server_said(worker: MakeWorker, late: Late) -> None:
    """
    F19, S28: "answered 529" in the journal and in the ledger, also at the end; a huge Retry-After fails nothing.
    """
    late.answer = _says(529, header=f"Retry-After: {10**19}")(late)
    w = worker(f"""
on_failure: continue
tasks:
  - {{id: a, retry: {{{FAST}, patience: 1s}}, http: {{method: POST, url: "{late.url()}"}}}}
  - {{id: b, retry: {{attempts: 1}}, python: 'late:refused', args: {{path: x}}, cwd: .}}
  - {{id: c, retry: {{attempts: 1}}, run: 'true', expect: {{matches: nothing}}}}
""")
    (w.config.parent / "late.py").write_text(LATE)
    assert w.run() == 70
    said = f"POST {late.url()[:-1]} answered 529"
    first, *_, last = [row for row in w.rows() if row.step == "a"]
    assert (first.outcome, first.cause.startswith(f"not now: {said}")) == ("deferred", True)
    assert first.delay == pytest.approx(1.0, abs=0.9)
    assert f"longer than its patience; at last: {said}" in last.cause
    assert w.matching(f"a: attempt 1 not now: {said}")
    causes = {row.step: row.cause for row in w.rows()}
    assert causes["b"] == "exited with status 1: ConnectionRefusedError: refused"
    assert causes["c"] == "expect: its output does not match 'nothing'"


def test_a_command_that_was_mended_is_no_conflict_for_ever(worker: MakeWorker, effects: Path) -> None:
    """
    F2: with a check a failed try stays open, also for another command; the refusal says how to go on.
    """
    once = f"{AGENTCTL} once k --check 'test -s {effects}' --"
    w = worker(f"""
defaults: {{env: {{PYTHONPATH: {ROOT}}}, retry: {{attempts: 1}}}}
tasks:
  - id: a
    run: |
      {once} sh -c 'exit 3' || {once} sh -c 'echo done >> {effects}'
""")
    assert w.run() == 70
    assert w.matching("use another key, or if that was tried in vain: agentctl settle 'k' --redo")
    assert cli.main(["settle", "k", "--redo", "--state", str(w.state)]) == 0
    w.config.write_text(w.config.read_text().replace("exit 3", f"echo done >> {effects}"))
    assert w.run() == 0
    assert effects.read_text() == "done\n"
