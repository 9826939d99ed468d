"""Where steps may write: found out before the run, never met as a bare "Read-only file system" in it."""

import os
from collections.abc import Iterable

from worker import awake, confine, distant, textfile
from worker.config import Config
from worker.errors import ConfigError, Mark, Problem
from worker.folder import Places
from worker.plan import Plan
from worker.task import Task


def check(settings: Config, plan: Plan, places: Places) -> None:
    """Raise ConfigError with everything a step, or a ping, could not have as this process is confined now."""
    problems = folder_problems(plan, silent=False) + _secret_problems(settings, plan, places.secrets)
    problems += confine.problems(_tasks(plan), places, confine.UNIT in os.environ)
    if problems:
        raise ConfigError(problems)


def folder_problems(plan: Plan, silent: bool = True) -> list[Problem]:
    """Return a problem for every folder that a step could not enter or write.

    `silent`: also for those whose file system does not answer now.  At its start it is named.

    A step works in its folder: a `cwd` that cannot be written is a mistake of the configuration or of
    the unit's sandbox, and so is the folder of an expected file.  A step that only reads elsewhere
    needs no `cwd` there.
    """
    folders: dict[str, tuple[str, Mark]] = {}
    for task in _tasks(plan):
        if task.cwd is not None:
            folders.setdefault(task.cwd, ("cwd", task.cwd_mark or task.mark))
        for path in task.confine.write if task.confine else ():
            if not os.path.isfile(path):
                folders.setdefault(path, ("confine: write", task.mark))
        if task.expect and task.expect.file and os.path.isabs(task.expect.file):
            folders.setdefault(os.path.dirname(task.expect.file), ("expect: the folder", task.mark))
    return [
        Problem(mark, f"{key}: '{path}' {what}", _beside(path, mark) or _hint(path))
        for path, (key, mark) in folders.items()
        if (what := _obstacle(path)) and (silent or what != distant.SILENT)
    ]


def awake_problems(wanted: awake.Wanted) -> list[Problem]:
    """Return a problem if this process could not make the file that `keep_awake:` names."""
    if wanted is None:
        return []
    path = awake.resolve(wanted[0])
    folder = awake.nearest(path)
    what = _obstacle(folder)
    return [Problem(wanted[1], f"keep_awake: '{folder}' {what}", awake.hint(os.path.dirname(path)))] if what else []


def _secret_problems(settings: Config, plan: Plan, credentials: str | None) -> list[Problem]:
    secrets: dict[str, tuple[str, Mark | None]] = {}
    for task in _tasks(plan):
        for name in task.secrets:
            secrets.setdefault(name, ("secrets", task.mark))
    for name in settings.contact.ping.secrets:
        secrets.setdefault(name, ("ping", settings.ping_mark))
    return [
        Problem(
            mark,
            f"{key}: the unit has no credential '{name}'",
            f"add LoadCredential={name}:/path/of/the/file to the unit (systemctl edit agent)",
        )
        for name, (key, mark) in secrets.items()
        if credentials is None or not os.path.exists(os.path.join(credentials, name))
    ]


def _tasks(plan: Plan) -> Iterable[Task]:
    return plan.tasks.values()


def _obstacle(path: str) -> str | None:
    if not distant.answers(path):
        return distant.SILENT
    if not os.path.isdir(path):
        return "is not a folder" if os.path.exists(path) else "is not there, or is hidden from this user"
    if not os.access(path, os.X_OK):
        return "may not be entered by this user"
    if os.access(path, os.W_OK):
        return None
    read_only = os.statvfs(path).f_flag & os.ST_RDONLY
    return "is on a read-only file system for this worker" if read_only else "may not be written by this user"


def _beside(path: str, mark: Mark) -> str:
    if not distant.answers(path):
        return ""
    meant = textfile.beside_target(path, mark)
    return textfile.link_hint(meant) if meant and os.path.isdir(meant) and not os.path.exists(path) else ""


def _hint(path: str) -> str:
    if "INVOCATION_ID" not in os.environ:  # not in a unit: nothing to open there
        return "make the folder, or leave cwd out to work in the state folder"
    return (
        f"open it to the agent with 'make install USER=name WORKDIR={path}', which writes the drop-in "
        "(User=, ReadWritePaths=, ProtectHome=), or leave cwd out to work in the state folder"
    )
