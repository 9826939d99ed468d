"""HTTP steps: one request to a real server on loopback, in a process of its own."""

import json
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE, ROOT
from tests.surroundings import Surroundings
from worker import doubt, step
from worker.steps import secrets
from worker.steps.http import problems, retry_after

SECRET = "s3cret/+ü"
NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
pytestmark = [
    pytest.mark.programs,
    pytest.mark.skipif(
        subprocess.run([sys.executable, "-c", "import httpx2"], capture_output=True).returncode != 0,
        reason="httpx2 is not installed",
    ),
]


class Handler(BaseHTTPRequestHandler):
    """Answers by the server's script, one entry a path."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, dict(self.headers), body))
        self.close_connection = True
        self.server.script[self.path.partition("?")[0]](self)

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    def answer(self, status: int, body: bytes = b"", length: int | None = None, header: str = "") -> None:
        self.send_response(status)
        if header:
            self.send_header(*header.split(": ", 1))
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: dict[str, Callable[[Handler], None]] = {}
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.go_on = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, path: str = "/") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def answers(self, status: int, body: bytes = b"", path: str = "/", header: str = "") -> str:
        """Answer so on `path` from now on; return its URL."""
        self.script[path] = lambda handler: handler.answer(status, body, header=header)
        return self.url(path)

    def does(self, what: Callable[[Handler], None], path: str = "/") -> str:
        self.script[path] = what
        return self.url(path)

    def close(self) -> None:
        self.go_on.set()
        self.shutdown()
        self.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def fetch(around: Surroundings, url: str, **spec: Any) -> subprocess.CompletedProcess[bytes]:
    return around.program("http", json.dumps({"url": url, **spec}))


def test_the_body_of_the_answer_is_the_result(around: Surroundings, server: Server) -> None:
    """
    Byte for byte on standard output; the request bears the step's key.
    """
    done = fetch(around, server.answers(200, bytes(range(256))))
    assert (done.returncode, done.stdout, done.stderr) == (0, bytes(range(256)), b"")
    method, _, headers, _ = server.requests[0]
    assert method == "GET"
    assert headers["idempotency-key"] == "run:step"


def test_what_is_sent_is_filled_in_the_process(around: Surroundings, server: Server) -> None:
    """
    `{secret:NAME}`, `{item}` and `{key}`: encoded in the URL, as they are elsewhere; other braces stay.
    """
    (around.secrets / "token").write_text(SECRET + "\n")
    url = server.answers(201, b"made", "/of/a%20b%2Fc")
    request: dict[str, Any] = {
        "url": f"{server.url()}of/{{item}}?token={{secret:token}}",
        "headers": {"Authorization": "Bearer {secret:token}", "idempotency-key": "own-{key}"},
        "json": {"text": ["{item}", "{secret:token}", "{other} {", 1, None]},
    }
    around.environ["AGENT_ITEM"] = "a b/c"
    done = around.program("http", json.dumps(request))
    assert (done.returncode, done.stdout) == (0, b"made"), (done.stderr, url)
    method, path, headers, body = server.requests[0]
    assert (method, path) == ("POST", "/of/a%20b%2Fc?token=s3cret%2F%2B%C3%BC")
    assert headers["authorization"].encode("latin-1").decode() == f"Bearer {SECRET}"
    assert (headers["idempotency-key"], headers["content-type"]) == ("own-run:step", "application/json")
    assert json.loads(body)["text"] == ["a b/c", SECRET, "{other} {", 1, None]
    assert secrets(request) == ["token"]


def test_a_url_may_be_a_secret_as_a_whole(around: Surroundings, server: Server) -> None:
    """
    Webhooks are; what stands at the start of a URL is not encoded.
    """
    (around.secrets / "hook").write_text(server.answers(200, b"ok", "/hook/1"))
    assert fetch(around, "{secret:hook}", body="hello").stdout == b"ok"
    assert server.requests[0][3] == b"hello"


def test_a_file_is_sent_as_a_stream(around: Surroundings, server: Server) -> None:
    """
    With its length; one that cannot be read is one line.
    """
    (around.cwd / "data").write_bytes(b"x" * 1_000_000)
    assert fetch(around, server.answers(204), file="data", method="put").returncode == 0
    assert (server.requests[0][0], len(server.requests[0][3])) == ("PUT", 1_000_000)
    done = fetch(around, server.url(), file="date")
    assert (done.returncode, done.stderr) == (1, b"http: file: cannot read 'date': No such file or directory\n")


@pytest.mark.parametrize("kind", ["/dev/zero", "fifo", "folder"])
def test_c11_a_file_that_has_no_end_is_not_sent(around: Surroundings, server: Server, kind: str) -> None:
    """C11: nor one that nobody writes to: refused at once, before the server has heard of it."""
    folder = Path(around.cwd)
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    done = fetch(around, server.answers(204), file=kind)
    assert (done.returncode, done.stderr) == (1, f"http: file: cannot read '{kind}': is no plain file\n".encode())
    assert server.requests == []


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 529])
def test_not_now(around: Surroundings, server: Server, status: int) -> None:
    """
    Case M1: a server that cannot now is tried again later, by exit status 75; it is not a failure.
    """
    done = fetch(around, server.answers(status, b"overloaded"))
    assert (done.returncode, done.stdout) == (step.AGAIN, b"")
    assert done.stderr.decode().startswith(f"GET {server.url('')}: {status}")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        ("0", 0.0),
        ("-5", 0.0),
        ("1000000000", 1e9),
        ("abc", None),
        ("10^9", None),
        (str(10**19), 1e9),
        ("nan", None),
        ("1.5 minutes", None),
        ("9" * 5000, None),
        ("", None),
        (format_datetime(NOW + timedelta(minutes=45), usegmt=True), 2700.0),
        (format_datetime(NOW - timedelta(minutes=45), usegmt=True), 0.0),
        ("Sat, 31 Jan 2026 12:00:10 -0000", 10.0),
        ("Sat, 99 Jan 2026 12:00:10 GMT", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 1e9),
        ("31 Jan 99999999999 1:1:1 +9999", None),
        ("-inf", None),
        ("1e400", None),
    ],
)
def test_retry_after_in_each_kind(value: str, seconds: float | None) -> None:
    """
    Case M1: seconds, a date, a negative, nonsense, a huge one.
    """
    assert retry_after(value, NOW) == seconds


@pytest.mark.parametrize(("value", "sent"), [("120", ["X_AGENT_RETRY_AFTER=120"]), ("-1", ["X_AGENT_RETRY_AFTER=0"])])
def test_the_server_s_wish_reaches_the_worker(
    around: Surroundings, server: Server, value: str, sent: list[str]
) -> None:
    """
    Case M1: as a message that is read while its sender lives.
    """
    around.listener.read_all()
    assert fetch(around, server.answers(529, header=f"Retry-After: {value}")).returncode == step.AGAIN
    assert around.messages == sent
    assert around.listener.unbelievable == []


def test_the_words_of_a_server_cannot_move_the_cursor(around: Surroundings, server: Server) -> None:
    """
    S32: its reason phrase goes into the log and into the cause.
    """

    def answer(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 400 Bad \x9b2J\r\nContent-Length: 4\r\n\r\n\x1b[2J")

    done = fetch(around, server.does(answer))
    assert (done.returncode, b"\x1b" in done.stderr, "\x9b" in done.stderr.decode()) == (1, False, False)
    assert f"GET {server.url('')}: 400 Bad" in done.stderr.decode()


@pytest.mark.parametrize("place", ["phrase", "body", "value", "name"])
def test_nothing_of_a_server_s_moves_the_cursor(around: Surroundings, server: Server, place: str) -> None:
    """
    S32: whatever a message of ours quotes is made safe in one place, also what is no ASCII.
    """
    evil = "a\x1b[2J\x9b2J\u202eb\x7f"
    expect: dict[str, Any] = {}
    if place == "phrase":
        line = f"HTTP/1.1 400 {evil}".encode("latin-1", "replace") + b"\r\nContent-Length: 0\r\n\r\n"

        def answer(handler: Handler) -> None:
            handler.wfile.write(line)

        url = server.does(answer)
    elif place == "body":
        url = server.answers(400, evil.encode())
    else:
        url = server.answers(200, json.dumps({"ok": evil, evil: 1}).encode())
        expect = {"json": {"ok": True} if place == "value" else {"ok." + evil: 1}}
    done = fetch(around, url, expect=expect)
    said = done.stderr.decode()
    assert done.returncode in (1, 75) and said
    assert all(c.isprintable() or c == "\n" for c in said), said.encode()


def test_an_answer_that_is_too_long_to_be_checked_leaves_a_doubt(around: Surroundings, server: Server) -> None:
    """
    F2: the server has done it; so it has where its answer ends too early, and where nobody reads what we print.
    """
    long = server.answers(200, b" " * (17 * 1024 * 1024))
    done = fetch(around, long, expect={"json": {"ok": True}}, unsure=[])
    assert (done.returncode, b"too long to be checked" in done.stderr) == (doubt.FAILED, True)
    with around.start(*around.command("http", json.dumps({"url": long, "unsure": []}))) as process:
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode not in (0, step.AGAIN, doubt.REFUSED, doubt.NO_HOST), "those leave no doubt"


def test_a_redirection_that_leads_nowhere_leaves_a_doubt(around: Surroundings, server: Server) -> None:
    """
    F2: the first server was asked, whatever became of the second.
    """
    url = server.answers(302, header="Location: http://127.0.0.1:1/")
    assert fetch(around, url, unsure=[]).returncode == doubt.NOT_NOW
    around_and_around = server.answers(302, header="Location: /loop", path="/loop")
    assert fetch(around, around_and_around, unsure=[]).returncode == doubt.FAILED


def test_nonsense_from_the_server_is_no_wish(around: Surroundings, server: Server) -> None:
    """
    Case M1: `Retry-After: abc` leaves the wait to the worker.
    """
    around.listener.read_all()
    assert fetch(around, server.answers(429, header="Retry-After: abc")).returncode == step.AGAIN
    assert around.messages == []


def _drop_at_once(handler: Handler) -> None:
    handler.connection.close()


def _drop_in_the_middle(handler: Handler) -> None:
    handler.answer(200, b"only a part", length=1000)


def _no_http(handler: Handler) -> None:
    handler.wfile.write(b"\0\1\2 this is not HTTP\r\n\r\n")


@pytest.mark.parametrize("what", [_drop_at_once, _drop_in_the_middle, _no_http])
def test_a_dropped_connection_is_not_now(around: Surroundings, server: Server, what: Callable[[Handler], None]) -> None:
    """
    Before the answer or in its middle: a part of a body is never a result.
    """
    done = fetch(around, server.does(what))
    assert done.returncode == step.AGAIN
    assert done.stderr.decode().startswith(f"GET {server.url('')}: ")
    assert done.stderr.count(b"\n") == 1


def test_no_server_is_not_now(around: Surroundings, server: Server) -> None:
    """
    Nobody listens there, or the name is not known just now.
    """
    server.close()
    assert fetch(around, server.url()).returncode == step.AGAIN
    done = fetch(around, "http://nowhere.invalid/")
    assert done.returncode == step.AGAIN
    if b"there is no host of that name" in done.stderr and b"default" in _routes():
        done = fetch(around, "http://nowhere.invalid/", unsure=[])
        assert done.returncode == doubt.NO_HOST, "E13: the worker has less patience with it"
    assert fetch(around, server.url(), unsure=[]).returncode == step.AGAIN


def _routes() -> bytes:
    return b"default" if any(line.split()[1] == "0" * 8 for line in Path("/proc/net/route").open()) else b""


def test_a_server_that_hangs_is_left_after_the_timeout(around: Surroundings, server: Server) -> None:
    """
    If the request has one; else the task's own limits end it.
    """
    url = server.does(lambda handler: _wait(server))
    done = fetch(around, url, timeout=0.2)
    assert done.returncode == step.AGAIN
    assert b"ReadTimeout" in done.stderr


def _wait(server: Server) -> None:
    server.go_on.wait(PATIENCE)


def test_a_slow_answer_is_passed_on_as_it_comes(around: Surroundings, server: Server) -> None:
    """
    The first bytes are out, and a beat sent, while the server still holds the rest back.
    """

    def slowly(handler: Handler) -> None:
        handler.answer(200, b"first ", length=12)
        _wait(server)
        handler.wfile.write(b"second")

    around.listener.read_all()
    command = around.command("http", json.dumps({"url": server.does(slowly)}))
    around.environ["WATCHDOG_USEC"] = "1000"
    with around.start(*command) as process:
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100) == b"first "
        server.go_on.set()
        assert process.communicate(timeout=PATIENCE)[0] == b"second"
    assert process.returncode == 0
    assert set(around.messages) == {"WATCHDOG=1"}


def test_a_large_answer_does_not_grow_the_process(around: Surroundings, server: Server) -> None:
    """
    A hundred megabytes pass through a few.
    """
    size = 100 * 1024 * 1024

    def large(handler: Handler) -> None:
        handler.answer(200, length=size)
        for _ in range(100):
            handler.wfile.write(bytes(size // 100))

    def peak(url: str) -> tuple[int, int]:
        command = [sys.executable, *around.command("http", json.dumps({"url": url}))]
        read, write = os.pipe()
        process = subprocess.Popen(command, env=around.environ, stdout=write)
        os.close(write)
        with open(read, "rb", buffering=0) as output:
            total = sum(iter(lambda: len(output.read(65536)), 0))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return total, usage.ru_maxrss

    _, small = peak(server.answers(200, b"x", "/small"))
    total, big = peak(server.does(large))
    assert total == size
    assert big - small < 20 * 1024  # KiB


@pytest.mark.parametrize("status", [301, 400, 401, 404, 410])
def test_other_statuses_fail_with_the_server_s_words(around: Surroundings, server: Server, status: int) -> None:
    """
    The first lines of the body say why; control characters do not reach the terminal.
    """
    done = fetch(around, server.answers(status, b"no such \x1b[2Jmodel\n" + b"line\n" * 100), method="POST")
    assert (done.returncode, done.stdout) == (1, b"")
    lines = done.stderr.decode().splitlines()
    assert lines[0].startswith(f"POST {server.url('')}: {status} ")
    assert lines[1] == "no such \ufffd[2Jmodel"
    assert len(lines) <= 11


def test_expected_statuses_replace_2xx(around: Surroundings, server: Server) -> None:
    """
    A 404 may be what one wants, and then 200 is not.
    """
    assert fetch(around, server.answers(404, b"gone"), expect={"status": [404, 410]}).stdout == b"gone"
    assert fetch(around, server.answers(503, b"down"), expect={"status": [503]}).returncode == 0
    assert fetch(around, server.answers(200, b"there"), expect={"status": [404, 410]}).returncode == 1


@pytest.mark.parametrize(
    ("body", "expected", "fault"),
    [
        ({"choices": [{"finish_reason": "stop"}]}, {"choices.0.finish_reason": "stop"}, None),
        ({"ok": True, "n": 1}, {"ok": True, "n": 1}, None),
        ({}, {}, None),
        ({"choices": [{"finish_reason": "length"}]}, {"choices.0.finish_reason": "stop"}, 'is "length", not "stop"'),
        ({"ok": 1}, {"ok": True}, "'ok' in the answer is 1, not true"),
        ({"choices": []}, {"choices.0.finish_reason": "stop"}, "there is no 'choices.0.finish_reason' in the answer"),
        (["x"], {"a": "b"}, "there is no 'a' in the answer"),
        (None, {"a": "b"}, "there is no 'a' in the answer"),
    ],
)
def test_what_the_answer_must_say(
    around: Surroundings, server: Server, body: object, expected: dict[str, object], fault: str | None
) -> None:
    """
    Case P8: a 200 that did not do the work is a failure, which is retried.
    """
    data = json.dumps(body).encode()
    done = fetch(around, server.answers(200, data), expect={"json": expected})
    assert done.stdout == data
    assert done.returncode == (0 if fault is None else 1)
    assert (fault or "") in done.stderr.decode()


def test_an_answer_that_is_not_json_fails(around: Surroundings, server: Server) -> None:
    """
    A proxy's friendly page is not what was asked for.
    """
    done = fetch(around, server.answers(200, b"<html>Please log in"), expect={"json": {"ok": True}})
    assert done.returncode == 1
    assert b"the answer is not JSON" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_an_answer_too_long_to_be_checked_fails(around: Surroundings, server: Server) -> None:
    """
    Rather than that the process grows with it.
    """
    url = server.answers(200, b"[" + b" " * (17 * 1024 * 1024) + b"]")
    done = fetch(around, url, expect={"json": {"ok": True}})
    assert done.returncode == 1
    assert b"too long to be checked" in done.stderr


def test_redirects_are_followed_where_nothing_is_sent(around: Surroundings, server: Server) -> None:
    """
    For GET and HEAD only, not for ever, and another host is told no secret.
    """
    (around.secrets / "token").write_text(SECRET)
    other = Server()
    try:
        target = other.answers(200, b"moved here", "/there")
        url = server.answers(302, header=f"Location: {target}")
        done = fetch(around, url, headers={"X-Api-Key": "{secret:token}", "X-Plain": "yes"})
        assert (done.returncode, done.stdout) == (0, b"moved here"), done.stderr
        there = {name.lower(): value for name, value in other.requests[0][2].items()}
        assert not {"x-api-key", "x-plain"} & set(there)
        assert "x-api-key" in {name.lower() for name in server.requests[0][2]}
        assert fetch(around, url, method="POST", body="x").returncode == 1
        assert len(other.requests) == 1
    finally:
        other.close()
    done = fetch(around, server.answers(302, header="Location: /"))
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"redirects" in done.stderr


@pytest.mark.parametrize("case", ["body", "url", "userinfo", "header", "no server", "answer"])
def test_no_secret_is_in_our_messages(around: Surroundings, server: Server, case: str) -> None:
    """
    Case J8: wherever it was sent, and whatever the server says about it, the log has only its name.
    """
    (around.secrets / "token").write_text(SECRET + "\n")
    spec: dict[str, Any] = {"url": server.answers(400, f"bad token {SECRET}".encode()), "headers": {}}
    if case == "url":
        spec["url"] += "?token={secret:token}"
    elif case == "userinfo":
        spec["url"] = spec["url"].replace("://", "://me:{secret:token}@")
    elif case == "header":
        (around.secrets / "token").write_text(SECRET + "\nX-Injected: yes")
        spec["headers"] = {"Authorization": "Bearer {secret:token}"}
    elif case == "no server":
        spec["url"] = "http://{secret:token}.invalid/"
        (around.secrets / "token").write_text("s3cret")
    elif case == "answer":
        spec |= {"url": server.answers(200, json.dumps([SECRET]).encode()), "expect": {"json": {"0": "x"}}}
    done = around.program("http", json.dumps(spec))
    assert done.returncode != 0
    assert b"s3cret" not in done.stderr, done.stderr
    assert done.stderr.startswith((b"GET http://", b"http: headers: the value of 'authorization'"))
    assert b"Traceback" not in done.stderr


def test_a_missing_secret_is_one_line(around: Surroundings, server: Server) -> None:
    """
    And nothing is sent.
    """
    done = fetch(around, server.answers(200), headers={"Authorization": "Bearer {secret:token}"})
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"there is no secret 'token' here" in done.stderr
    assert server.requests == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
def test_a_certificate_that_is_not_trusted_fails(around: Surroundings, server: Server, tmp_path: Path) -> None:
    """
    Waiting does not mend it.
    """
    files = ["-keyout", f"{tmp_path}/key", "-out", f"{tmp_path}/certificate"]
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", *files]
    subprocess.run(request, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    done = fetch(around, server.url().replace("http:", "https:"))
    assert (done.returncode, b"CERTIFICATE" in done.stderr.upper()) == (1, True), done.stderr


CA = """
[ca]
default_ca = own
[own]
new_certs_dir = .
database = index
serial = serial
default_md = sha256
policy = policy
copy_extensions = copy
[policy]
commonName = supplied
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate")
@pytest.mark.parametrize(
    ("start", "end", "name", "status", "words"),
    [
        ("20400102030405Z", "20410101000000Z", "127.0.0.1", step.AGAIN, b"not valid before 2040-01-02T03:04:05Z; this"),
        ("20510102030405Z", "20520101000000Z", "127.0.0.1", step.AGAIN, b"not valid before 2051-01-02T03:04:05Z; this"),
        ("20200101000000Z", "20210101000000Z", "127.0.0.1", 1, b"certificate has expired"),
        ("20200101000000Z", "20410101000000Z", "127.0.0.2", 1, b"IP address mismatch"),
        ("20200101000000Z", "20410101000000Z", "127.0.0.1", 0, b""),
    ],
)
def test_a_certificate_of_a_later_date_is_not_now(
    around: Surroundings, server: Server, tmp_path: Path, start: str, end: str, name: str, status: int, words: bytes
) -> None:
    """
    N24: the clock of a machine that was just started may be behind; expired and of another host are refusals.
    """
    (tmp_path / "ca.cnf").write_text(CA)
    (tmp_path / "index").touch()
    (tmp_path / "serial").write_text("01\n")

    def openssl(words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=tmp_path, check=True, capture_output=True)

    openssl(
        "req -x509 -newkey rsa:2048 -nodes -subj /CN=ca -keyout ca.key -out ca.crt -days 9999 "
        "-addext keyUsage=critical,keyCertSign,cRLSign"
    )  # Python 3.13 wants it
    openssl(
        f"req -newkey rsa:2048 -nodes -subj /CN=localhost -addext subjectAltName=IP:{name} -keyout key -out request"
    )
    ours = "-batch -config ca.cnf -cert ca.crt -keyfile ca.key -in request -out certificate"
    openssl(f"ca {ours} -startdate {start} -enddate {end}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    around.environ["SSL_CERT_FILE"] = f"{tmp_path}/ca.crt"
    done = fetch(around, server.answers(200).replace("http:", "https:"))
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "url: is missing"),
        ({"url": 3}, "url: must be text"),
        ({"url": "ftp://x/"}, "url: must begin with http:// or https://"),
        ({"url": "example.org"}, "url: must begin with http:// or https://"),
        ({"url": "http:///path"}, "url: has no host"),
        ({"url": "http://x y/"}, "url: has a space"),
        ({"url": "http://me:hunter2/"}, "url: its host or port cannot be read"),
        ({"url": "http://[::1/"}, "url: its host or port cannot be read"),
        ({"url": "http://x", "method": "GE T"}, "method: "),
        ({"url": "http://x", "headers": {"a b": "c"}}, "headers: 'a b' is not a header's name"),
        ({"url": "http://x", "headers": {"a": "b\r\nc: d"}}, "headers: the value of 'a' has a line break"),
        ({"url": "http://x", "headers": {"a": 1}}, "headers: the value of 'a' must be text"),
        ({"url": "http://x", "headers": {"Content-Length": "1"}}, "headers: 'Content-Length' follows from"),
        ({"url": "http://x", "headers": []}, "headers: must be a mapping"),
        ({"url": "http://x", "json": 1, "body": "x"}, "json and body: only one"),
        ({"url": "http://x", "body": 1}, "body: must be text"),
        ({"url": "http://x", "timeout": 0}, "timeout: must be"),
        ({"url": "http://x", "timeout": True}, "timeout: must be"),
        ({"url": "http://x", "expect": {"status": []}}, "expect: 'status' must be"),
        ({"url": "http://x", "expect": {"status": ["200"]}}, "expect: 'status' must be"),
        ({"url": "http://x", "expect": {"json": "ok"}}, "expect: 'json' must be"),
        ({"url": "http://x", "expect": {"jsno": {}}}, "expect: 'jsno': unknown key"),
        ({"url": "http://x", "metod": "GET"}, "metod: unknown key"),
    ],
)
def test_a_bad_request_is_known_before_the_run(spec: dict[str, Any], words: str) -> None:
    """
    One line for each mistake, none of which shows a value.
    """
    (found,) = problems(spec)
    assert found.startswith(words)
    assert "hunter2" not in found


