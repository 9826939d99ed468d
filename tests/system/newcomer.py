"""`python -m tests.system.newcomer SUITE COMMAND`: run a command as somebody who has just cloned the project.

He is an ordinary user of a fresh Debian ("trixie"), with git, make and python3, no locale, and a clone of the last
commit.  The output and the exit status are the command's; 2 if there can be no such machine here.
"""

import sys
import tempfile
from pathlib import Path

from tests.system.machine import Machine
from tests.system.supervisor import why_not
from tests.system.tree import base_tree, why_not_build

PATIENCE = 3600.0
NAME = "ann"


def run(suite: str, command: str) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="agent-newcomer-", dir="/var/tmp") as upper,
        Machine(base_tree(suite), upper=Path(upper), network=True) as m,
    ):
        m.run(["useradd", "--create-home", "--shell", "/bin/sh", NAME])
        m.run("git config --system safe.directory '*'")  # the checkout is another user's
        m.run(f"git clone --quiet /src /home/{NAME}/agent", user=NAME)
        return m.call(f"cd agent && {command}", user=NAME, timeout=PATIENCE)


def main(suite: str, command: str) -> int:
    reason = why_not() or why_not_build()
    if reason:
        print(f"no fresh machine: {reason}", file=sys.stderr)
        return 2
    return run(suite, command)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
