"""The source as git hands it out: the same everywhere."""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_n16_a_clone_with_autocrlf_has_what_a_shell_can_read(tmp_path: Path) -> None:
    """N16: no carriage return in anything that a shell, make, Python or systemd reads, whatever git is set to."""
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    ignore = shutil.ignore_patterns(".git", ".venv", ".agent", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(SOURCE, origin, ignore=ignore, symlinks=True)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "init.defaultBranch=main"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, "-C", str(origin), *command], check=True, capture_output=True)

    subprocess.run([*git, "clone", "-q", "-c", "core.autocrlf=true", str(origin), str(clone)], check=True)

    files = [path for path in clone.rglob("*") if path.is_file() and ".git" not in path.parts]
    assert len(files) > 100
    assert [path for path in files if b"\r\n" in path.read_bytes()] == []
    assert subprocess.run([clone / "install.sh", "--help"], capture_output=True).returncode == 0
