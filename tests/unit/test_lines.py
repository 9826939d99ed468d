"""Lines for the journal, whatever the bytes are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.lines import LINE_MAX, Lines


def lines_of(*chunks: bytes) -> list[str]:
    lines = Lines()
    return [line for chunk in chunks for line in lines.feed(chunk, 10**9)[0]] + lines.end()


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
        assert lines.feed(b"x" * 1_000_000, 1) == ([], 0)
    (line,), _skipped = lines.feed(b"tail\n", 1)
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


@given(st.binary(max_size=300).map(lambda data: data.replace(b"\r", b"")), st.integers(0, 20), st.integers(1, 7))
def test_lines_that_may_not_pass_are_counted(data: bytes, most: int, size: int) -> None:
    """
    Shown and skipped are all there are, and the shown ones are the first, however the bytes come.
    """
    lines, whole = Lines(), Lines()
    everything, none = whole.feed(data, 10**9)
    assert none == 0
    shown: list[str] = []
    skipped = 0
    for at in range(0, len(data), size):
        some, more = lines.feed(data[at : at + size], most - len(shown))
        shown, skipped = shown + some, skipped + more
    assert shown == everything[:most]
    assert len(shown) + skipped == len(everything)
    assert lines.end() == whole.end()
