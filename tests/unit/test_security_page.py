"""SECURITY.md: what it says is tried is."""

import re

from tests.support import ROOT


def test_each_test_that_it_names_is_there() -> None:
    """
    A row whose test has been renamed or removed claims what nobody tries.
    """
    text = (ROOT / "SECURITY.md").read_text()
    named = set(re.findall(r"`(test_\w+\.py)`", text))
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert named
    assert named - there == set()


def test_the_readme_points_at_it() -> None:
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text()
