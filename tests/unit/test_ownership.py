"""install.sh beside another program that is called "agent": what it refuses before anything is written."""

import os
from pathlib import Path

import pytest

from tests.unit.test_install import Run, dest, put, pytestmark, run, snapshot

__all__ = ["dest", "pytestmark", "run"]

FOREIGN = [
    "etc/agent/other.conf",
    "etc/agent/config.yaml",  # no task list
    "etc/agent/config.d/other.conf",
    "var/lib/agent/vendor.db",
    "var/lib/agent/log/vendor.log",
    "var/lib/agent@blue/vendor.db",
    "var/lib/agent-supervisor/vendor.db",
    "var/cache/agent/package.deb",
    "run/agent/socket",
    "usr/local/bin/agentctl",
    "usr/local/lib/agent/plugin.so",
    "usr/local/lib/systemd/system/agent.service",
    "usr/lib/systemd/system/agent.service",
    "etc/systemd/system/agent.path",
    "etc/systemd/system/agent.service.d/limits.conf",
]


@pytest.mark.parametrize("path", FOREIGN)
def test_n19_install_stops_at_what_is_not_its_own_and_names_it(run: Run, dest: Path, path: str) -> None:
    """
    N19: before anything is touched, with the path and a way to go on; uninstall and purge leave it, too.
    """
    put(dest / path)
    before = snapshot(dest)

    done = run("install")

    assert done.returncode == 1
    parts = path.split("/")
    ways = [f"  /{'/'.join(parts[:n])}: {parts[n]}\n" for n in range(2, len(parts))]
    assert any(way in done.stderr for way in (f"  /{path}: ", "/run/agent: socket", *ways))
    assert "sudo " in done.stderr
    assert "nothing was changed" in done.stderr
    assert snapshot(dest) == before
    for command in ("uninstall", "purge"):
        assert run(command).returncode == 0
        assert (dest / path).read_text() == "somebody else's\n"


def test_n19_everything_that_is_in_the_way_is_named_at_once(run: Run, dest: Path) -> None:
    """N19: one look costs one refusal, not one for each thing."""
    for path in FOREIGN:
        put(dest / path)
    put(dest / "etc/passwd", "agent:x:1000:1000:Agent Smith:/home/agent:/bin/bash\n")

    done = run("install")

    assert done.returncode == 1
    for named in ("other.conf", "vendor.db", "/usr/local/bin/agentctl", "plugin.so", "/run/agent", "package.deb"):
        assert named in done.stderr
    assert "user agent: was not made by this installer (home /home/agent, shell /bin/bash)" in done.stderr


@pytest.mark.parametrize("path", ["etc/agent", "var/lib/agent", "var/cache/agent", "usr/local/lib/agent"])
def test_n19_a_file_or_a_dangling_link_where_a_folder_belongs_is_named(run: Run, dest: Path, path: str) -> None:
    """N19: found before anything is written, not half-way."""
    put(dest / path)
    done = run("install")
    assert done.returncode == 1
    assert f"/{path}: a file where a folder belongs" in done.stderr

    (dest / path).unlink()
    (dest / path).symlink_to("nowhere")
    done = run("install")
    assert done.returncode == 1
    assert f"/{path}: a link to nowhere, which is no folder, where a folder belongs" in done.stderr
    run("purge")
    assert (dest / path).is_symlink()


def test_n19_a_group_whose_members_could_read_the_state_is_named(run: Run, dest: Path) -> None:
    """N19: a group `agent` without a user of that name would become the group of ours; nobody gets rights unasked."""
    put(dest / "etc/group", "agent:x:1000:bob,eve\n")

    done = run("install")

    assert done.returncode == 1
    assert "group agent: its members (bob,eve) could read the list and the state" in done.stderr
    assert "sudo make install USER=agent" in done.stderr


def test_purge_removes_nothing_elsewhere_whatever_a_step_calls_its_files(run: Run, dest: Path) -> None:
    """
    A name with a newline was taken for two paths, the second of which counted from where purge was called; names
    are printed so that no terminal obeys them.
    """
    assert run("install").returncode == 0
    state = dest / "var/lib/agent"
    for name in ("out", "steps", "work"):
        (state / name).mkdir(parents=True)
    put(state / "lock")
    put(state / "before-restore-x\nvictim")
    put(state / "somebody's \x1b[2J \n")
    put(Path(f"{dest}victim"))

    done = run("purge")

    assert (done.returncode, Path(f"{dest}victim").exists()) == (0, True)
    assert [path.name for path in state.iterdir()] == ["somebody's \x1b[2J \n"]
    assert "kept /var/lib/agent, in which these are not known to be the agent's: somebody's ?[2J ?" in done.stdout


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_no_fifo_of_a_steps_is_waited_for_and_no_link_followed(run: Run, dest: Path, kind: str) -> None:
    """
    Where the mark of a state folder has gone, root looks into its files: never through what a step has put there.
    """
    state, trap = dest / "var/lib/agent", dest.parent / "trap"
    state.mkdir(parents=True)
    os.mkfifo(trap)
    for name in ("ledger.db", "checkpoint.json"):
        if kind == "fifo":
            os.mkfifo(state / name)
        else:
            (state / name).symlink_to(trap)
    for command in ("install", "purge"):
        done = run(command)
        assert "/var/lib/agent" in done.stdout + done.stderr
    assert sorted(path.name for path in state.iterdir()) == ["checkpoint.json", "ledger.db"]
