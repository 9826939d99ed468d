"""What a step makes of its folders costs the worker little: very many files, very deep trees, odd names."""

import os
from pathlib import Path

import pytest

from worker import deeptree, savings


def deep(folder: Path, levels: int) -> None:
    """Make a tree so deep that its path is too long for the kernel."""
    folder.mkdir()
    at = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)


@pytest.mark.parametrize("levels", [3, 1500, 5000])
def test_s30_a_tree_of_any_depth_is_removed(tmp_path: Path, levels: int) -> None:
    """
    S30: neither the language's recursion nor the longest path ends the worker.
    """
    folder = tmp_path / "given.0"
    deep(folder, levels)
    (folder / "a\nb").write_text("")
    (folder / "closed").mkdir(mode=0)
    (folder / "link").symlink_to("/")
    deeptree.remove(str(folder))
    assert not folder.exists()
    assert Path("/usr").exists()


def test_s30_of_very_many_files_only_those_that_travel_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    S30: a look every two seconds at 40,000 files must not be what the worker does most.
    """
    for number in range(2000):
        (tmp_path / f"f{number:04d}").touch()
    (tmp_path / "a\nb").touch()
    asked: list[str] = []

    def status(path: str) -> os.stat_result:
        asked.append(path)
        return os.stat(path, follow_symlinks=False)

    monkeypatch.setattr(savings, "_status", status)
    found = [name for name, _path, _status in savings._entries(str(tmp_path))]
    assert found == ["a\nb", *(f"f{number:04d}" for number in range(99))]
    assert len(asked) == 100
