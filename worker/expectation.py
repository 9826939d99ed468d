"""Expectations: a program that exits with 0 having done nothing has not done its work."""

import os

from worker import distant
from worker.output import Spool
from worker.task import Task


def fault(task: Task, output: Spool, work: str) -> str | None:
    """Return what is wrong with what the step's own program has left, as far as no program has to look; else None.

    Where one has to, the whole output is in its file after this.  `work` is where steps work by default.
    """
    expect = task.expect
    if expect is None:
        return None
    if expect.matches is not None:
        try:
            output.show()
        except OSError as exc:
            return f"its output cannot be looked at: {exc.strerror}"
    return None if expect.file is None else _file_fault(expect.file, task.cwd or work)


def _file_fault(name: str, cwd: str) -> str | None:
    path = os.path.join(cwd, name)
    if not distant.answers(path):
        return f"the expected file '{path}' cannot be looked at: {distant.SILENT}"
    try:
        empty = os.stat(path).st_size == 0
    except OSError as exc:
        return f"the expected file '{path}' is not there: {exc.strerror}"
    return f"the expected file '{path}' is empty" if empty else None
