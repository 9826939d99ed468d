"""strace(1), by which tests see system calls and let them fail; some machines have none, or let nobody trace."""

import functools
import subprocess

import pytest


def require() -> None:
    """Skip the test unless strace is here and may trace."""
    reason = _why_not()
    if reason:
        pytest.skip(reason)


@functools.cache
def _why_not() -> str:
    try:
        tried = subprocess.run(["strace", "-f", "-o", "/dev/null", "true"], capture_output=True, check=False)
    except FileNotFoundError:
        return "needs strace"
    return "strace may not trace here" if tried.returncode else ""
