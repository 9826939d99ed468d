"""http: steps against a real server on loopback that is scripted to misbehave, under a real worker."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.conftest import MakeWorker

pytest.importorskip("httpx2")


class Script:
    """What the server does with the n-th request; `seen` are the requests' headers and, as `:path`, their paths."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.seen: list[dict[str, str]] = []
        self.times: list[float] = []


@contextmanager
def serving(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            script.seen.append({":path": self.path, **headers})
            script.times.append(time.monotonic())
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = script.answers[min(len(script.seen), len(script.answers)) - 1]
            answer(self) if callable(answer) else send(self, *answer)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # clients that go away are what these tests are about

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def drop(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def test_a_server_that_is_overloaded_for_long_is_outlasted_even_by_a_new_worker(worker: MakeWorker) -> None:
    """
    Case M1, scaled: 529 twelve times, then 200; waits grow, the worker is killed in the middle of one, the
    result is there once and under one key.
    """
    script = Script(*[(529, b"overloaded")] * 12, (200, b'{"ok": true}'))
    with serving(script) as url:
        w = worker(f"""
tasks:
  - id: ask
    http: {{method: POST, url: "{url}", json: {{n: 1}}}}
    retry: {{attempts: 2, delay: 100ms, max_delay: 1s, patience: 1min}}
""")
        w.start()
        for _ in range(6):
            w.until("ask: attempt .*not now.*; next")
        w.kill()
        assert w.run() == 0
    assert w.output("ask") == b'{"ok": true}'
    assert len(script.seen) in (13, 14)  # the kill may have fallen into a request
    assert {headers["idempotency-key"] for headers in script.seen} == {"list:ask"}
    outcomes = [row.outcome for row in w.rows()]
    assert outcomes.count("done") == 1 and set(outcomes) <= {"deferred", "interrupted", "done"}
    assert all(row.delay <= 1.0 for row in w.rows())


@pytest.mark.parametrize("value", ["2", "date", "1000000000", "-5", "abc"])
def test_each_kind_of_retry_after(worker: MakeWorker, value: str) -> None:
    """
    Case M1: seconds and dates are obeyed, nonsense is ignored, and nothing outlasts patience.
    """
    at, patience = int(time.time()) + 3, 5 if value == "1000000000" else 60
    said = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(at)) if value == "date" else value
    script = Script(lambda handler: send(handler, 503, Retry_After=said), (200, b"ok"))
    with serving(script) as url:
        w = worker(f"""
tasks:
  - {{id: ask, http: {{url: "{url}"}}, retry: {{delay: 100ms, patience: {patience}s}}}}
""")
        assert w.run() == 0
    (deferred, done) = w.rows()
    assert (deferred.outcome, done.outcome) == ("deferred", "done")
    assert deferred.ended is not None
    due = {"2": deferred.ended + 2, "date": at, "1000000000": deferred.started + patience}.get(value, deferred.ended)
    assert -0.1 <= deferred.ended + deferred.delay - max(due, deferred.ended) <= 1.5


def test_a_slow_stream_is_alive_and_a_hanging_one_is_not(worker: MakeWorker) -> None:
    """
    Bytes count as signs of life; a server that says nothing more is given up after stall_after.
    """
    script = Script(_drip, _hang_after_a_byte, (200, b"whole"))
    with serving(script) as url:
        w = worker(f"""
defaults: {{stall_after: 2s, retry: {{delay: 10ms}}}}
tasks:
  - {{id: slow, http: {{url: "{url}"}}}}
  - {{id: hangs, http: {{url: "{url}"}}}}
""")
        assert w.run() == 0
    assert w.output("slow") == b"x" * 12
    assert w.output("hangs") == b"whole"
    assert [row.outcome for row in w.rows()] == ["done", "stalled", "done"]


def _drip(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "12")
    handler.end_headers()
    for _ in range(12):
        handler.wfile.write(b"x")
        handler.wfile.flush()
        time.sleep(0.3)  # what makes it slow


def _hang_after_a_byte(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "12")
    handler.end_headers()
    handler.wfile.write(b"x")
    handler.wfile.flush()
    handler.rfile.read(1)  # until the client gives up


def test_dropped_and_refused_connections_are_not_now(worker: MakeWorker) -> None:
    """
    No network is "not now", not a failure.
    """
    script = Script(drop, drop, (200, b"ok"))
    with serving(script) as url:
        w = worker(f"""
tasks:
  - {{id: ask, http: {{url: "{url}"}}, retry: {{attempts: 1, delay: 10ms}}}}
""")
        assert w.run() == 0
    assert [row.outcome for row in w.rows()] == ["deferred", "deferred", "done"]
    w = worker(
        f"""
tasks:
  - {{id: ask, http: {{url: "{url}"}}, retry: {{attempts: 1, delay: 10ms, patience: 1s}}}}
""",
        folder="refused",
    )
    assert w.run() == 70
    assert "longer than its patience" in w.rows()[-1].cause


def test_what_the_answer_must_hold(worker: MakeWorker) -> None:
    """
    expect on status and JSON; an answer that is no JSON where JSON is expected is a failed step with the reason.
    """
    good = json.dumps({"choices": [{"finish_reason": "stop"}]}).encode()
    script = Script((404, b"none"), (200, b"<html>"), (200, b'{"choices": []}'), (200, good))
    with serving(script) as url:
        w = worker(f"""
on_failure: continue
defaults: {{retry: {{attempts: 1}}}}
tasks:
  - {{id: gone, http: {{url: "{url}"}}, expect: {{status: [404]}}}}
  - {{id: html, http: {{url: "{url}"}}, expect: {{json: {{choices.0.finish_reason: stop}}}}}}
  - {{id: empty, http: {{url: "{url}"}}, expect: {{json: {{choices.0.finish_reason: stop}}}}}}
  - {{id: good, http: {{url: "{url}"}}, expect: {{json: {{choices.0.finish_reason: stop}}}}}}
""")
        assert w.run() == 70
    assert w.done() == ["gone", "good"]
    assert w.matching("html: .*JSON")


def test_a_secret_in_a_header_is_found_nowhere(worker: MakeWorker, tmp_path: Any) -> None:
    """
    Case J8: in the request only; also when the server sends an error, and the URL holds one.
    """
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "api").write_text("planted-secret-51d0")
    script = Script((401, b"who are you"))
    with serving(script) as url:
        w = worker(
            f"""
tasks:
  - id: ask
    secrets: [api]
    http: {{url: "{url}?k={{secret:api}}", headers: {{Authorization: "Bearer {{secret:api}}"}}}}
    retry: {{attempts: 1}}
""",
            environ={"CREDENTIALS_DIRECTORY": str(credentials)},
        )
        assert w.run() == 70
    assert script.seen[0]["authorization"] == "Bearer planted-secret-51d0"
    assert not w.matching("planted-")
    for path in w.state.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"planted-" not in path.read_bytes(), path
    assert re.search("401", w.rows()[0].cause + " ".join(w.lines))


def test_a_python_step_returns_its_result(worker: MakeWorker) -> None:
    """
    python: module:function with args; an exception is a failure with a short traceback in the log.
    """
    w = worker("""
on_failure: continue
defaults: {cwd: ., retry: {attempts: 1}}
tasks:
  - {id: sums, python: "jobs:add", args: {a: "1", b: "2"}}
  - {id: fails, python: "jobs:fail"}
  - {id: missing, python: "jobs:nothing"}
""")
    (w.config.parent / "jobs.py").write_text(
        "from worker import step\n"
        "def add(a, b):\n"
        "    step.progress(1, 1)\n"
        "    print('said by the way')\n"
        "    return {'sum': int(a) + int(b)}\n"
        "def fail():\n"
        "    raise ValueError('on purpose')\n"
    )
    assert w.run() == 70
    assert json.loads(w.output("sums")) == {"sum": 3}
    assert w.rows()[0].progress == 1.0
    assert w.matching("fails: ValueError: on purpose")
    assert w.matching("missing: .*nothing")
