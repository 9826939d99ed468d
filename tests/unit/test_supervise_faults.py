"""What goes wrong outside: hosts that are somebody else's, words that are not true, commands that do half of it.

No step may be done by two, none be called done that is not, and no machine be forgotten.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.supervision import COPIED, DONE, SOURCE, World
from worker.errors import OK, OUT_OF_BUDGET

pytestmark = pytest.mark.programs

FENCE = "fence: 50ms\n"
# A machine that is away: no command reaches it, and its provider says what is in $disk/away.
AWAY = """
if [ -e "$disk/away" ]; then
    case $1 in state) cat "$disk/away"; exit ;; *) echo "cannot reach $2" >&2; exit 1 ;; esac
fi
"""


def hooked(folder: Path, story: str, hook: str, more: str = "") -> World:
    """Return a world in which `hook` (sh; $1 the command, $2 the id, $disk) comes before each provider's command."""
    world = World(folder, story, more)
    do = world.root / "do"
    do.write_text(do.read_text().replace("case $1 in\n", f"{hook}\ncase $1 in\n", 1))
    return world


def alerting(world: World, more: str = "") -> Path:
    """Have what somebody is told written to the file that is returned."""
    told = world.root / "told"
    told.touch()
    world.configure(f"alert: 'echo \"$AGENT_ALERT $AGENT_CAUSE\" >>{told}'\n{more}")
    return told


def kinds(told: Path) -> list[str]:
    return [line.split()[0] for line in told.read_text().splitlines()]


def first(what: str, others: str = DONE) -> str:
    """Return a story in which something happens to the first machine only."""
    return f"if [ $number = 1 ]; then {what.strip()}; else {others.strip()}; fi\n"


# -- whose machine, whose run


def test_a_host_that_another_supervision_holds_is_left_to_it(tmp_path: Path) -> None:
    """
    A1: nothing is put there, started or stopped; the run is done on the next one, and the holder is named.
    """
    hook = 'case $1$2 in create*-1) mkdir -p "$disk/stage"; echo other-1f >"$disk/stage/holder" ;; esac'
    world = hooked(tmp_path / "w", DONE, hook, "setup: touch set-up\n")
    assert world.supervise() == OK, world.said
    assert world.words() == "create1 create2 put2 start2 pause2"
    assert world.machines() == [("1", "taken"), ("2", "paused")]
    assert "the supervision 'other-1f' has it" in world.said
    assert not list(world.root.glob("disks/*-1/set-up"))


def test_a_host_that_another_supervision_has_taken_meanwhile_is_left_to_it(tmp_path: Path) -> None:
    """
    A1: somebody has removed our name there, and the other one's worker is not stopped for us.
    """
    world = World(tmp_path / "w", first("[ $looks != 2 ] || echo other-1f >stage/holder"))
    assert world.supervise() == OK, world.said
    assert world.machines() == [("1", "taken"), ("2", "paused")]
    assert "pause1" not in world.words()
    assert list(world.root.glob("disks/*-1/worker"))


def test_a_host_is_free_for_the_next_supervision_when_the_run_has_ended(tmp_path: Path) -> None:
    """
    A1: nobody has to go there and remove a name.
    """
    world = World(tmp_path / "w", DONE)
    assert world.supervise() == OK, world.said
    assert not list(world.root.glob("disks/*/stage/holder"))


@pytest.mark.parametrize("end", ["done", "failed 70", "out-of-budget 69"])
def test_what_another_run_has_come_to_is_no_end_of_this_one(tmp_path: Path, end: str) -> None:
    """
    A1: a host has done another run before, and today its worker does not start.
    """
    world = World(tmp_path / "w", first(f"run=runb; ends {end}"))
    assert world.supervise() == OK, world.said
    assert "what is there is the run 'runb'" in world.said or "exit status" in world.said
    assert world.machines() == [("1", "paused"), ("2", "paused")]
    assert world.words().count("start2") == 1


def test_done_is_not_done_without_a_copy_of_this_run(tmp_path: Path) -> None:
    """
    A1: the machine says so, and what comes from there is another run's.  Somebody is told, and it is never exit 0.
    """
    story = f'sed -i \'s/"run": "job"/"run": "runb"/\' checkpoint.json\n{DONE}'
    world = World(tmp_path / "w", story)
    told = alerting(world, "budget: {hours: 0.001}\n")
    assert world.supervise() == OUT_OF_BUDGET
    assert "it says that the run is done, and no copy of that comes" in world.said
    assert kinds(told) == ["no-copy", "out-of-budget"]
    assert world.record()["outcome"] == "out-of-budget"


# -- gone, left, and back


