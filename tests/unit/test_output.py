"""What a step wrote: from the pipe into the file, byte for byte, whatever the disk does."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.output import CHUNK, INLINE_MAX, Spool


class Pipe:
    """A step's pipe: the worker's end, and a step that writes."""

    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        os.set_blocking(self.write, False)

    def put(self, data: bytes) -> bytes:
        """Write what fits; return the rest."""
        with contextlib.suppress(BlockingIOError):
            while data:
                data = data[os.write(self.write, data) :]
        return data

    def close(self) -> None:
        os.close(self.read)
        os.close(self.write)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


def pass_on(pipe: Pipe, spool: Spool, data: bytes) -> bytes:
    """Let a step write `data`; return what the spool said that it took."""
    taken = b""
    while data:
        data = pipe.put(data)
        while (part := spool.take(pipe.read)) is not None:
            taken += part
    return taken


def test_what_is_taken_is_in_the_file_at_once(tmp_path: Path, pipe: Pipe) -> None:
    """
    A worker that is killed then has left it there, and the next one goes on behind it.
    """
    spool = Spool(str(tmp_path / "part"))
    assert pass_on(pipe, spool, b"first\n") == b"first\n"
    assert (tmp_path / "part").read_bytes() == b"first\n"
    heir = Spool(str(tmp_path / "part"))
    heir.resume(str(tmp_path / "out"), None)
    pass_on(pipe, heir, b"second\n")
    assert heir.inline and heir.contents() == b"first\nsecond\n"


def test_a_result_that_was_published_is_taken_back(tmp_path: Path, pipe: Pipe) -> None:
    """
    The worker was killed between the rename and the commit; another file of that name is none of its.
    """
    spool = Spool(str(tmp_path / "part"))
    pass_on(pipe, spool, b"all\n")
    inode = spool.inode()
    spool.publish(str(tmp_path / "out"))
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(FileNotFoundError):
        Spool(str(tmp_path / "part")).resume(str(tmp_path / "out"), (inode or 0) + 1)
    assert spool.inode() == inode, "it is asked for again until the commit"
    heir = Spool(str(tmp_path / "part"))
    heir.resume(str(tmp_path / "out"), inode)
    assert heir.contents() == b"all\n"


@pytest.mark.parametrize("splices", [True, False])
@given(sizes=st.lists(st.integers(0, 90_000), max_size=6))
def test_streams_are_whole(tmp_path_factory: pytest.TempPathFactory, splices: bool, sizes: list[int]) -> None:
    """
    Whatever the sizes of the writes, and whether or not the file system can splice: every byte, in order.
    """
    folder = tmp_path_factory.mktemp("spool")
    chunks = [os.urandom(size) for size in sizes]
    whole = b"".join(chunks)
    pipe, spool = Pipe(), Spool(str(folder / "part"))
    spool._splices = splices
    assert b"".join(pass_on(pipe, spool, chunk) for chunk in chunks) == whole
    pipe.close()
    assert spool.size == len(whole)
    assert spool.inline == (len(whole) <= INLINE_MAX)
    assert whole.endswith(spool.contents())
    if spool.inline:
        assert spool.contents() == whole
    spool.publish(str(folder / "out"))
    assert (folder / "out").read_bytes() == whole
    assert set(os.listdir(folder)) - {".empty"} == {"out"}


def test_nothing_now_is_not_the_end(tmp_path: Path, pipe: Pipe) -> None:
    """
    An empty pipe gives None while somebody may write, and b"" afterwards.
    """
    spool = Spool(str(tmp_path / "part"))
    assert spool.take(pipe.read) is None
    os.close(pipe.write)
    assert spool.take(pipe.read) == b""
    pipe.write = os.open(os.devnull, os.O_WRONLY)


def test_a_full_disk_leaves_everything_in_the_pipe(tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Case F4: what cannot be written is not taken, so a worker that is killed meanwhile loses nothing.
    """
    spool = Spool(str(tmp_path / "part"))
    pass_on(pipe, spool, b"before\n")
    real, full = os.splice, [True]

    def limited(*args: int, **more: int) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **more)

    monkeypatch.setattr(os, "splice", limited)
    pipe.put(b"after\n")
    with pytest.raises(OSError):
        spool.take(pipe.read)
    assert spool.size == len(b"before\n")
    full[0] = False
    assert spool.take(pipe.read) == b"after\n"
    assert spool.contents() == b"before\nafter\n"


def test_a_pipe_that_is_closed_while_the_disk_is_full_loses_no_byte(
    tmp_path: Path, pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    The write fails in the middle; what was taken is kept, in order, and written when there is space.
    """
    spool = Spool(str(tmp_path / "part"))
    real, room = os.pwrite, [30_000]

    def limited(fd: int, data: bytes, place: int) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(fd, bytes(data)[: room[0]], place)
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "pwrite", limited)
    first, second = os.urandom(60_000), os.urandom(10)
    for data in (first, second):
        pipe.put(data)
        while spool.absorb(pipe.read):
            pass
        with pytest.raises(OSError):
            spool.retry()
    assert spool.contents() == first + second
    room[0] = 1_000_000
    spool.publish(str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == first + second


def test_a_file_that_a_step_removes_is_made_again(tmp_path: Path, pipe: Pipe) -> None:
    """
    Its bytes are still ours.
    """
    folder = tmp_path / "out"
    folder.mkdir()
    spool = Spool(str(folder / "part"))
    pass_on(pipe, spool, b"x" * 1000)
    (folder / "part").unlink()
    folder.rmdir()
    spool.publish(str(folder / "a"))
    assert (folder / "a").read_bytes() == b"x" * 1000


def test_the_next_attempt_begins_with_nothing(tmp_path: Path, pipe: Pipe) -> None:
    """
    Also where the one before could not be kept.
    """
    spool = Spool(str(tmp_path / "part"))
    pass_on(pipe, spool, b"y" * CHUNK)
    spool.abandon()
    pipe.put(b"end")
    assert spool.take(pipe.read) == b"end" and spool.contents().endswith(b"yyend") and not spool.inline
    spool.restart()
    assert (spool.size, spool.contents(), spool.inline) == (0, b"", True)
    pass_on(pipe, spool, b"z")
    assert (tmp_path / "part").read_bytes() == b"z"
