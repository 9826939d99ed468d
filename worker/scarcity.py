"""A program cannot be started because the machine is short of something, which says nothing of the step.

Processes (RLIMIT_NPROC, pids.max), memory, descriptors and space come back; a program that is being written will have
been.  Then the same start is tried again, and the step is charged for nothing.  Arguments that are too long stay so.
"""

import errno
import os
import re
from collections.abc import Mapping, Sequence

from worker.errors import quote

SCARCE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY, errno.ENOSPC, errno.EDQUOT)
RETRY = 1.0  # seconds
# The longest single argument or variable that the kernel takes (MAX_ARG_STRLEN, execve(2)), its end included.
_LONGEST = 128 * 1024
# What the shell that is the leader of a program says where it could not begin the program (see leader.sh).
_NO_FORK = re.compile(r"[Cc]an(?:no|')t fork|\bfork: ")
_NO_CGROUP = 125


def code(exc: BaseException) -> int:
    """Return the number of the system's error behind an exception, 0 if there is none."""
    cause = exc if isinstance(exc, OSError) else exc.__cause__
    return (cause.errno or 0) if isinstance(cause, OSError) else 0


def is_scarce(exc: BaseException) -> bool:
    """Return whether waiting may mend it."""
    return code(exc) in SCARCE


def of_leader(said: str | None, status: int | None) -> str:
    """Return why a leader could not begin its program, as far as waiting may mend that; empty if it did.

    `said`: what it has said of the program in its report, None if it never came to have one.
    """
    if said is None:
        return "its leader could not enter its cgroup" if status == _NO_CGROUP else ""
    last = said.strip().rpartition("\n")[2]
    if status is None or status < 0:
        return ""
    return last if _NO_FORK.search(last) else ""


def too_long(argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return what of a command is longer than the kernel takes, and by how much, after E2BIG."""
    words = [(f"its argument {quote(word)}", len(os.fsencode(word)) + 1) for word in argv]
    words += [(f"its variable {name}", len(os.fsencode(f"{name}={value}")) + 1) for name, value in env.items()]
    name, size = max(words, key=lambda word: word[1])
    if size > _LONGEST:
        what = f"{name} has {size - 1} bytes, and {_LONGEST - 1} is the most that the kernel takes"
    else:
        what = f"its arguments and variables have {sum(size for _, size in words)} bytes, more than the kernel takes"
    return f"{what}; put it into a file, and give the file's name"
