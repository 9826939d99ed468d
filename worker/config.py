"""The user's YAML as a Config: every value typed, every default filled in, every path absolute.

`load()` either returns a Config that holds or raises one ConfigError with all mistakes of all files.  The
files are opened once and for reading only.  What they name outside of them (lists of items, environment
files) is the plan's affair.
"""

import gc
import os
import re
from typing import Any, Literal, NamedTuple

from worker import envfile, schema, yamlfile
from worker.errors import ConfigError, Mark, Problem, quote
from worker.schema import Source, Table, Wrong
from worker.yamlfile import Mapping, Node, Scalar, Sequence

ITEM = "{item}"  # what a list of arguments has in place of the item

_LONGEST_RUN = 64
_LONGEST_ID = 100
_MOST_IN_RANGE = 1_000_000


class Items(NamedTuple):
    """The items as the user listed them, and where each stands."""

    texts: tuple[str, ...]
    marks: tuple[Mark, ...]


class Lines(NamedTuple):
    """One item for each line of a file."""

    path: str


class Glob(NamedTuple):
    """One item for each path that matches."""

    pattern: str


class Range(NamedTuple):
    """One item for each number from `first` to `last`, padded with zeros to `width`."""

    first: int
    last: int
    width: int


Foreach = Items | Lines | Glob | Range


class Retry(NamedTuple):
    """How often a step is tried, and the seconds between two tries."""

    attempts: int = 3
    delay: float = 10.0


class Task(NamedTuple):
    """One entry of the list; a limit that is None does not apply."""

    id: str
    mark: Mark
    run: str | tuple[str, ...]  # text for the shell, or the arguments of a program
    shell: tuple[str, ...]
    env: dict[str, str]
    env_files: tuple[str, ...]  # later ones win, and `env` wins over all
    env_file_marks: tuple[Mark, ...]
    cwd: str | None
    cwd_mark: Mark | None
    foreach: Foreach | None
    foreach_mark: Mark | None
    timeout: float | None
    stall_after: float | None
    watchdog: float | None
    retry: Retry


class Config(NamedTuple):
    """A task list; `files` are the YAML files it was read from, the main one first."""

    run: str
    concurrency: int
    on_failure: Literal["stop", "continue"]
    tasks: tuple[Task, ...]
    files: tuple[str, ...]


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
    main = _file(path, _MAIN, problems)
    top = main or {}
    lists = [(top.get("tasks"), Source(os.path.dirname(path), problems))]
    for file in drop_ins:
        extra = _file(file, _DROP_IN, problems) or {}
        lists.append((extra.get("tasks"), Source(os.path.dirname(file), problems)))
    tasks = _tasks(lists, _merge(_BASE, top.get("defaults", {})), problems)
    if not tasks and not problems:
        problems.append(Problem(Mark(path, 1, 1), "tasks: at least one is wanted", "add one below 'tasks:'"))
    run = top.get("run") or os.path.splitext(os.path.basename(path))[0]
    if main is not None and not schema.is_name(run, _LONGEST_RUN):
        problems.append(
            Problem(Mark(path, 1, 1), f"{quote(run)} cannot name the run", "add 'run:' and a name")
        )
    if problems:
        raise ConfigError(problems)
    return Config(run, top.get("concurrency", 1), top.get("on_failure", "stop"), tasks, (path, *drop_ins))


def _drop_ins(path: str, problems: list[Problem]) -> list[str]:
    folder = os.path.splitext(path)[0] + ".d"
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as exc:
        problems.append(
            Problem(Mark(folder), f"cannot be read: {exc.strerror}", "make it a folder for drop-ins")
        )
        return []
    return [os.path.join(folder, name) for name in names if _is_drop_in(name)]


def _is_drop_in(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) and not name.startswith(".")


