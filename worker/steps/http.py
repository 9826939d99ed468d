"""An `http:` step's process: sends one request and prints the body of the answer, as it comes.

SPEC: {method, url, headers, json | body | file, expect: {status: [...], json: {PATH: VALUE}}, timeout, max, unsure},
all but `url` optional.  `timeout` is the longest silence of the server in seconds; without it the task's own limits
rule.  `max` is the most bytes that an answer may have, unpacked.  In a URL, what a placeholder stands for is
percent-encoded, unless it stands at the start: then it begins the URL.  The request bears $AGENT_KEY as its
Idempotency-Key.

The step is done on 2xx, or on a status that `expect` names; it is tried again later when the server or the
network cannot now, and failed on anything else, with the server's words about it in the log.  Once the request has
been sent, any end but an answer that says no leaves a doubt: see _judge, redirects.py and worker/doubt.py.  Proxies
come from the environment (HTTPS_PROXY and its like), trusted certificates from the system.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time

from worker import __version__, doubt, files, step
from worker.steps import NoSuchHost, NotNow, StepError, body, fill, fill_url, lookup, redirects, run

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from datetime import datetime
    from typing import Any

_KEYS = ("method", "url", "headers", "json", "body", "file", "expect", "timeout", "max", "unsure")
_CONTENT = ("json", "body", "file")
_TOKEN = "!#$%&'*+-.^_`|~"  # and letters and digits (RFC 9110, 5.6.2)
_OWN_HEADERS = {"User-Agent": f"agent/{__version__}", "Accept-Encoding": body.ENCODINGS}
_NOT_NOW = (408, 425, 429)
_NOT_YET_VALID = 9  # X509_V_ERR_CERT_NOT_YET_VALID of OpenSSL
_NO_NAME = (-2, -5)  # EAI_NONAME, EAI_NODATA: a name server has said no
_CONNECT = 30.0  # seconds
# The longest that any answer takes, from the first look for its server to its end: a server may be slow, or have much
# to say, and one that sends a byte now and then is never silent.
_LONGEST, _SLOWEST = 24 * 3600.0, 64 * 1024  # seconds, bytes a second
_CHECKED_MAX = 16 * 1024 * 1024
_REASON_MAX, _REASON_LINES = 4096, 10
_RETRY_AFTER_MAX = 1e9  # seconds; the worker has a lower limit of its own


def problems(spec: Mapping[str, Any]) -> list[str]:
    """Return everything that is wrong with `spec` as far as can be seen without sending it."""
    found = [f"{key}: unknown key; there are {', '.join(_KEYS)}" for key in spec if key not in _KEYS]
    if not _is_token(spec.get("method", "GET")):
        found.append("method: is not one; write GET, POST, PUT ...")
    if "url" not in spec:
        found.append("url: is missing")
    elif not (isinstance(spec["url"], str) and spec["url"].startswith("{")):  # or it is known only in the step
        found += _url_problems(fill(spec["url"], lambda name: "x"))
    found += _header_problems(spec.get("headers", {}))
    given = [key for key in _CONTENT if key in spec]
    if len(given) > 1:
        found.append(f"{' and '.join(given)}: only one of them can be sent")
    found += [f"{key}: must be text" for key in ("body", "file") if not isinstance(spec.get(key, ""), str)]
    timeout = spec.get("timeout", 1)
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        found.append("timeout: must be a number of seconds above 0")
    most = spec.get("max", 1)
    if isinstance(most, bool) or not isinstance(most, int) or not most > 0:
        found.append("max: must be a number of bytes above 0")
    found += _expect_problems(spec.get("expect", {}))
    return found


def fetch(spec: dict[str, Any]) -> None:
    """Send the request and print the answer's body; raise StepError unless it is what the step needs."""
    wrong = problems(spec)
    if wrong:
        raise StepError("\n".join(f"http: {line}" for line in wrong))
    httpx = _library()
    with contextlib.ExitStack() as closed:
        request = _request(spec, closed)
        said = f"{request['method']} {_host(request['url'])}"
        timeout = spec.get("timeout")
        limits = httpx.Timeout(timeout, connect=min(_CONNECT, timeout or _CONNECT))
        sent = _Sent()
        try:
            _set_deadline(said, spec.get("max", body.MAX), sent, closed)
            client = closed.enter_context(httpx.Client(timeout=limits, headers=_OWN_HEADERS, verify=_trust(httpx)))
            asked = client.build_request(**request, extensions={"trace": sent.note})
            answer, way = redirects.send(client, asked, _secret_headers(spec))
            closed.callback(answer.close)
            _judge(answer, spec.get("expect", {}), said, spec.get("unsure", ()), spec.get("max", body.MAX), way)
        except (
            httpx.TimeoutException,
            httpx.NetworkError,
            httpx.RemoteProtocolError,
            httpx.ProxyError,
        ) as exc:
            before = httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError
            raise _unreached(exc, said, sent.begun or not isinstance(exc, before)) from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError, ImportError) as exc:
            raise StepError(f"{said}: {_named(exc)}", unsure=sent.begun) from None


