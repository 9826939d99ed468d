"""Whole files: old bytes or new ones, never a mix."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from worker import files
from worker.errors import StateError

OLD, NEW = b"old " * 500, b"new " * 700


def in_child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("point", "survivor"), [("file-written", OLD), ("file-synced", OLD), ("file-renamed", NEW)])
def test_sigkill_leaves_a_whole_file(tmp_path: Path, point: str, survivor: bytes) -> None:
    """
    Wherever we die inside replace(), the reader finds the old bytes or the new ones.
    """
    path = tmp_path / "checkpoint.json"
    files.replace(str(path), [OLD])
    code = (
        "import os, signal, sys; from worker import files, points\n"
        "points.at = lambda p: p == sys.argv[2] and os.kill(os.getpid(), signal.SIGKILL)\n"
        f"files.replace(sys.argv[1], [{NEW!r}])"
    )

    child = in_child(code, str(path), point)

    assert child.returncode == -signal.SIGKILL, "the child never reached the kill point"
    assert path.read_bytes() == survivor
    files.replace(str(path), [b"third"])  # a leftover temp file must not be in the way
    assert path.read_bytes() == b"third"
    assert os.listdir(tmp_path) == ["checkpoint.json"]


def test_a_disk_that_fills_at_any_offset_costs_nothing(tmp_path: Path) -> None:
    """
    Case F4: the write fails at every offset in turn; the old file stays byte for byte, no temp file is left.
    """
    path = tmp_path / "checkpoint.json"
    files.replace(str(path), [OLD])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for offset in range(len(NEW)):
            resource.setrlimit(resource.RLIMIT_FSIZE, (offset, before[1]))
            with pytest.raises(OSError) as caught:
                files.replace(str(path), [NEW[:1000], NEW[1000:]])
            assert caught.value.errno == errno.EFBIG
            assert path.read_bytes() == OLD
            assert os.listdir(tmp_path) == ["checkpoint.json"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """
    Case F2: the file that the link points to is replaced.
    """
    real = tmp_path / "elsewhere" / "real.json"
    real.parent.mkdir()
    real.write_bytes(OLD)
    link = tmp_path / "checkpoint.json"
    link.symlink_to(real)

    files.replace(str(link), [NEW])

    assert link.is_symlink()
    assert real.read_bytes() == NEW


def test_a_mount_point_is_named_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Case F3: rename(2) says EBUSY for a bind-mounted file; the error says to mount the folder.

    The real mount is tried in the throw-away machine; here the kernel's answer is played.
    """
    path = tmp_path / "checkpoint.json"
    path.write_bytes(OLD)

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "rename", busy)
    with pytest.raises(StateError, match="mount the folder"):
        files.replace(str(path), [NEW])
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["checkpoint.json"]


def test_adopting_keeps_every_byte(tmp_path: Path) -> None:
    """
    A finished part gets its final name and is gone under the old one.
    """
    part = tmp_path / ".big.part"
    part.write_bytes(NEW)
    files.adopt(str(part), str(tmp_path / "big"))
    assert (tmp_path / "big").read_bytes() == NEW
    assert os.listdir(tmp_path) == ["big"]


def test_empty_files_are_names_of_one_that_nobody_writes_to(tmp_path: Path) -> None:
    """
    They cost no new file each, read as empty, and may be replaced one by one; one that was written to all the same
    is given up.
    """
    first, second, third = (str(tmp_path / name) for name in ("a", "b", "c"))
    files.publish(first, b"")
    files.publish(second, b"")
    assert os.stat(first).st_ino == os.stat(second).st_ino
    assert not os.stat(first).st_mode & 0o222
    files.publish(first, b"now there is something")
    assert Path(second).read_bytes() == b""

    os.chmod(second, 0o640)
    Path(second).write_text("a step wrote to it")
    files.publish(third, b"")
    assert Path(third).read_bytes() == b"", "what was written to another name"

    files.publish(first, b"")  # a name that is taken
    assert Path(first).read_bytes() == b""


def test_empty_files_are_made_where_names_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Some file systems have no hard links, and all have a highest number of them.
    """
    real, fault = os.link, [errno.EPERM]

    def link(source: str, target: str) -> None:
        if fault:
            raise OSError(fault.pop(), "no")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    files.publish(str(tmp_path / "a"), b"")
    files.publish(str(tmp_path / "b"), b"")
    fault.append(errno.EMLINK)
    files.publish(str(tmp_path / "c"), b"")
    assert [(tmp_path / name).read_bytes() for name in "abc"] == [b"", b"", b""]
    assert len({(tmp_path / name).stat().st_ino for name in "abc"}) == 3
