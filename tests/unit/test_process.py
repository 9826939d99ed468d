"""A step's process: its own session, nothing of ours, and ended with everything it started."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from worker import process
from worker.process import SpawnError

ENV = {"PATH": "/usr/bin:/bin"}


def finish(child: process.Child) -> tuple[int, bytes, bytes]:
    os.set_blocking(child.pipes.stdout, True)
    os.set_blocking(child.pipes.stderr, True)
    with open(child.pipes.stdout, "rb") as out, open(child.pipes.stderr, "rb") as err:
        written = out.read(), err.read()
    _pid, status = os.waitpid(child.pid, 0)
    return os.waitstatus_to_exitcode(status), *written


def sh(text: str, cwd: str = "/", **env: str) -> tuple[int, bytes, bytes]:
    return finish(process.spawn(["/bin/sh", "-c", text], {**ENV, **env}, cwd))


def test_a_step_sees_exactly_what_it_is_given(tmp_path: Path) -> None:
    """
    Its environment, its folder, an empty standard input, a session of its own.
    """
    code, out, _err = sh("env; pwd; cat; ps -o sid= -p $$ | tr -d ' '; echo $$", str(tmp_path), A="x y")
    lines = out.decode().splitlines()
    assert code == 0
    assert "A=x y" in lines and str(tmp_path) in lines
    assert not [line for line in lines if line.startswith(("HOME=", "PYTHON", "USER="))]
    assert lines[-2] == lines[-1], "it does not lead a session"


def test_no_descriptor_of_ours_reaches_a_step() -> None:
    """
    Case P11: a step holds its own three and nothing else.
    """
    read, write = os.pipe()
    os.set_inheritable(write, True)  # as a shell or a harness may have left it to us
    process.keep_descriptors()
    _code, out, _err = sh("ls -l /proc/self/fd")
    os.close(read)
    os.close(write)
    descriptors = [line.split(" -> ")[0].split()[-1] for line in out.decode().splitlines() if "->" in line]
    assert descriptors == ["0", "1", "2", "3"], out  # 3 is the folder that ls itself reads


def test_signals_are_as_a_service_has_them() -> None:
    """
    Python ignores SIGPIPE; `yes | head -1` must end all the same.
    """
    code, out, err = sh("yes | head -1; grep -E 'Sig(Blk|Ign)' /proc/self/status")
    assert (code, err) == (0, b"")
    masks = [int(line.split()[1], 16) for line in out.decode().splitlines() if line.startswith("Sig")]
    pipe = 1 << (signal.SIGPIPE - 1)
    assert masks[0] == 0 and not masks[1] & pipe


@pytest.mark.parametrize(
    ("argv", "cwd", "message"),
    [
        (["no-such-program"], "/", "'no-such-program' not found in PATH"),
        (["/no/such/program"], "/", "cannot start '/no/such/program': No such file"),
        (["/etc/passwd"], "/", "cannot start '/etc/passwd': Permission denied"),
        (["true"], "/no/such/folder", "cannot work in '/no/such/folder': no such folder"),
    ],
)
def test_what_cannot_start_says_why(argv: list[str], cwd: str, message: str) -> None:
    """
    One clear line, no descriptor lost, and the worker's own folder unchanged.
    """
    before, here = len(os.listdir("/proc/self/fd")), os.getcwd()
    with pytest.raises(SpawnError, match=message):
        process.spawn(argv, ENV, cwd)
    assert (len(os.listdir("/proc/self/fd")), os.getcwd()) == (before, here)


def test_a_folder_in_path_is_no_program(tmp_path: Path) -> None:
    """
    As execvp(3) looks programs up, with the step's own PATH.
    """
    (tmp_path / "one" / "tool").mkdir(parents=True)
    (tmp_path / "two").mkdir()
    tool = tmp_path / "two" / "tool"
    tool.write_text("#!/bin/sh\necho found")
    tool.chmod(0o755)
    path = f"{tmp_path}/one:{tmp_path}/two"
    assert process.find_program("tool", path, "/") == str(tool)


TREE = """
import os, signal, sys, time
from worker import process
process.become_subreaper()
child = process.spawn(["/bin/sh", "-c", '''
  setsid sh -c 'sh -c "echo deep; exec sleep 1000" & exec sleep 1000' &
  (setsid sh -c "echo gone; exec sleep 1000" &)
  echo up
  exec sleep 1000
'''], {"PATH": "/usr/bin:/bin", "STATE_DIRECTORY": "/x/steps/a"}, "/")
os.set_blocking(child.pipes.stdout, True)
said = b""
while not all(word in said for word in (b"up", b"deep", b"gone")):
    said += os.read(child.pipes.stdout, 100)
found = process.family(child.pid, b"STATE_DIRECTORY=/x/steps/a")
print(len(found), flush=True)
if sys.argv[1] == "leader-first":
    os.kill(child.pid, signal.SIGKILL)
    os.waitpid(child.pid, 0)
while found := process.family(child.pid, b"STATE_DIRECTORY=/x/steps/a"):
    process.send(found, signal.SIGKILL)
    process.reap()
process.reap()
print(process.has_orphans(()), flush=True)
"""


@pytest.mark.parametrize("order", ["leader-first", "together"])
def test_the_whole_tree_is_found_and_ended(order: str) -> None:
    """
    Case P5: children with sessions of their own, and double-forked ones, whether or not the leader lives.
    """
    child = subprocess.run([sys.executable, "-c", TREE, order], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["4", "False"]


def test_what_a_dead_worker_left_is_found_by_its_environment() -> None:
    """
    Case S11: by an entry of the environment that only this step of this state folder has.
    """
    marker = f"STATE_DIRECTORY=/x/{os.getpid()}/steps/a"
    stray = subprocess.Popen(["sleep", "1000"], env={"STATE_DIRECTORY": marker.split("=")[1]})
    try:
        assert [found.pid for found in process.strays([marker.encode()])] == [stray.pid]
        assert process.strays([marker[:-1].encode()]) == []
    finally:
        stray.kill()
        stray.wait()
