"""Redirects of an `http:` step: another origin learns nothing that was meant for the first one.

An origin is scheme, host and port, so that https after http on the same host is another one, too.  To another origin
go the method, Accept and User-Agent; a request with a body is not sent on to one.  Nothing comes back on the way back.
"""

from __future__ import annotations

from worker import doubt
from worker.steps import StepError

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

FOLLOWED = ("GET", "HEAD")
MOST = 20
_PORTS = {"http": 80, "https": 443}
_HARMLESS = ("accept", "user-agent")


def send(client: Any, request: Any, secret_headers: Collection[str]) -> tuple[Any, str]:
    """Send `request` and follow redirects as far as it is safe; return the answer and what to tell of the way to it.

    `secret_headers`: the names of those that hold a secret.  Raises StepError for a way that has no end, or that
    leads a body to another origin.
    """
    first, way, has_body = request, "", "content-length" in request.headers or "transfer-encoding" in request.headers
    for _ in range(MOST):
        answer = client.send(request, stream=True)
        if answer.next_request is None or request.method not in FOLLOWED:
            return answer, way
        answer.close()
        following = answer.next_request
        if origin(following.url) != origin(request.url):
            if has_body:
                what = f"a redirect ({answer.status_code}) to {_shown(following.url)}"
                raise StepError(
                    f"{request.method} {_shown(request.url)}: {what}, to which what is sent here is not sent; "
                    "if it is meant for that server, let 'url' name it",
                    unsure=answer.status_code in doubt.DONE_ELSEWHERE,
                )
            following = _stripped(following, secret_headers)
            way = f", sent on to {_shown(following.url)} without its headers"
        request = following
    raise StepError(f"{first.method} {_shown(first.url)}: more than {MOST} redirects", unsure=True)


def origin(url: Any) -> tuple[str, bytes, int | None]:
    """Return scheme, host and port of a URL, in the form in which two that are the same are equal."""
    return url.scheme, url.raw_host.lower(), url.port or _PORTS.get(url.scheme)


def _stripped(request: Any, secret_headers: Collection[str]) -> Any:
    """Return the request without body, cookies, userinfo, and headers other than the harmless ones."""
    secret = {name.lower() for name in secret_headers}
    headers = {name: request.headers[name] for name in _HARMLESS if name in request.headers and name not in secret}
    url = request.url.copy_with(username=None, password=None)
    return type(request)(request.method, url, headers=headers, extensions=request.extensions)


def _shown(url: Any) -> str:
    """Return scheme, host and port: the rest of a URL often holds a secret that nobody declared."""
    return f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}"
