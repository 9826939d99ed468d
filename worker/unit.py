"""The installed unit seen from outside: how it stands, and what its sandbox would let a step do.

Read with systemctl(1); without systemd there is nothing to say.
"""

import grp
import os
import pwd
import re
import stat
from collections.abc import Iterable
from typing import Any

from worker import awake, cgroup, confine, distant, plural
from worker.errors import OUT_OF_BUDGET, Mark, Problem
from worker.folder import Places
from worker.plan import Plan

_CONFINEMENT = (
    "User", "Group", "ProtectSystem", "ProtectHome", "ReadWritePaths", "BindPaths", "StateDirectory",
)  # fmt: skip
_HIDDEN_BY_PROTECT_HOME = ("/home", "/root", "/run/user")  # systemd.exec(5)


def properties(name: str, *wanted: str) -> dict[str, str]:
    """Return properties of a unit; empty where systemd does not run or does not know it."""
    shown = _systemctl("show", f"{name}.service", "-p", ",".join(wanted))
    return dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)


def credentials(name: str) -> dict[str, str]:
    """Return the file of each credential that the unit loads: where it lies while the unit does not run."""
    found: dict[str, str] = {}
    # `systemctl show` calls this property unprintable.
    for line in _systemctl("cat", f"{name}.service").splitlines():
        setting, _, value = line.partition("=")
        credential, _, path = value.strip().partition(":")
        if setting.strip() != "LoadCredential":
            continue
        if credential:
            found[credential] = path
        else:
            found.clear()  # an empty setting takes back the ones before it
    return found


