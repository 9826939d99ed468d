"""Time spans, as systemd understands them."""

import math
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker import timespan

SPANS = {
    "5": 5,
    "0": 0,
    "1.5": 1.5,
    ".5s": 0.5,
    "1h30min": 5400,
    "1h 30min": 5400,
    " 2 h ": 7200,
    "1h30": 3630,
    "1 2": 3,
    "2hours": 7200,
    "48hr": 172800,
    "1y 12month": 31557600 + 12 * 2629800,
    "55s500ms": 55.5,
    "300ms20s 5day": 432020.3,
    "1m": 60,
    "1M": 2629800,
    "2 weeks 3d": 17 * 86400,
    "1w": 604800,
    "5us": 0.000005,
    "5\N{MICRO SIGN}s": 0.000005,
    "5\N{GREEK SMALL LETTER MU}s": 0.000005,
    "1 usec": 0.000001,
    "0.0000019s": 0.000001,
    "1msec": 0.001,
    "1minute 1seconds": 61,
    "007s": 7,
}
NOT_SPANS = (
    "",
    " ",
    "1:30",
    "5 parsecs",
    "1s,",
    "1,5s",
    "-1s",
    "1e3",
    "1.s",
    "1H",
    "infinity 1s",
    "s",
    "\N{ARABIC-INDIC DIGIT ONE}s",
    "9" * 300,
)


@pytest.mark.parametrize("text, seconds", SPANS.items())
def test_a_span_is_read_to_the_microsecond(text: str, seconds: float) -> None:
    """
    Every unit, combinations, fractions, and seconds when there is no unit.
    """
    assert timespan.parse(text) == seconds


def test_infinity_is_infinite() -> None:
    """
    The word, and only the word.
    """
    assert timespan.parse("infinity") == math.inf
    with pytest.raises(ValueError, match="too long; use 290000 years"):
        timespan.parse("300000y")


@pytest.mark.parametrize("text", NOT_SPANS)
def test_what_is_no_span_says_what_to_write(text: str) -> None:
    """
    The message has the text and a way out, on one line.
    """
    with pytest.raises(ValueError, match=r"^[^\n]+; [^\n]+$"):
        timespan.parse(text)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze to compare with")
def test_systemd_reads_the_same() -> None:
    """
    The real systemd-analyze is asked about every span above.
    """
    command = ["systemd-analyze", "timespan", "--", *SPANS]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env={"LC_ALL": "C.UTF-8"}).stdout
    theirs = [int(line.split(":")[1]) for line in output.splitlines() if line.strip()[1:].startswith("s:")]
    assert theirs == [round(timespan.parse(text) * 1e6) for text in SPANS]


@pytest.mark.parametrize(
    "seconds, shown",
    [
        (0, "0s"),
        (0.000004, "4us"),
        (0.34, "340ms"),
        (0.9996, "1s"),
        (2.5, "2.5s"),
        (12, "12s"),
        (59.96, "1min"),
        (61, "1min 1s"),
        (3599.6, "1h"),
        (5400, "1h 30min"),
        (7199, "2h"),
        (93600, "1d 2h"),
        (math.inf, "infinity"),
        (-1, "0s"),
    ],
)
def test_a_span_is_shown_in_two_units_at_most(seconds: float, shown: str) -> None:
    """
    Rounded for people, without '1h 60min'.
    """
    assert timespan.show(seconds) == shown


@given(st.floats(0, 1e9))
def test_what_is_shown_can_be_read(seconds: float) -> None:
    """
    What the worker prints, the configuration takes, within what rounding costs.
    """
    assert timespan.parse(timespan.show(seconds)) == pytest.approx(seconds, rel=0.03, abs=1e-6)
