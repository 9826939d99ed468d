"""Results: what a later step reads is what the earlier one wrote."""

import pytest

from tests.conftest import MakeWorker

LIST = """
run: demo
tasks:
  - {id: a, run: '%s'}
  - {id: b, run: 'cat ../go >/dev/null && wc -c < "$AGENT_OUT/a"', needs: [a], retry: {attempts: 1}}
"""


@pytest.mark.parametrize(("command", "size"), [("echo small", 6), ("head -c 100000 /dev/zero", 100000)])
def test_a_result_that_was_changed_is_noticed_where_it_is_needed(worker: MakeWorker, command: str, size: int) -> None:
    """
    Finding C12: on the same boot, too; a small one is written again, a large one is named.
    """
    w = worker(LIST % command)
    assert w.run() == 70
    assert len(w.rows()[0].digest) == 64
    path = w.state / "out" / "a"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.unlink()
    path.write_bytes(data)
    (w.state / "go").touch()
    assert w.run() == 0
    assert w.output("b").strip() == str(size).encode()
    if size < 1000:
        assert w.output("a") == b"small\n"
        assert w.matching("out/a: was not what a had written; written again from the ledger")
    else:
        assert w.matching("out/a: the result is not what it was; the step stays done")


LARGE = """
run: demo
on_failure: continue
tasks:
  - {id: a, run: 'head -c %d /dev/zero'}
  - {id: b, run: 'cat ../go >/dev/null && wc -c < "$AGENT_OUT/a"', needs: [a], retry: {attempts: 1, patience: %s}}
  - {id: c, run: 'echo free'}
"""


@pytest.mark.parametrize("size", [100_000, 17 << 20], ids=["with a digest", "too large for one"])
def test_c2_a_step_waits_for_a_result_that_is_missing(worker: MakeWorker, size: int) -> None:
    """
    Finding C2: the result is named, what needs it begins when it is back, with its first attempt, and others go on.
    """
    w = worker(LARGE % (size, "1h"))
    assert w.run() == 70
    path = w.state / "out" / "a"
    path.rename(w.state / "kept")
    (w.state / "go").touch()
    w.start().until("b: .*the result .*out/a is not here; put it there; trying again")
    (w.state / "kept").rename(path)
    assert w.wait() == 0
    assert w.output("b").strip() == str(size).encode()


def test_c2_a_result_that_never_comes_back_fails_what_needs_it(worker: MakeWorker) -> None:
    """
    Within the step's patience, by name; it has not begun, so nothing is in doubt.
    """
    w = worker(LARGE % (100_000, "1s"))
    assert w.run() == 70
    (w.state / "out" / "a").unlink()
    assert w.run() == 70
    assert w.matching("b: .*the result .*out/a is not here; put it there, for .*, longer than its patience")
    assert w.rows()[-1].outcome == "failed"