def retry_after(value: str, now: datetime) -> float | None:
    """Return the seconds that a Retry-After header (RFC 9110) asks for, or None if it makes no sense."""
    from datetime import UTC
    from email.utils import parsedate_to_datetime

    with contextlib.suppress(ValueError, OverflowError):
        return min(max(0.0, float(int(value))), _RETRY_AFTER_MAX)
    with contextlib.suppress(ValueError, OverflowError):
        then = parsedate_to_datetime(value)
        seconds = ((then if then.tzinfo else then.replace(tzinfo=UTC)) - now).total_seconds()
        return min(max(0.0, seconds), _RETRY_AFTER_MAX)
    return None


# -- what is sent


def _library() -> Any:
    for name in ("httpx2", "httpx"):  # the same interface; the second is what distributions have
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise StepError("http: needs httpx2 or httpx; on Debian and Ubuntu: apt-get install python3-httpx")


def _request(spec: dict[str, Any], closed: contextlib.ExitStack) -> dict[str, Any]:
    """Return the arguments of build_request(), every placeholder filled in, or raise StepError."""
    url = fill_url(spec["url"], lookup)
    wrong = _url_problems(url)
    headers = {name.lower(): fill(value, lookup) for name, value in spec.get("headers", {}).items()}
    wrong += _header_problems(headers)
    if wrong:
        raise StepError("\n".join(f"http: {line}" for line in wrong))
    if "AGENT_KEY" in os.environ:
        headers.setdefault("idempotency-key", os.environ["AGENT_KEY"])
    content: Any = None
    if "json" in spec:
        content = json.dumps(fill(spec["json"], lookup), ensure_ascii=False).encode(errors="surrogateescape")
        headers.setdefault("content-type", "application/json")
    elif "body" in spec:
        content = str(fill(spec["body"], lookup)).encode(errors="surrogateescape")
    elif "file" in spec:
        path = fill(spec["file"], lookup)
        try:
            content = closed.enter_context(open(files.open_plain(path), "rb"))  # noqa: SIM115 - a context manager
        except OSError as exc:
            raise StepError(f"http: file: cannot read '{path}': {exc.strerror}") from None
    method = spec.get("method", "GET" if content is None else "POST").upper()
    raw = {name.encode(): value.encode(errors="surrogateescape") for name, value in headers.items()}
    return {"method": method, "url": url, "headers": raw, "content": content}


def _secret_headers(spec: dict[str, Any]) -> list[str]:
    return [name for name, value in spec.get("headers", {}).items() if "{secret:" in value]


class _Sent:
    """`begun`: something of the request has gone out, to the server or to one that it redirected us to."""

    def __init__(self) -> None:
        self.begun = False

    def note(self, event: str, about: Mapping[str, Any]) -> None:
        """Take an event of the HTTP library (its `trace` extension); CONNECT asks a proxy and not the server."""
        if event.endswith(".send_request_headers.started") and about["request"].method != b"CONNECT":
            self.begun = True


def _trust(httpx: Any) -> Any:
    """Return the certificates that are trusted, for connections whose end is believed only if the server said it."""
    import ssl

    class Socket(ssl.SSLSocket):
        """Takes an end that anybody on the way can bring about for an error, and not for the answer's end."""

        def do_handshake(self, block: bool = False) -> None:
            self.suppress_ragged_eofs = False
            super().do_handshake(block)

    context = httpx.create_ssl_context()
    context.sslsocket_class = Socket
    return context


