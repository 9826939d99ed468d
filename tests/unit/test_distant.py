"""File systems that may never answer are found without a look at them; the look itself is in tests/system."""

import os
import time
from pathlib import Path

import pytest

from worker import config, distant, plan, walk
from worker.errors import ConfigError


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


@pytest.mark.parametrize("pattern", ["/**", "/**/*.nothing-has-this-ending"])
def test_a_pattern_that_leads_through_the_whole_machine_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """
    Case N26: it is a mistake with its place in the list, not a start that hangs.
    """
    monkeypatch.setattr(walk, "LIMIT", 0.5)
    (tmp_path / "list.yaml").write_text(f'tasks:\n  - {{id: a, foreach: {{glob: "{pattern}"}}, run: "true"}}\n')
    with pytest.raises(ConfigError, match=r"list.yaml:2:.*cannot be found.*name the folder in which they are"):
        plan.build(config.load(str(tmp_path / "list.yaml")))


def test_a_walk_by_a_child_finds_what_a_walk_of_ours_does(tmp_path: Path) -> None:
    """
    Also names that are not UTF-8, or have a newline in them; no more than are wanted.
    """
    names = [b"a.csv", b"b\xff.csv", "ü.csv".encode(), b"n\nl.csv"]
    (tmp_path / "deep/er").mkdir(parents=True)
    for name in names:
        (tmp_path / "deep/er" / os.fsdecode(name)).touch()
    found = walk.find(f"{tmp_path}/**/*.csv", str(tmp_path), 10)
    assert found == sorted(os.fsdecode(bytes(tmp_path) + b"/deep/er/" + name) for name in names)
    assert found == walk.find(f"{tmp_path}/deep/er/*.csv", f"{tmp_path}/deep/er", 10)
    assert len(walk.find(f"{tmp_path}/**/*.csv", str(tmp_path), 2)) == 2
