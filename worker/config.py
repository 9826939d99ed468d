"""The user's YAML as a Config: every value typed, every default filled in, every path absolute.

`load()` either returns a Config that holds or raises one ConfigError with all mistakes of all files.  The
files are opened once and for reading only.  What they name outside of them (lists of items, environment
files) is the plan's affair.
"""

import gc
import json
import os
from typing import Any, Literal, NamedTuple

from worker import contact, fields, schema, yamlfile
from worker.atlimit import POLICIES, STOP
from worker.budget import HOURS, RESTARTS, SPEND, Budget
from worker.contact import Contact, Ping
from worker.errors import ConfigError, Mark, Problem, quote
from worker.schema import Source, Table, Wrong
from worker.steps import http as http_step
from worker.steps import python as python_step
from worker.task import ITEM, MAX_OUTPUT, Command, Expect, Given, Task
from worker.timespan import show
from worker.yamlfile import Mapping, Node, Scalar, Sequence

LONGEST_RUN = 64
_MOST_AT_ONCE = 256
# A claim is renewed three times while it holds, and a slow server may take some seconds for it.
_LEASE, _LEASE_MIN = 60.0, 5.0


# A copy costs a process; one a second is as much as anybody could want.
_COPY_EVERY, _COPY_EVERY_MIN, _COPY_TIMEOUT = 60.0, 1.0, 600.0
_COPIED_LEDGER = "{ledger}"


class Copy(NamedTuple):
    """How the run's state is taken off the machine; seconds."""

    every: float
    command: Command
    timeout: float


class Config(NamedTuple):
    """A task list; `files` are the YAML files it was read from, the main one first."""

    run: str
    concurrency: int
    on_failure: Literal["stop", "continue"]
    on_unknown: Literal["stop", "continue"]
    after_restore: Literal["ask", "go"]  # where a step with `redo: never` may have happened since a copy was made
    ledger: str | None  # a PostgreSQL connection string, which may name secrets; None: SQLite in the state folder
    budget: Budget
    lease: float  # seconds that a claim on a server holds without a word from its worker
    contact: Contact  # whom to tell of a change for the worse
    ping_mark: Mark | None  # where its URLs stand
    keep_awake: tuple[str, Mark] | None  # a file that is there while there is work; it may begin with "~/"
    copy: Copy | None
    tasks: tuple[Task, ...]
    files: tuple[str, ...]
    named: bool  # the list names its run itself, and does not leave that to its file's name
    at_limit: str  # what becomes of steps at work when the budget is used up: see worker/atlimit.py


def load(path: str) -> Config:
    """Return what the file and its drop-ins say; raises ConfigError with all that is wrong with them."""
    collecting = gc.isenabled()
    gc.disable()  # a hundred thousand tasks are a million objects and no garbage
    try:
        return _load(os.path.abspath(path))
    finally:
        if collecting:
            gc.enable()


