"""HTTP steps and servers that lie: about sizes, packings, ends and times."""

import contextlib
import functools
import gzip
import json
import socket
import ssl
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.listener import Listener
from tests.support import PATIENCE, ROOT
from tests.surroundings import Surroundings
from tests.unit import test_http_step
from tests.unit.test_http_step import Handler, Server, fetch

server = test_http_step.server
pytestmark = test_http_step.pytestmark
MIB = 1 << 20


@functools.cache
def bomb(size: int, how_often: int = 1) -> bytes:
    """Zeros, packed."""
    data = bytes(size)
    for _ in range(how_often):
        data = gzip.compress(data, mtime=0)
    return data


def test_a_bomb_is_ended_at_the_bound(around: Surroundings, server: Server) -> None:
    """
    S23: counted after unpacking; the cause names the key, and nothing more than the bound is written.
    """
    url = server.answers(200, bomb(200 * MIB), header="Content-Encoding: gzip")
    done = fetch(around, url, max=MIB)
    assert (done.returncode, len(done.stdout)) == (1, MIB)
    assert b"the answer has more than 1M bytes" in done.stderr and b"'max:'" in done.stderr
    assert done.stderr.count(b"\n") == 1
    done = around.program("http", json.dumps({"url": url, "max": MIB, "unsure": []}))
    assert done.returncode == 76, "its request was answered: whether it happened is a doubt"


def test_the_bound_is_there_without_a_key(around: Surroundings, server: Server) -> None:
    """
    S23: a server that says how much is coming is not read at all.
    """

    def huge(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str((1 << 30) + 1))
        handler.end_headers()

    done = fetch(around, server.does(huge))
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"more than 1G bytes" in done.stderr


@pytest.mark.parametrize(
    ("encoding", "packed"),
    [
        ("gzip", gzip.compress(b"x" * MIB)),
        ("x-gzip", gzip.compress(b"x" * MIB)),
        ("GZIP", gzip.compress(b"x" * (MIB - 1)) + gzip.compress(b"x")),
        ("deflate", zlib.compress(b"x" * MIB)),
        ("deflate", zlib.compress(b"x" * MIB)[2:-4]),
        ("identity", b"x" * MIB),
        ("utf-8", b"x" * MIB),
    ],
)
def test_as_much_as_there_may_be_is_done(around: Surroundings, server: Server, encoding: str, packed: bytes) -> None:
    """
    S23: to the byte, however it is packed.
    """
    done = fetch(around, server.answers(200, packed, header=f"Content-Encoding: {encoding}"), max=MIB)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"x" * MIB, b"")
    assert fetch(around, server.url(), max=MIB - 1).returncode == 1


def test_memory_does_not_grow_with_what_is_unpacked(around: Surroundings, server: Server) -> None:
    """
    S23: neither a bomb in the answer nor one in the words of a refusal, nor one inside another, is unpacked at once.
    """
    import resource

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (400 * MIB, 400 * MIB))

    for status, times, header in [(200, 1, "gzip"), (404, 1, "gzip"), (200, 2, "gzip, gzip"), (404, 2, "gzip, gzip")]:
        url = server.answers(status, bomb(600 * MIB, times), header=f"Content-Encoding: {header}")
        boot = "import sys; sys.path.insert(0, sys.argv.pop(1)); from worker.steps import main; main(sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-I", "-c", boot, str(ROOT), "http", json.dumps({"url": url, "max": 8 * MIB})],
            env=around.environ,
            capture_output=True,
            timeout=PATIENCE,
            preexec_fn=limited,
        )
        assert done.returncode == 1 and len(done.stdout) <= 8 * MIB
        assert b"Traceback" not in done.stderr and b"Memory" not in done.stderr, done.stderr


@pytest.mark.parametrize("packed", [gzip.compress(b"x" * 1000)[:-9], b"no gzip", gzip.compress(b"x" * 100000)[:50]])
def test_what_cannot_be_unpacked_to_its_end_is_not_done(around: Surroundings, server: Server, packed: bytes) -> None:
    """
    A cut result is never called done.
    """
    done = fetch(around, server.answers(200, packed, header="Content-Encoding: gzip"))
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1
    assert b"unpacked" in done.stderr or b"ends before" in done.stderr


class Raw(Listener):
    """A server that does to a connection what it is given; certificates where it speaks TLS."""

    def __init__(self, talk: Callable[[socket.socket], None], context: ssl.SSLContext | None = None) -> None:
        self.ended = threading.Event()
        self._talk, self._context = talk, context
        super().__init__()

    def talk(self, client: socket.socket) -> None:
        talking = client if self._context is None else self._context.wrap_socket(client, server_side=True)
        talking.recv(65536)
        self._talk(talking)

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http{'s' if self._context else ''}://{host}:{self.port}/"

    def close(self) -> None:
        self.ended.set()
        super().close()


