"""What a step wrote: in memory while it is small, in a file when it is not, and byte for byte."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.output import INLINE_MAX, Spool


def test_small_streams_never_touch_the_disk(tmp_path: Path) -> None:
    """
    They are committed with the step's row.
    """
    spool = Spool(str(tmp_path / "part"))
    spool.write(b"x" * INLINE_MAX)
    assert spool.inline and spool.contents() == b"x" * INLINE_MAX
    assert os.listdir(tmp_path) == []


@given(st.lists(st.integers(0, 90_000), max_size=6))
def test_large_streams_are_whole(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    """
    Whatever the sizes of the writes, the published file has every byte in order.
    """
    folder = tmp_path_factory.mktemp("spool")
    chunks = [os.urandom(size) for size in sizes]
    spool = Spool(str(folder / "part"))
    for chunk in chunks:
        spool.write(chunk)
    whole = b"".join(chunks)
    assert spool.size == len(whole)
    if spool.inline:
        assert spool.contents() == whole
        return
    assert whole.endswith(spool.contents())
    spool.publish(str(folder / "out"))
    assert (folder / "out").read_bytes() == whole
    assert os.listdir(folder) == ["out"]


def test_a_full_disk_loses_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Case F4: the write fails in the middle; what was taken is kept, in order, and written when there is space.
    """
    spool = Spool(str(tmp_path / "part"))
    real, room = os.write, [100_000]

    def limited(fd: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(fd, bytes(data)[: room[0]])
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", limited)
    first, second = os.urandom(150_000), os.urandom(10)
    with pytest.raises(OSError):
        spool.write(first)
    with pytest.raises(OSError):
        spool.write(second)
    with pytest.raises(OSError):
        spool.retry()
    room[0] = 1_000_000
    spool.retry()
    spool.publish(str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == first + second
