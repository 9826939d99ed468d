"""The plan: every step of a run, in order, with the identity by which finished work is known again.

`build()` either returns a plan that holds (no two steps with one id, no item that a process cannot be given,
every environment file in order) or raises one ConfigError with all that is wrong.  It reads the lists that
`foreach` names, once; a plan never changes, but another one may take its place.
"""

import gc
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from worker import argspace, distant, envfile, foreach, task
from worker.config import Config
from worker.errors import SHOWN, ConfigError, Problem, quote
from worker.task import Command, Task

if TYPE_CHECKING:
    from hashlib import blake2b

_LONGEST_ID = 200  # bytes: leaves room in a file name for the endings that state files have
_DIGEST = 8  # bytes
_CIRCLES = 20  # each takes a look at the whole list
# Isolated (-I): neither the step's environment nor its folder decides what our programs import.
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from worker.steps import main; main(sys.argv[2:])"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
OUR_PROGRAM = (sys.executable, "-I", "-c", _BOOT, _ROOT)
_SAFE = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789:_."
_ESCAPES = {byte: f"\\x{byte:02x}" for byte in range(256) if chr(byte) not in _SAFE} | {ord("/"): "-"}


class Step(NamedTuple):
    """One unit of the plan: a task, or a task with one of its items."""

    id: str
    task: Task
    item: str | None

    def key(self, run: str) -> str:
        """Return what the step's effect is known by outside: the same for every attempt, on every machine."""
        if self.task.key is None:
            return f"{run}:{self.id}"
        key = self.task.key.replace("{run}", run).replace("{step}", self.id)
        return key if self.item is None else key.replace(task.ITEM, self.item)

    def under(self, key: str, run: str) -> "Step":
        """Return the same step with this key, "" being RUN:STEP, whatever the list says by now."""
        whole = key or f"{run}:{self.id}"
        return self if self.key(run) == whole else self._replace(task=self.task._replace(key=whole))

    def argv(self) -> list[str]:
        """Return the program of the step and its arguments; http and python steps are programs of ours."""
        if self.task.run is not None:
            return self.command(self.task.run)
        unsure = f'"unsure": {list(self.task.retry.unsure)}'
        if self.task.http is not None:
            return [*OUR_PROGRAM, "http", f"{self.task.http[:-1]}, {unsure}}}"]
        return [*OUR_PROGRAM, "python", f'{{"call": "{self.task.python}", "args": {self.task.args}, {unsure}}}']

    def matches(self, file: str) -> list[str]:
        """Return the program that looks for the expected pattern in `file`, and its arguments."""
        assert self.task.expect is not None
        return [*OUR_PROGRAM, "matches", json.dumps({"pattern": self.task.expect.matches, "file": file})]

    def command(self, command: Command) -> list[str]:
        """Return a command's arguments; a shell's text is never changed, a list gets the item."""
        if isinstance(command, str):
            return [*self.task.shell, command]
        if self.item is None:
            return list(command)
        return [argument.replace(task.ITEM, self.item) for argument in command]


