"""The items of a task: what its `foreach` names in the world, read once, within limits."""

import os
import re
from collections.abc import Callable, Sequence

from worker import distant, plural, task, textfile
from worker.errors import ConfigError, Mark, Problem, quote
from worker.task import Task

MOST = 2_000_000  # steps of a plan: what is kept of each is a quarter of a kilobyte
_LARGEST = 64 * textfile.MEGABYTE  # a file of items
_ESCAPED = re.compile(r"\[([*?[])\]")  # glob.escape()
_NO_ITEM = re.compile("[\0\n\ud800-\udfff]")


def is_no_item(item: str) -> bool:
    """Return whether no step can be given this item: it is empty, has a newline or NUL in it, or is not UTF-8."""
    return not item or _NO_ITEM.search(item) is not None


def is_there(entry: Task) -> bool:
    """Return whether something is there already of what a late task takes its items from."""
    if isinstance(entry.foreach, task.Lines):
        return os.path.lexists(entry.foreach.path)
    assert isinstance(entry.foreach, task.Glob)
    return bool(_found(entry.foreach.pattern, entry.foreach_mark or entry.mark))


def nothing(entry: Task) -> Problem:
    """Return what is told of a task with no item today: an inbox that is empty is no mistake."""
    foreach = entry.foreach
    if isinstance(foreach, task.Glob):
        what = f"foreach: nothing matches {foreach.pattern!r}"
        meant = textfile.beside_target(foreach.pattern, entry.foreach_mark)
        if meant and _found(meant, entry.foreach_mark or entry.mark):
            return Problem(entry.foreach_mark, what, textfile.link_hint(meant))
    else:
        assert isinstance(foreach, task.Lines)
        what = f"foreach: {foreach.path!r} has no lines with anything on them"
    return Problem(entry.foreach_mark or entry.mark, what, f"the task '{entry.id}' has no steps of its own now")


def items(entry: Task, most: int) -> tuple[Sequence[str], Callable[[int], Mark]]:
    """Return the items of a task's foreach, and where to look for the n-th of them."""
    foreach = entry.foreach
    mark = entry.foreach_mark or entry.mark
    if isinstance(foreach, task.Items):
        marks = foreach.marks
        return foreach.texts, lambda index: marks[index]
    if isinstance(foreach, task.Range):
        return [str(n).zfill(foreach.width) for n in range(foreach.first, foreach.last + 1)], lambda index: mark
    if isinstance(foreach, task.Lines):
        path = foreach.path
        text = distant.read(path, _LARGEST, mark)
        if text.count("\n") > most:
            raise too_many(mark)
        lines = text.split("\n")
        numbers = [number for number, line in enumerate(lines, 1) if line.strip()]
        return [lines[number - 1] for number in numbers], lambda index: Mark(path, numbers[index], 1)
    assert foreach is not None
    return _matches(foreach.pattern, mark, most), lambda index: mark


def too_many(where: Mark) -> ConfigError:
    """Return the error of a plan that would have more steps than any may have."""
    what = f"foreach: more than {plural.of(MOST, 'step')} in all"
    return ConfigError([Problem(where, what, "make several runs of it")])


def _matches(pattern: str, mark: Mark, most: int) -> list[str]:
    """Return the paths that match, none if there are none today.

    Raises ConfigError if the folder in which they would be cannot be looked into: that is a mistake.
    """
    folder = _folder(pattern)
    try:
        distant.ask(folder)
        with os.scandir(folder):
            pass
    except OSError as exc:
        what = f"foreach: nothing can match {pattern!r}: '{folder}' cannot be looked into ({exc.strerror})"
        meant = textfile.beside_target(pattern, mark)
        hint = textfile.link_hint(meant) if meant and _found(meant, mark) else "check the pattern and its folder"
        raise ConfigError([Problem(mark, what, hint)]) from None
    matches = _found(pattern, mark, most + 1)
    if len(matches) > most:
        raise too_many(mark)
    return matches


def _folder(pattern: str) -> str:
    """Return the folder above the first wildcard of a pattern."""
    import glob  # only for the lists that ask for it

    folder = "/"
    for part in pattern.split("/")[:-1]:
        literal = _ESCAPED.sub(r"\1", part)
        if glob.has_magic(_ESCAPED.sub("", part)):
            break
        folder = os.path.join(folder, literal)
    return folder


def _found(pattern: str, mark: Mark, most: int = 1) -> list[str]:
    """Return the first `most` paths that match, in order.  Raises ConfigError if that takes too long."""
    from worker import walk  # only for the lists that ask for it

    try:
        return walk.find(pattern, _folder(pattern), most)
    except OSError as exc:
        what = f"foreach: the matches of {pattern!r} cannot be found: {exc.strerror}"
        hint = "mount it anew" if exc.strerror == distant.SILENT else "name the folder in which they are"
        raise ConfigError([Problem(mark, what, hint)]) from None


def bad_item(item: str, where: Mark) -> Problem:
    """Return what is wrong with an item that no step can have."""
    if not item:
        return Problem(where, "foreach: an item is empty", "remove it")
    if "\n" in item or "\0" in item:
        return Problem(where, f"foreach: the item {quote(item)} has a newline or NUL in it", "remove that")
    return Problem(where, f"foreach: the item {quote(item)} is not UTF-8", "rename the file")
