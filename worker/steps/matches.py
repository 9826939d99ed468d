"""The program behind `expect: {matches: PATTERN}`: looks for a pattern in what a step has printed.

SPEC: {pattern, file}.  A process of its own, because a pattern can take for ever: then a limit of its own, or the
step's timeout, ends it, and not the worker.
"""

from __future__ import annotations

import re
import signal

from worker.steps import StepError

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    from typing import Any

# A pattern is looked for in so much of the output, from its beginning; an output can be larger than memory.
_LOOK_MAX = 16 * 1024 * 1024
# CPU time, so that a slow or frozen machine costs nothing.  A pattern that has not come to an end by then has too
# many ways to match, and using the CPU it would count as alive.
_PATIENCE = 30.0


def search(spec: dict[str, Any]) -> None:
    """Return if the pattern is found; raise StepError if it is not, or if the output cannot be read."""
    try:
        with open(spec["file"], "rb") as file:
            text = file.read(_LOOK_MAX).decode(errors="replace")
    except OSError as exc:
        raise StepError(f"its output cannot be read: {exc.strerror}") from None
    signal.signal(signal.SIGVTALRM, lambda *_: _give_up(spec["pattern"]))
    signal.setitimer(signal.ITIMER_VIRTUAL, spec.get("patience", _PATIENCE))
    if not re.search(spec["pattern"], text, re.MULTILINE):
        raise StepError(f"its output does not match '{spec['pattern']}'")


def _give_up(pattern: str) -> None:
    what = f"the pattern '{pattern}' took longer than {_PATIENCE:.0f}s of CPU time"
    raise StepError(f"{what}: it has too many ways to match, as (a+)+ does")