class Plan:
    """The steps in order, those of one task side by side, and by id; the tasks by id, also those without a step.

    `kept`: the steps that are there only because the ledger has begun them; see worker/begun.py.  `empty`: what is
    to be told of tasks for which nothing is there today.  `late`: the tasks whose items are not known before what
    they need is done; see worker/late.py.  `lacks`: what is to be told of items that wait for others to end.
    """

    __slots__ = ("_task_hashes", "by_id", "empty", "kept", "lacks", "late", "run", "steps", "tasks")

    def __init__(
        self,
        steps: tuple[Step, ...],
        by_id: dict[str, Step],
        tasks: Iterable[Task] = (),
        run: str = "",
        kept: frozenset[str] = frozenset(),
        empty: tuple[Problem, ...] = (),
        late: frozenset[str] = frozenset(),
    ) -> None:
        self.steps = steps
        self.by_id = by_id
        self.tasks = {entry.id: entry for entry in tasks} or {step.task.id: step.task for step in steps}
        self.run = run
        self.kept = kept
        self.empty = empty
        self.late = late
        self.lacks: Problem | None = None
        self._task_hashes: dict[str, blake2b] = {}

    def listing(self) -> list[tuple[str, str]]:
        """Return the id and the definition of every step that the list has for certain, in order."""
        listed = (step for step in self.steps if step.id not in self.kept and step.task.id not in self.late)
        return [(step.id, self.digest(step)) for step in listed]

    def identity(self, listing: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return what machines that share the run must have in common: all of the list but what it finds in the world.

        `listing`: what listing() returns, which costs a digest for each step.
        Each has its own world at its own time; a task with a pattern or a file of lines stands for all its steps.
        """
        whole = {name for name, entry in self.tasks.items() if isinstance(entry.foreach, task.Glob | task.Lines)}
        if not whole:
            return listing
        fixed = [(step, digest) for step, digest in listing if self.by_id[step].task.id not in whole]
        return fixed + [(f"{name}@*", _task_hash(self.tasks[name]).hexdigest()) for name in self.tasks if name in whole]

    def keeping(self, steps: Iterable[Step]) -> "Plan":
        """Return a plan that has these steps besides, each after the others of its task."""
        of_task, added = self._of_task(), list(steps)
        for step in added:
            of_task[step.task.id].append(step)
        return self._with(of_task, self.kept.union(step.id for step in added), self.late)

    def dropping(self, steps: Iterable[Step]) -> "Plan":
        """Return a plan that has none of these steps, which were kept."""
        of_task, gone = self._of_task(), {step.id for step in steps}
        left = {name: [step for step in held if step.id not in gone] for name, held in of_task.items()}
        return self._with(left, self.kept - gone, self.late)

    def replacing(self, name: str, steps: Sequence[Step], late: bool) -> "Plan":
        """Return a plan in which the task of this name has these steps; `late`: they are not its real ones yet."""
        of_task = self._of_task()
        kept = self.kept.difference(step.id for step in of_task[name])
        of_task[name] = list(steps)
        return self._with(of_task, kept, self.late | {name} if late else self.late - {name})

    def lacking(self, note: Problem) -> "Plan":
        """Return the same plan with this to be told of it."""
        made = self._with(self._of_task(), self.kept, self.late)
        made.lacks = note
        return made

    def _of_task(self) -> dict[str, list[Step]]:
        of_task: dict[str, list[Step]] = {name: [] for name in self.tasks}
        for step in self.steps:
            of_task[step.task.id].append(step)
        return of_task

    def _with(self, of_task: dict[str, list[Step]], kept: frozenset[str], late: frozenset[str]) -> "Plan":
        by_id = {step.id: step for steps in of_task.values() for step in steps}
        made = Plan(tuple(by_id.values()), by_id, self.tasks.values(), self.run, kept, self.empty, late)
        made.lacks = self.lacks
        return made

    def digest(self, step: Step) -> str:
        """Return a text that stands for the work of a step: while it is the same, the work is.

        The command, its shell, environment, folder and item count; limits and retries do not.
        """
        known = self._task_hashes.get(step.task.id)
        if known is None:
            known = self._task_hashes[step.task.id] = _task_hash(step.task)
        if step.item is None:
            return known.hexdigest()
        with_item = known.copy()
        with_item.update(step.item.encode())
        return with_item.hexdigest()


def build(config: Config) -> Plan:
    """Return the plan; raises ConfigError with everything that stands in its way."""
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage
    try:
        return _build(config)
    finally:
        if collecting:
            gc.enable()


def escape(item: str) -> str:
    """Return the item as systemd-escape would: safe in a file or unit name, and different for every item."""
    # One character a byte: translate() is the fastest way through.
    escaped = item.encode().decode("latin-1").translate(_ESCAPES)
    return "\\x2e" + escaped[1:] if escaped.startswith(".") else escaped


def step_id(task_id: str, item: str) -> str:
    """Return TASK@ITEM with the item escaped; a long one is cut and told apart by a digest."""
    name = f"{task_id}@{escape(item)}"
    if len(name) <= _LONGEST_ID:
        return name
    digest = hashlib.blake2b(item.encode(), digest_size=6).hexdigest()
    return f"{name[: _LONGEST_ID - 1 - len(digest)]}~{digest}"


def item_of(name: str) -> str | None:
    """Return the item of the step with this id; None if it has none, or if the id was cut."""
    _task, at, escaped = name.partition("@")
    if not at or "~" in escaped:
        return None
    parts = re.split(r"(\\x[0-9a-f]{2})", escaped.replace("-", "/"))
    try:
        return b"".join(bytes.fromhex(p[2:]) if p.startswith("\\x") else p.encode() for p in parts).decode()
    except (UnicodeDecodeError, ValueError):
        return None


def _build(config: Config) -> Plan:
    files: dict[str, int] = {}
    problems = _env_file_problems(config, files)
    _count_ranges(config.tasks)
    by_id: dict[str, Step] = {}
    empty: list[Problem] = []
    late = frozenset(entry.id for entry in config.tasks if is_late(entry))
    for entry in config.tasks:
        if entry.foreach is None:
            by_id[entry.id] = Step(entry.id, entry, None)
        elif entry.id in late:
            if not (foreach.is_there(entry) and _expand(entry, by_id, problems)):
                standing_in = placeholder(entry)
                by_id[standing_in.id] = standing_in
        elif not _expand(entry, by_id, problems):
            empty.append(foreach.nothing(entry))
    problems += _size_problems(config.tasks, by_id.values(), files)
    problems += _needs_problems(config.tasks)
    if any(entry.key is not None for entry in config.tasks):
        problems += key_problems(config.run, by_id.values())
    if problems:
        raise ConfigError(problems)
    return Plan(tuple(by_id.values()), by_id, config.tasks, config.run, empty=tuple(empty), late=late)


def is_late(entry: Task) -> bool:
    """Return whether what a task needs may make its items; see worker/late.py."""
    return isinstance(entry.foreach, task.Glob | task.Lines) and bool(entry.needs)


def placeholder(entry: Task) -> Step:
    """Return the step that stands for all of a task whose items are not known; no item gives its id."""
    return Step(f"{entry.id}@", entry, None)


def late_items(entry: Task) -> list[str]:
    """Return the items of a late task, which have just been made.  Raises ConfigError with all its mistakes."""
    by_id: dict[str, Step] = {}
    problems: list[Problem] = []
    _expand(entry, by_id, problems)
    if problems:
        raise ConfigError(problems)
    return [step.item for step in by_id.values() if step.item is not None]


def _count_ranges(tasks: Sequence[Task]) -> None:
    """Raise ConfigError if the ranges alone are too many steps, before any is made."""
    count = 0
    for entry in tasks:
        if isinstance(entry.foreach, task.Range):
            count += entry.foreach.last - entry.foreach.first + 1
            if count > foreach.MOST:
                raise foreach.too_many(entry.foreach_mark or entry.mark)


def _expand(entry: Task, by_id: dict[str, Step], problems: list[Problem]) -> bool:
    """Add a step for each item of a task's foreach; return whether there is any, or a mistake.

    Raises ConfigError where they are more than any plan has.
    """
    try:
        items, place = foreach.items(entry, foreach.MOST - len(by_id))
    except ConfigError as exc:
        problems += exc.problems
        return True
    for index, item in enumerate(items):
        if len(problems) > SHOWN:
            return True
        if len(item) > argspace.SHORT and (fault := argspace.item_excess(entry, item)):
            problems.append(Problem(place(index), f"foreach: {fault}", argspace.HINT))
            continue
        if foreach.is_no_item(item):
            problems.append(foreach.bad_item(item, place(index)))
            continue
        name = step_id(entry.id, item)
        if name in by_id:
            what = f"foreach: the item {quote(item)} is there twice"
            problems.append(Problem(place(index), what, "remove one"))
        by_id[name] = Step(name, entry, item)
    return bool(items)


def _size_problems(tasks: Sequence[Task], steps: Iterable[Step], files: dict[str, int]) -> list[Problem]:
    """Return a problem for each task whose steps are given more than any program can be."""
    longest: dict[str, str] = {}
    for step in steps:
        if step.item and len(step.item) > argspace.SHORT and len(step.item) > len(longest.get(step.task.id, "")):
            longest[step.task.id] = step.item
    return [
        Problem(entry.mark, fault, argspace.HINT)
        for entry in tasks
        if (fault := argspace.total_excess(entry, files, longest.get(entry.id, "")))
    ]


def key_problems(run: str, steps: Iterable[Step]) -> list[Problem]:
    """Return a problem for each step whose effect would be taken for another step's."""
    problems: list[Problem] = []
    owners: dict[str, Step] = {}
    for step in steps:
        owner = owners.setdefault(step.key(run), step)
        if owner is not step:
            mark = (step if step.task.key is not None else owner).task.mark
            what = f"key: the steps '{owner.id}' and '{step.id}' would both have the key {quote(step.key(run))}"
            problems.append(Problem(mark, what, "use {step} or {item} in it, or another text"))
            if len(problems) > SHOWN:
                break
    return problems


def _needs_problems(tasks: Sequence[Task]) -> list[Problem]:
    """Return what is wrong with `needs`: tasks that are not there, and circles."""
    by_id = {entry.id: entry for entry in tasks}
    problems: list[Problem] = []
    for entry in tasks:
        for need, mark in zip(entry.needs, entry.needs_marks, strict=True):
            if need not in by_id:
                close = f"the tasks are: {', '.join(islice(by_id, 8))}{' ...' if len(by_id) > 8 else ''}"
                problems.append(Problem(mark, f"needs: there is no task {quote(need)}", close))
    if problems or not any(entry.needs for entry in tasks):
        return problems
    return _circles(by_id)


def _circles(by_id: dict[str, Task]) -> list[Problem]:
    """Return a problem for each circle of needs."""
    import graphlib  # only for the lists that have needs

    graph = {entry.id: entry.needs for entry in by_id.values()}
    problems: list[Problem] = []
    while len(problems) < _CIRCLES:
        try:
            graphlib.TopologicalSorter(graph).prepare()
            return problems
        except graphlib.CycleError as exc:
            circle: list[str] = exc.args[1][::-1]  # each needs the next, the last is the first again
            entry = by_id[circle[0]]
            mark = entry.needs_marks[entry.needs.index(circle[1])]
            what = f"needs: these wait for each other: {' needs '.join(circle)}"
            problems.append(Problem(mark, what, "take one of them out"))
            for name in circle[1:]:
                del graph[name]
    return problems


def _env_file_problems(config: Config, sizes: dict[str, int]) -> list[Problem]:
    """Return what is wrong with environment files; note in `sizes` how much room the variables of each take."""
    problems: list[Problem] = []
    for entry in config.tasks:
        for path, mark in zip(entry.env_files, entry.env_file_marks, strict=True):
            if path in sizes:
                continue
            sizes[path] = 0
            if not distant.answers(path):
                continue  # its steps will say so, and the others begin
            try:
                variables = envfile.load(path, mark)
                sizes[path] = argspace.size(f"{name}={value}" for name, value in variables.items())
            except ConfigError as exc:
                problems += exc.problems
    return problems


def _task_hash(entry: Task) -> "blake2b":
    shell = entry.shell if isinstance(entry.run, str) else ()
    # ascii() because repr() changes with Python's tables of printable characters.
    work = ascii((entry.run, shell, sorted(entry.env.items()), entry.env_files, entry.cwd))
    if entry.http or entry.python:
        work += ascii((entry.http, entry.python, entry.args))
    if entry.before or entry.after or entry.expect:
        work += ascii((entry.before, entry.after, entry.expect and tuple(entry.expect)))
    return hashlib.blake2b(work.encode() + b"\0", digest_size=_DIGEST)