def _set_deadline(said: str, most: int, sent: _Sent, closed: contextlib.ExitStack) -> None:
    """Let NotNow be raised when the whole answer is not here after the longest time that any takes."""
    import signal

    def give_up(_number: int, _frame: object) -> None:
        raise NotNow(f"{said}: there is no end of its answer after {seconds / 3600:.0f}h", sent.begun)

    seconds = _LONGEST + most / _SLOWEST
    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    closed.callback(signal.setitimer, signal.ITIMER_REAL, 0)


# -- what comes back


def _judge(answer: Any, expect: dict[str, Any], said: str, listed: Collection[int], most: int, way: str) -> None:
    """Print the body if the status is what the step needs; raise StepError if not.

    A status that says no leaves no doubt.  A success that is not the expected one does, and so do a gateway's word
    about a server that did not answer, a redirection that may lead to the result, and a status that is `listed`.
    """
    code: int = answer.status_code
    if code in expect["status"] if "status" in expect else 200 <= code < 300:
        try:
            _print(answer, expect.get("json"), said, most)
        except StepError as exc:
            raise StepError(str(exc), unsure=True) from None  # it has happened
        return
    said = f"{said}: {code} {answer.reason_phrase}".rstrip() + way
    unsure = code < 300 or code in doubt.GATEWAY or code in listed
    unsure = unsure or (code in doubt.DONE_ELSEWHERE and answer.request.method not in redirects.FOLLOWED)
    if code in _NOT_NOW or 500 <= code < 600:
        from datetime import UTC, datetime

        seconds = retry_after(answer.headers.get("Retry-After", ""), datetime.now(UTC))
        if seconds is not None:
            step.retry_after(seconds)
        raise NotNow(said, unsure)
    raise StepError("\n".join([said, *_reason(answer)]), unsure)


def _print(answer: Any, expected: dict[str, Any] | None, said: str, most: int) -> None:
    """Copy the body to standard output; keep it in memory only if there is something to check in it."""
    kept = bytearray()
    beat = _beats()
    try:
        for chunk in body.pieces(answer, most):
            files.write_all(1, chunk)
            next(beat)
            if expected is not None:
                kept += chunk
                if len(kept) > _CHECKED_MAX:
                    raise StepError("the answer is too long to be checked (expect: json)")
    except StepError as exc:
        raise StepError(f"{said}: {exc}") from None
    if expected is not None:
        _check(bytes(kept), expected, said)


def _beats() -> Iterator[None]:
    """Beat each time a value is taken, but no more often than the watchdog needs."""
    every = int(os.environ.get("WATCHDOG_USEC") or 0) / 1e6 / 4
    due = 0.0
    while True:
        if every and time.monotonic() >= due:
            due = time.monotonic() + every
            step.beat()
        yield


def _check(body: bytes, expected: dict[str, Any], said: str) -> None:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise StepError(f"{said}: the answer is not JSON ({exc})") from None
    for path, value in expected.items():
        found = _at(answer, path, said)
        value = fill(value, lookup)
        if json.dumps(found, sort_keys=True) != json.dumps(value, sort_keys=True):  # 1 is not true, as in Python
            raise StepError(f"{said}: '{path}' in the answer is {_short(found)}, not {_short(value)}")


def _at(answer: Any, path: str, said: str) -> Any:
    found = answer
    for name in path.split("."):
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise StepError(f"{said}: there is no '{path}' in the answer")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _reason(answer: Any) -> list[str]:
    """Return the first lines of the body, fit for a log."""
    kept = b""
    with contextlib.suppress(_library().HTTPError, StepError):  # its status has said enough
        for chunk in body.pieces(answer, _REASON_MAX):
            kept += chunk
    lines = kept[:_REASON_MAX].decode(errors="replace").splitlines()
    return lines[:_REASON_LINES]


