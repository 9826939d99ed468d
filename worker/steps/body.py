"""The body of an HTTP answer, decoded a little at a time: what is small on the way can be without end unpacked."""

from __future__ import annotations

import zlib

from worker import files
from worker.steps import StepError

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ENCODINGS = "gzip, deflate"
MAX = 1 << 30  # bytes of an answer, unpacked, unless the list says otherwise
_PIECE = 256 * 1024
_GZIP = 16 + zlib.MAX_WBITS
_BITS = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": 0}  # others are passed on as they are


class TooLarge(StepError):
    """The answer has more bytes than are wanted."""


def pieces(answer: Any, most: int) -> Iterator[bytes]:
    """Yield the body of an answer, in pieces of up to 256 KiB; at most `most` bytes, and then TooLarge is raised.

    Raises StepError for a body that cannot be unpacked or ends too early, and what the HTTP library raises.
    """
    encoding = answer.headers.get("Content-Encoding", "").strip().lower()
    length = answer.headers.get("Content-Length", "")
    if encoding in ("", "identity") and length.isdecimal() and len(length) < 20 and int(length) > most:
        raise TooLarge(_too_large(most))
    left = most
    for piece in _unpacked(answer, encoding):
        if len(piece) > left:
            yield piece[:left]
            raise TooLarge(_too_large(most))
        left -= len(piece)
        yield piece


def _too_large(most: int) -> str:
    return (
        f"the answer has more than {files.shown_size(most)} bytes; if that is right, give the request a larger 'max:'"
    )


def _unpacked(answer: Any, encoding: str) -> Iterator[bytes]:
    known = [_BITS[name] for word in encoding.split(",") if (name := word.strip()) in _BITS]
    if len(known) > 1:
        raise StepError(f"the answer is packed more than once ({encoding[:60]!a})")
    return _inflated(answer.iter_raw(), known[0]) if known else _cut(answer.iter_raw())


def _cut(parts: Iterator[bytes]) -> Iterator[bytes]:
    for part in parts:
        yield from (part[at : at + _PIECE] for at in range(0, len(part), _PIECE))


def _inflated(parts: Iterator[bytes], bits: int) -> Iterator[bytes]:
    """Yield what `parts` are unpacked; 0 `bits`: zlib's own format or a bare stream, as servers disagree."""
    inflate: Any = None
    for part in parts:
        if inflate is None and part:
            inflate = zlib.decompressobj(bits or (zlib.MAX_WBITS if part[0] & 15 == 8 else -zlib.MAX_WBITS))
        while part:
            try:
                piece = inflate.decompress(part, _PIECE)
            except zlib.error as exc:
                raise StepError(f"the answer cannot be unpacked: {exc}") from None
            if piece:
                yield piece
            part = inflate.unconsumed_tail
            if inflate.eof:
                part = inflate.unused_data.lstrip(b"\0")
                if part and bits == _GZIP:  # a file of gzip can have several members
                    inflate = zlib.decompressobj(bits)
                else:
                    part = b""
    # What has not been flushed by the end is there still, a piece at a time.
    while inflate is not None and not inflate.eof:
        piece = inflate.decompress(b"", _PIECE)
        if not piece:
            raise StepError("the answer ends before its packed content does")
        yield piece
