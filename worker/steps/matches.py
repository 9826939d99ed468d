"""The program behind `expect: {matches: PATTERN}`: looks for a pattern in what a step has printed.

SPEC: {pattern, file}.  A process of its own, because a pattern can take for ever: then the step's timeout
ends it, and not the worker.
"""

from __future__ import annotations

import re

from worker.steps import StepError

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    from typing import Any

# A pattern is looked for in so much of the output, from its beginning; an output can be larger than memory.
_LOOK_MAX = 16 * 1024 * 1024


def search(spec: dict[str, Any]) -> None:
    """Return if the pattern is found; raise StepError if it is not, or if the output cannot be read."""
    try:
        with open(spec["file"], "rb") as file:
            text = file.read(_LOOK_MAX).decode(errors="replace")
    except OSError as exc:
        raise StepError(f"its output cannot be read: {exc.strerror}") from None
    if not re.search(spec["pattern"], text, re.MULTILINE):
        raise StepError(f"its output does not match '{spec['pattern']}'")
