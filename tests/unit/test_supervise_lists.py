"""The list that a supervised run works through: what of it reaches which machine, and when."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import IO

import pytest

from tests.supervision import DONE, SOURCE, TWO_MACHINES, World
from worker.errors import STATE_UNUSABLE
from worker.supervise import parcel

pytestmark = pytest.mark.programs

MENDED = "run: job\ntasks:\n  - {id: mended, run: 'true'}\n"
WAITS = "if grep -q mended etc/config.yaml; then ends done; fi\n"


def test_what_the_list_is_made_of_goes_to_the_machine(tmp_path: Path) -> None:
    """
    The drop-ins beside it as well: without them it would be another run than the one that was checked here.
    """
    world = World(tmp_path / "w", DONE)
    more = world.root / "job.d/more.yaml"
    more.parent.mkdir()
    more.write_text("tasks:\n  - {id: b, run: 'true'}\n")
    assert world.supervise() == 0, world.said
    (there,) = (world.root / "disks").glob("*/etc/config.d/more.yaml")
    assert there.read_bytes() == more.read_bytes()


def test_a_changed_list_reaches_the_machine_at_work_by_a_reload_if_it_is_sound(tmp_path: Path) -> None:
    """
    With its drop-ins, of which one is no more; what is wrong with it is one line, and changes nothing.
    """
    world = World(tmp_path / "w", WAITS)
    (world.root / "job.d").mkdir()
    old, new = world.root / "job.d/old.yaml", world.root / "job.d/new.yaml"
    old.write_text("tasks:\n  - {id: old, run: 'true'}\n")
    with world.supervisor(stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        said = read_until(first.stderr, "the run goes on there")
        for wrong, why in ((MENDED.replace("id:", "di:"), "job.yaml:3:"), (MENDED.replace("job", "other"), "the run")):
            (world.root / "job.yaml").write_text(wrong)
            first.send_signal(signal.SIGHUP)
            said = read_until(first.stderr, "nothing is changed")
            assert why in said[-1] and len(said) == 1, said
        assert world.words() == "create1 put1 put1 start1"
        old.rename(new)
        (world.root / "job.yaml").write_text(MENDED)
        first.send_signal(signal.SIGHUP)
        read_until(first.stderr, "the changed list is there, and its worker reads it")
        assert first.wait() == 0
    assert world.words() == "create1 put1 put1 start1 put1 put1 reload1 start1 pause1"
    assert [path.name for path in (world.root / "disks").glob("*/etc/config.d/*")] == ["new.yaml"]


def test_the_end_of_the_old_list_is_not_that_of_the_changed_one(tmp_path: Path) -> None:
    """
    A machine that has ended with it, and cannot be given the other one, is replaced.
    """
    ended = "[ ! -e ../../ended ] || ends done"
    world = World(tmp_path / "w", f"if [ $number = 1 ]; then {ended}; else {WAITS.strip()}; fi\n")
    with world.supervisor(stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        read_until(first.stderr, "the run goes on there")
        (stage,) = world.root.glob("disks/*/stage")
        shutil.rmtree(stage)
        stage.touch()
        (world.root / "job.yaml").write_text(MENDED)
        first.send_signal(signal.SIGHUP)
        read_until(first.stderr, "the changed list cannot be put there")
        (world.root / "ended").touch()
        said = read_until(first.stderr, "the run goes on elsewhere")
        assert len(said) == 1 and "it has ended (done) and does not take the changed list" in said[0]
        first.stderr.read()
        assert first.wait() == 0
    assert world.machines() == [("1", "paused"), ("2", "paused")]


def test_a_list_that_changed_while_there_was_no_supervisor_reaches_the_machine_once(tmp_path: Path) -> None:
    """
    Also if the supervisor is killed before it could write down that it has been there.
    """
    world = World(tmp_path / "w", WAITS)
    with world.supervisor(stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        read_until(first.stderr, "the run goes on there")
        first.terminate()
    (world.root / "job.yaml").write_text(MENDED)
    before = len(world.calls())
    (world.root / "fatal").write_text(str(2 * (before + 5)))  # after the start of the worker there
    assert world.supervise() == -signal.SIGKILL
    assert world.words() == "create1 put1 start1 put1 reload1 start1"
    assert world.supervise() == 0, world.said
    assert world.words() == "create1 put1 start1 put1 reload1 start1 put1 start1 pause1"


@pytest.mark.parametrize(
    ("before", "now", "promised"),
    [
        ((), (("a", "1"),), (("a", ""),)),
        ((("a", "1"), ("b", "1")), (("a", "1"), ("b", "1")), (("a", "1"), ("b", "1"))),
        ((("a", "1"), ("b", "1")), (("a", "1"), ("b", "2")), (("a", "1"), ("b", ""))),
        ((("a", "1"), ("b", "1")), (("a", "1"), ("c", "1")), (("a", "1"), ("b", ""), ("c", ""))),
        ((("a", ""),), (("a", "1"),), (("a", ""),)),
    ],
)
def test_of_what_changes_nobody_knows_which_a_machine_has(
    before: parcel.Marks, now: parcel.Marks, promised: parcel.Marks
) -> None:
    """
    Until it is known to have taken it: then, too, when the list becomes meanwhile what it had been before.
    """
    assert parcel.promised(before, now) == promised


def test_what_a_dead_supervisor_has_put_on_a_machine_does_not_stay_there_when_it_is_dropped(tmp_path: Path) -> None:
    """
    It died before it could write down that the machine has it.
    """
    world = World(tmp_path / "w", DONE)
    more = world.root / "job.d/more.yaml"
    more.parent.mkdir()
    more.write_text("tasks:\n  - {id: b, run: 'true'}\n")
    create_knock_ready_put_put_place = 6
    (world.root / "fatal").write_text(f"{2 * create_knock_ready_put_put_place}")
    assert world.supervise() == -signal.SIGKILL
    (there,) = (world.root / "disks").glob("*/etc/config.d/more.yaml")
    more.unlink()
    assert world.supervise() == 0, world.said
    assert not there.exists()


def test_a_run_that_is_done_goes_on_there_when_its_list_has_grown(tmp_path: Path) -> None:
    """
    As with the worker itself; a start with the same list has nothing to do.
    """
    world = World(tmp_path / "w", DONE)
    assert world.supervise() == 0, world.said
    assert world.supervise() == 0
    assert world.words() == "create1 put1 start1 pause1"
    (world.root / "job.yaml").write_text(MENDED)
    assert world.supervise() == 0, world.said
    assert world.words() == "create1 put1 start1 pause1 resume1 put1 start1 pause1"


def test_a_list_that_somebody_is_writing_reaches_no_machine(tmp_path: Path) -> None:
    """
    A new machine gets the list that was checked, until a reload or a start has checked another one.
    """
    world = World(tmp_path / "w", f'echo "tasks: [" >"$disk/../../job.yaml"\n{TWO_MACHINES}')
    assert world.supervise() == 0, world.said
    assert [path.read_text().count("id: a") for path in (world.root / "disks").glob("*/etc/config.yaml")] == [1, 1]


def test_a_terminal_that_is_closed_ends_the_supervisor_in_order(tmp_path: Path) -> None:
    """
    Then SIGHUP asks for no reload: nobody would know of a supervisor that goes on.
    """
    world = World(tmp_path / "w", WAITS)
    ours, theirs = os.openpty()
    on_terminal = ["setsid", "--ctty", *world.command()]
    with subprocess.Popen(on_terminal, cwd=SOURCE, stdin=theirs, stderr=subprocess.PIPE, text=True) as first:
        os.close(theirs)
        assert first.stderr is not None
        read_until(first.stderr, "the run goes on there")
        os.close(ours)
        assert "its machines go on" in read_until(first.stderr, "the supervisor ends")[-1]
        assert first.wait() == 75


def read_until(stream: IO[str], text: str) -> list[str]:
    """Return the lines up to the first one that has this text in it."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was not said: {lines}")


