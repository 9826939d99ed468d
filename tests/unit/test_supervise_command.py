"""A provider's commands, with real processes: what they are given, and that none of them holds the supervisor up."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import hear
from worker import process
from worker.supervise.command import Answer, Runner
from worker.supervise.provider import TIMEOUTS, Hand, Provider, fill
from worker.supervise.record import Machine, Moment

NOW = Moment(0.0, 0.0, "b")
MACHINE = Machine(3, "job-1f-3", "i-77", "working", NOW, NOW)
ENV = {"PATH": os.environ["PATH"]}


def runner(tmp_path: Path) -> Runner:
    return Runner(str(tmp_path / "command"), lambda: None)


def hand(tmp_path: Path, **commands: str | tuple[str, ...]) -> Hand:
    known: dict[str, str | tuple[str, ...]] = dict(commands)
    return Hand(Provider("p.yaml", known, {"BASE": "a b"}, TIMEOUTS | {"get": 0.3}), runner(tmp_path), ENV)


def test_a_command_gets_its_words_and_nothing_is_spliced_into_a_shells_text() -> None:
    """
    Lists have {places}, texts have $variables: an id with a quote in it is an argument, never code.
    """
    evil = "x'; touch /tmp/owned; '"
    argv, _env = fill(("go", "{id}", "{BASE}:{remote}", "{other}"), {"id": evil, "remote": "/r"}, {"BASE": "b"}, {})
    assert argv == ["go", evil, "b:/r", "{other}"]
    argv, env = fill('go "$id"', {"id": evil}, {"BASE": "b"}, {"HOME": "/h"})
    assert argv == ["/bin/sh", "-c", 'go "$id"']
    assert (env["id"], env["BASE"], env["HOME"]) == (evil, "b", "/h")


def test_a_script_reaches_the_machine_on_standard_input_or_as_a_word(tmp_path: Path) -> None:
    """
    `exec` is a prefix to which `sh` is added, or a text that runs it, or a list that has {script} in it.
    """
    for command in (("env", "-i"), "exec sh", ("sh", "-c", "{script}")):
        answer = hand(tmp_path, exec=command).script(MACHINE, 'echo "it\'s $((6 * 7))"')
        assert (answer.status, answer.output) == (0, "it's 42\n"), command


@pytest.mark.parametrize(
    "said, state",
    [
        ("echo running", "running"),
        ("echo; echo it is stopped", "stopped"),
        ("echo gone", "gone"),
        ("echo dancing", "unknown"),
        ("echo gone; exit 1", "unknown"),
        ("true", "unknown"),
    ],
)
def test_a_provider_that_does_not_know_is_not_taken_for_one_that_does(tmp_path: Path, said: str, state: str) -> None:
    """
    Only a machine that is said to be gone, by a command that succeeds, is gone.
    """
    assert hand(tmp_path, state=said).state(MACHINE) == state


def test_the_supervisors_own_line_to_systemd_reaches_no_command(tmp_path: Path) -> None:
    """
    A command line that knows sd_notify must not ping in our name.
    """
    ours = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "INVOCATION_ID": "1", "TOKEN": "secret"} | ENV
    answer = Hand(Provider("p", {"create": "env"}, {}, TIMEOUTS), runner(tmp_path), ours).do("create", MACHINE)
    assert "TOKEN=secret" in answer.output
    assert not any(name in answer.output for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "INVOCATION_ID"))


def test_a_command_whose_time_is_over_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """
    Also one that ignores SIGTERM and has children in the background, with our pipes open.
    """
    pids = tmp_path / "pids"
    text = f'trap "" TERM; sleep 1000 & echo $! $$ >"{pids}"; printf half; wait; wait'
    answer = hand(tmp_path, get=text).get(MACHINE, "/r", "/l")
    assert (answer.status, answer.output) == (None, "half")
    assert answer.fault() == "did not end in time"
    assert not any(process.lives(int(pid)) for pid in pids.read_text().split())


def test_what_a_command_leaves_behind_in_order_is_left_alone(tmp_path: Path) -> None:
    """
    A connection that is kept for the next time, say; and it does not hold us up, though it has our pipes.
    """
    pid = tmp_path / "pid"
    answer = hand(tmp_path, put=f'sleep 1000 & echo $! >"{pid}"; echo done').put(MACHINE, "/l", "/r")
    assert (answer.status, answer.output) == (0, "done\n")
    left = int(pid.read_text())
    assert process.lives(left)
    os.kill(left, signal.SIGKILL)


def test_a_program_that_is_missing_is_a_failure_and_no_exception(tmp_path: Path) -> None:
    """
    The provider's command line was not installed, or is being upgraded.
    """
    answer = hand(tmp_path, pause=("no-such-program", "{id}")).do("pause", MACHINE)
    assert answer.status == 127
    assert "no-such-program" in answer.fault()


@pytest.mark.parametrize("word", ["a\0b", "x" * 200_000])
def test_words_that_no_command_can_have_are_a_failure_and_no_exception(tmp_path: Path, word: str) -> None:
    """
    So is a machine that has no more room for a process.
    """
    answer = hand(tmp_path, pause=("true", "{id}")).do("pause", MACHINE._replace(id=word))
    assert answer.status == 126
    assert "cannot be run: " in answer.fault()


def test_a_large_file_is_given_more_time(tmp_path: Path) -> None:
    """
    B2: 27 MB need more than two minutes at 1 Mbit/s; the other time limits stay.
    """
    limits: list[float] = []

    class Noting(Runner):
        def run(
            self, argv: Sequence[str], env: Mapping[str, str], limit: float, given: str = "", most: int | None = None
        ) -> Answer:
            limits.append(limit)
            return super().run(argv, env, limit, given, most)

    with open(tmp_path / "large", "wb") as file:
        file.truncate(27_000_000)
    commands: dict[str, str | tuple[str, ...]] = dict.fromkeys(("put", "get", "pause"), "true")
    ours = Hand(Provider("p.yaml", commands, {}, TIMEOUTS), Noting(str(tmp_path / "command"), lambda: None), ENV)
    ours.put(MACHINE, str(tmp_path / "large"), "/r")
    ours.get(MACHINE, "/r", "/l", 27_000_000)
    ours.do("pause", MACHINE)
    assert limits == [120 + 540, 120 + 540, 60]


def test_a_lot_of_output_neither_blocks_nor_stays(tmp_path: Path) -> None:
    """
    The end of it is kept.
    """
    assert hand(tmp_path, state="seq 2000000; seq 100000 >&2; echo running").state(MACHINE) == "running"


def test_whoever_waits_is_called_while_a_command_runs_and_may_end_it(tmp_path: Path) -> None:
    """
    So systemd is pinged, and a stop does not wait for a slow provider.
    """

    class Enough(Exception):
        pass

    pid = tmp_path / "pid"

    def idle() -> None:
        if pid.exists() and pid.read_text().endswith("\n"):
            raise Enough

    with pytest.raises(Enough):
        Runner(str(tmp_path / "command"), idle).run(["sh", "-c", f'echo $$ >"{pid}"; sleep 1000'], ENV, 60)
    assert not process.lives(int(pid.read_text()))
    assert not (tmp_path / "command").exists()


def test_the_command_of_a_dead_supervisor_is_ended_by_the_next_one(tmp_path: Path) -> None:
    """
    Two of them at work for the same machine could make two.
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    code = (
        "import sys; from worker.supervise.command import Runner\n"
        "Runner(sys.argv[1], lambda: None).run(['sh', '-c', f'echo $$ >\"{sys.argv[2]}\"; sleep 1000'], {}, 60)"
    )
    dead = subprocess.Popen([sys.executable, "-c", code, tmp_path / "command", fifo], cwd=Path(__file__).parents[2])
    left = int(hear(fifo, dead))
    dead.kill()
    dead.wait()
    assert process.lives(left)
    runner(tmp_path).end_left()
    assert not process.lives(left)
    assert not (tmp_path / "command").exists()


def test_a_pid_that_is_somebody_elses_by_now_is_left_alone(tmp_path: Path) -> None:
    """
    The note of a dead supervisor may be older than this boot.
    """
    (tmp_path / "command").write_text(f"{os.getpid()} 1\n")
    runner(tmp_path).end_left()
    (tmp_path / "command").write_text("nonsense")
    runner(tmp_path).end_left()
