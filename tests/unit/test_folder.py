"""The state folder: what is known of how workers have ended."""

from pathlib import Path

import pytest

from worker import folder


@pytest.mark.parametrize(
    ("lines", "faults", "stopped"),
    [
        ("", [], False),
        ("success exited 0\nsuccess killed TERM\nexit-code exited 69\nexit-code exited 70\n", [], False),
        ("signal killed KILL\nwatchdog killed ABRT\n", ["signal, SIGKILL", "watchdog, SIGABRT"], False),
        ("exit-code exited 1\noom-kill killed KILL\n", ["exit-code, exit status 1", "oom-kill, SIGKILL"], False),
        ("signal killed KILL\ntimeout killed KILL\nstop\n", ["signal, SIGKILL"], True),
        ("success exited 75\nstop\nsignal killed SEGV\n", ["signal, SIGSEGV"], False),
        ("rubbish\nstop\n\n", [], False),
    ],
)
def test_faults_are_ends_that_nobody_asked_for(tmp_path: Path, lines: str, faults: list[str], stopped: bool) -> None:
    """
    Told by systemd's words; what nobody can read says nothing.
    """
    (tmp_path / "ended").write_text(lines)
    found = folder.ended(str(tmp_path))
    assert (found.faults, found.stopped) == (faults, stopped)
    folder.forget_ended(str(tmp_path))
    assert folder.ended(str(tmp_path)) == folder.Ends([], None)
