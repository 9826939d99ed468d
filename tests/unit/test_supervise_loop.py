"""What the supervisor does about a machine, as a whole: its record, its commands, its words and its exit status."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.supervision import DONE, SOURCE, TWO_MACHINES, World
from tests.support import hear
from worker import process
from worker.errors import OUT_OF_BUDGET

pytestmark = pytest.mark.programs


def test_a_machine_that_is_stopped_is_resumed_and_goes_on(tmp_path: Path) -> None:
    """
    The same machine, with nothing put on it again: its own ledger knows best.
    """
    world = World(tmp_path / "w", "[ $looks != 2 ] || off\n[ $looks -lt 5 ] || ends done\n")
    assert world.supervise() == 0, world.said
    assert world.words() == "create1 put1 start1 resume1 start1 pause1"
    assert "it is stopped; resuming it" in world.said


def test_a_worker_that_ended_is_started_again_there_once_and_then_elsewhere(tmp_path: Path) -> None:
    """
    Exit 73: the disk may be read-only.
    """
    dead = "if [ $number = 1 ]; then looks=2; ends failed 73; else [ $looks -lt 3 ] || ends done; fi\n"
    world = World(tmp_path / "w", dead)
    assert world.supervise() == 0, world.said
    assert world.words() == "create1 put1 start1 start1 pause1 create2 put2 put2 start2 pause2"
    assert "(exit status 73), though it was started again once; the run goes on elsewhere" in world.said


def test_one_that_can_be_neither_reached_nor_paused_may_come_back(tmp_path: Path) -> None:
    """
    While the fence is waited out nobody else has the run; if the machine answers again, it goes on there.
    """
    story = "[ $looks != 2 ] || mute\n[ $looks -lt 5 ] || ends done\n"
    world = World(
        tmp_path / "w",
        story,
        "fence: 1min\n",
        mute='echo x >>"$disk/asked"; [ $(wc -l <"$disk/asked") -lt 3 ] || rm "$disk/mute"',
    )
    assert world.supervise() == 0, world.said
    assert "it answers again; going on there" in world.said
    assert world.machines() == [("1", "paused")]
    assert "create2" not in world.words()


def test_after_the_fence_the_run_goes_on_elsewhere_and_says_what_is_left(tmp_path: Path) -> None:
    """
    Loudly: somebody has to end that machine by hand.
    """
    story = f"if [ $number = 1 ]; then [ $looks != 2 ] || mute; else {DONE.strip()}; fi\n"
    world = World(tmp_path / "w", story, "fence: 50ms\n")
    assert world.supervise() == 0, world.said
    assert "can be neither reached nor paused, so its worker may be at work; waiting 50ms" in world.said
    assert "still neither reached nor paused; going on all the same: end it by hand" in world.said
    assert world.machines() == [("1", "left"), ("2", "paused")]


def test_one_that_answers_again_after_the_fence_is_stopped_before_the_next_is_made(tmp_path: Path) -> None:
    """
    The supervisor itself had no network: nobody answered, and no machine could be made.  What the old one has done
    meanwhile is copied, and gone on from.
    """
    story = f': >"$disk/../../broken"\nif [ $number = 1 ]; then [ $looks != 2 ] || mute; else {DONE.strip()}; fi\n'
    world = World(tmp_path / "w", story.replace(": >", '[ "$number$looks" != 12 ] || : >'), "fence: 50ms\n")
    assert world.supervise() == 0, world.said
    assert "could not be made" in world.said
    assert "it answers again; it is stopped now" in world.said
    assert world.machines() == [("1", "paused"), ("2", "paused")]
    assert world.words().endswith("pause1 create2 put2 put2 start2 pause2")


def test_a_full_disk_here_neither_makes_nor_starts_anything_that_is_not_written_down(tmp_path: Path) -> None:
    """
    The machine is made when there is space again.
    """
    world = World(tmp_path / "w", DONE)
    state = world.root / "state"
    state.mkdir()
    (state / ".machines.json.new").mkdir()  # the temp file cannot be opened: as good as a full disk
    with world.supervisor(stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        assert "machines.json: cannot be written" in first.stderr.readline()
        assert not (world.root / "log").exists()
        (state / ".machines.json.new").rmdir()
        assert first.wait() == 0
    assert world.words() == "create1 put1 start1 pause1"


def test_a_budget_of_machines_is_kept_and_can_be_raised(tmp_path: Path) -> None:
    """
    Exit 69, also when it is started again; with one more machine it goes on.
    """
    world = World(tmp_path / "w", TWO_MACHINES, "budget: {machines: 1}\n")
    assert world.supervise() == 69
    assert "out-of-budget (1 machine has been used)" in world.said
    assert world.supervise() == 69
    assert world.record()["outcome"] == "out-of-budget"
    world.configure("budget: {machines: 2}\n")
    assert world.supervise() == 0, world.said
    assert world.machines() == [("1", "gone"), ("2", "paused")]


def test_a_machine_that_was_still_to_be_prepared_when_the_budget_was_spent_is_when_it_is_raised(tmp_path: Path) -> None:
    """
    Before its worker is started: without the copy that would begin the run anew.
    """
    world = World(tmp_path / "w", TWO_MACHINES, "setup: '[ ${PWD##*-} = 1 ] || sleep 1000'\n")
    with world.supervisor(stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        assert any("-2: made" in line for line in first.stderr)
        first.kill()
    world.configure("budget: {hours: 0.000001}\n")
    assert world.supervise() == OUT_OF_BUDGET
    world.configure("")
    assert world.supervise() == 0, world.said
    assert len(list((world.root / "disks").glob("*-2/restored.json"))) == 1


def test_spend_counts_what_a_lost_machine_had_spent_and_its_successor_does_not_know(tmp_path: Path) -> None:
    """
    The first one reports 3 and is lost with a copy that has nothing of it; the second one reports 3 of its own.
    """
    story = "spend=3\nif [ $number = 1 ]; then [ $looks != 3 ] || gone; else spend=$looks; fi\n"
    world = World(tmp_path / "w", story, "budget: {spend: 7}\n")
    assert world.supervise() == 69, world.said
    known = world.record()
    assert known["spend_lost"] == 3
    assert known["spend"] == 4
    assert world.machines() == [("1", "gone"), ("2", "paused")]
    assert world.supervise() == 69
    assert world.words().count("start") == 2


@pytest.mark.parametrize("code, status", [(70, 70), (69, 69), (78, 78)])
def test_an_end_for_good_is_the_supervisors_end_too(tmp_path: Path, code: int, status: int) -> None:
    """
    The machine is paused and kept; starting the supervisor again starts the worker again, as with the worker itself,
    with the list as it is by then.
    """
    world = World(tmp_path / "w", f"[ $looks != 2 ] || ends failed {code}\n[ $looks -lt 4 ] || ends done\n")
    assert world.supervise() == status, world.said
    assert world.machines() == [("1", "paused")]
    disk = tmp_path / f"w/disks/{world.record()['machines'][0]['name']}"
    (disk / "exit").unlink()
    (world.root / "job.yaml").write_text("run: job\ntasks:\n  - {id: mended, run: 'true'}\n")
    assert world.supervise() == 0, world.said
    assert world.words() == "create1 put1 start1 pause1 resume1 put1 start1 pause1"
    assert "mended" in (disk / "etc/config.yaml").read_text()


def test_an_end_for_good_is_told_in_the_workers_own_words(tmp_path: Path) -> None:
    """
    In the last line, and by --status; nobody has to look for them on the machine.
    """
    what = "/etc/agent/config.yaml:3:5: tasks[0].rnu: unknown key 'rnu'"
    words = json.dumps([78, "gave-up", f"{what} (and 2 more)", "", "its\nlast\nlines"])
    world = World(tmp_path / "w", f"ends failed 78; cat >last-words <<'END'\n{words}\nEND\n")
    assert world.supervise() == 78
    assert f"job: configuration (exit status 78: {what} (and 2 more))" in world.said
    shown = subprocess.run([*world.command(), "--status"], cwd=SOURCE, capture_output=True, text=True, check=True)
    assert what in shown.stdout


def test_somebody_is_told_once_of_an_end_that_is_not_well(tmp_path: Path) -> None:
    """
    With what and why; an end that is met again is not told again, a good one not at all.
    """
    said = f"{tmp_path}/said"
    alert = f"alert: 'echo \"$AGENT_ALERT $AGENT_RUN $AGENT_CAUSE\" >>{said}'\n"
    world = World(tmp_path / "w", "[ $looks -lt 2 ] || ends out-of-budget 69\n", alert + "budget: {machines: 1}\n")
    assert world.supervise() == 69, world.said
    told = Path(said).read_text().splitlines()
    assert len(told) == 1 and told[0].startswith("out-of-budget "), told
    well = World(tmp_path / "v", DONE, alert)
    assert well.supervise() == 0, well.said
    assert len(Path(said).read_text().splitlines()) == 1


def test_a_machine_that_cannot_be_made_is_tried_again_under_the_same_name(tmp_path: Path) -> None:
    """
    A provider that has no room now; nothing leaks if it had made half of it.  The record says why until it has.
    """
    world = World(tmp_path / "w", DONE)
    (world.root / "broken").touch()
    (world.root / "fatal").write_text(f"{2 * 2 + 1}")  # killed at its second command
    assert world.supervise() == -signal.SIGKILL
    why = "could not be made: exited with status 1: no room"
    assert f"{why}; again in" in world.said
    assert world.record()["machines"][0]["why"] == why
    assert world.supervise() == 0, world.said
    assert world.machines() == [("1", "paused")]
    assert world.record()["machines"][0]["why"] == "done"


@pytest.mark.parametrize("said", [r"--force", r"no\0id", r"$(yes x | head -c 900 | tr -d '\n')", r"\033[31mred"])
def test_what_can_name_no_machine_is_not_written_down_for_one(tmp_path: Path, said: str) -> None:
    """
    In the record it would end each supervisor that reads it, or be an option to a command.
    """
    world = World(tmp_path / "w", DONE)
    once = f'[ -e once ] || {{ touch once; printf -- "{said}"; }}'
    do = (world.root / "do").read_text()
    (world.root / "do").write_text(re.sub('(mkdir -p "\\$disk" && .*) ;;', lambda found: f"{found[1]}; {once} ;;", do))
    assert world.supervise() == 0, world.said
    assert "could not be made: its id cannot be '" in world.said
    assert world.record()["machines"][0]["id"].endswith("-1")


@pytest.mark.parametrize(
    "facts",
    [
        '"last_sign_age": "x"',
        '"last_sign_age": 1e999',
        '"steps": [1]',
        '"steps": {"done": "x"}',
        '"worker": "?"',
        '"budget": {"spend": 7}',
        '"budget": {"spend": {"used": NaN}}',
    ],
)
def test_a_machine_may_say_anything(tmp_path: Path, facts: str) -> None:
    """
    What makes no sense is not known; the supervisor looks again.
    """
    story = f"""[ $looks != 1 ] || {{ printf '{{\\n%s\\n}}\\n' '{facts}'; exit; }}\n{DONE}"""
    world = World(tmp_path / "w", story)
    assert world.supervise() == 0, world.said
    assert "Traceback" not in world.said


def test_what_a_dead_supervisor_left_running_is_ended_before_anything_else(tmp_path: Path) -> None:
    """
    A `create` that goes on, beside another one, would make two machines.
    """
    world = World(tmp_path / "w", DONE)
    os.mkfifo(world.root / "hang")
    with world.supervisor(stderr=subprocess.DEVNULL) as first:
        left = int(hear(world.root / "hang", first))
        first.kill()
    assert process.lives(left)
    assert world.supervise() == 0, world.said
    assert not process.lives(left)
    assert world.words() == "create1 put1 start1 pause1"


def test_a_machine_that_cannot_be_prepared_is_left_and_setup_runs_on_the_next(tmp_path: Path) -> None:
    """
    `setup:` fails three times on the first machine.
    """
    world = World(tmp_path / "w", DONE, "setup: |\n  case $disk in *-1) echo 'no compiler' >&2; exit 3 ;; esac\n")
    assert world.supervise() == 0, world.said
    assert "it cannot be prepared: setup: exited with status 1: no compiler" in world.said
    assert world.words() == "create1 pause1 create2 put2 start2 pause2"


def test_results_are_fetched_and_a_machine_can_be_kept(tmp_path: Path) -> None:
    """
    at_end: keep leaves it running.
    """
    (tmp_path / "there").write_bytes(b"\0 1 2\n" * 9999)
    world = World(tmp_path / "w", DONE, f"at_end: keep\nresults: {{report: {tmp_path}/there}}\n")
    assert world.supervise() == 0, world.said
    assert "pause" not in world.words()
    assert world.machines() == [("1", "kept")]
    assert (world.root / "report").read_bytes() == (tmp_path / "there").read_bytes()


def test_a_second_supervisor_is_refused_and_a_stop_leaves_the_machine_alone(tmp_path: Path) -> None:
    """
    Exit 77 names the first one; SIGTERM ends it with 75, and the next one goes on.
    """
    world = World(tmp_path / "w", ': >>"$disk/seen"\n[ ! -e "$disk/../../stop" ] || ends done\n')
    os.mkfifo(world.root / "news")
    (world.root / "story").write_text((world.root / "story").read_text() + f"[ $looks != 2 ] || : >{world.root}/news\n")
    with world.supervisor(stderr=subprocess.PIPE, text=True) as first:
        hear(world.root / "news", first)
        assert world.supervise() == 77
        assert f"held by another worker, process {first.pid}" in world.said
        status = subprocess.run([*world.command(), "--status", "--json"], cwd=SOURCE, capture_output=True, check=True)
        assert json.loads(status.stdout)["supervisor"] == {"pid": first.pid}
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 75
        assert first.stderr is not None and "its machines go on" in first.stderr.read()
    assert "pause" not in world.words()
    (world.root / "stop").touch()
    assert world.supervise() == 0, world.said
    assert world.words() == "create1 put1 start1 pause1"


def test_mistakes_in_the_file_and_a_broken_copy_make_no_machine(tmp_path: Path) -> None:
    """
    Exit 78 with file, line and column; exit 73 with what to do.
    """
    world = World(tmp_path / "w", DONE, "pol: 3s\n")
    assert world.supervise() == 78
    assert "sandbox.yaml:6:1: unknown key 'pol'; did you mean 'poll'?" in world.said
    world.configure("")
    (world.root / "state").mkdir()
    (world.root / "state/checkpoint.json").write_text("{")
    assert world.supervise() == 73
    assert "nothing was changed; put a sound copy there, or begin anew: rm" in world.said
    assert not (world.root / "log").exists()


def test_the_run_goes_on_from_a_copy_that_was_put_there(tmp_path: Path) -> None:
    """
    How a run that exists already comes under supervision.
    """
    world = World(tmp_path / "w", DONE)
    (world.root / "state").mkdir()
    rest = '"facts": {},\n"effects": [\n{}],\n"attempts": [\n{}\n]}\n'
    (world.root / "state/checkpoint.json").write_text(f'{{"format": 2, "run": "job", "revision": 1, {rest}')
    assert world.supervise() == 0, world.said
    assert world.words() == "create1 put1 put1 start1 pause1"


def test_a_run_whose_ledger_is_on_a_server_needs_no_copy(tmp_path: Path) -> None:
    """
    The next machine finds all that was done, and spent, on the server: nothing is brought here or put there.
    """
    goes, ends = "[ $looks -lt 3 ] || gone", "[ $looks -lt 3 ] || ends done"
    world = World(
        tmp_path / "w", f"spend=3; if [ $number = 1 ]; then {goes}; else {ends}; fi\n", "budget: {spend: 5}\n"
    )
    listed = world.root / "job.yaml"
    listed.write_text(f"ledger: postgresql://agent@db.example/agent\n{listed.read_text()}")
    assert world.supervise() == 0, world.said
    assert world.words() == "create1 put1 start1 pause1 create2 put2 start2 pause2"
    assert (world.record()["spend"], world.record()["spend_lost"]) == (3, 0)
    assert "get" not in (world.root / "calls").read_text()
    assert not list(world.root.glob("disks/*/restored.json"))
