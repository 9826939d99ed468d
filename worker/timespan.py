"""Time spans as in systemd.time(7): '90s', '1h 30min', '2.5s', plain numbers for seconds, 'infinity'."""

import math
import re

_MICROSECONDS = {
    unit: size
    for size, units in (
        (1, ("usec", "us", "\N{MICRO SIGN}s", "\N{GREEK SMALL LETTER MU}s")),
        (1_000, ("msec", "ms")),
        (1_000_000, ("seconds", "second", "sec", "s", "")),
        (60_000_000, ("minutes", "minute", "min", "m")),
        (3_600_000_000, ("hours", "hour", "hr", "h")),
        (86_400_000_000, ("days", "day", "d")),
        (604_800_000_000, ("weeks", "week", "w")),
        (2_629_800_000_000, ("months", "month", "M")),
        (31_557_600_000_000, ("years", "year", "y")),
    )
    for unit in units
}
_TERM = re.compile(r"\s*([0-9]+)?(?:\.([0-9]+))?\s*([^\W\d_]*)\s*")
_LONGEST = 2**63 - 1  # microseconds: what the kernel and systemd can still count
_LONGEST_TEXT, _SHOWN = 200, 60
_PAIRS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
_FORM = "write it like '90s', '2.5s' or '1h 30min'"


def parse(text: str) -> float:
    """Return the span in seconds, to the microsecond; 'infinity' is math.inf.

    Raises ValueError with a message that says what to write instead.
    """
    if text.strip() == "infinity":
        return math.inf
    if not text.strip() or len(text) > _LONGEST_TEXT:
        raise ValueError(f"{text[:20]!r} is not a time span; {_FORM}")
    total = position = 0
    while position < len(text):
        term = _TERM.match(text, position)
        whole, fraction, unit = term.groups() if term else (None, None, "")
        if term is None or (whole is None and fraction is None):
            raise ValueError(f"{text!r} is not a time span; {_FORM}")
        if unit not in _MICROSECONDS:
            raise ValueError(f"{unit!r} in {text!r} is no unit of time; use us, ms, s, min, h, d, w, month or y")
        fraction = fraction or ""
        total += int((whole or "") + fraction) * _MICROSECONDS[unit] // 10 ** len(fraction)
        position = term.end()
    if total > _LONGEST:
        raise ValueError(f"{text[:_SHOWN]!r} is too long; use 290000 years at most")
    return total / 1_000_000


def show(seconds: float) -> str:
    """Return the span for people, to two units at most: '1h 30min', '2.5s', '340ms'."""
    if math.isinf(seconds):
        return "infinity"
    if seconds < 0.0009995:
        return f"{round(seconds * 1e6)}us" if seconds > 0.0000005 else "0s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.3g}ms"
    if seconds < 0.9995:
        return f"{round(seconds * 1000)}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s".replace(".0s", "s")
    left = round(seconds)
    for size, unit, smaller, smaller_unit in _PAIRS:
        # Rounded before it is split, or there would be '1h 60min'.
        total = (left + smaller // 2) // smaller * smaller
        if total >= size:
            rest = total % size // smaller
            return f"{total // size}{unit} {rest}{smaller_unit}" if rest else f"{total // size}{unit}"
    return f"{left}s"
