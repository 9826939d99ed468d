"""checkpoint.json: portable, whole, and never older than what it replaces."""

import json
from pathlib import Path

import pytest

from tests.plans import ENDED, sealed
from tests.unit.test_fromcopy import agentctl
from worker import checkpoint
from worker.checkpoint import CheckpointError
from worker.ledger import DONE, FAILED, Claim, Holdings, Row, Saved
from worker.ledger.sqlite import SqliteLedger


def ledger_with(tmp_path: Path, steps: int) -> SqliteLedger:
    store = SqliteLedger.create(str(tmp_path / "ledger.db"))
    names = [f"step-{n}" for n in range(steps)]
    store.record([], [Claim(name, 1, "abc", 1000.0, "boot") for name in names])
    store.record(
        [ENDED._replace(step=name, output=name.encode(), output_size=len(name)) for name in names],
        [],
    )
    return store


@pytest.mark.parametrize("steps", [0, 1, 999, 1000, 1001, 2500])
def test_what_was_written_comes_back(tmp_path: Path, steps: int) -> None:
    """
    Every attempt and every small result, and plain JSON for everybody else.
    """
    store = ledger_with(tmp_path, steps)
    path = str(tmp_path / "checkpoint.json")
    checkpoint.write(path, "demo", store)

    head, attempts, *_others = checkpoint.load(path)

    assert head == checkpoint.header(path)
    assert (head.run, head.revision) == ("demo", 2 * steps)
    assert [row for row, _ in attempts] == list(store.rows())
    assert [output for _, output in attempts] == [f"step-{n}".encode() for n in range(steps)]
    assert json.loads(Path(path).read_bytes())["run"] == "demo"
    store.close()


def test_what_steps_have_saved_and_learnt_travels_along(tmp_path: Path) -> None:
    """
    Finding F3: saved files and items are in it, what was too large for the ledger by name.
    """
    store = ledger_with(tmp_path, 2)
    path = str(tmp_path / "checkpoint.json")
    files = [
        Saved("a", "bytes", b"\xff\0", 2, 1.5),
        Saved("a", "large", None, 2**40, 2),
        Saved("a", "text", b"ok", 2, 3),
    ]
    store.save_files("a", files)
    store.add_items("t", ["b ✓", "a"])
    checkpoint.write(path, "demo", store)

    found = checkpoint.load(path)
    other = SqliteLedger.create(
        str(tmp_path / "other.db"), Holdings(found.attempts, {}, found.effects, 99, found.saved, found.items)
    )

    assert list(other.saved()) == files
    assert other.items() == {"t": ["b ✓", "a"]}
    assert other.revision() >= 99
    store.close()
    other.close()


def test_a_byte_that_changed_is_noticed(tmp_path: Path) -> None:
    """
    Finding B6: also where what is left is a checkpoint still, as with a digit of a number.
    """
    store = ledger_with(tmp_path, 2)
    path = tmp_path / "checkpoint.json"
    checkpoint.write(str(path), "demo", store)
    store.close()
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        with pytest.raises(CheckpointError):
            checkpoint.parse(bytes(damaged))


NASTY = '"}, {"seq": 1, "step": "x"}, {"seq": \\" \n \x7f é \u2028 \U0001f600 {'


