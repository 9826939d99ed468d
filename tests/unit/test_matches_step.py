"""The program behind `expect: {matches: PATTERN}`, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_RUN = "import sys; from worker.steps import main; main(['matches', sys.argv[1]])"


@pytest.mark.parametrize("pattern", ["^(a+)+$", "(a|a)*b", "(.*)*c", "^(([a-z])+.)+[A-Z]$"])
def test_e11_a_pattern_that_has_no_end_has_one(tmp_path: Path, pattern: str) -> None:
    """E11: a limit in CPU time, and a word that says what it is about."""
    (tmp_path / "out").write_text("a" * 60 + "!")
    spec = {"pattern": pattern, "file": f"{tmp_path}/out", "patience": 0.2}
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(spec)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"the pattern '{pattern}' took longer than ")
    assert "too many ways to match" in done.stderr and "Traceback" not in done.stderr