def test_gone_is_not_believed_at_first_sight(tmp_path: Path) -> None:
    """
    A2: one command that fails, and one word of a provider whose list is behind, cost nothing.
    """
    hook = AWAY.replace('cat "$disk/away"', 'cat "$disk/away"; rm "$disk/away"')
    world = hooked(tmp_path / "w", f"[ $looks != 2 ] || echo gone >away\n{DONE.replace('3', '5')}", hook)
    assert world.supervise() == OK, world.said
    assert "it is said to be gone; looking again" in world.said
    assert world.words() == "create1 put1 start1 pause1"


@pytest.mark.parametrize("word", ["gone", "unknown"])
def test_a_machine_that_was_given_up_and_comes_back_is_stopped_beside_the_next_one(tmp_path: Path, word: str) -> None:
    """
    A2, A3: it had been said to be gone, or nobody could say; it works on beside the next one until it can be reached.
    """
    lost = f"! {{ {COPIED}; }} || echo {word} >away"
    others = "[ $looks != 3 ] || rm ../*-1/away; [ $looks -lt 4 ] || [ -e ../*-1/worker ] || ends done"
    world = hooked(tmp_path / "w", first(lost, others), AWAY, FENCE)
    told = alerting(world, FENCE)
    assert world.supervise() == OK, world.said
    assert world.machines() == [("1", "paused"), ("2", "paused")]
    assert kinds(told) == ([] if word == "gone" else ["machine-left"])
    assert "left, see to it yourself" not in world.said
    kept = (world.root / "state/checkpoint.json").read_text()
    # The first machine's, which had gone on from more; or the next one's, if that had been copied by then.
    assert re.search('"revision": [23]', kept), kept


def test_what_is_left_at_the_end_is_named_and_somebody_is_told(tmp_path: Path) -> None:
    """
    A3: though the run is done.  --status says that it may run on; a later start looks after it again.
    """
    world = hooked(tmp_path / "w", first(f"! {{ {COPIED}; }} || echo unknown >away"), AWAY)
    told = alerting(world, FENCE)
    assert world.supervise() == OK, world.said
    name = world.record()["machines"][0]["name"]
    assert f"left, see to it yourself: {name} (it is neither stopped nor paused" in world.said
    assert kinds(told) == ["machine-left", "machine-left"]
    shown = subprocess.run([*world.command(), "--status"], cwd=SOURCE, capture_output=True, text=True, check=True)
    assert f"{name}: left;" in shown.stdout and "its worker may be at work" in shown.stdout
    (world.root / "disks" / name / "away").unlink()
    assert world.supervise() == OK
    assert world.machines() == [("1", "paused"), ("2", "paused")]


@pytest.mark.parametrize(
    ("story", "more", "status"),
    [(DONE, "", OK), ("spend=$looks\n", "budget: {spend: 3}\n", OUT_OF_BUDGET)],
    ids=["done", "budget"],
)
def test_a_stop_that_is_refused_at_the_end_is_tried_again(tmp_path: Path, story: str, more: str, status: int) -> None:
    """
    A4: the bill must not run on behind a record that says `paused`.
    """
    hook = '[ "$1" != pause ] || [ -e refused ] || { touch refused; echo "429 too many requests" >&2; exit 1; }'
    world = hooked(tmp_path / "w", story, hook, more)
    assert world.supervise() == status, world.said
    assert world.calls().count("pause1") == 2
    assert world.machines() == [("1", "paused")]


@pytest.mark.parametrize(
    ("story", "more", "status", "kind"),
    [(DONE, "", OK, "machine-left"), ("spend=$looks\n", "budget: {spend: 3}\n", OUT_OF_BUDGET, "out-of-budget")],
    ids=["done", "budget"],
)
def test_a_machine_that_cannot_be_paused_at_the_end_is_left_and_told_of(
    tmp_path: Path, story: str, more: str, status: int, kind: str
) -> None:
    """
    A4: after as many tries as results get; the record says what is true, and so does the alert.
    """
    world = hooked(tmp_path / "w", story, '[ "$1" != pause ] || { echo "no" >&2; exit 1; }')
    told = alerting(world, more)
    assert world.supervise() == status, world.said
    assert world.machines() == [("1", "left")]
    assert world.calls().count("pause1") >= 5
    assert kinds(told) == [kind]
    assert "its worker is stopped, but it is not paused, and may cost" in told.read_text()


def test_an_agent_that_was_stopped_in_order_is_waited_for_no_longer(tmp_path: Path) -> None:
    """
    A4: its machine cannot be paused; that costs, but nobody is at work there, so no fence is needed.
    """
    hook = '[ "$1" != pause ] || [ ! -e "$disk/worker-was-here" ] || { echo "no" >&2; exit 1; }'
    story = first(f"done=1; : >worker-was-here; ! {{ {COPIED}; }} || ends failed 73")
    world = hooked(tmp_path / "w", story, hook, "fence: 10min\n")
    assert world.supervise() == OK, world.said
    assert world.machines() == [("1", "left"), ("2", "paused")]
    assert "may be at work" not in world.said


