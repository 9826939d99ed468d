"""Walking: the paths that match a pattern, found within a time limit.

`**` may lead through a whole machine, and on the way lie file systems that never answer.  Where a pattern can get to
either, a child walks, which can be ended; elsewhere the walk costs what it did.
"""

import contextlib
import errno
import glob
import os
import select
import signal
import sys
from itertools import islice

from worker import clock, distant, process

LIMIT = 20.0  # seconds; two of them are below WatchdogSec=
_ENV = {"PATH": process.DEFAULT_PATH, os.fsdecode(process.ERRAND): "walk"}
_CHILD = """
import glob, itertools, os, sys
for path in itertools.islice(glob.iglob(sys.argv[1], recursive=True), int(sys.argv[2])):
    sys.stdout.buffer.write(os.fsencode(path) + b"\\0")
"""
_CHUNK = 1 << 20


def find(pattern: str, folder: str, most: int) -> list[str]:
    """Return the first `most` paths that match, in order; `folder`: that above the first wildcard.

    Raises OSError (ETIMEDOUT) with distant.SILENT if a file system on the way does not answer, and with another text
    if there is too much to look through.
    """
    points = distant.below(folder)
    if not points and "**" not in pattern:
        return sorted(islice(glob.iglob(pattern, recursive=True), most))
    silent = not all([distant.answers(point) for point in points])
    found = _walk(pattern, most, distant.WITHIN if silent else LIMIT)
    if found is None:
        raise OSError(errno.ETIMEDOUT, distant.SILENT if silent else f"that is not looked through within {LIMIT:.0f} s")
    return sorted(found)


def _walk(pattern: str, most: int, within: float) -> list[str] | None:
    """Return what a child finds; None if it had to be ended."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        argv = [sys.executable, "-I", "-S", "-c", _CHILD, pattern, str(most)]
        pid = process.launch(sys.executable, argv, _ENV, "/", writer, null)
    except process.SpawnError as exc:
        os.close(reader)
        raise OSError(errno.EAGAIN, str(exc)) from exc
    finally:
        os.close(writer)
        os.close(null)
    data = _read(reader, clock.monotonic() + within)
    os.close(reader)
    if data is None:
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # one that cannot even be killed is collected by the loop
        os.waitpid(pid, 0 if data is not None else os.WNOHANG)
    return None if data is None else [os.fsdecode(path) for path in data.split(b"\0")[:-1]]


def _read(fd: int, until: float) -> bytes | None:
    """Return all that comes from a pipe to its end; None if that takes too long."""
    chunks: list[bytes] = []
    while select.select([fd], [], [], max(0.0, until - clock.monotonic()))[0]:
        chunk = os.read(fd, _CHUNK)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)
    return None