@pytest.mark.parametrize("room", [8 * 1024 * 1024, 9000, 4096, 4095, 5, 0])
def test_each_attempt_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """
    Byte for byte what the encoder makes of each attempt alone, whatever stands in it; the results that there is room
    for travel along, the earlier ones first.
    """
    monkeypatch.setattr(checkpoint, "_OUTPUTS_MAX", room)
    outputs = [b"", b"small", b"x" * 4096, b"\xff\0", None, NASTY.encode(), b"x" * 4097, b"y" * 4000]
    rows = [
        (Row(n, f"s@{n}", 1, NASTY, n / 7, "boot", outcome, n % 2 == 0, outcome == FAILED, cause, status, n / 3,
             1e300 * (n % 3), 0.0, 0.0, 1e-9, NASTY if n % 5 else "", size, 0, n % 4 == 0, cause), output)
        for n in range(1, 2003)
        for outcome, cause, status in [((DONE, "", 0), (FAILED, NASTY, None), (DONE, NASTY, 0))[n % 3]]
        for output in [outputs[n % len(outputs)]]
        for size in [9 if output is None else len(output)]
    ]  # fmt: skip
    store = SqliteLedger.create(str(tmp_path / "ledger.db"), Holdings(rows, {"run": "demo"}))
    expected, left = [], room
    for row, (_, output) in zip(store.rows(), rows, strict=True):
        usual = checkpoint._DEFAULT_VALUES
        entry: dict[str, object] = {name: value for name, value in row._asdict().items() if value != usual[name]}
        if row.outcome == DONE and output and len(output) <= min(4096, left):
            entry |= checkpoint._packed(output)
            left -= len(output)
        expected.append(json.dumps(entry, ensure_ascii=False))

    found = b"".join(checkpoint.chunks("demo", store)).decode()

    lines = found.partition('"attempts": [\n')[2].rpartition("], ")[0]
    same = lines == ",\n".join([*expected, "{}"]) + "\n"
    assert same, "compared outside of the assertion, which would look for the difference for minutes"
    store.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b'{"format": 1, "run": 1, "revision": "x", "facts": {},\n"attempts": [\n{}\n]}\n',
        b'{"format": 4, "run": "a", "revision": 1, "facts": {},\n"attempts": [\n{}\n]}\n',
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    """
    With a reason, and never as an empty run.
    """
    path = tmp_path / "checkpoint.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        checkpoint.header(str(path))
    with pytest.raises(CheckpointError):
        checkpoint.load(str(path))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_number_that_is_none_is_not_taken_for_one(number: str) -> None:
    """
    No ledger could be made of it, or its budget would be spent for ever: such a copy is not sound.
    """
    row = f'{{"seq": 1, "step": "a", "number": 1, "definition": "", "started": 1, "boot": "", "spend": {number}}}'
    text = f'{{"format": 2, "run": "demo", "revision": 1, "facts": {{}},\n"attempts": [\n{row},\n{{}}\n]}}\n'
    assert len(checkpoint.parse(text.replace(number, "1").encode()).attempts) == 1
    with pytest.raises(CheckpointError, match=r"'spend' is (nan|inf)"):
        checkpoint.parse(text.encode())


BIG = 36893488147419103232


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("revision", '"revision": 4', f'"revision": {BIG}'),
        ("revision", '"revision": 4', '"revision": ' + "7" * 400),
        ("revision", '"revision": 4', f'"revision": {2**53}'),
        ("revision", '"revision": 4', '"revision": -1'),
        ("number", '"number": 1', f'"number": {2**31}'),
        ("size", '"output_size": 6', f'"output_size": {2**53}'),
        ("outcome", '"outcome": "done"', '"outcome": "dona"'),
        ("line", '{"seq": 2, ', '{"seq": 1, '),
        ("surrogate", '"definition": "abc"', '"definition": "\\ud800"'),
    ],
)
def test_verify_and_restore_agree(tmp_path: Path, name: str, old: str, new: str) -> None:
    """
    Findings B6 and S26: what no ledger can hold is said by both, in one line, and leaves nothing.
    """
    store = ledger_with(tmp_path, 2)
    path = tmp_path / "checkpoint.json"
    checkpoint.write(str(path), "demo", store)
    store.close()
    assert agentctl("verify-copy", path, "--state", tmp_path / "none").returncode == 0
    text = path.read_text()
    assert old in text
    path.write_text(sealed(text.replace(old, new, 1)))
    for command in ("verify-copy", "restore"):
        done = agentctl(command, path, "--state", tmp_path / "new")
        assert (done.returncode, "Traceback" in done.stderr + done.stdout) == (73, False), done.stderr
    assert not (tmp_path / "new" / "ledger.db").exists()
    # Nor does a worker that has nothing else end with more than one line.
    (tmp_path / "state").mkdir()
    path.rename(tmp_path / "state" / "checkpoint.json")
    (tmp_path / "list.yaml").write_text("run: demo\ntasks:\n  - {id: step-0, run: 'true'}\n")
    done = agentctl("run", tmp_path / "list.yaml", "--state", tmp_path / "state")
    assert (done.returncode, "Traceback" in done.stderr) == (73, False), done.stderr
