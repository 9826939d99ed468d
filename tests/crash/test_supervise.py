"""The supervisor killed at every command that it runs, and between any two writes: no machine is lost, none is made
twice, and no worker is started beside another.

The machines are folders; what is on them are a few lines of sh in the place of systemctl and agentctl, which write
down what they were asked.  The supervisor, its files and the signals are real.
"""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.crash.test_servers import Script, serving
from tests.supervision import TWO_MACHINES, World

AT_ONCE = 4  # they wait most of the time
ONE_COPY = "copy_every: 1h\n"  # from each machine, so that every world needs about as many commands


def check(world: World) -> None:
    """Two machines, each made under its own name and known; the run was gone on with on the second."""
    assert world.machines() == [("1", "gone"), ("2", "paused")], world.said
    log = world.log()
    assert len({line for line in log if line.startswith("create")}) == 2
    for start in (line for line in set(log) if line.startswith("start")):
        assert start.replace("start", "put") not in log[log.index(start) :], "put on a machine that was at work"
    assert len(list((world.root / "disks").iterdir())) == 2
    kept = json.loads((world.root / "state/checkpoint.json").read_text())
    assert kept["revision"] >= 23
    assert not (world.root / "state/command").exists() and not (world.root / "state/copying").exists()


def test_a_run_is_taken_to_its_end_on_two_machines(tmp_path: Path) -> None:
    """
    Without any fault but the one that the first machine has.
    """
    world = World(tmp_path / "w", TWO_MACHINES)
    assert world.supervise() == 0, world.said
    check(world)
    log = [line.split()[0] for line in world.log()]
    assert log == ["create", "put", "start", "pause", "create", "put", "put", "start", "pause"]
    assert world.supervise() == 0
    assert "job: done" in world.said


def test_a_dead_man_service_hears_of_a_supervision(tmp_path: Path) -> None:
    """
    When it begins and when the run is done, once each.
    """
    script = Script((200, b""))
    with serving(script) as url:
        world = World(tmp_path / "w", TWO_MACHINES, f"ping: {{start: '{url}start', finish: '{url}finish'}}\n")
        assert [world.supervise(), world.supervise()] == [0, 0], world.said
    assert [seen[":path"] for seen in script.seen] == ["/start", "/finish"]


def test_killed_at_any_command_it_goes_on_from_the_record(tmp_path: Path) -> None:
    """
    kill -9 before and after each command that it runs; nothing is made, started or put in another one's place twice.
    """
    world = World(tmp_path / "whole", TWO_MACHINES, ONE_COPY)
    assert world.supervise() == 0
    calls = len(world.calls())
    assert calls > 15

    def kill(fatal: int) -> None:
        world = World(tmp_path / f"w{fatal}", TWO_MACHINES, ONE_COPY)
        (world.root / "fatal").write_text(str(fatal))
        first = world.supervise()
        if first == 0:  # it needed fewer calls this time
            assert fatal >= 2 * calls - 8, (fatal, world.said)
            return
        assert first == -signal.SIGKILL, (fatal, world.said)
        assert world.supervise() == 0, (fatal, world.said)
        check(world)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(kill, range(2, 2 * calls + 2)))


@pytest.mark.parametrize("point", ["file-renamed", "output-renamed"])
def test_killed_at_any_write_it_goes_on_from_what_was_before_or_after(tmp_path: Path, point: str) -> None:
    """
    Of its record and of the copy: the reader finds the old one or the new one, and both are enough.
    """

    def kill(number: int) -> bool:
        world = World(tmp_path / f"w{number}", TWO_MACHINES)
        first = world.supervise(point, number)
        assert first in (-signal.SIGKILL, 0), (number, world.said)
        if first:
            assert world.supervise() == 0, (number, world.said)
        check(world)
        return first == 0

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for first in range(1, 100, AT_ONCE):
            whole = list(pool.map(kill, range(first, first + AT_ONCE)))
            if any(whole):
                assert first > 1 or not any(whole[:2]), "there were hardly any writes"
                return
    pytest.fail("it never got to its end")
