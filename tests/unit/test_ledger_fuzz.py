"""A ledger of random bytes: every command says one clear line, or does what it can; none prints a traceback."""

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.unit import test_damage
from worker import cli
from worker.errors import OK, STATE_UNUSABLE, STEP_FAILED
from worker.folder import Places

# Half a minute.
pytestmark = pytest.mark.programs

places = test_damage.places
LIST = "run: demo\ntasks: [{id: s, foreach: {range: 00-29}, run: 'true'}]\n"
_WORDS = [b"outcome", b"step", b"attempts", b"effects", b"facts", b"value", b"number", b"done", b"name", b"change"]


def random_bytes(draw: random.Random, data: bytearray) -> None:
    for _ in range(draw.choice([1, 4, 16, 200])):
        data[draw.randrange(len(data))] = draw.randrange(256)


def random_block(draw: random.Random, data: bytearray) -> None:
    start = draw.randrange(len(data))
    data[start : start + draw.choice([16, 512, 4096])] = draw.randbytes(draw.choice([16, 512, 4096]))


def no_text(draw: random.Random, data: bytearray) -> None:
    """Let names and values be bytes that are no UTF-8."""
    for word in draw.sample([*_WORDS, b"s@", b"abc", b"boot"], 2):
        places = [n for n in range(len(data)) if data.startswith(word, n)]
        for place in draw.sample(places, min(len(places), 3)):
            data[place] = draw.choice([0x80, 0xFF, 0xC3, 0xED])


def other_words(draw: random.Random, data: bytearray) -> None:
    """Let tables and columns have other names, as a changed schema has."""
    word = draw.choice(_WORDS)
    data[:] = data.replace(word, word[:-1] + bytes([draw.choice(b"xyz")]), draw.choice([1, 3, -1]))


def cut(draw: random.Random, data: bytearray) -> None:
    del data[draw.randrange(len(data)) :]


def swapped_pages(draw: random.Random, data: bytearray) -> None:
    one, two = (draw.randrange(len(data) // 4096) * 4096 for _ in range(2))
    data[one : one + 4096], data[two : two + 4096] = data[two : two + 4096], data[one : one + 4096]


def header(draw: random.Random, data: bytearray) -> None:
    data[draw.randrange(16, 100)] = draw.randrange(256)


def nothing_but_the_head(draw: random.Random, data: bytearray) -> None:
    data[100:] = draw.randbytes(len(data) - 100)


KINDS = [random_bytes, random_block, no_text, other_words, cut, swapped_pages, header, nothing_but_the_head]


def damages(whole: bytes, kind: Callable[[random.Random, bytearray], None], how_many: int) -> Iterator[bytes]:
    for seed in range(how_many):
        data = bytearray(whole)
        kind(random.Random(f"{kind.__name__} {seed}"), data)
        yield bytes(data)


def commands(root: Path, other: Path, damaged: Path) -> list[list[str]]:
    state = ["--state", str(root)]
    return [
        ["list", *state],
        ["status", *state],
        ["status", "--json", *state],
        ["log", "s@03", *state],
        ["log", "--output", "s@03", *state],
        ["budget", *state],
        ["export", str(other / "run.json"), *state],
        ["export", str(other / "run.db"), *state],
        ["verify-copy", str(damaged)],
        ["restore", str(damaged), "--state", str(other / "state")],
        ["settle", "s@03", "--redo", *state],
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_ledger_of_random_bytes_costs_one_line(
    places: Places,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: Callable[[random.Random, bytearray], None],
) -> None:
    """
    S31: 200 of them, in each command that opens one; what is said has no control characters in it.
    """
    root, other, copy = Path(places.root), tmp_path / "other", tmp_path / "copy.db"
    whole = Path(places.ledger).read_bytes()
    kept = {path.name: path.read_bytes() for path in root.glob("checkpoint*")}
    for number, damaged in enumerate(damages(whole, kind, 25)):
        for command in commands(root, other, copy):
            shutil.rmtree(other, ignore_errors=True)
            other.mkdir()
            for path in root.glob("ledger.db*"):
                path.unlink()
            Path(places.ledger).write_bytes(damaged)
            copy.write_bytes(damaged)
            for name, content in kept.items():
                (root / name).write_bytes(content)
            with contextlib.suppress(SystemExit):
                try:
                    status = cli.main(command)
                except Exception as exc:
                    raise AssertionError(f"{command} on damage {number} of {kind.__name__}") from exc
                said = capsys.readouterr()
                case = f"{command[0]}, damage {number} of {kind.__name__}: {status}, {said.err!r}"
                assert status in (OK, 1, STEP_FAILED, STATE_UNUSABLE), case
                assert status == OK or said.err or said.out, f"nothing was said: {case}"
                assert all(c.isprintable() or c == "\n" for c in said.err), case
                if status == STATE_UNUSABLE:
                    assert (said.out + said.err).count("\n") == 1, case


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_worker_survives_a_ledger_of_random_bytes(
    worker: MakeWorker, kind: Callable[[random.Random, bytearray], None]
) -> None:
    """
    S31: it goes on from the checkpoint, or says in one line why it cannot; a traceback is a fault of ours.
    """
    w = worker(LIST)
    assert w.run() == OK
    ledger = w.state / "ledger.db"
    whole = ledger.read_bytes()
    for damaged in damages(whole, kind, 3):
        for path in w.state.glob("ledger.db*"):
            path.unlink()
        ledger.write_bytes(damaged)
        assert w.run() in (OK, STATE_UNUSABLE), w.lines[-5:]
        assert not w.matching("Traceback"), w.lines[-30:]
