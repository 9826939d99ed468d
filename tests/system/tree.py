"""Base trees: what a freshly installed Debian of some release looks like, to boot machines on.

Built once and kept in the user's cache folder.  A tree that has its name is whole: it is built
beside it and renamed.  Machines never write to it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# What a newcomer has; neither pip nor venv.  systemd's own packages make the tree bootable.
PACKAGES = "python3,git,make,systemd,systemd-sysv,dbus,procps,ca-certificates"


def why_not_build() -> str | None:
    """Return why no tree can be built here, as one sentence, or None if one can."""
    if os.geteuid() != 0:
        return "base trees need root: run the tests with sudo"
    if not (shutil.which("mmdebstrap") or shutil.which("debootstrap")):
        return "base trees need mmdebstrap or debootstrap: install the package mmdebstrap"
    return None


def base_tree(suite: str) -> Path:
    """Return the tree of a Debian release ("bookworm"), built by the first call from the network."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agent-tests"
    tree = cache / f"debian-{suite}"
    if tree.exists():
        return tree
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{suite}-", dir=cache) as folder:
        building = Path(folder, "tree")
        # In a mount namespace, so that nothing is mounted below a folder that gets removed.
        isolate = ["unshare", "--mount", "--propagation=slave", "--"]
        subprocess.run([*isolate, *_command(suite, building)], check=True, stdout=sys.stderr)
        # Every machine gets an identity of its own, and the lists are old when they are needed.
        (building / "etc/machine-id").unlink(missing_ok=True)
        for junk in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(building / junk, ignore_errors=True)
            (building / junk / "partial").mkdir(parents=True)
        try:
            building.rename(tree)
        except OSError:
            if not tree.exists():  # else another process was faster, and its tree is as good
                raise
    return tree


def _command(suite: str, tree: Path) -> list[str]:
    if shutil.which("mmdebstrap"):  # takes less than half of debootstrap's time
        return [
            "mmdebstrap",
            "--quiet",
            "--mode=root",
            "--variant=minbase",
            f"--include={PACKAGES}",
            suite,
            str(tree),
        ]
    return ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(tree)]
