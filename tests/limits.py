"""The time limit of a test, so that it holds for what is blocked while it is cleaned up, too.

pytest-timeout raises an error in the test, once, and sets its clock for no clean-up after a failure.  A `with` block
around a process waits for that process, and a fixture for what it made: either would wait for ever.
"""

import contextlib
import os
import signal
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

# Seconds after which an error is raised again if the first one has ended nothing.
AGAIN = 30.0

Settings = Any  # of pytest-timeout, which has no types
_settings = pytest.StashKey[Settings]()
_before = pytest.StashKey[set[int]]()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Settings) -> Generator[None, object, object]:
    """Kill what the test has started when its time is over, then raise the error, again and again."""
    result = yield
    item.stash[_settings] = settings
    fail = signal.getsignal(signal.SIGALRM)
    if settings.method == "signal" and callable(fail):

        def over(number: int, frame: FrameType | None) -> None:
            __tracebackhide__ = True
            before = item.stash.get(_before, None)
            for child in set() if before is None else children() - before:
                os.kill(child, signal.SIGKILL)
            fail(number, frame)

        signal.signal(signal.SIGALRM, over)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Remember the children that fixtures have made: a server of the whole session is none of the test's."""
    item.stash[_before] = children()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Set the clock anew: a failure has stopped it."""
    settings = item.stash.get(_settings, None)
    if settings is not None:
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)


def children() -> set[int]:
    """Return the processes that this one has started and not collected."""
    found = ""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            found += f" {(task / 'children').read_text()}"
    return set(map(int, found.split()))