def test_two_files_of_one_name_do_not_share_a_record(tmp_path: Path) -> None:
    """
    N5: the second one is not said to be done because the first one is; it is told which it met, and the ways out.
    """
    first, second = World(tmp_path / "p", DONE), World(tmp_path / "q", DONE)
    assert first.own().returncode == 0
    done = second.own()
    assert done.returncode == STATE_UNUSABLE, done.stderr
    assert f"keeps the run of {first.root}/sandbox.yaml alive, not of {second.root}/sandbox.yaml" in done.stderr
    assert second.own("--status").returncode == STATE_UNUSABLE
    assert not (second.root / "log").exists()
    assert second.own("--state", str(tmp_path / "other")).returncode == 0
    assert second.words() == "create1 put1 start1 pause1"


def test_a_record_of_an_earlier_version_is_that_of_the_file_that_goes_on_with_it(tmp_path: Path) -> None:
    """
    N5: and one whose file has been moved is gone on with when it is named.
    """
    first, second = World(tmp_path / "p", DONE), World(tmp_path / "q", DONE)
    assert first.own().returncode == 0
    record = tmp_path / "home/agent-supervisor/sandbox/machines.json"
    content = json.loads(record.read_text())
    del content["file"]
    record.write_text(json.dumps(content))
    assert first.own().returncode == 0
    assert json.loads(record.read_text())["file"] == f"{first.root}/sandbox.yaml"
    assert second.own().returncode == STATE_UNUSABLE
    assert second.own("--state", str(record.parent)).returncode == 0
    assert not (second.root / "log").exists()
    assert first.own().returncode == STATE_UNUSABLE
    (tmp_path / "link").symlink_to(second.root)
    linked = World.__new__(World)
    linked.root = tmp_path / "link"
    assert linked.own("--status").returncode == 0
