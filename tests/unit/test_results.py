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