@pytest.mark.parametrize(
    "url", ["https://x:8443/a?b=c#d", "{item}", "{secret:hook}", "https://{item}/", "https://[::1]/", "http://ü/"]
)
def test_a_good_request_has_no_problems(url: str) -> None:
    """
    What only the step can know is left to the step.
    """
    spec: dict[str, Any] = {"url": url, "headers": {"A": "{secret:a}", "B": "ü"}, "json": {"a": [1]}}
    assert problems({**spec, "timeout": 1.5, "expect": {"status": [200], "json": {"a.0": 1}}}) == []


@pytest.mark.parametrize("item", ["ftp://x/", "no url", ""])
def test_a_url_that_turns_out_bad_is_one_line(around: Surroundings, item: str) -> None:
    """
    As when it came from a list of items.
    """
    around.environ["AGENT_ITEM"] = item
    done = fetch(around, "{item}")
    assert done.returncode == 1
    assert done.stderr.startswith(b"http: url: ")
    assert done.stderr.count(b"\n") == 1


def test_without_a_library_it_says_what_to_install(around: Surroundings, server: Server) -> None:
    """
    A machine that was installed without a network runs everything else.
    """
    hide = "import sys; sys.modules.update(httpx=None, httpx2=None)\n"
    command = around.command("http", json.dumps({"url": server.answers(200)}))
    command[2] = hide + command[2]
    done = around.run(*command)
    assert done.returncode == 1
    assert b"apt-get install python3-httpx" in done.stderr


def test_the_daemon_can_look_at_requests_without_the_library() -> None:
    """
    problems() is called before the run; the library is imported in the step's process only.
    """
    look = "import sys, worker.steps.http as h; h.problems({'url': 'http://x'}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, check=True, text=True)
    assert {"httpx", "httpx2", "ssl", "asyncio"}.isdisjoint(done.stdout.split())
