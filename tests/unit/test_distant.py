"""File systems that may never answer are found without a look at them; the look itself is in tests/system."""

import time
from pathlib import Path

import pytest

from worker import distant


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("hung", True), ("hung/a/b", True), ("link", True), ("link/a", True), ("far/link/x", True),
        ("far/../hung", True),
        ("here", False), ("here/hung", False), ("out", False), ("loop/a", False), ("hungry", False),
        ("none/hung", False),
        ("inner/../here", False),
    ],
)  # fmt: skip
def test_a_mount_is_met_on_the_way(tmp_path: Path, path: str, found: bool) -> None:
    """
    Case N26: by names and links, as path_resolution(7) says; what is beyond the mount point is never asked for.
    """
    for name in ("hung", "here/hung", "far"):
        (tmp_path / name).mkdir(parents=True)
    for name, target in (("link", "hung"), ("far/link", tmp_path / "link"), ("out", "/"), ("loop", "loop")):
        (tmp_path / name).symlink_to(target)
    assert (distant.mount_on_the_way(f"{tmp_path}/{path}", {f"{tmp_path}/hung"}) is not None) == found


def test_a_local_folder_is_not_asked(tmp_path: Path) -> None:
    """
    Case N26: a step on a local disk pays nothing for this.
    """
    began = time.process_time()
    for _ in range(100):
        assert distant.answers(str(tmp_path))
    assert time.process_time() - began < 1.0
