"""The state folder: what is known of how workers have ended."""

from pathlib import Path

import pytest

from worker import folder


@pytest.mark.parametrize(
    ("lines", "faults", "stopped"),
    [
        ("", [], ""),
        ("success exited 0\nsuccess killed TERM\nexit-code exited 69\nexit-code exited 70\n", [], ""),
        ("signal killed KILL\nwatchdog killed ABRT\n", ["signal, SIGKILL", "watchdog, SIGABRT"], ""),
        ("exit-code exited 1\noom-kill killed KILL\n", ["exit-code, exit status 1", "oom-kill, SIGKILL"], ""),
        ("signal killed KILL\ntimeout killed KILL\nstop\n", ["signal, SIGKILL"], "timeout"),
        ("success exited 75\nstop\nsignal killed SEGV\n", ["signal, SIGSEGV"], ""),
        ("success exited 75\nstop\n", [], "success"),
        ("stop\n", [], ""),
        ("signal killed KILL 0a1b\nsuccess exited 75 2c3d\nstop\n", ["signal, SIGKILL"], "success"),
        ("rubbish\nstop\n\n", [], ""),
    ],
)
def test_faults_are_ends_that_nobody_asked_for(tmp_path: Path, lines: str, faults: list[str], stopped: str) -> None:
    """
    Told by systemd's words; what nobody can read says nothing.
    """
    (tmp_path / "ended").write_text(lines)
    found = folder.ended(str(tmp_path))
    assert (found.faults, found.stopped) == (faults, stopped)
    folder.forget_ended(str(tmp_path))
    assert folder.ended(str(tmp_path)) == folder.Ends([], None)


def test_each_fault_has_the_id_that_systemd_gave_the_worker(tmp_path: Path) -> None:
    """
    By which it is known again; ends in order, and those that an older version wrote down, have none to tell.
    """
    (tmp_path / "ended").write_text("signal killed KILL\nsignal killed KILL b\nsuccess exited 0 c\noom killed KILL d\n")
    found = folder.ended(str(tmp_path))
    assert found.ids == ("", "b", "d")
    assert [found.since(known) for known in ("", "b", "d", "c", "gone")] == [3, 1, 0, 3, 3]


def test_a_step_is_not_told_to_use_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Confined, it has not even the rights of its user; sudo does nothing there.
    """
    refused = PermissionError(13, "Permission denied")
    assert folder.look_hint(refused) == "use sudo"
    monkeypatch.setenv("AGENT_STEP", "a")
    assert "'confine: no'" in folder.look_hint(refused)
