"""Redirects of HTTP steps: what another origin is told."""

import base64
import json
from collections.abc import Iterator

import pytest

from tests.surroundings import Surroundings
from tests.unit import test_http_step
from tests.unit.test_http_step import SECRET, Server, fetch
from worker.steps import redirects

server = test_http_step.server
pytestmark = test_http_step.pytestmark


@pytest.fixture
def other() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def told(server: Server) -> str:
    """Return all that a server has been told, in lower case."""
    return "\n".join(f"{method} {path} {headers} {body!r}" for method, path, headers, body in server.requests).lower()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_another_origin_gets_accept_and_user_agent_and_nothing_more(
    around: Surroundings, server: Server, other: Server, status: int
) -> None:
    """
    S20: no header that was written for the first one, no key, no cookie, no userinfo, whichever status sends us there.
    """
    (around.secrets / "token").write_text(SECRET)
    target = other.answers(200, b"moved here", "/there")
    url = server.answers(status, header=f"Location: {target}").replace("http://", "http://me:userinfo-password@")
    headers = {
        "X-Other-Key": "literal-key",
        "X-Api-Key": "{secret:token}",
        "Cookie": "session=biscuit",
        "Idempotency-Key": "run:step",
        "Accept": "text/plain",
        "User-Agent": "mine",
        "Accept-Language": "{secret:token}",
    }
    done = fetch(around, url, headers=headers)
    assert (done.returncode, done.stdout) == (0, b"moved here"), done.stderr
    assert {name.lower() for name in other.requests[0][2]} <= {"host", "accept", "user-agent", "connection"}
    assert "text/plain" in told(other) and "mine" in told(other)
    assert base64.b64encode(b"me:userinfo-password").decode().lower() in told(server)


def test_a_secret_is_in_no_header_that_goes_along(around: Surroundings, server: Server, other: Server) -> None:
    """
    S20: not even where the list has put it into User-Agent or Accept.
    """
    (around.secrets / "token").write_text("s3cret")
    url = server.answers(302, header=f"Location: {other.answers(200, b'there')}")
    headers = {"USER-AGENT": "me {secret:token}", "accept": "x/{secret:token}"}
    assert fetch(around, url, headers=headers).returncode == 0
    assert "s3cret" in told(server) and "s3cret" not in told(other)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("content", ["body", "json", "file"])
def test_a_body_is_not_sent_on_to_another_origin(
    around: Surroundings, server: Server, other: Server, status: int, content: str
) -> None:
    """
    S20: a GET with a body is led away; nothing arrives there, and it is said which server the list would have to name.
    """
    (around.secrets / "tok").write_text("s3cret")
    (around.cwd / "data").write_text("s3cret")
    url = server.answers(status, header=f"Location: {other.answers(200, b'there', '/x')}")
    values = {"body": "pw={secret:tok}", "json": {"pw": "{secret:tok}"}, "file": "data"}
    done = around.program("http", json.dumps({"url": url, "method": "GET", content: values[content]}))
    assert (done.returncode, other.requests, done.stdout) == (1, [], b"")
    assert f"a redirect ({status}) to http://127.0.0.1:{other.server_port}" in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1 and b"s3cret" not in done.stderr


def test_a_body_follows_within_its_origin(around: Surroundings, server: Server) -> None:
    """
    S20: with its headers, since it is the same server.
    """
    server.answers(200, b"there", "/there")
    url = server.answers(307, header="Location: /there")
    assert fetch(around, url, method="GET", body="query", headers={"X-Key": "k"}).stdout == b"there"
    assert server.requests[1][3] == b"query" and "x-key" in told(server).splitlines()[1]


def test_nothing_comes_back_on_the_way_back(around: Surroundings, server: Server, other: Server) -> None:
    """
    S20: who sends us away and gets us back could otherwise choose where the headers arrive.
    """
    server.answers(200, b"back", "/back")
    away = other.answers(302, header=f"Location: {server.url('/back')}")
    url = server.answers(302, header=f"Location: {away}")
    assert fetch(around, url, headers={"X-Key": "literal-key"}).stdout == b"back"
    assert "literal-key" in told(server).splitlines()[0]
    assert "literal-key" not in told(server).splitlines()[1]


def test_a_cookie_of_one_port_is_not_for_another(around: Surroundings, server: Server, other: Server) -> None:
    """
    S20: cookies know no ports, origins do.
    """
    target = other.answers(200, b"there")
    server.does(lambda handler: None)

    def set_cookie(handler: test_http_step.Handler) -> None:
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.send_header("Set-Cookie", "session=biscuit; Path=/")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    assert fetch(around, server.does(set_cookie)).stdout == b"there"
    assert "biscuit" not in told(other)


def test_userinfo_in_a_location_is_not_used(around: Surroundings, server: Server, other: Server) -> None:
    """
    S20: a server does not decide as whom we speak to another one.
    """
    target = other.answers(200, b"there").replace("http://", "http://admin:admin@")
    assert fetch(around, server.answers(302, header=f"Location: {target}")).stdout == b"there"
    assert "authorization" not in told(other)


def test_the_log_says_that_the_headers_were_left_behind(around: Surroundings, server: Server, other: Server) -> None:
    """
    S20: a 401 after a redirect is not for a wrong password.
    """
    url = server.answers(301, header=f"Location: {other.answers(401, b'who are you')}")
    done = fetch(around, url, headers={"Authorization": "Bearer x"})
    said = done.stderr.decode()
    assert f": 401 Unauthorized, sent on to http://127.0.0.1:{other.server_port} without its headers" in said, said


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("http://example.com/a", "http://EXAMPLE.com:80/b", True),
        ("https://example.com", "https://example.com:443", True),
        ("http://user:pw@example.com", "http://example.com", True),
        ("http://bücher.example", "http://xn--bcher-kva.example", True),
        ("http://BÜCHER.example", "http://bücher.example", True),
        ("http://[::1]", "http://[::1]:80", True),
        ("http://example.com", "https://example.com", False),
        ("http://example.com:443", "https://example.com:443", False),
        ("https://example.com:80", "http://example.com:80", False),
        ("http://example.com", "http://example.com:8080", False),
        ("http://example.com", "http://example.com.", False),
        ("http://example.com", "http://www.example.com", False),
        ("http://example.com@evil.test", "http://example.com", False),
        ("http://127.0.0.1", "http://localhost", False),
    ],
)
def test_what_one_origin_is(one: str, two: str, same: bool) -> None:
    """
    S20: scheme, host and port; neither the case nor the spelling of a host makes another one.
    """
    httpx = pytest.importorskip("httpx2")
    assert (redirects.origin(httpx.URL(one)) == redirects.origin(httpx.URL(two))) is same
