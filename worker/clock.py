"""Clocks: what time it is, and which boot this is.

Durations come from the monotonic clock, so that a jump of the wall clock ends no step and makes
no duration negative.  Wall-clock times are for people and for the ledger.
"""

import time
from typing import NamedTuple

monotonic = time.monotonic
wall = time.time


class Now(NamedTuple):
    """One moment on both clocks."""

    wall: float
    monotonic: float


def now() -> Now:
    return Now(time.time(), time.monotonic())


def boot_id() -> str:
    """Return the kernel's id of this boot (random(4)); it changes with every reboot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def stamp(seconds: float) -> str:
    """Return a wall-clock time as UTC text: 2026-01-31T12:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def unstamp(text: str) -> float | None:
    """Return the wall-clock time that `stamp` has made a text of; None for any other text."""
    import calendar  # 0.4 ms

    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None