@pytest.fixture
def raw() -> Iterator[Callable[..., Raw]]:
    made: list[Raw] = []

    def make(talk: Callable[[socket.socket], None], context: ssl.SSLContext | None = None) -> Raw:
        made.append(Raw(talk, context))
        return made[-1]

    yield make
    for one in made:
        one.close()


def endless_headers(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        client.sendall(b"X-Filler: " + b"x" * 1000 + b"\r\n")


def one_endless_header(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nX-Filler: ")
    while True:
        client.sendall(b"x" * 1000)


def endless_chunks(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        client.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n")


def endless_body(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        client.sendall(b"x" * 1000)


def endless_trailers(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
    while True:
        client.sendall(b"X-Filler: " + b"x" * 1000 + b"\r\n")


def endless_interim_answers(client: socket.socket) -> None:
    while True:
        client.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 50)


@pytest.mark.parametrize("talk", [endless_headers, one_endless_header, endless_chunks, endless_body, endless_trailers])
def test_what_has_no_end_ends(
    around: Surroundings, raw: Callable[..., Raw], talk: Callable[[socket.socket], None]
) -> None:
    """
    Headers, chunks, bodies and trailers: each has a bound, the end of which is one line and never "done".
    """
    done = fetch(around, raw(talk).url(), max=MIB)
    assert done.returncode in (1, 75) and len(done.stdout) <= MIB
    assert done.stderr.count(b"\n") == 1, done.stderr


DEADLINE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from worker.steps import http, main
http._LONGEST = 1.0
main(sys.argv[2:])
"""


def drop_by_drop(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    while True:
        client.sendall(b"x")
        time.sleep(0.01)


def headers_drop_by_drop(client: socket.socket) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nX-Filler: ")
    while True:
        client.sendall(b"x")
        time.sleep(0.01)


@pytest.mark.parametrize("talk", [drop_by_drop, headers_drop_by_drop, endless_interim_answers])
def test_a_byte_now_and_then_is_not_for_ever(
    around: Surroundings, raw: Callable[..., Raw], talk: Callable[[socket.socket], None]
) -> None:
    """
    The whole answer has a deadline, that of a day and more, here of a second; it is not now, and a doubt.
    """
    spec = json.dumps({"url": raw(talk).url(), "timeout": 30, "max": 1, "unsure": []})
    done = subprocess.run(
        [sys.executable, "-I", "-c", DEADLINE, str(ROOT), "http", spec],
        env=around.environ,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert done.stderr.count(b"\n") == 1
    assert done.returncode in (74, 76), done.stderr
    if talk is not drop_by_drop:  # which is more than its max, too
        assert b"no end of its answer" in done.stderr


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 50\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1e1\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nshort\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffffffffff\r\nshort",
    ],
)
def test_a_length_that_is_not_so_is_not_done(around: Surroundings, raw: Callable[..., Raw], answer: bytes) -> None:
    """
    Fewer bytes than were said, two lengths, none that can be: a cut result is never called done.
    """
    done = fetch(around, raw(lambda client: client.sendall(answer)).url())
    assert done.returncode in (1, 75), (done.returncode, done.stdout)
    assert done.stderr.count(b"\n") == 1 and b"Traceback" not in done.stderr


def test_an_end_that_anybody_can_bring_about_is_none(
    around: Surroundings, raw: Callable[..., Raw], tmp_path: Path
) -> None:
    """
    Over TLS, a body that ends with its connection has ended when the server says so, and not when a packet does.
    """
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    named = ["-addext", "subjectAltName=DNS:localhost", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run([*new, *named], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    around.environ["SSL_CERT_FILE"] = str(tmp_path / "cert.pem")

    def cut(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\nhalf of it")

    def end(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        with contextlib.suppress(OSError):
            client.unwrap()  # type: ignore[attr-defined]

    def whole(client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nall of it")

    done = fetch(around, raw(end, context).url("localhost"))
    assert (done.returncode, done.stdout) == (0, b"all of it"), done.stderr
    done = fetch(around, raw(cut, context).url("localhost"))
    assert done.returncode == 75, (done.stdout, done.stderr)
    done = fetch(around, raw(whole, context).url("localhost"))
    assert (done.returncode, done.stdout) == (0, b"all of it"), "its length has said where it ends"
