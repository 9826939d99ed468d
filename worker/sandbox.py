"""Where steps may write: found out before the run, never met as a bare "Read-only file system" in it."""

import os

from worker.errors import ConfigError, Mark, Problem
from worker.plan import Plan


def check(plan: Plan) -> None:
    """Raise ConfigError with every `cwd` in which a step could not work as this process is confined now.

    A step works in its folder: one that cannot be entered or written is a mistake of the
    configuration or of the unit's sandbox.  A step that only reads elsewhere needs no `cwd` there.
    """
    wanted: dict[str, Mark] = {}
    for step in plan.steps:
        if step.task.cwd is not None and step.task.cwd not in wanted:
            wanted[step.task.cwd] = step.task.cwd_mark or step.task.mark
    problems = [problem for path, mark in wanted.items() if (problem := _problem(path, mark))]
    if problems:
        raise ConfigError(problems)


def _problem(path: str, mark: Mark) -> Problem | None:
    if not os.path.isdir(path):
        there = "is not a folder" if os.path.exists(path) else "is not there, or is hidden from this user"
        return Problem(mark, f"cwd: '{path}' {there}", _hint(path))
    if not os.access(path, os.X_OK):
        return Problem(mark, f"cwd: '{path}' may not be entered by this user", _hint(path))
    if os.access(path, os.W_OK):
        return None
    read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    what = "is on a read-only file system for this worker" if read_only else "may not be written by this user"
    return Problem(mark, f"cwd: '{path}' {what}", _hint(path))


def _hint(path: str) -> str:
    if "INVOCATION_ID" not in os.environ:  # not in a unit: nothing to open there
        return "make the folder, or leave cwd out to work in the state folder"
    return (
        f"open it to the agent with 'make install USER=name WORKDIR={path}', which writes the drop-in "
        "(User=, ReadWritePaths=, ProtectHome=), or leave cwd out to work in the state folder"
    )
