"""What others have written, in what the worker says of it: nothing moves a terminal's cursor."""

from tests.conftest import MakeWorker
from worker.errors import OK

EVIL = r"a\033[2J\033]0;title\007\302\2332J\342\200\256b\177"  # for printf: CSI, OSC, C1, a bidirectional override


def test_the_last_words_of_a_command_are_made_safe(worker: MakeWorker) -> None:
    """
    S32: of a copy and of steps, in every line of the worker's, wherever they come from.
    """
    w = worker(
        "copy: {every: 1s, command: 'printf \"" + EVIL + "\" >&2; exit 3'}\n"
        "on_failure: continue\n"
        "tasks:\n"
        "  - {id: a, run: 'printf \"" + EVIL + "\" >&2; exit 1', retry: {attempts: 1}}\n"
        "  - {id: b, python: 'jobs:none', cwd: ., retry: {attempts: 1}}\n"
    )
    (w.config.parent / "jobs.py").write_text("def none():\n    raise ValueError('a\\x1b[2J\\x9b2J\\u202eb')\n")
    assert w.run() != OK
    assert w.matching("3: a.*b"), "what the copy said is there"
    assert all(c.isprintable() for line in w.lines for c in line.rstrip("\r\n").replace("\t", " ")), [
        line for line in w.lines if not line.isprintable()
    ]
