"""What agent.service has done around the worker (units/hooks.sh), as far as it needs no systemd."""

import os
import subprocess
from pathlib import Path

import pytest

HOOKS = Path(__file__).resolve().parents[2] / "units" / "hooks.sh"


@pytest.fixture
def systemctl(tmp_path: Path) -> Path:
    """A systemctl that fails, as while systemd is being upgraded; a test may write another one."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n")
    program.chmod(0o755)
    return program


def hook(verb: str, tmp_path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "CGROUPS": str(tmp_path / "cgroups"), **more}
    return subprocess.run(["sh", HOOKS, verb, "agent.service"], env=env, capture_output=True, text=True)


@pytest.mark.usefixtures("systemctl")
def test_who_is_in_no_unit_kills_nobody(tmp_path: Path) -> None:
    """
    Whatever systemd answers: outside the unit's cgroup nothing is touched, least of all at the root.
    """
    others = [tmp_path / "cgroups" / name for name in ("system.slice", "user.slice", "init.scope")]
    for folder in others:
        folder.mkdir(parents=True)
        (folder / "cgroup.kill").write_text("")
    (tmp_path / "cgroups/cgroup.procs").write_text(f"{os.getpid()}\n")
    done = hook("ended", tmp_path, SERVICE_RESULT="success", EXIT_STATUS="0")
    assert all((folder / "cgroup.kill").read_text() == "" for folder in others), done


def test_only_a_restart_is_told_to_the_worker(tmp_path: Path, systemctl: Path) -> None:
    """
    By SIGUSR1, before SIGTERM; a stop, and a worker that has just died, are none.
    """
    for job, signalled in (("stop", False), ("restart", True)):
        systemctl.write_text(f"#!/bin/sh\necho '1 other.service restart waiting\n23 agent.service {job} running'\n")
        with subprocess.Popen(["sh", "-c", "trap 'exit 7' USR1; echo up; sleep 0.5 & wait; exit 0"],
                              stdout=subprocess.PIPE) as worker:  # fmt: skip
            assert worker.stdout is not None and worker.stdout.readline() == b"up\n"
            hook("stop", tmp_path, MAINPID=str(worker.pid))
            assert worker.wait() == (7 if signalled else 0)
    assert hook("stop", tmp_path).stderr.strip().endswith("it has just died")


@pytest.mark.usefixtures("systemctl")
def test_temporary_files_go_only_when_no_step_can_have_them(tmp_path: Path) -> None:
    """
    A runtime folder that is still there may have steps; systemd may name several folders in one variable.
    """
    for name in ("run", "cache", "state"):
        (tmp_path / name).mkdir()
    folders = {f"{kind}_DIRECTORY": f"{tmp_path}/{kind.lower()}:/nonexistent" for kind in ("CACHE", "STATE")}
    folders["RUNTIME_DIRECTORY"] = f"{tmp_path}/run:/nonexistent"
    hook("make_tmp", tmp_path, **folders)
    (tmp_path / "cache/tmp/closed").mkdir()
    (tmp_path / "cache/tmp/closed/file").write_text("x")
    (tmp_path / "cache/tmp/closed").chmod(0o500)
    (tmp_path / "run/seen").write_text("1")
    hook("prepare", tmp_path, **folders)
    assert (tmp_path / "cache/tmp/closed/file").exists()
    (tmp_path / "run/seen").unlink()
    hook("prepare", tmp_path, **folders)
    assert os.listdir(tmp_path / "cache/tmp") == []
    assert (tmp_path / "cache/tmp").stat().st_mode & 0o7777 == 0o1777
    for result in ("watchdog", "success"):
        hook("note", tmp_path, SERVICE_RESULT=result, EXIT_CODE="killed", EXIT_STATUS="ABRT", **folders)
    hook(
        "note", tmp_path, SERVICE_RESULT="signal", EXIT_CODE="killed", EXIT_STATUS="KILL", INVOCATION_ID="0a", **folders
    )
    said = "watchdog killed ABRT\nsuccess killed ABRT\nsignal killed KILL 0a\n"
    assert (tmp_path / "state/ended").read_text() == said


@pytest.mark.parametrize(
    ("job", "result", "status", "stays"),
    [
        ("", "signal", "KILL", True),
        ("", "watchdog", "ABRT", True),
        ("", "success", "75", True),
        ("restart", "success", "75", True),
        ("stop", "success", "75", False),
        ("stop", "timeout", "KILL", False),
        ("", "success", "0", False),
        ("", "exit-code", "70", False),
        ("", "exit-code", "78", False),
        ("", "exit-code", "77", True),
    ],
)
def test_what_keeps_the_machine_awake_goes_when_no_worker_comes(
    tmp_path: Path, systemctl: Path, job: str, result: str, status: str, stays: bool
) -> None:
    """
    It stays for the next worker, and for another one that holds the state folder; `--` and spaces are part of a path.
    """
    systemctl.write_text(f"#!/bin/sh\necho '23 agent.service {job} running'\n")
    (tmp_path / "state").mkdir()
    kept = tmp_path / "-- a b"
    kept.touch()
    (tmp_path / "state/keep-awake").write_text(f"{kept}\n")
    done = hook("note", tmp_path, SERVICE_RESULT=result, EXIT_CODE="x", EXIT_STATUS=status,
                STATE_DIRECTORY=f"{tmp_path}/state:/nonexistent")  # fmt: skip
    assert (tmp_path / "state/ended").read_text() == f"{result} x {status}\n" + ("stop\n" if job == "stop" else "")
    assert (kept.exists(), (tmp_path / "state/keep-awake").exists()) == (stays, stays), done


@pytest.mark.usefixtures("systemctl")
def test_no_fifo_of_a_steps_holds_up_the_end_of_the_unit(tmp_path: Path) -> None:
    """
    Waited for it had been until TimeoutStopSec=, and then nobody would have ended what the worker had left.
    """
    (tmp_path / "state").mkdir()
    for name in ("ended", "keep-awake"):
        os.mkfifo(tmp_path / "state" / name)
    hook("note", tmp_path, STATE_DIRECTORY=f"{tmp_path}/state", SERVICE_RESULT="success", EXIT_CODE="", EXIT_STATUS="")
    assert (tmp_path / "state/ended").is_fifo()
