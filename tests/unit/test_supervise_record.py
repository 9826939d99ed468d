"""The record of a supervision, and the copy of its run's checkpoint."""

import json
import os
from pathlib import Path

import pytest

from worker import checkpoint
from worker.errors import StateError
from worker.ledger import Holdings
from worker.ledger.sqlite import SqliteLedger
from worker.supervise import copy, record, sound
from worker.supervise.record import Moment

NOW = Moment(1000.0, 10.0, "boot")


def test_what_is_saved_is_found_again(tmp_path: Path) -> None:
    """
    A restarted supervisor knows each machine, and what had been noted about it.
    """
    known = record.new("nightly", "job", "/nightly.yaml", NOW).add(NOW)
    machine = known.machine
    assert machine is not None
    later = Moment(2000.0, 1010.0, "boot")
    known = known.put(machine._replace(state=record.LEAVING, fence=later, why="it is gone", unanswered=2))
    known = known._replace(spend=1.5, steps={"done": 3, "total": 9})
    record.save(str(tmp_path), known)
    assert record.load(str(tmp_path)) == known
    assert record.load(str(tmp_path / "elsewhere")) is None


def test_machines_have_names_that_no_other_supervision_uses(tmp_path: Path) -> None:
    """
    Two supervisions of the same name, on the same account, do not take each other's machines.
    """
    first, second = (record.new("nightly", "job", "/nightly.yaml", NOW).add(NOW).machine for _ in range(2))
    assert first is not None and second is not None and first.name != second.name
    assert first.name.startswith("nightly-") and first.name.endswith("-1")


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[]", '{"format": 1, "machines": 3}'])
def test_a_record_that_cannot_be_read_is_never_replaced_by_an_empty_one(tmp_path: Path, content: str) -> None:
    """
    It names machines that cost money: exit 73, and the file stays as it is.
    """
    Path(record.path(str(tmp_path))).write_text(content)
    with pytest.raises(StateError, match=r"machines\.json: cannot be read"):
        record.load(str(tmp_path))
    assert Path(record.path(str(tmp_path))).read_text() == content


def written(steps: int, run: str = "job") -> bytes:
    """Return a checkpoint with so many attempts begun."""
    head = {"format": 2, "run": run, "revision": steps, "facts": {}}
    attempt = {"seq": 1, "step": "a", "number": 1, "definition": "d", "started": 1.0, "boot": "b", "outcome": "done"}
    rows = ",".join(f"\n{json.dumps(attempt | {'seq': n, 'step': f'a{n}', 'spend': 0.5})}" for n in range(1, steps + 1))
    return (json.dumps(head)[:-1] + ',\n"effects": [\n{}],\n"attempts": [' + rows + ",\n{}\n]}\n").encode()


def take(root: Path, data: bytes | None) -> str:
    def fetch(into: str) -> str:
        if data is None:
            return "no such file"
        Path(into).write_bytes(data)
        return ""

    return copy.take(str(root), "job", fetch, sound.read)


def test_a_copy_is_never_replaced_by_an_older_or_a_broken_one(tmp_path: Path) -> None:
    """
    Case F12: cut short, of another run, older, or not there at all, the copy before stays, byte for byte.
    """
    good = written(5)
    assert take(tmp_path, good) == ""
    kept = Path(copy.path(str(tmp_path)))
    assert "older (revision 4) than the copy (5)" in take(tmp_path, written(4))
    assert "of the run 'other'" in take(tmp_path, written(9, "other"))
    assert take(tmp_path, None) == "no such file"
    better = written(6)
    for size in range(len(better)):
        assert "no checkpoint" in take(tmp_path, better[:size]), size
    assert kept.read_bytes() == good
    assert os.listdir(tmp_path).count("checkpoint.json.incoming") == 0
    assert take(tmp_path, better) == ""
    assert kept.read_bytes() == better


def test_a_copy_says_what_was_done_and_spent(tmp_path: Path) -> None:
    """
    What a lost machine had spent after its last copy is not forgotten: it is told from what the copy has.
    """
    assert take(tmp_path, written(4)) == ""
    found = copy.load(str(tmp_path), "job", sound.read)
    assert found is not None and (found.done, found.spend) == (4, 2.0)


def test_a_copy_that_cannot_be_read_is_reported_and_not_gone_on_without(tmp_path: Path) -> None:
    """
    To go on without it would be to begin anew, in silence.
    """
    path = Path(copy.path(str(tmp_path)))
    path.write_bytes(written(4)[:-9])
    with pytest.raises(StateError, match="begin anew: rm"):
        copy.load(str(tmp_path), "job", sound.read)
    path.write_bytes(written(4, "other"))
    with pytest.raises(StateError, match="of the run 'other', not of 'job'"):
        copy.load(str(tmp_path), "job", sound.read)


def test_a_real_checkpoint_is_taken(tmp_path: Path) -> None:
    """
    What the worker writes is what is read here.
    """
    ledger = SqliteLedger.create(str(tmp_path / "ledger.db"), Holdings(facts={"run": "job"}))
    checkpoint.write(str(tmp_path / "real.json"), "job", ledger)
    ledger.close()
    assert take(tmp_path, (tmp_path / "real.json").read_bytes()) == ""
