"""What a step costs, counted in system calls of the worker: times differ from machine to machine, these do not."""

import itertools
import re
import statistics
from pathlib import Path

from tests import tracing
from tests.conftest import MakeWorker

# 77 when this was written, 91 before that; a few depend on which of two events comes first.
_MOST = 84


def test_a_durable_step_costs_few_system_calls(worker: MakeWorker, tmp_path: Path) -> None:
    """
    One that prints nothing, in the foreground: the lines about it, its process, one flush.  The median, since a
    checkpoint is written now and then.
    """
    tracing.require()
    w = worker("tasks:\n  - {id: a, foreach: {range: 1-60}, run: 'true'}\n")
    assert w.start("strace", "-o", str(tmp_path / "trace")).wait() == 0
    calls = (tmp_path / "trace").read_text(errors="replace").splitlines()
    calls = [call for call in calls if re.match(r"\w+\(", call)]
    begun = [number for number, call in enumerate(calls) if re.search(r'^write\(\d+, "a@\d+: started\\n"', call)]
    assert len(begun) == 60
    assert statistics.median(after - before for before, after in itertools.pairwise(begun)) <= _MOST