def test_a_machine_that_was_never_begun_is_not_in_the_record_of_the_end(tmp_path: Path) -> None:
    """
    A4: what is not there is neither paused nor left.
    """
    world = World(tmp_path / "w", DONE, "budget: {hours: 0.0000001}\n")
    assert world.supervise() == OUT_OF_BUDGET
    assert world.machines() == []
    world.configure("")
    assert world.supervise() == OK, world.said
    assert world.machines() == [("1", "paused")]


# -- making one


def test_a_machine_is_not_made_again_while_nobody_knows_whether_it_is_there(tmp_path: Path) -> None:
    """
    A5: `create` has made it, and its answer was lost; then the provider cannot be asked for a while.
    """
    lost = 'mkdir -p "$disk"; echo running >"$disk/power"; echo "create $2" >>log; touch lost; exit 1'
    hook = f"""
    if [ "$1" = create ]; then [ -e lost ] || {{ {lost}; }}; fi
    if [ "$1" = state ]; then echo x >>asked; [ "$(wc -l <asked)" -gt 3 ] || exit 1; fi
    """
    world = hooked(tmp_path / "w", DONE, hook)
    assert world.supervise() == OK, world.said
    assert world.words() == "create1 put1 start1 pause1"
    assert "whether it has been made is not known" in world.said


def test_a_machine_of_which_the_list_does_not_know_yet_is_not_made_again(tmp_path: Path) -> None:
    """
    A5, A2: "gone" at one look is a list that is behind.
    """
    lost = 'mkdir -p "$disk"; echo running >"$disk/power"; echo "create $2" >>log; touch lost; exit 1'
    hook = f"""
    if [ "$1" = create ]; then [ -e lost ] || {{ {lost}; }}; fi
    if [ "$1" = state ] && [ ! -e asked ]; then touch asked; echo gone; exit; fi
    """
    world = hooked(tmp_path / "w", DONE, hook)
    assert world.supervise() == OK, world.said
    assert world.words() == "create1 put1 start1 pause1"


def test_somebody_is_told_once_that_no_machine_can_be_made(tmp_path: Path) -> None:
    """
    B5: before the budget of hours is over.
    """
    world = hooked(tmp_path / "w", DONE, '[ "$1" != create ] || { echo "no host left" >&2; exit 1; }')
    told = alerting(world, "budget: {hours: 0.0005}\n")
    assert world.supervise() == OUT_OF_BUDGET
    assert kinds(told) == ["no-machine", "out-of-budget"]
    assert "could not be made: exited with status 1: no host left" in told.read_text()


def test_somebody_is_told_once_that_no_copy_comes(tmp_path: Path) -> None:
    """
    B5: the run goes on; a lost machine would cost all of it.
    """
    hook = '[ "$1" != get ] || [ -e ../told-by-now ] || { echo "no get today" >&2; exit 1; }'
    story = 'told=$disk/../../told; [ ! -s "$told" ] || : >"$disk/../../../told-by-now"\n'
    world = hooked(tmp_path / "w", f"{story}[ ! -s $told ] || ends done\n", hook)
    told = alerting(world)
    assert world.supervise() == OK, world.said
    assert kinds(told) == ["no-copy"]


def test_an_alert_that_could_not_be_given_is_tried_again_and_holds_nothing_up(tmp_path: Path) -> None:
    """
    B5: the run is not kept waiting for somebody who cannot be told.
    """
    world = hooked(tmp_path / "w", first(f"! {{ {COPIED}; }} || echo unknown >away"), AWAY)
    world.configure(f"{FENCE}alert: 'exit 3'\n")
    assert world.supervise() == OK, world.said
    assert "again later" in world.said
    assert world.record()["told"] == []


# -- half of it, and too much


@pytest.mark.parametrize("half", ['head -c 30 "$3" >"$disk/$4"', ': >"$disk/$4"', 'cat "$3" "$3" >"$disk/$4"', ":"])
def test_a_list_that_came_in_part_is_not_worked_through(tmp_path: Path, half: str) -> None:
    """
    A6: a command line that ends with 0 half-way, or has sent nothing, or twice as much.
    """
    hook = f'[ "$1" != put ] || [ -e halved ] || {{ touch halved; {half}; exit 0; }}'
    world = hooked(tmp_path / "w", DONE, hook)
    assert world.supervise() == OK, world.said
    assert "is not what was sent; trying again" in world.said
    (there,) = world.root.glob("disks/*/etc/config.yaml")
    assert there.read_bytes() == (world.root / "job.yaml").read_bytes()
    assert world.words() == "create1 put1 start1 pause1"


