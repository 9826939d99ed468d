"""step.once(): what it returns, what it raises, and when it calls what."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.keeper import Keeper


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    made = Keeper(tmp_path_factory.mktemp("keeper"))
    yield made
    made.close()


@pytest.fixture
def keeper(kept: Keeper, tmp_path: Path) -> Keeper:
    return kept.use(tmp_path)


def test_what_json_can_hold_is_what_every_call_returns(keeper: Keeper) -> None:
    """
    The first call, too, returns what JSON gives back, so that a program sees no difference later.
    """
    code = "value = {'a': (1, 2.5), 'ü': [None, True, '\\ud800']}\nprint(step.once('k', lambda: value, tell=print))"
    first, again = keeper.script(code), keeper.script(code)
    assert first.stdout.startswith(b"executed\n"), first.stderr
    assert again.stdout.startswith(b"skipped\n")
    assert first.stdout.partition(b"\n")[2] == again.stdout.partition(b"\n")[2]
    assert b"[1, 2.5]" in first.stdout
    assert keeper.script("assert step.once('none', lambda: happen()) is None").returncode == 0
    assert keeper.script("assert step.once('none', lambda: happen()) is None").returncode == 0
    assert keeper.happened() == 1


@pytest.mark.parametrize(
    ("result", "words"), [("object()", "not JSON"), ("'x' * 1048576", "1048578 bytes are too many")]
)
def test_a_value_that_cannot_be_kept_is_an_error_and_no_second_effect(keeper: Keeper, result: str, words: str) -> None:
    """
    It has happened, so it is committed; who needs the value learns that it is not there.
    """
    code = f"step.once('k', lambda: happen({result}))"
    first, again = keeper.script(code), keeper.script(code)
    assert (b"NoResult" in first.stderr) == (words == "not JSON")
    if words == "not JSON":
        assert b"nothing that JSON can hold: Object of type object" in first.stderr
        words = "JSON could not hold it"
    assert b"NoResult" in again.stderr
    assert words.encode() in again.stderr
    assert keeper.happened() == 1


def test_what_a_person_gave_as_the_result_is_returned(keeper: Keeper) -> None:
    """
    'agentctl settle' takes any text: JSON is read as such, anything else is the text.
    """
    for key, text, value in (("a", b'{"n": 3}', {"n": 3}), ("b", b"pr-17", "pr-17"), ("c", b"", None)):
        keeper.script("import os\n" + f"step.once({key!r}, lambda: os.kill(os.getpid(), 9))")
        assert b"Unknown" in keeper.script(f"step.once({key!r}, lambda: 1)").stderr
        with keeper.effects() as store:
            store.settle(key, text)
        done = keeper.script(f"import json; print(json.dumps(step.once({key!r}, lambda: 1)))")
        assert json.loads(done.stdout) == value


def test_a_function_that_raises_has_not_happened_and_one_that_exits_may_have(keeper: Keeper) -> None:
    """
    An exception goes on and the next call tries again; after SystemExit nobody can tell.
    """
    raised = keeper.script("step.once('k', lambda: 1 / 0)")
    assert b"ZeroDivisionError" in raised.stderr
    left = keeper.script("step.once('k', lambda: step.again('full'))")
    assert (left.returncode, left.stderr) == (75, b"full\n")
    done = keeper.script("step.once('k', lambda: 1)")
    assert b"Unknown: 'k': step 'a' was cut off in it at" in done.stderr
    assert b"agentctl settle 'k' --done [RESULT], or --redo" in done.stderr


def test_a_check_in_python_finds_it_or_raises(keeper: Keeper) -> None:
    """
    What it raises goes on, and the next call asks again.
    """
    keeper.script("import os; step.once('k', lambda: os._exit(3))")
    raised = keeper.script("step.once('k', happen, check=lambda: 1 / 0)")
    assert b"ZeroDivisionError" in raised.stderr
    found = keeper.script("print(step.once('k', happen, check=lambda: 'pr-17', tell=print))")
    assert found.stdout == b"found\npr-17\n"
    assert keeper.happened() == 0


def test_other_parameters_are_another_effect(keeper: Keeper) -> None:
    """
    Whatever JSON can hold says what the effect is; the order of names does not matter.
    """
    keeper.script("step.once('p', lambda: 1, parameters={'to': 'ann', 'n': 1})")
    assert b"Conflict" in keeper.script("step.once('p', lambda: 1, parameters={'to': 'bob', 'n': 1})").stderr
    assert keeper.script("assert step.once('p', lambda: 2, parameters={'n': 1, 'to': 'ann'}) == 1").returncode == 0
    refused = keeper.script("step.once('q', happen, parameters=object())")
    assert b"TypeError" in refused.stderr
    assert b"ValueError: '' is no key" in keeper.script("step.once('', happen)").stderr
    assert keeper.happened() == 0


def test_redo_calls_it_again(keeper: Keeper) -> None:
    """
    Where that is harmless, nothing is left open.
    """
    keeper.script("import os; step.once('k', lambda: os._exit(3))")
    assert keeper.script("print(step.once('k', lambda: happen(5), redo=True, tell=print))").stdout == b"taken-over\n5\n"
    assert keeper.script("print(step.once('k', lambda: happen(6), redo=True, tell=print))").stdout == b"skipped\n5\n"
    assert keeper.happened() == 1
