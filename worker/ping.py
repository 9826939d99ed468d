"""Pings: a dead-man service is told that the run begins, is done, or has failed, by a GET of a URL.

This module is also the program that calls one (process.ours); it finds the URL in its environment, because everybody
on the machine can read a command line, and fills in what `{secret:NAME}` stands for by itself, so that no other process
knows it.  Where one fails, only the host is named.
"""

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence

from worker import errands, process, step, steps
from worker.errands import Report
from worker.process import SpawnError
from worker.signs import printable

URL = "AGENT_PING"
PROGRAM = process.ours("ping")
# What it finds of the unit's, too, unless the list says otherwise.
_WAYS = re.compile(r"(http|https|no)_proxy|SSL_CERT_(FILE|DIR)", re.ASCII | re.IGNORECASE)
_URL = re.compile(r"https?://([^\s/?#@]+)(?:[/?#]\S*)?", re.ASCII)
_SECRET = re.compile(r"(\{secret:[^}]*\})")
TIMEOUT = 10.0
_PAUSES = (1.0, 3.0)
# How long the program takes at most.
LONGEST = TIMEOUT * (len(_PAUSES) + 1) + sum(_PAUSES) + 5.0


def main(_arguments: Sequence[str]) -> None:
    """Call the URL in the environment, and exit; what came of it is the last word."""
    template = os.environ.get(URL, "")
    try:
        well, said = call(steps.fill_url(template, _secret))
    except LookupError as exc:
        well, said = False, f"{host(template)}: {exc.args[0]}"
    print(steps.mask(said))
    sys.exit(0 if well else 1)


def _secret(name: str) -> str:
    """Return what the placeholder `{name}` stands for, or raise LookupError."""
    name = name.removeprefix("secret:")
    try:
        return step.secret(name)
    except (LookupError, OSError):
        units = "agent.service and agent-alert@.service"
        raise LookupError(f"the unit has no credential '{name}'; add LoadCredential={name}:/PATH to {units}") from None


def environment(url: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the program that calls `url`; `base` is that of a command of the worker's own."""
    said = {name.lower() for name in base}
    ways = {name: os.environ[name] for name in os.environ if _WAYS.fullmatch(name) and name.lower() not in said}
    return ways | dict(base) | {URL: url}


def send(url: str, base: Mapping[str, str]) -> tuple[bool, str]:
    """Have `url` called, and wait for that; return whether that went well, and what came of it.

    By the program, which can be ended: a server that answers one byte at a time is within every time limit of a socket.
    """
    try:
        report = errands.run(PROGRAM, environment(url, base), "/", LONGEST, keep_output=True)
        return not report.fault, _said(url, report)
    except SpawnError as exc:
        return False, f"{host(url)}: {exc}"


def fault(url: str, report: Report) -> str:
    """Return what went wrong in the program's own words, which name the host only; empty if nothing did."""
    return _said(url, report) if report.fault else ""


def _said(url: str, report: Report) -> str:
    return printable(report.output.decode(errors="replace").strip()) or f"{host(url)}: {report.fault}"


def is_url(text: str) -> bool:
    """Return whether `text` is a URL that can be called."""
    return text.isascii() and _URL.fullmatch(text) is not None


def host(url: str) -> str:
    """Return the host that a URL names, or which secret names it; the rest is for nobody to see."""
    found = _URL.fullmatch(url) or _SECRET.match(url)
    return found[1] if found else "?"


def call(url: str) -> tuple[bool, str]:
    """Call `url`, three times if need be; return whether that went well, and what came of it."""
    if not is_url(url):
        return False, "what the secrets of the list make is not the URL of a page"
    well, said = _once(url)
    for pause in _PAUSES:
        if well:
            break
        time.sleep(pause)  # whoever calls has nothing else to do
        well, said = _once(url)
    return well, f"{host(url)}: {said}"


def _once(url: str) -> tuple[bool, str]:
    import http.client
    import urllib.error
    import urllib.request

    request = urllib.request.Request(url, headers={"User-Agent": "agent"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return True, f"answered with {answer.status}"
    except urllib.error.HTTPError as exc:
        exc.close()
        fault = f"answered with {exc.code}"
    except urllib.error.URLError as exc:
        reason = exc.reason
        fault = f"cannot be reached: {reason.strerror if isinstance(reason, OSError) and reason.strerror else reason}"
    except OSError as exc:  # a time-out while the answer was read
        fault = f"did not answer: {exc.strerror or 'timed out'}"
    except (http.client.HTTPException, ValueError) as exc:
        fault = f"cannot be called: {type(exc).__name__}"
    return False, fault
