"""The copies that the supervisor takes beside its looks: none of them holds one up, none outlives it for long."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.supervision import DONE, World
from tests.support import hear
from worker import process
from worker.journal import Journal
from worker.supervise import record, remote, sandbox
from worker.supervise.book import Book
from worker.supervise.clockwork import Clockwork
from worker.supervise.command import Runner
from worker.supervise.copier import Copier
from worker.supervise.provider import Hand
from worker.supervise.record import WORKING, Machine, moment
from worker.systemd import Notifier

pytestmark = pytest.mark.programs


def test_a_copy_that_hangs_holds_up_no_look(tmp_path: Path) -> None:
    """
    The machine stops answering while `get` is at work: it is noticed at the next looks, not after that one's time.
    """
    story = f"if [ $number = 1 ]; then [ $looks != 3 ] || mute; else {DONE.strip()}; fi\n"
    world = World(tmp_path / "w", story, "fence: 50ms\n")
    (world.root / "stuck").touch()
    assert world.supervise() == 0, world.said
    calls = world.calls()[: world.calls().index("pause1")]
    assert calls.count("get1") == 1
    looks = [call for call in calls if call != "get1"]
    assert looks[-7:] == ["exec1", *("exec1", "state1") * 3]
    assert "did not end in time" not in world.said
    assert "it has not answered 2 times; the run goes on elsewhere" in world.said
    assert world.machines() == [("1", "left"), ("2", "paused")]
    assert not process.lives(int((world.root / "hung").read_text()))


def test_a_copy_is_ended_when_its_time_is_over_and_the_next_one_is_taken(tmp_path: Path) -> None:
    """
    Said once; nothing of it is left.
    """
    ended = (
        '[ -s "$disk/../../hung" ] && ! kill -0 $(cat "$disk/../../hung") && [ -e "$disk/../../state/checkpoint.json" ]'
    )
    world = World(tmp_path / "w", f"! {{ {ended}; }} || ends done\n", "timeouts: {get: 200ms}\n")
    (world.root / "stuck").touch()
    assert world.supervise() == 0, world.said
    assert world.said.count("the checkpoint cannot be copied: did not end in time; the copy before stays") == 1
    assert world.said.count("the checkpoint is copied again") == 1
    assert not list((world.root / "state").glob("*.incoming"))


@pytest.mark.parametrize("end, lives", [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_no_copy_that_is_under_way_outlives_its_supervisor_for_long(
    tmp_path: Path, end: signal.Signals, lives: bool
) -> None:
    """
    One that is told to stop ends it, and what one that was killed has left the next one ends.
    """
    world = World(tmp_path / "w", '[ ! -e "$disk/../../stop" ] || ends done\n')
    os.mkfifo(world.root / "stuck")
    with world.supervisor(stderr=subprocess.DEVNULL) as first:
        left = int(hear(world.root / "stuck", first))
        first.send_signal(end)
    assert process.lives(left) == lives
    (world.root / "stop").touch()
    assert world.supervise() == 0, world.said
    assert not process.lives(left)
    assert not (world.root / "state/copying").exists()


def test_nothing_is_copied_and_nothing_said_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    """
    A young run: its first step is not done, and its worker has written none.
    """
    young = '[ $looks -gt 3 ] || { rm "$disk/checkpoint.json"; done=0; }\n[ $looks -lt 6 ] || ends done\n'
    world = World(tmp_path / "w", young)
    assert world.supervise() == 0, world.said
    assert "cannot be copied" not in world.said
    calls = world.calls()
    assert calls[: calls.index("get1")].count("exec1") >= 3 + 4, "it was copied before the fourth look"
    assert (world.root / "state/checkpoint.json").exists()


@pytest.mark.parametrize("comes", ["and is heard of", "and nobody has heard of it yet", ""])
def test_what_has_come_when_a_machine_is_given_up_is_taken_in_and_the_rest_is_dropped(
    tmp_path: Path, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    It may be the newest that there will ever be of that machine.
    """
    monkeypatch.setattr(remote, "STAGE", "stage")
    monkeypatch.setattr(remote, "CHECKPOINT", "checkpoint.json")
    world = World(tmp_path / "w", DONE)
    disk, state = world.root / "disks/m-1", world.root / "state"
    for folder in (disk, state):
        folder.mkdir()
    rest = '"facts": {},\n"effects": [\n{}],\n"attempts": [\n{}\n]}\n'
    (disk / "power").write_text("running")
    (disk / "checkpoint.json").write_text(f'{{"format": 2, "run": "job", "revision": 1, {rest}')
    if not comes:
        (world.root / "stuck").touch()
    settings = sandbox.load(str(world.root / "sandbox.yaml"))
    now = moment()
    machine, known = Machine(1, "m-1", "m-1", WORKING, now, now), record.new("m", "job", "/m.yaml", now)
    clockwork = Clockwork(Notifier({}, print))
    runner = Runner(f"{state}/copying", clockwork.idle)
    book = Book(str(state), known, Journal("job", lambda *_: None))
    hand = Hand(settings.provider, runner, {})
    copier = Copier(settings, hand, runner, clockwork, book)
    try:
        copier.tend(machine, there=True)
        while copier._under_way is not None and copier._under_way.offer is None:
            clockwork.wait(60)  # it wakes us
            copier.tend(machine, there=True)
        if comes == "and is heard of":
            clockwork.wait(60)
        elif comes:
            assert copier._under_way is not None and copier._under_way.running._started is not None
            os.waitid(os.P_PID, copier._under_way.running._started.pid, os.WEXITED | os.WNOWAIT)
        copier.drop()
    finally:
        clockwork.close()
    assert sorted(path.name for path in state.iterdir()) == (["checkpoint.json"] if comes else [])