def _systemctl(*arguments: str) -> str:
    import subprocess

    try:
        command = ["systemctl", "--no-pager", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def state(name: str) -> dict[str, Any] | None:
    """Return how the unit stands, with the command that brings it back if it has failed."""
    found = properties(name, "ActiveState", "SubState", "Result", "NRestarts", "ExecMainStatus", "ControlGroup")
    if not found:
        return None
    hint = _frozen(name, found)
    if found.get("ActiveState") == "failed":
        # After the start limit a plain start is refused, so the way back is always the long one.
        more = f"{_granting(name)} && " if found.get("ExecMainStatus") == str(OUT_OF_BUDGET) else ""
        hint = (
            f"exit status {found.get('ExecMainStatus')}, {plural.of(int(found.get('NRestarts') or 0), 'restart')}; "
            f"'journalctl -u {name}' says why; bring it back with: "
            f"{more}systemctl reset-failed {name} && systemctl start {name}"
        )
    return {
        "failed": found.get("ActiveState") == "failed",
        "state": f"{found.get('ActiveState')} ({found.get('SubState')})",
        "result": found.get("Result"),
        "status": int(found.get("ExecMainStatus") or 0),
        "restarts": int(found.get("NRestarts") or 0),
        "hint": hint,
    }


def _frozen(name: str, found: dict[str, str]) -> str | None:
    """Return what to do about a unit whose cgroup is frozen; None if it is not.

    systemd 252 cannot thaw a unit that its watchdog has begun to end; the kernel can.
    """
    group = cgroup.ROOT + found["ControlGroup"] if found.get("ControlGroup") else ""
    try:
        with open(f"{group}/cgroup.freeze", encoding="ascii") as file:
            if not group or file.read().strip() != "1":
                return None
    except OSError:
        return None
    if found.get("ActiveState") == "active":
        return f"frozen, as by 'systemctl freeze'; let it go on with: sudo systemctl thaw {name}"
    return (
        f"frozen while systemd ends it, so nothing moves; let it go on with: echo 0 | sudo tee '{group}/cgroup.freeze'"
    )


def _granting(name: str) -> str:
    instance = name.partition("@")[2]
    return f"agentctl budget{f' --instance {instance}' if instance else ''} --add NAME=AMOUNT"


def folder_problems(plan: Plan, name: str) -> list[Problem]:
    """Return a problem for every `cwd`, and each path of `confine:`, that the unit would not let a step write."""
    found = properties(name, *_CONFINEMENT)
    problems: dict[str, Problem] = {}
    for step in plan.steps:
        task = step.task
        named = [("cwd", task.cwd, task.cwd_mark)]
        named += [("confine: write", path, task.mark) for path in (task.confine.write if task.confine else ())]
        for key, path, mark in named:
            if path is None or path in problems or (key != "cwd" and os.path.isfile(path)):
                continue
            what = _obstacle(path, found)
            if what:
                problems[path] = Problem(mark, f"{key}: '{path}' {what}", _hint(path))
    places = Places(plan.run, f"/var/lib/{name}", f"/run/{name}")
    return [*problems.values(), *confine.problems(plan.tasks.values(), places, True)]


def awake_problems(wanted: awake.Wanted, name: str) -> list[Problem]:
    """Return a problem if the unit could not make the file that `keep_awake:` names."""
    if wanted is None:
        return []
    found = properties(name, *_CONFINEMENT)
    path = awake.resolve(wanted[0], found.get("User") or None)
    folder = awake.nearest(path)
    what = _obstacle(folder, found)
    return [Problem(wanted[1], f"keep_awake: '{folder}' {what}", _hint(os.path.dirname(path)))] if what else []


def ping_problems(wanted: Iterable[str], mark: Mark | None, name: str) -> list[Problem]:
    """Return a problem for each secret in the URLs of `ping:` that the unit, or who tells of it, is not given."""
    alert = f"agent-alert@{name}"
    hint = "add LoadCredential=NAME:/PATH with: systemctl edit "
    return [
        Problem(mark, f"ping: {unit}.service has no credential '{secret}'", f"{hint}{template}")
        for secret in wanted
        for unit, template in ((name, name), (alert, "agent-alert@.service"))
        if _lacks(unit, secret)
    ]


def _lacks(unit: str, credential: str) -> bool:
    """Return whether no setting of a unit that is there can be what gives it the credential."""
    text = _systemctl("cat", f"{unit}.service")
    given = re.findall(r"^\s*(\w+)Credential\w*\s*=\s*([^:\s]*)", text, re.MULTILINE)
    return bool(text) and not any(kind == "Import" or found == credential for kind, found in given)


def _hint(folder: str) -> str:
    if not distant.answers(folder):
        return "wait until it does, or mount it anew"
    if not os.path.isdir(folder):
        return f"make '{folder}' first"
    return f"open it with: sudo make install USER={_owner(folder)} WORKDIR={folder}"


def _obstacle(path: str, unit: dict[str, str]) -> str | None:
    if not distant.answers(path):
        return distant.SILENT
    if not os.path.isdir(path):
        return "is not a folder"
    if unit.get("ProtectHome") in ("yes", "tmpfs", "read-only") and _below(path, _HIDDEN_BY_PROTECT_HOME):
        opened = [entry.split(":")[0] for entry in unit.get("BindPaths", "").split()]
        if not _below(path, opened):
            return "is hidden from the unit (ProtectHome=)"
    if unit.get("ProtectSystem") == "strict":
        opened = [entry.lstrip("-+") for entry in unit.get("ReadWritePaths", "").split()]
        opened += [f"/var/lib/{entry}" for entry in unit.get("StateDirectory", "").split()]
        if not _below(path, opened):
            return "is read-only for the unit (ProtectSystem=strict)"
    user = unit.get("User")
    if user and not _may_write(path, user):
        return f"may not be written by the unit's user '{user}'"
    return None


def _below(path: str, folders: Iterable[str]) -> bool:
    real = os.path.realpath(path)
    return any(real == folder or real.startswith(folder.rstrip("/") + "/") for folder in folders)


def _may_write(path: str, user: str) -> bool:
    """Return whether the permission bits let `user` write and enter the folder."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        return True  # systemd will say so better than we can
    if entry.pw_uid == 0:
        return True
    status = os.stat(path)
    groups = {entry.pw_gid, *(group.gr_gid for group in grp.getgrall() if user in group.gr_mem)}
    if status.st_uid == entry.pw_uid:
        wanted = stat.S_IWUSR | stat.S_IXUSR
    elif status.st_gid in groups:
        wanted = stat.S_IWGRP | stat.S_IXGRP
    else:
        wanted = stat.S_IWOTH | stat.S_IXOTH
    return status.st_mode & wanted == wanted


def _owner(path: str) -> str:
    try:
        return pwd.getpwuid(os.stat(path).st_uid).pw_name
    except (OSError, KeyError):
        return "name"
