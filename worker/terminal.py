"""What is printed for people: no step, no server and no other machine gives their terminals orders.

A step's words, a run's name out of a ledger, a planted answer: all of it may hold escape sequences, which a terminal
obeys.  They are escaped where text is printed, in one place, and not where it comes from.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import TextIO, cast

# C0 but tab and newline, DEL, C1; what is invisible, or turns the direction of what follows.
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")


def safe(text: str) -> str:
    r"""Return `text` with what a terminal would obey as \uXXXX, which is what JSON calls it as well."""
    return _ORDERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@contextlib.contextmanager
def kept_safe() -> Iterator[None]:
    """Within the block what is printed is safe; bytes are where a terminal shows them, and kept elsewhere."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, _Safe(out)), cast(TextIO, _Safe(err))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


class _Safe:
    """A text stream that prints safe text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(safe(text))
        return len(text)

    @property
    def buffer(self) -> object:
        return _Bytes(self) if self._stream.isatty() else self._stream.buffer

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


class _Bytes:
    """The bytes of a stream that is a terminal."""

    def __init__(self, text: _Safe) -> None:
        self._text = text

    def write(self, data: bytes) -> int:
        self._text.write(data.decode(errors="backslashreplace"))
        return len(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._text, name)
