"""What a start needs and the machine is short of says nothing of the step."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT
from worker import scarcity

# While that file is there, nothing with its second line in its command can be started, for the reason in its first.
HOOK = """
import os, sys

if "worker" in sys.orig_argv and "run" in sys.orig_argv:
    spawn, pipe2 = os.posix_spawn, os.pipe2

    def short(argv):
        try:
            with open(os.environ["SHORT"]) as file:
                code, words = file.read().split(":")
        except FileNotFoundError:
            return
        if words in " ".join(argv):
            with open(os.environ["SHORT"] + ".seen", "a") as file:
                file.write("x")
            raise OSError(int(code), os.strerror(int(code)))

    def hooked(program, argv, *rest, **more):
        short(argv)
        return spawn(program, argv, *rest, **more)

    def hooked_pipe(flags):
        short(["pipe" if sys._getframe(1).f_code.co_name == "spawn" else "other"])
        return pipe2(flags)

    os.posix_spawn, os.pipe2 = hooked, hooked_pipe
"""
CODES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ETXTBSY)


@pytest.fixture
def short(tmp_path: Path) -> Path:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook/sitecustomize.py").write_text(HOOK)
    return tmp_path / "short"


def environ(short: Path) -> dict[str, str]:
    return {"SHORT": str(short), "PYTHONPATH": f"{ROOT}:{short.parent}/hook"}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("program", ["its-own", "its-check", "its-before", "its-expect", "its-after", "pipe"])
def test_what_the_machine_is_short_of_is_waited_for(worker: MakeWorker, short: Path, code: int, program: str) -> None:
    """
    N23: not counted, and the other programs of the attempt are not begun again.
    """
    if program != "its-own" and code != errno.EAGAIN:
        pytest.skip("one of them stands for all")
    first = "test $AGENT_ATTEMPT = 2 || kill -9 $$" if program == "its-check" else "true"
    w = worker(
        f"""
tasks:
  - id: a
    retry: {{attempts: 2, delay: 0}}
    redo: check
    check: ': its-check; exit 1'
    before: ': its-before'
    run: ': its-own; echo ran >> {short.parent}/ran; {first}'
    expect: {{run: ': its-expect'}}
    after: ': its-after'
""",
        environ=environ(short),
    )
    short.write_text(f"{code}:{program}")
    w.start().until("a: .*trying again, the step is charged for nothing")
    assert w.rows()[-1].outcome is None
    assert os.path.exists(f"{short}.seen")
    short.unlink()
    assert w.wait() == 0
    attempts = 2 if program == "its-check" else 1
    assert [row.outcome for row in w.rows()] == ["failed"] * (attempts - 1) + ["done"]
    assert (short.parent / "ran").read_text() == "ran\n" * attempts
    assert w.matching("a: waiting|started; going on")


def test_the_wait_for_a_start_ends_with_patience_and_with_the_worker(worker: MakeWorker, short: Path) -> None:
    """
    N23: then it has failed for good; a stop costs it nothing.
    """
    tasks = "tasks:\n  - {id: a, redo: never, run: ': its-own', retry: {attempts: 9, patience: PATIENCE}}\n"
    w = worker(tasks.replace("PATIENCE", "2s"), environ=environ(short))
    short.write_text(f"{errno.EAGAIN}:its-own")
    assert w.run() == 70
    (row,) = w.rows()
    assert (row.outcome, bool(row.final)) == ("failed", True)
    assert "Resource temporarily unavailable" in row.cause
    assert "longer than its patience" in row.cause
    w.config.write_text(tasks.replace("PATIENCE", "1h"))
    w.start().until("a: .*trying again")
    assert w.kill(15) == 75
    assert (w.rows()[-1].outcome, w.rows()[-1].counted, w.rows()[-1].unsure) == ("interrupted", False, False)


def test_a_worker_that_cannot_begin_for_want_of_descriptors_is_started_again(worker: MakeWorker, short: Path) -> None:
    """
    N23: that is no fault of the state folder, with which its unit would not start it again.
    """
    w = worker("tasks:\n  - {id: a, run: 'true'}\n", environ=environ(short))
    short.write_text(f"{errno.EMFILE}:other")
    assert w.run() == 75
    assert w.matching("cannot begin now: Too many open files; start it again in a moment; its unit does")
    short.unlink()
    assert w.run() == 0


def test_an_argument_that_is_too_long_fails_at_once_and_is_named(worker: MakeWorker) -> None:
    """
    N12: with its size and the limit, where it was not known before; no other attempt mends it.
    """
    w = worker("""
tasks:
  - {id: make, run: '(printf LONG=; head -c 140000 /dev/zero | tr "\\0" x) > ENV'}
  - {id: use, needs: [make], env_file: ENV, run: 'true', retry: {attempts: 3}}
""")
    path = w.config.parent / "some.env"
    path.write_text("LONG=short\n")
    w.config.write_text(w.config.read_text().replace("ENV", str(path)))
    assert w.run() == 70
    (row,) = [row for row in w.rows() if row.step != "make"]
    assert (row.outcome, bool(row.final)) == ("failed", True)
    assert "LONG: 140005 bytes are more than the 131071 that a program can be given at once" in row.cause


def test_what_is_too_long_is_told_from_what_is_too_much() -> None:
    """
    N12: one argument, one variable, or all of them together.
    """
    long = "x" * 200_000
    assert scarcity.too_long(["a", long], {}).startswith("its argument 'xxx")
    assert "its variable LONG has 200005 bytes, and 131071 is the most" in scarcity.too_long(["a"], {"LONG": long})
    assert "have 3000002 bytes" in scarcity.too_long(["a"] + ["x" * 99] * 30_000, {})


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="a limit of processes holds for no root")
def test_what_the_leader_of_a_program_says_is_understood(tmp_path: Path) -> None:
    """
    N23: where steps outlive the worker a shell begins them, and it may be what finds that there is no process to spare.
    """
    folder = Path(f"/tmp/agent-leader-{os.getpid()}")
    folder.mkdir()
    try:
        folder.chmod(0o777)
        shutil.copy(ROOT / "worker/leader.sh", folder / "leader.sh")

        def lead(program: str, *prefix: str) -> str:
            report = folder / "report"
            report.unlink(missing_ok=True)
            opened = ["sh", "-c", 'exec "$@" 3>report 4>/dev/null 5</dev/null', "sh"]
            command = [*opened, "setpriv", "--reuid=54321", "--clear-groups", *prefix, "sh", str(folder / "leader.sh")]
            done = subprocess.run([*command, program], cwd=folder, capture_output=True)
            return scarcity.of_leader(report.read_text(), done.returncode)

        assert "fork" in lead("/bin/true", "prlimit", "--nproc=1")
        assert lead("/bin/true") == ""
        assert lead("./missing") == ""
        assert scarcity.of_leader(None, 125) != ""
    finally:
        shutil.rmtree(folder)
