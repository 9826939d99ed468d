"""Expectations: a program that exits with 0 having done nothing has not done its work."""

import os
import re

from worker.output import Spool
from worker.task import Expect

# A pattern is looked for in so much of the output, from its beginning; an output can be larger than memory.
_LOOK_MAX = 1024 * 1024


def fault(expect: Expect, cwd: str, output: Spool) -> str | None:
    """Return what does not hold of the file and the pattern that are expected, or None."""
    if expect.file is not None:
        path = os.path.join(cwd, expect.file)
        try:
            if os.stat(path).st_size == 0:
                return f"the expected file '{path}' is empty"
        except OSError as exc:
            return f"the expected file '{path}' is not there: {exc.strerror}"
    if expect.matches is not None:
        try:
            text = output.beginning(_LOOK_MAX).decode(errors="replace")
        except OSError as exc:
            return f"its output cannot be read: {exc.strerror}"
        if not re.search(expect.matches, text, re.MULTILINE):
            return f"its output does not match '{expect.matches}'"
    return None