def test_results_and_copies_that_came_in_part_are_fetched_again(tmp_path: Path) -> None:
    """
    A6: each of them once, and each ends with 0.
    """
    (tmp_path / "there").write_bytes(b"result\n" * 999)
    hook = '[ "$1" != get ] || [ -e "half-${3##*/result.*}" ] || { head -c 99 "$disk/$3" >"$4"; touch half-; exit 0; }'
    world = hooked(tmp_path / "w", DONE, hook.replace('"$disk/$3"', '"$(ls -d "$disk/$3")"'))
    world.configure(f"results: {{report: {tmp_path}/there}}\n")
    assert world.supervise() == OK, world.said
    assert (world.root / "report").read_bytes() == (tmp_path / "there").read_bytes()
    assert (world.root / "half-").exists()


def test_a_machine_that_cannot_be_extended_is_said_to_be_from_the_first_time_on(tmp_path: Path) -> None:
    """
    B9: right after it was prepared, and when it was resumed.
    """
    world = World(tmp_path / "w", f"[ $looks != 2 ] || off\n{DONE.replace('3', '4')}")
    world.configure("commands: {extend: 'echo no credit >&2; false'}\n")
    assert world.supervise() == OK, world.said
    assert world.said.count("cannot be extended: exited with status 1: no credit") == 2


# -- no fault of the machine


def test_a_machine_that_answers_again_is_not_paused_first(tmp_path: Path) -> None:
    """
    B1: two commands that failed in a row; it is knocked at before anything is done about it.
    """
    hook = """
    if [ "$1" = exec ] && [ -s "$disk/hiccups" ]; then sed -i 1d "$disk/hiccups"; echo "reset by peer" >&2; exit 1; fi
    """
    story = f"[ $looks != 2 ] || printf '1\\n2\\n' >hiccups\n{DONE.replace('3', '6')}"
    world = hooked(tmp_path / "w", story, hook, "copy_every: 1h\n")
    assert world.supervise() == OK, world.said
    assert world.words() == "create1 put1 start1 pause1"
    assert "it answers again; going on there" in world.said


def test_a_machine_that_can_be_knocked_at_and_not_looked_at_is_given_up_in_the_end(tmp_path: Path) -> None:
    """
    B1: it goes on there once; without a look that succeeds there is no second time.
    """
    hook = """
    if [ "$1" = exec ]; then
        cat >script
        [ ! -e "$disk/dumb" ] || ! grep -q LastWords script || exit 1
        exec <script
    fi
    """
    world = hooked(tmp_path / "w", first(f"! {{ {COPIED}; }} || : >dumb"), hook, FENCE)
    assert world.supervise() == OK, world.said
    first_machine = world.said.partition("-2: made")[0]
    # Once since it is dumb, and once more if it was slow before that, on a busy host.
    assert first_machine.count("it answers again; going on there") in (1, 2)
    assert world.machines() == [("1", "paused"), ("2", "paused")]


def test_too_many_requests_are_no_fault_of_the_machine(tmp_path: Path) -> None:
    """
    B1, B3: while it is prepared, looked at, resumed and stopped; one machine does it all.
    """
    hook = """
    case $1 in exec | put | resume)
        echo x >>busy
        if [ $(($(wc -l <busy) % 4)) = 0 ]; then echo "Error: 429 Too Many Requests" >&2; exit 1; fi ;;
    esac
    """
    story = f"[ $looks != 2 ] || off\n{DONE.replace('3', '5')}"
    world = hooked(tmp_path / "w", story, hook)
    assert world.supervise() == OK, world.said
    assert "create2" not in world.words() and "machine-left" not in world.said
    assert world.machines() == [("1", "paused")]


@pytest.mark.parametrize("said", ["echo 'a new release is available'", "printf 'no line end'"])
def test_what_a_command_line_says_after_a_command_is_not_the_machines_answer(tmp_path: Path, said: str) -> None:
    """
    B3: our own line is looked for, wherever it is; the state is a line of its own.
    """
    world = World(tmp_path / "w", DONE)
    do = world.root / "do"
    do.write_text(do.read_text().replace("status=$?\n", f'status=$?\n[ "$1" = create ] || {said}\n'))
    assert world.supervise() == OK, world.said
    assert world.words() == "create1 put1 start1 pause1"


def test_a_machine_that_ends_a_script_early_shows_what_it_said(tmp_path: Path) -> None:
    """
    B3: the status 0 of a command line says nothing of the script; what was printed is shown.
    """
    hook = """
    if [ "$1" = exec ]; then
        echo x >>execs
        [ "$(wc -l <execs)" != 2 ] || { cat >/dev/null; echo "maintenance until noon"; exit 0; }
    fi
    """
    world = hooked(tmp_path / "w", DONE, hook)
    assert world.supervise() == OK, world.said
    assert "the last line was 'maintenance until noon'; trying again" in world.said