def fingerprint(path: str) -> tuple[tuple[str, int, int, int], ...]:
    """Return a value that changes when the file or its drop-ins do; reads none of them."""
    found = []
    for file in (path, *_drop_ins(path, [])):
        try:
            status = os.stat(file)
        except OSError:
            continue
        found.append((file, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _load(path: str) -> Config:
    problems: list[Problem] = []
    drop_ins = _drop_ins(path, problems)
    size = yamlfile.Size()
    main = _file(path, _MAIN, problems, size)
    top = main or {}
    lists = [(top.get("tasks"), Source(os.path.dirname(path), problems))]
    for file in drop_ins:
        extra = _file(file, _DROP_IN, problems, size) or {}
        lists.append((extra.get("tasks"), Source(os.path.dirname(file), problems)))
    defaults = _merge(fields.BASE, top.get("defaults", {}))
    tasks = _tasks(lists, defaults, problems)
    if not tasks and not problems:
        problems.append(Problem(Mark(path, 1, 1), "tasks: at least one is wanted", "add one below 'tasks:'"))
    run = top.get("run") or os.path.splitext(os.path.basename(path))[0]
    if main is not None and not schema.is_name(run, LONGEST_RUN):
        problems.append(Problem(Mark(path, 1, 1), f"{quote(run)} cannot name the run", "add 'run:' and a name"))
    if top.get("ledger") and "run" not in top and not problems:
        what = "run: is wanted where the ledger is on a server, which knows the list by that name alone"
        problems.append(Problem(Mark(path, 1, 1), what, f"add one that no other list has, such as 'run: {run}'"))
    ping, ping_mark = top.get("ping", (Ping(), None))
    copy, mark = top.get("copy", (None, None))
    if copy is not None and top.get("ledger") and _COPIED_LEDGER in copy.command:
        what = f"copy: {quote(_COPIED_LEDGER)} stands for nothing where the ledger is on a server"
        problems.append(Problem(mark, what, "use '{checkpoint}'"))
    if problems:
        raise ConfigError(problems)
    budget: dict[str, Any] = top.get("budget", {})
    given = Given(defaults["env"], tuple(file for file, _ in defaults["env_file"]))
    return Config(
        run=run,
        concurrency=top.get("concurrency", 1),
        on_failure=top.get("on_failure", "stop"),
        on_unknown=top.get("on_unknown", "stop"),
        after_restore=top.get("after_restore", "ask"),
        ledger=top.get("ledger"),
        budget=Budget(**{name: value for name, value in budget.items() if name in Budget._fields}),
        lease=top.get("lease", _LEASE),
        contact=Contact(run, top.get("alert"), os.path.dirname(path), ping, given),
        ping_mark=ping_mark,
        keep_awake=top.get("keep_awake"),
        copy=copy,
        tasks=tasks,
        files=(path, *drop_ins),
        named="run" in top,
        at_limit=budget.get("at_limit", STOP),
    )


def _drop_ins(path: str, problems: list[Problem]) -> list[str]:
    folder = os.path.splitext(path)[0] + ".d"
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as exc:
        denied = isinstance(exc, PermissionError)
        hint = "use sudo, or join the group that owns it" if denied else "make it a folder for drop-ins"
        problems.append(Problem(Mark(folder), f"cannot be read: {exc.strerror}", hint))
        return []
    return [os.path.join(folder, name) for name in names if _is_drop_in(name)]


def _is_drop_in(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and not name.startswith(".")


def _file(path: str, table: Table, problems: list[Problem], size: yamlfile.Size) -> dict[str, Any] | None:
    """Return the keys at the top that are right, or None when the file could not be read at all."""
    node = yamlfile.load(path, problems, size)
    if node is None:
        return None
    if type(node) is Mapping:
        return schema.fields(node, table, Source(os.path.dirname(path), problems))
    hint = "put 'tasks:' above it" if type(node) is Sequence else "start with 'tasks:' and a list"
    problems.append(Problem(node.mark, f"{schema.found(node)} at the top of the file", hint))
    return None


def _tasks(
    lists: list[tuple[Sequence | None, Source]], base: dict[str, Any], problems: list[Problem]
) -> tuple[Task, ...]:
    """Return the tasks that are right, in order; no id stands there twice."""
    tasks = []
    ids: dict[str, Mark] = {}
    for nodes, source in lists:
        for node in nodes.items if nodes else ():
            try:
                task = _task(node, source, base, ids)
            except Wrong as wrong:
                problems.append(Problem(wrong.where, f"a task {wrong.what}", wrong.hint))
            else:
                if task is not None:
                    tasks.append(task)
    return tuple(tasks)


def _task(node: Node, source: Source, base: dict[str, Any], ids: dict[str, Mark]) -> Task | None:
    known = len(source.problems)
    own = schema.fields(node, fields.TASK, source, ("id",))
    if "id" in own:
        name, mark = own["id"]
        if name in ids:
            what = f"id: {quote(name)} is already the id of the task at {ids[name]}"
            source.problems.append(Problem(mark, what, "choose another"))
        ids.setdefault(name, mark)
    assert type(node) is Mapping
    keys = {key.text: key.mark for key, _ in node.entries}
    _check_kind(node, keys, source)
    _check_expect(own, keys, source)
    _check_programs(own, keys, source)
    _check_redo(own, keys, source)
    if isinstance(own.get("run"), tuple):
        _no_stray_item(node, source)
    if len(source.problems) > known:
        return None
    return _build(node.mark, _merge(base, own))


def _check_kind(node: Mapping, keys: dict[str, Mark], source: Source) -> None:
    kinds = [kind for kind in fields.KINDS if kind in keys]
    if not kinds:
        source.problems.append(Problem(node.mark, "'run' is missing", "add 'run:' (or 'http:' or 'python:')"))
    elif len(kinds) > 1:
        what = f"a task has one of {', '.join(fields.KINDS)}, not {' and '.join(kinds)}"
        source.problems.append(Problem(keys[kinds[1]], what, "make two tasks of it"))
    if "args" in keys and "python" not in keys:
        source.problems.append(Problem(keys["args"], "args: only 'python' takes them", "use 'env' for others"))


def _check_expect(own: dict[str, Any], keys: dict[str, Mark], source: Source) -> None:
    expect, mark = own.get("expect", ({}, None))
    if "http" not in keys and ("status" in expect or "json" in expect):
        what = "expect: 'status' and 'json' are for http tasks"
        source.problems.append(Problem(mark, what, "use 'file', 'matches' or 'run'"))


def _check_redo(own: dict[str, Any], keys: dict[str, Mark], source: Source) -> None:
    if own.get("redo") == "check" and "check" not in keys:
        what = "redo: 'check' wants a command that finds out whether it had happened"
        source.problems.append(Problem(keys["redo"], what, "add 'check:', or use 'always' or 'never'"))
    elif "check" in keys and own.get("redo", "check") != "check":
        what = f"check: would never be asked with 'redo: {own['redo']}'"
        source.problems.append(Problem(keys["check"], what, "take one of them out"))
    if ITEM in own.get("key", "") and "foreach" not in keys:
        what = f"key: {quote(ITEM)} stands for nothing without 'foreach'"
        source.problems.append(Problem(keys["key"], what, "take it out"))


def _check_programs(own: dict[str, Any], keys: dict[str, Mark], source: Source) -> None:
    """Note what our own programs would refuse, as far as it can be known before the run."""
    if "url" in own.get("http", {}):
        wrong = http_step.problems(_request(own))
    elif "python" in own and "cwd" in own:
        fault = python_step.problem(own["python"], own["cwd"][0])
        wrong = [fault] if fault else []
    else:
        return
    kind = "http" if "http" in own else "python"
    source.problems.extend(Problem(keys[kind], f"{kind}: {what}") for what in wrong)


def _request(values: dict[str, Any]) -> dict[str, Any]:
    """Return what the http program is given: the request, and what is expected of the answer."""
    expect = values.get("expect", ({}, None))[0]
    answer = {key: expect[key] for key in ("status", "json") if key in expect}
    request: dict[str, Any] = values["http"]
    return request | ({"expect": answer} if answer else {})


def _build(mark: Mark, values: dict[str, Any]) -> Task:
    files: tuple[tuple[str, Mark], ...] = values["env_file"]
    needs: tuple[tuple[str, Mark], ...] = values["needs"]
    cwd, cwd_mark = values.get("cwd", (None, None))
    foreach, foreach_mark = values.get("foreach", (None, None))
    expect: dict[str, Any] = values.get("expect", ({}, None))[0]
    own = {key: expect[key] for key in Expect._fields if key in expect}
    return Task(
        id=values["id"][0],
        mark=mark,
        run=values.get("run"),
        http=json.dumps(_request(values), sort_keys=True) if "http" in values else None,
        python=values.get("python"),
        args=json.dumps(values["args"], sort_keys=True) if "args" in values else "{}",
        shell=values["shell"],
        env=values["env"],
        env_files=tuple(path for path, _ in files),
        env_file_marks=tuple(mark for _, mark in files),
        secrets=values["secrets"],
        cwd=cwd,
        cwd_mark=cwd_mark,
        foreach=foreach,
        foreach_mark=foreach_mark,
        needs=tuple(name for name, _ in needs),
        needs_marks=tuple(mark for _, mark in needs),
        before=values.get("before"),
        after=values.get("after"),
        expect=Expect(**own) if own else None,
        key=values.get("key"),
        redo=values.get("redo", "check" if "check" in values else "always"),
        check=values.get("check"),
        timeout=values.get("timeout"),
        stall_after=values.get("stall_after"),
        watchdog=values.get("watchdog"),
        progress_every=values.get("progress_every"),
        retry=values["retry"],
        confine=values.get("confine"),
        max_output=values.get("max_output", MAX_OUTPUT),
    )


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return both, `over` winning; environments and retries are merged key by key.

    Files of environments and secrets come to those of `under`; an empty list takes these back.
    """
    merged = under | over
    if "env" in over:
        merged["env"] = under["env"] | over["env"]
    if "env_file" in over:
        merged["env_file"] = over["env_file"] and under["env_file"] + over["env_file"]
    if "secrets" in over:
        merged["secrets"] = over["secrets"] and tuple(dict.fromkeys((*under["secrets"], *over["secrets"])))
    if "retry" in over:
        merged["retry"] = under["retry"]._replace(**over["retry"])
    return merged


def _no_stray_item(task: Mapping, source: Source) -> None:
    values = {key.text: value for key, value in task.entries}
    run = values["run"]
    if "foreach" in values or not isinstance(run, Sequence):
        return
    for argument in run.items:
        if isinstance(argument, Scalar) and ITEM in argument.text:
            what = f"run: {quote(ITEM)} stands for nothing without 'foreach'"
            source.problems.append(Problem(argument.mark, what, "add 'foreach', or use a text for the shell"))


def _list(node: Node, source: Source) -> Sequence:
    if type(node) is not Sequence:
        raise Wrong(node, f"wants a list of tasks, found {schema.found(node)}", "start each with '- id: NAME'")
    return node


def _main_only(node: Node, source: Source) -> None:
    raise Wrong(node, "has no place in a drop-in, which only adds tasks", "move it to the main file")


def _slots(node: Node, source: Source) -> int:
    value = schema.integer(node, source)
    if value > _MOST_AT_ONCE:
        raise Wrong(node, f"{value} steps at a time are too many", f"use at most {_MOST_AT_ONCE}")
    return value


def _server(node: Node, source: Source) -> str:
    value = schema.text(node, source)
    if not value.startswith(("postgresql://", "postgres://")):
        what = "this is not the address of a PostgreSQL server"  # not shown: it may have a password in it
        raise Wrong(node, what, "write postgresql://USER@HOST/DATABASE, or take the line out for SQLite")
    return value


def _keep_awake(node: Node, source: Source) -> str:
    """A path like others, but for "~", which is the home of whoever the worker runs as."""
    value = schema.text(node, source)
    if not value.isprintable():
        raise Wrong(node, "the path has control characters", "use another one")
    return value if value.startswith("~/") else schema.path(node, source)


def _copy(node: Node, source: Source) -> Copy:
    values = schema.fields(node, _COPY, source, ("command",))
    every = values.get("every", _COPY_EVERY)
    return Copy(every, values.get("command", ()), values.get("timeout", max(every, _COPY_TIMEOUT)))


def _copy_every(node: Node, source: Source) -> float:
    value = schema.positive_span(node, source)
    if value < _COPY_EVERY_MIN:
        raise Wrong(node, f"{show(value)} is too often", f"use {show(_COPY_EVERY_MIN)} or more")
    return value


def _lease(node: Node, source: Source) -> float:
    value = schema.positive_span(node, source)
    if value < _LEASE_MIN:
        raise Wrong(node, f"{show(value)} is too short to be kept up", f"use {show(_LEASE_MIN)} or more")
    return value


_BUDGET: Table = {
    RESTARTS: schema.amount,
    HOURS: schema.amount,
    SPEND: schema.amount,
    "at_limit": schema.choice(*POLICIES),
}
_COPY: Table = {"every": _copy_every, "command": fields.command, "timeout": schema.positive_span}
_MAIN: Table = {
    "run": schema.name(LONGEST_RUN),
    "concurrency": _slots,
    "on_failure": schema.choice("stop", "continue"),
    "on_unknown": schema.choice("stop", "continue"),
    "after_restore": schema.choice("ask", "go"),
    "ledger": _server,
    "lease": _lease,
    "budget": lambda node, source: schema.fields(node, _BUDGET, source),
    "alert": contact.read_alert,
    "ping": schema.marked(contact.read_ping),
    "keep_awake": schema.marked(_keep_awake),
    "copy": schema.marked(_copy),
    "defaults": lambda node, source: schema.fields(node, fields.DEFAULTS, source),
    "tasks": _list,
}
_DROP_IN: Table = {**dict.fromkeys(_MAIN, _main_only), "tasks": _list}
