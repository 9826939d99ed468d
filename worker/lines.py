"""Lines for people: a step's bytes as journal lines, whatever the bytes are.

No line is longer than LINE_MAX bytes, control characters are escaped, and a progress bar drawn with
carriage returns folds to its last state.  Memory does not grow with the length of a line.
"""

from worker import plural
from worker.signs import printable

LINE_MAX = 8 * 1024
_HEAD = 6 * 1024
_TAIL = 1024


class Lines:
    """One stream, cut into lines as it comes."""

    __slots__ = ("_head", "_left_out", "_tail")

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""
        self._left_out = 0

    def feed(self, data: bytes, most: int) -> tuple[list[str], int]:
        """Return up to `most` of the lines that `data` completes, and how many more it completes.

        The others cost no more than being counted.
        """
        *complete, rest = data.split(b"\n", most)
        skipped = rest.count(b"\n")
        if skipped:
            rest = rest[rest.rindex(b"\n") + 1 :]
            if not complete:  # the line that was begun before is among them
                self._head, self._tail, self._left_out = b"", b"", 0
        lines = []
        for part in complete:
            if self._head:
                self._grow(part)
                lines.append(self._take())
            else:
                lines.append(_text(part) if len(part) <= _HEAD else self._whole(part))
        if rest:
            self._grow(rest)
        return lines, skipped

    def end(self) -> list[str]:
        """Return the last line, if the stream did not end with a newline."""
        return [self._take()] if self._head else []

    def _whole(self, part: bytes) -> str:
        self._grow(part)
        return self._take()

    def _grow(self, part: bytes) -> None:
        room = _HEAD - len(self._head)
        self._head += part[:room]
        rest = part[room:]
        if rest:
            kept = self._tail + rest[-_TAIL:]
            self._left_out += len(self._tail) + len(rest) - min(len(kept), _TAIL)
            self._tail = kept[-_TAIL:]

    def _take(self) -> str:
        head, tail, left_out = self._head, self._tail, self._left_out
        self._head, self._tail, self._left_out = b"", b"", 0
        if not left_out:
            return _text(head + tail)
        end = _text(tail)[-_TAIL:]
        return f"{_cut(_text(head), _HEAD)} [... {plural.of(left_out, 'byte')} left out ...] {end}"


def _text(line: bytes) -> str:
    line = line.removesuffix(b"\r")
    if b"\r" in line:
        line = line[line.rindex(b"\r") + 1 :]
    # Escaping can make a line of control bytes four times as long.
    return _cut(printable(line.decode(errors="backslashreplace")), LINE_MAX)


def _cut(text: str, size: int) -> str:
    """Return `text` if it fits into `size` bytes, else its beginning and a word about the rest."""
    if len(text) <= size // 4 or len(data := text.encode()) <= size:
        return text
    room = size - 48
    return f"{data[:room].decode(errors='ignore')} [... {plural.of(len(data) - room, 'more byte')}]"
