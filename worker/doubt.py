"""Ends that leave a doubt: a program has ended badly, and what it was to do may have happened all the same.

A client that timed out is no proof that its server did nothing.  Used by the worker, by its own programs and by
`agentctl once`, so it imports nothing (see worker/step.py).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

# Exit statuses of our own programs where the worker asks for them (SPEC has "unsure"), in place of 1 and 75: of ends
# that leave a doubt; of a failure that leaves none, which 1 is not: a bug ends with that, too; of a name that a name
# server does not know.
FAILED, NOT_NOW = 76, 74
REFUSED, NO_HOST = 69, 68
# HTTP: a gateway gave up on a server that has the request.  The last four are those of proxies and CDNs.
GATEWAY = (502, 504, 520, 524, 598, 599)
# Redirections behind which the result of what was done may lie; 307 and 308 ask for the same request elsewhere.
DONE_ELSEWHERE = (301, 302, 303)

_TIMED_OUT = 124  # timeout(1)
_BY_SIGNAL, _SIGNALS = 128, 64  # a shell says so of a command that a signal has ended
# Of errors that mean the request was never sent, and of others that are no TimeoutError or ConnectionError.
_NOT_SENT = {
    "ConnectTimeout", "ConnectTimeoutError", "ConnectError", "NewConnectionError", "NameResolutionError",
    "PoolTimeout", "ConnectionRefusedError", "gaierror", "SSLCertVerificationError",
}  # fmt: skip
_BROKEN = {
    "ReadTimeout", "WriteTimeout", "ReadError", "WriteError", "RemoteProtocolError", "IncompleteRead",
    "ServerDisconnectedError", "TimeoutExpired",
}  # fmt: skip


def of_status(status: int, listed: Collection[int] = ()) -> bool:
    """Return whether an exit status leaves a doubt: it is `listed`, timeout(1)'s, or tells of a signal."""
    return status in listed or status == _TIMED_OUT or 0 < status - _BY_SIGNAL <= _SIGNALS


def of_error(exc: BaseException, listed: Collection[int] = ()) -> bool:
    """Return whether an exception leaves a doubt: a time-out or a broken connection, whichever library raised it.

    `listed`: HTTP statuses and exit statuses of commands that leave one, too.
    """
    found = False
    link: BaseException | None = exc
    seen: list[BaseException] = []
    while link is not None and link not in seen:
        seen.append(link)
        names = {kind.__name__ for kind in type(link).__mro__}
        if names & _NOT_SENT:
            return False
        found = (
            found
            or isinstance(link, (TimeoutError, ConnectionError))
            or bool(names & _BROKEN)
            or _by_code(link, listed)
        )
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return found


def _by_code(exc: BaseException, listed: Collection[int]) -> bool:
    """Return whether the HTTP status, or the exit status of a command, that an error tells of leaves a doubt."""
    answer = getattr(exc, "response", exc)
    code = getattr(answer, "status_code", getattr(answer, "code", None))
    status = getattr(exc, "returncode", None)
    return (isinstance(code, int) and (code in GATEWAY or code in listed)) or (
        isinstance(status, int) and (status < 0 or of_status(status, listed))
    )