def _unreached(exc: Exception, said: str, begun: bool) -> StepError:
    """Return what an error of the network means.

    Waiting does not mend a certificate that is refused, except for one of a later date: the clock may be behind.  It
    seldom mends a name that does not exist.
    """
    import socket
    import ssl

    link: BaseException | None = exc
    while link is not None:
        if isinstance(link, ssl.SSLCertVerificationError):
            if link.verify_code == _NOT_YET_VALID:
                clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                since = _valid_from(getattr(exc, "request", None))
                return NotNow(f"{said}: its certificate is not valid before {since}; this machine's clock says {clock}")
            return StepError(f"{said}: {_named(exc)}", unsure=begun)
        if isinstance(link, socket.gaierror) and link.errno in _NO_NAME:
            kind = NoSuchHost if _has_network() else NotNow
            return kind(f"{said}: there is no host of that name ({link.strerror})", unsure=begun)
        link = link.__cause__ or link.__context__
    return NotNow(f"{said}: {_named(exc)}", unsure=begun)


def _valid_from(request: Any) -> str:
    """Return from when the certificate of a request's server is valid, as far as that can be found out."""
    import re
    import ssl

    with contextlib.suppress(OSError, ValueError, AttributeError):
        place = request.url.host, request.url.port or 443
        der = ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(place, timeout=_CONNECT))
        # The first time in it (RFC 5280, 4.1): UTCTime, or GeneralizedTime from 2050 on.
        found = re.search(rb"\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z", der)
        if found:
            text = ((b"20" + found[1]) if found[1] else found[2]).decode()
            return f"{text[:4]}-{text[4:6]}-{text[6:8]}T{text[8:10]}:{text[10:12]}:{text[12:14]}Z"
    return "a later date"


def _has_network() -> bool:
    """Return whether this machine has a default route."""
    with contextlib.suppress(OSError), open("/proc/net/route", encoding="ascii") as file:
        if any(line.split()[1] == "00000000" for line in file if line.strip()):
            return True
    with contextlib.suppress(OSError), open("/proc/net/ipv6_route", encoding="ascii") as file:
        return any(words[:2] == ["0" * 32, "00"] and words[-1] != "lo" for words in map(str.split, file))
    return False


def _named(exc: Exception) -> str:
    return f"{exc or 'no answer'} ({type(exc).__name__})"


def _host(url: str) -> str:
    """Return scheme, host and port of `url`: the rest of a URL often holds a secret that nobody declared."""
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


# -- what can be known before


def _is_token(text: object) -> bool:
    if not isinstance(text, str) or not text:
        return False
    return all(c in _TOKEN or (c.isascii() and c.isalnum()) for c in text)


def _url_problems(url: object) -> list[str]:
    if not isinstance(url, str):
        return ["url: must be text"]
    from urllib.parse import urlsplit

    if any(c.isspace() or not c.isprintable() for c in url):
        return ["url: has a space or a control character in it; write %20 for a space"]
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return ["url: its host or port cannot be read"]
    if parts.scheme not in ("http", "https"):
        return ["url: must begin with http:// or https://"]
    return [] if parts.hostname else ["url: has no host"]


def _header_problems(headers: object) -> list[str]:
    if not isinstance(headers, dict):
        return ["headers: must be a mapping of names to texts"]
    found = []
    for name, value in headers.items():
        if not _is_token(name):
            found.append(f"headers: {name!r} is not a header's name")
        elif name.lower() in ("content-length", "transfer-encoding"):
            found.append(f"headers: '{name}' follows from what is sent; leave it out")
        elif not isinstance(value, str):
            found.append(f"headers: the value of '{name}' must be text")
        elif any(ord(c) < 32 or ord(c) == 127 for c in value) or value != value.strip():
            found.append(f"headers: the value of '{name}' has a line break, or a space at its start or end")
    return found


def _expect_problems(expect: object) -> list[str]:
    if not isinstance(expect, dict):
        return ["expect: must be a mapping with 'status' or 'json'"]
    found = [f"expect: {key!r}: unknown key; there are status, json" for key in expect if key not in ("status", "json")]
    statuses = expect.get("status", [200])
    if not (isinstance(statuses, list) and statuses and all(_is_status(code) for code in statuses)):
        found.append("expect: 'status' must be a list of numbers from 200 to 599")
    if not isinstance(expect.get("json", {}), dict):
        found.append("expect: 'json' must be a mapping of paths to values, like {choices.0.finish_reason: stop}")
    return found


def _is_status(code: object) -> bool:
    return isinstance(code, int) and 200 <= code <= 599


if __name__ == "__main__":
    sys.exit(run(fetch, sys.argv[1:], doubt.REFUSED))
