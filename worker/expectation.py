"""Expectations: a program that exits with 0 having done nothing has not done its work."""

import os


def file_fault(name: str, cwd: str) -> str | None:
    """Return what is wrong with the file that a step was expected to make, or None if it is there and not empty."""
    path = os.path.join(cwd, name)
    try:
        empty = os.stat(path).st_size == 0
    except OSError as exc:
        return f"the expected file '{path}' is not there: {exc.strerror}"
    return f"the expected file '{path}' is empty" if empty else None
