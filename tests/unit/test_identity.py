"""Which run a list is: never another list's that happens to have the same name."""

from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import Worker

LIST = "tasks:\n  - {id: a, run: 'pwd; echo once >&2'}\n"
CONFIG, DONE = 78, 0


def pair(worker: MakeWorker, first: str, second: str) -> tuple[Worker, Worker]:
    """Return workers of two lists at two places with one state folder; the first has been worked through."""
    one, other = worker(first, folder="p"), worker(second, folder="q")
    other.state = one.state
    assert one.run() == DONE
    return one, other


@pytest.mark.parametrize("name", ["", "run: build\n"])
def test_a_list_does_not_take_the_state_of_another_one_with_its_name(worker: MakeWorker, name: str) -> None:
    """
    N5: it is refused, with the other's path and the ways out; nothing of the other's is changed.
    """
    one, other = pair(worker, name + LIST, name + LIST)
    assert other.run() == CONFIG
    (line,) = other.lines
    run = name[5:-1] or "list"
    assert line.startswith(f"{other.config}:1:1: the run '{run}' was begun by another list, {one.config}")
    assert "run:" in line and "--state" in line
    assert not other.matching("nothing to do")
    assert one.run() == DONE
    assert one.matching("nothing to do")


def test_a_list_with_a_name_of_its_own_is_another_run(worker: MakeWorker) -> None:
    """
    N5: the way out that the refusal names.
    """
    _one, other = pair(worker, LIST, "run: mine\n" + LIST)
    assert other.run() == DONE
    assert other.done() == ["a"] and other.matching("a: once")


def test_a_list_that_was_moved_goes_on_if_it_names_its_run(worker: MakeWorker) -> None:
    """
    N5: its former place is empty; that is said.
    """
    one, other = pair(worker, "run: build\n" + LIST, "run: build\n" + LIST)
    one.config.unlink()
    assert other.run() == DONE
    assert other.matching("nothing to do")
    assert other.matching(f"the list was {one.config} before")
    assert other.run() == DONE
    assert len(other.matching("the list was")) == 1


def test_a_list_that_was_moved_and_has_no_name_is_asked_for_it(worker: MakeWorker) -> None:
    """
    N5: in a new folder with the same file name nobody can tell a moved list from another one.
    """
    one, other = pair(worker, LIST, LIST)
    one.config.unlink()
    assert other.run() == CONFIG
    assert "to go on with that run, write 'run: list' into it" in other.lines[-1]
    other.config.write_text("run: list\n" + LIST)
    assert other.run() == DONE
    assert other.matching("nothing to do")


def test_a_list_is_the_same_by_whatever_path_it_is_called(worker: MakeWorker, tmp_path: Path) -> None:
    """
    N5: a link to its folder, say.
    """
    one = worker(LIST, folder="p")
    assert one.run() == DONE
    (tmp_path / "link").symlink_to(tmp_path / "p")
    one.config = tmp_path / "link" / "list.yaml"
    assert one.run() == DONE
    assert one.matching("nothing to do")


def test_lists_on_a_server_name_their_run(worker: MakeWorker) -> None:
    """
    N5: there the name alone is the identity, and every machine's list may be called config.yaml.
    """
    w = worker("ledger: postgresql://nobody@127.0.0.1:1/none\n" + LIST)
    assert w.run() == CONFIG
    assert "run: is wanted where the ledger is on a server" in w.lines[0]
