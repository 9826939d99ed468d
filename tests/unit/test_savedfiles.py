"""What counts as something saved in a step's own folder, and what a program of ours says of its failure."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from worker import reasons, savedfiles


def _append(folder: Path) -> None:
    with (folder / "log").open("a") as file:
        file.write("more\n")


def _replace(folder: Path) -> None:
    (folder / "new").write_bytes((folder / "state").read_bytes())
    os.rename(folder / "new", folder / "state")


def _replace_by_more(folder: Path) -> None:
    (folder / "new").write_text((folder / "state").read_text() + "5")
    os.rename(folder / "new", folder / "state")


@pytest.mark.parametrize(
    ("what", "saved"),
    [
        (lambda folder: None, False),
        (_append, False),
        (_replace, False),
        (lambda folder: (folder / "state").touch(), False),
        (lambda folder: (folder / "log").unlink(), False),
        (_replace_by_more, True),
        (lambda folder: (folder / "state").write_text("4\n"), True),
        (lambda folder: (folder / "state").write_text("30 and more\n"), True),
        (lambda folder: (folder / "state").write_text(""), True),
        (lambda folder: (folder / "other").touch(), True),
        (lambda folder: os.pwrite(os.open(folder / "large", os.O_RDWR), b"x", 99_000), True),
        (lambda folder: os.pwrite(os.open(folder / "large", os.O_RDWR), b"x", 9), True),
    ],
)
def test_a_log_and_the_same_once_more_are_nothing_saved(
    tmp_path: Path, what: Callable[[Path], object], saved: bool
) -> None:
    """
    F1: other bytes under a name are; a file that has only grown where it was is not.
    """
    (tmp_path / "log").write_text("first\n")
    (tmp_path / "state").write_text("3\n")
    (tmp_path / "large").write_bytes(bytes(100_000))
    before = savedfiles.look(str(tmp_path))
    what(tmp_path)
    assert savedfiles.changed(str(tmp_path), before) is saved
    assert savedfiles.resume(savedfiles.memo(before)) == before


def test_what_an_older_worker_knew_is_no_reason_to_begin_at_once(tmp_path: Path) -> None:
    """
    It kept a digest of all; an empty one was of an empty folder.
    """
    assert savedfiles.resume("") == {}
    assert savedfiles.resume("8f3a") is None


@pytest.mark.parametrize(
    ("log", "http", "words"),
    [
        (b"GET http://h: 529 Overloaded\n", True, "GET http://h answered 529 Overloaded"),
        (b"GET http://h: 529\n", True, "GET http://h answered 529"),
        (b"before\nPOST https://h:1: 404 Not Found\n{\n}\nGET http://x: 200 OK\n", True, None),
        (b"GET http://h: timed out (ReadTimeout)\n", True, "GET http://h: timed out (ReadTimeout)"),
        (b"http: needs httpx2\n", True, "http: needs httpx2"),
        (b"GET http://h: 529\nTraceback\nValueError: \x1b[2J\n\n", False, "ValueError: \\x1b[2J"),
        (b"", True, ""),
        (b"x" * 500, False, "x" * 197 + "..."),
    ],
)
def test_the_reason_is_one_line_fit_for_a_terminal(log: bytes, http: bool, words: str | None) -> None:
    """
    F19: the answer of a server, whatever its body says; the last line of a traceback.
    """
    assert reasons.last_words(log, http) == (words if words is not None else "POST https://h:1 answered 404 Not Found")
