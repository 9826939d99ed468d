"""Why a program of ours has failed: the last line, or the answer of a server, that it has left in the step's log."""

import re

from worker.signs import printable

_LONGEST = 200
# As worker/steps/http.py says it: an answer, whose body may stand below it, or what kept one from coming.
_REQUEST = re.compile(r"([A-Za-z!#$%&'*+.^_`|~0-9-]+ https?://\S+): (.*)")
_ANSWER = re.compile(r"[1-5]\d\d( .*)?")
_BODY = 10  # lines of it, at most
_END = 4096
_NO_MOUNT = re.compile(
    r"^.*(bwrap|mount|root filesystem propagation|pivot_root).*(operation not permitted|EPERM)", re.I | re.M
)


def last_words(log: bytes, http: bool) -> str:
    """Return the reason in one line, empty where there is none; `http`: it is that of a request."""
    lines = [line for line in log.decode(errors="replace").splitlines() if line.strip()]
    for line in lines[-1 - _BODY :] if http else ():
        found = _REQUEST.fullmatch(line)
        if found is not None:
            between = " answered " if _ANSWER.fullmatch(found[2]) else ": "
            return _short(f"{found[1]}{between}{found[2]}")
    return _short(lines[-1].strip()) if lines else ""


def of_confined(log: bytes) -> str:
    """Return what to do where the end of the log says that something could not be mounted; else nothing."""
    text = log[-_END:].decode(errors="replace")
    return "no confined step can mount; if it has to, add 'confine: no' to its task" if _NO_MOUNT.search(text) else ""


def _short(line: str) -> str:
    text = printable(line)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
