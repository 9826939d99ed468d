"""Lines for the journal, whatever the bytes are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.lines import LINE_MAX, Lines


def lines_of(*chunks: bytes) -> list[str]:
    lines = Lines()
    return [line for chunk in chunks for line in lines.feed(chunk)] + lines.end()


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"o", b"ne\ntw", b"o"], ["one", "two"]),
        ([b"\n\n"], ["", ""]),
        ([b"crlf\r\n"], ["crlf"]),
        ([b" 10%\r 50%\r100%\n"], ["100%"]),  # case J3
        ([b"\x1b[31mred\x07\n"], ["\\x1b[31mred\\x07"]),
        ([b"\xff\xfe\n"], ["\\xff\\xfe"]),
        (["grün\n".encode()], ["grün"]),
    ],
)
def test_bytes_become_lines(chunks: list[bytes], expected: list[str]) -> None:
    """
    Case J3: control bytes are escaped, a progress bar folds to its last state.
    """
    assert lines_of(*chunks) == expected


def test_a_line_without_end_is_cut_and_says_how_much_is_missing() -> None:
    """
    Cases J1 and P2: head, tail and the number of bytes left out; memory stays small.
    """
    lines = Lines()
    for _ in range(200):
        assert lines.feed(b"x" * 1_000_000) == []
    (line,) = lines.feed(b"tail\n")
    assert len(line) <= LINE_MAX
    assert line.startswith("xxx") and line.endswith("tail")
    left_out = int(line.split("[... ")[1].split()[0])
    shown = len(line) - len(f" [... {left_out} bytes left out ...] ")
    assert left_out + shown == 200_000_004


@given(st.lists(st.binary(max_size=20_000), max_size=5))
def test_no_line_is_too_long_or_unprintable(chunks: list[bytes]) -> None:
    """
    Case J1, for any bytes.
    """
    for line in lines_of(*chunks):
        assert len(line.encode()) <= LINE_MAX
        assert "\n" not in line and "\x1b" not in line and "\r" not in line
