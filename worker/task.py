"""A task as data: one entry of the list, every value typed, every default filled in, every path absolute."""

from typing import Literal, NamedTuple

from worker.errors import Mark

MAX_OUTPUT = 16 << 30  # bytes; more than anybody prints who means to
ITEM = "{item}"  # what a list of arguments has in place of the item


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
    """How often a step is tried, and how long to wait in between; seconds."""

    attempts: int = 3  # failures after which the step has failed for good
    delay: float = 10.0  # after the first failure; doubled with each
    max_delay: float = 300.0
    patience: float = 7200.0  # how long "not now" is taken for an answer
    never: tuple[int, ...] = ()  # exit codes that no further attempt can mend
    unsure: tuple[int, ...] = ()  # exit codes, or statuses of HTTP, after which it may have happened all the same
    success: tuple[int, ...] = ()  # exit codes that mean "done", as 0 does


Command = str | tuple[str, ...]  # text for the shell, or the arguments of a program
# What to do about a step that was cut off, so that nobody knows whether its effect happened: do it again; ask
# `check`; or leave that to a person.
Redo = Literal["always", "check", "never"]


def arguments(command: Command) -> list[str]:
    """Return a command as the arguments of a program; text is for /bin/sh."""
    return ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)


class Given(NamedTuple):
    """What `defaults:` has in store for the environment of whatever is run."""

    env: dict[str, str] = {}  # noqa: RUF012 - nobody changes it
    env_files: tuple[str, ...] = ()  # later ones win, and `env` wins over all


class Expect(NamedTuple):
    """What must hold after a step has exited with 0."""

    file: str | None = None  # exists and is not empty; relative to the folder in which the step works
    matches: str | None = None  # a regular expression that is found in the output
    run: Command | None = None  # exits with 0


class Confine(NamedTuple):
    """Whether a task's steps are confined, and what they may write besides what each may."""

    on: bool
    write: tuple[str, ...] = ()


class Task(NamedTuple):
    """One entry of the list; a limit that is None does not apply.  Exactly one of run, http, python is set."""

    id: str
    mark: Mark
    run: Command | None
    http: str | None  # the request as JSON text, see worker/steps/http.py
    python: str | None  # MODULE:FUNCTION
    args: str  # its arguments as JSON text
    shell: tuple[str, ...]
    env: dict[str, str]
    env_files: tuple[str, ...]  # later ones win, and `env` wins over all
    env_file_marks: tuple[Mark, ...]
    secrets: tuple[str, ...]
    cwd: str | None
    cwd_mark: Mark | None
    foreach: Foreach | None
    foreach_mark: Mark | None
    needs: tuple[str, ...]
    needs_marks: tuple[Mark, ...]
    before: Command | None
    after: Command | None
    expect: Expect | None
    key: str | None  # what the effect is known by outside, with {run}, {step} and {item}; None: RUN:STEP
    redo: Redo
    check: Command | None  # exits with 0 if the effect has happened, 1 if not; its output is the result
    timeout: float | None
    stall_after: float | None
    watchdog: float | None
    progress_every: float | None
    retry: Retry
    confine: Confine | None = None  # None: as it is where the worker runs
    max_output: int | None = MAX_OUTPUT  # bytes, of each of its two streams


def commands(task: Task) -> list[list[str]]:
    """Return the arguments of every program that a task names; those of ours are not among them."""
    given: list[Command | None] = [task.run, task.before, task.after, task.check, task.expect and task.expect.run]
    return [arguments(command) for command in given if command is not None]
