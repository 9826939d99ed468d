"""How much the kernel hands to a program: one argument or variable, and all of them together (execve(2)).

What goes beyond is known before the run; met in it, it is "Argument list too long" at every attempt.
"""

import os
from collections.abc import Iterable, Mapping

from worker.task import ITEM, Task, commands

LONGEST = 32 * 4096 - 1  # bytes of one, without its closing NUL (MAX_ARG_STRLEN)
_ALL = min(os.sysconf("SC_ARG_MAX"), 2**21)  # a quarter of the usual limit on the stack
_SPARE = 2**16  # for what the worker's own environment and the worker add
_EACH = 1 + 8  # the closing NUL and a pointer
SHORT = 200  # characters: an item up to this fits wherever it is put
_ITEM_VARIABLE, _KEY_VARIABLE = "AGENT_ITEM=", "AGENT_KEY="
HINT = "put it into a file, and let the step read that"


def excess(text: str) -> str | None:
    """Return what is wrong with a text that is too long for one argument, or NAME=VALUE for one variable; or None."""
    if len(text) <= LONGEST // 4 or (size := len(text.encode(errors="surrogatepass"))) <= LONGEST:
        return None
    return f"{size} bytes are more than the {LONGEST} that a program can be given at once"


def item_excess(task: Task, item: str) -> str | None:
    """Return what is wrong with an item that is too long where the steps of `task` are given it, or None."""
    texts = [_ITEM_VARIABLE + item, _KEY_VARIABLE + (task.key or "").replace(ITEM, item)]
    texts += [text.replace(ITEM, item) for command in _commands(task) for text in command if ITEM in text]
    return next((fault for text in texts if (fault := excess(text))), None)


def total_excess(task: Task, files: Mapping[str, int], item: str) -> str | None:
    """Return what is wrong if a step of `task` with `item` is given more than any program can be, or None.

    `files`: the size of the variables in each environment file.
    """
    env = size(f"{name}={value}" for name, value in task.env.items())
    env += sum(files.get(path, 0) for path in task.env_files) + len(item)
    for command in _commands(task):
        whole = env + size(text.replace(ITEM, item) for text in command)
        if whole > _ALL - _SPARE:
            return f"arguments and environment come to {whole} bytes; a program can be given {_ALL - _SPARE}"
    return None


def size(texts: Iterable[str]) -> int:
    """Return how much of the room these arguments, or variables, take."""
    return sum(len(text.encode(errors="surrogatepass")) + _EACH for text in texts)


def _commands(task: Task) -> list[list[str]]:
    """Return the arguments of every program of a task; those of ours get theirs in a file if need be."""
    return commands(task) or [[]]