def _file(path: str, table: Table, problems: list[Problem]) -> dict[str, Any] | None:
    """Return the keys at the top that are right, or None when the file could not be read at all."""
    node = yamlfile.load(path, problems)
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
    own = schema.fields(node, _TASK, source, ("id", "run"))
    if "id" in own:
        name, mark = own["id"]
        if name in ids:
            what = f"id: {quote(name)} is already the id of the task at {ids[name]}"
            source.problems.append(Problem(mark, what, "choose another"))
        ids.setdefault(name, mark)
    if isinstance(own.get("run"), tuple) and isinstance(node, Mapping):
        _no_stray_item(node, source)
    if len(source.problems) > known:
        return None
    values = _merge(base, own)
    files: tuple[tuple[str, Mark], ...] = values["env_file"]
    cwd, cwd_mark = values.get("cwd", (None, None))
    foreach, foreach_mark = values.get("foreach", (None, None))
    return Task(
        id=values["id"][0],
        mark=node.mark,
        run=values["run"],
        shell=values["shell"],
        env=values["env"],
        env_files=tuple(path for path, _ in files),
        env_file_marks=tuple(mark for _, mark in files),
        cwd=cwd,
        cwd_mark=cwd_mark,
        foreach=foreach,
        foreach_mark=foreach_mark,
        timeout=values.get("timeout"),
        stall_after=values.get("stall_after"),
        watchdog=values.get("watchdog"),
        retry=values["retry"],
    )


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return both, `over` winning; environments and retries are merged key by key."""
    merged = under | over
    if "env" in over:
        merged["env"] = under["env"] | over["env"]
    if "env_file" in over:
        merged["env_file"] = under["env_file"] + over["env_file"]
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
        raise Wrong(
            node, f"wants a list of tasks, found {schema.found(node)}", "start each with '- id: NAME'"
        )
    return node


def _main_only(node: Node, source: Source) -> None:
    raise Wrong(node, "has no place in a drop-in, which only adds tasks", "move it to the main file")


def _only_one(node: Node, source: Source) -> int:
    value = schema.integer(node, source)
    if value != 1:
        raise Wrong(
            node, f"this version runs only 1 step at a time, not {value}", "write 1, or leave the key out"
        )
    return value


def _arguments(node: Node, source: Source) -> tuple[str, ...]:
    values = schema.list_of(schema.any_text)(node, source)
    if values and not values[0]:
        raise Wrong(node, "the first item names the program, and is empty", "write a program")
    return values


def _run(node: Node, source: Source) -> str | tuple[str, ...]:
    if type(node) is Mapping:
        raise Wrong(
            node, "wants a text for the shell or a list of arguments, found a mapping", "quote the text"
        )
    return _arguments(node, source) if type(node) is Sequence else schema.text(node, source)


def _shell(node: Node, source: Source) -> tuple[str, ...]:
    return (schema.text(node, source), "-c") if type(node) is Scalar else _arguments(node, source)


def _env(node: Node, source: Source) -> dict[str, str]:
    if type(node) is not Mapping:
        raise Wrong(
            node, f"wants a mapping of names to texts, found {schema.found(node)}", "write NAME: VALUE"
        )
    env = {}
    for key, value in node.entries:
        fault = envfile.name_fault(key.text)
        if fault:
            source.problems.append(Problem(key.mark, f"env: {fault[0]}", fault[1]))
            continue
        try:
            env[key.text] = schema.any_text(value, source)
        except Wrong as wrong:
            source.problems.append(Problem(wrong.where, f"env: {key.text}: {wrong.what}", wrong.hint))
    return env


def _env_files(node: Node, source: Source) -> tuple[tuple[str, Mark], ...]:
    one = schema.marked(schema.path)
    return schema.list_of(one)(node, source) if type(node) is Sequence else (one(node, source),)


def _range(node: Node, source: Source) -> Range:
    value = schema.text(node, source)
    parts = re.fullmatch(r"([0-9]{1,9}) *- *([0-9]{1,9})", value)
    if not parts:
        raise Wrong(
            node, f"{quote(value)} is not a range", "write two numbers of up to nine digits, like 1-40"
        )
    first, last = parts.groups()
    numbers = Range(int(first), int(last), max(map(len, parts.groups())) if _padded(first, last) else 0)
    if numbers.first > numbers.last:
        raise Wrong(node, f"the range {quote(value)} runs backwards", f"write {last}-{first}")
    if numbers.last - numbers.first >= _MOST_IN_RANGE:
        raise Wrong(node, f"the range {quote(value)} is too long", f"use at most {_MOST_IN_RANGE} numbers")
    return numbers


def _padded(*numbers: str) -> bool:
    return any(len(number) > 1 and number.startswith("0") for number in numbers)


def _foreach(node: Node, source: Source) -> Foreach:
    if type(node) is Sequence:
        pairs = schema.list_of(schema.marked(schema.any_text))(node, source)
        return Items(tuple(text for text, _ in pairs), tuple(mark for _, mark in pairs))
    if type(node) is not Mapping or len(node.entries) != 1:
        what = schema.found(node) if type(node) is not Mapping else f"{len(node.entries)} keys"
        raise Wrong(node, f"wants a list, or exactly one of {', '.join(_FOREACH)}; found {what}")
    nothing = Items((), ())  # stands in where a problem has been noted
    chosen: Foreach = next(iter(schema.fields(node, _FOREACH, source).values()), nothing)
    return chosen


_FOREACH: Table = {
    "lines": lambda node, source: Lines(schema.path(node, source)),
    "glob": lambda node, source: Glob(schema.pattern(node, source)),
    "range": _range,
}
_RETRY: Table = {"attempts": schema.integer, "delay": schema.span}
_DEFAULTS: Table = {
    "shell": _shell,
    "env": _env,
    "env_file": _env_files,
    "cwd": schema.marked(schema.path),
    "timeout": schema.limit,
    "stall_after": schema.limit,
    "watchdog": schema.positive_span,
    "retry": lambda node, source: schema.fields(node, _RETRY, source),
}
_TASK: Table = {
    "id": schema.marked(schema.name(_LONGEST_ID)),
    "run": _run,
    "foreach": schema.marked(_foreach),
    **_DEFAULTS,
}
_MAIN: Table = {
    "run": schema.name(_LONGEST_RUN),
    "concurrency": _only_one,
    "on_failure": schema.choice("stop", "continue"),
    "defaults": lambda node, source: schema.fields(node, _DEFAULTS, source),
    "tasks": _list,
}
_DROP_IN: Table = {**dict.fromkeys(_MAIN, _main_only), "tasks": _list}
_BASE: dict[str, Any] = {"shell": ("/bin/sh", "-c"), "env": {}, "env_file": (), "retry": Retry()}
