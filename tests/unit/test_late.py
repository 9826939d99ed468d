"""Items from a file that an earlier step makes: read when that is done, and kept from then on."""

from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from worker import report

LATE = """run: late
defaults: {cwd: %s, retry: {attempts: 1}}
tasks:
  - {id: make, run: "%s"}
  - {id: each, needs: [make], foreach: {lines: %s/made.txt}, run: 'echo "$AGENT_ITEM"%s'}
  - {id: last, needs: [each], run: echo last}
"""


def late(folder: Path, make: str, more: str = "") -> str:
    return LATE % (folder, make, folder, more)


def test_items_come_from_the_step_that_makes_their_file(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N9: what needs the task waits for all of its steps, and the counts grow.
    """
    w = worker(late(tmp_path, "printf 'x\\\\ny\\\\n' > made.txt"))
    assert w.run() == 0
    assert w.done() == ["make", "each@x", "each@y", "last"]
    assert w.matching("each: 2 items; the run has 4 steps now")
    assert w.matching("run late: done, 4 of 4 steps done")


def test_a_file_from_before_is_not_what_the_step_makes(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N9: what is there at the start is last night's.
    """
    (tmp_path / "made.txt").write_text("old\n")
    w = worker(late(tmp_path, "echo new > made.txt"))
    assert w.run() == 0
    assert w.done() == ["make", "each@new", "last"]


def test_items_outlive_their_file(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N9: the plan has grown durably; neither kill -9 nor a change of the file takes a step out of it.
    """
    made = late(tmp_path, "printf '1\\\\n2\\\\n3\\\\n' > made.txt", " >&2; rm -f made.txt; test -e go || sleep 300")
    w = worker(made.replace("attempts: 1", "delay: 0s"))
    w.start().until("each@1: 1")
    w.kill()
    assert report.look(str(w.state), None)["steps"]["total"] == 5
    (tmp_path / "made.txt").write_text("other\n")
    (tmp_path / "go").touch()
    assert w.run() == 0
    assert w.done() == ["make", "each@1", "each@2", "each@3", "last"]


@pytest.mark.parametrize(
    "make, said", [("true", "cannot be read: No such file"), ("printf 'a\\\\na\\\\n' > made.txt", "is there twice")]
)
def test_a_file_that_was_not_made_well_fails_its_task(worker: MakeWorker, tmp_path: Path, make: str, said: str) -> None:
    """
    N9: and the run, with 70; mended, the next start reads it.
    """
    w = worker(late(tmp_path, make))
    assert w.run() == 70
    assert w.matching(f"each: failed for good: its items cannot be read: .*{said}")
    assert w.done() == ["make"]
    (tmp_path / "made.txt").write_text("a\n")
    assert w.run() == 0
    assert w.done() == ["make", "each@a", "last"]


def test_a_file_without_lines_holds_nothing_up(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N9, N8: there is nothing to do today.
    """
    w = worker(late(tmp_path, "touch made.txt"))
    assert w.run() == 0
    assert w.done() == ["make", "last"]
    assert w.run() == 0


def test_two_items_with_one_key_are_refused_when_they_are_known(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N9: as in a list that has them from the beginning.
    """
    w = worker(late(tmp_path, "printf 'a\\\\nb\\\\n' > made.txt").replace("needs: [make]", "key: one, needs: [make]"))
    assert w.run() == 70
    assert w.matching("both have the key 'one'")
    assert w.done() == ["make"]


def test_a_list_whose_file_is_not_made_yet_is_right(
    worker: MakeWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    N9: check and plan say what will come; without `needs` a file that is not there stays a mistake.
    """
    w = worker(late(tmp_path, "echo a > made.txt"))
    report.check(str(w.config), "agent", installed=False)
    report.show_plan(str(w.config))
    assert f"each@\t(one for each line of {tmp_path}/made.txt, once what it needs is done)" in capsys.readouterr().out
    w.config.write_text(w.config.read_text().replace("needs: [make], ", ""))
    assert w.run() == 78


def test_a_chain_of_made_files(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N9: steps of a task that came late make the file of the next one.
    """
    w = worker(
        late(tmp_path, "printf 'a\\\\nb\\\\n' > made.txt", " >> next.txt")
        + f"  - {{id: then, needs: [each], foreach: {{lines: {tmp_path}/next.txt}}, run: 'true'}}\n"
    )
    assert w.run() == 0
    assert sorted(w.done()) == ["each@a", "each@b", "last", "make", "then@a", "then@b"]


PARTS = """run: parts
defaults: {cwd: %s, retry: {attempts: 1}}
tasks:
  - {id: split, run: "%s"}
  - {id: each, needs: [split], foreach: {glob: "%s/parts/*"}, run: 'echo "${AGENT_ITEM##*/}"'}
  - {id: last, needs: [each], run: 'ls %s/parts | wc -l'}
"""


def parts(folder: Path, split: str) -> str:
    return PARTS % (folder, split, folder, folder)


def done(found: list[str]) -> list[str]:
    return [step.rpartition("-")[2] for step in found]


@pytest.mark.parametrize("there", [False, True])
def test_files_that_a_step_makes_are_matched_when_it_is_done(worker: MakeWorker, tmp_path: Path, there: bool) -> None:
    """
    N9, F8: whether their folder is there before or not, and what needs the task does not overtake it.
    """
    if there:
        (tmp_path / "parts").mkdir()
    w = worker(parts(tmp_path, "mkdir -p parts; touch parts/x parts/y"))
    assert w.run() == 0
    assert done(w.done()) == ["split", "x", "y", "last"]
    assert w.output("last") == b"2\n"


def test_what_needs_an_empty_file_waits_until_it_is_made(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N9: at the start the file is there and has no lines yet.
    """
    (tmp_path / "made.txt").touch()
    w = worker("concurrency: 2\n" + late(tmp_path, "sleep 0.1; echo a > made.txt"))
    assert w.run() == 0
    assert w.done() == ["make", "each@a", "last"]


def test_a_pattern_that_matches_nothing_then_is_an_empty_inbox(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N8, N9: what needs it goes on, no count says that something waits, and tomorrow's files are found.
    """
    w = worker(parts(tmp_path, "mkdir -p parts"))
    assert w.run() == 0
    assert w.done() == ["split", "last"]
    found = report.look(str(w.state), None)["steps"]
    assert (found["total"], found["done"], found["waiting"]) == (2, 2, 0)
    (tmp_path / "parts" / "z").touch()
    assert w.run() == 0
    assert done(w.done()) == ["split", "last", "z"]


def test_a_folder_that_was_not_made_fails_its_task(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N9: it is a mistake then as it is at the start of a list without `needs`.
    """
    w = worker(parts(tmp_path, "true"))
    assert w.run() == 70
    assert w.matching("each: failed for good: its items cannot be read: .*cannot be looked into")


def test_a_begun_step_of_matches_that_came_late_stays(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N6, N9: its file was made, matched, and moved away when the worker was killed.
    """
    made = parts(tmp_path, "mkdir parts; touch parts/x parts/y").replace("attempts: 1", "delay: 0s")
    w = worker(made.replace("'echo ", "'rm $AGENT_ITEM && echo gone >&2 && sleep 300; echo "))
    w.start().until("x: gone")
    w.kill()
    w.config.write_text(w.config.read_text().replace("sleep 300", "true"))
    assert w.run() == 0
    assert done(w.done()) == ["split", "x", "y", "last"]
    found = report.look(str(w.state), None)["steps"]
    assert found["done"] == found["total"]
