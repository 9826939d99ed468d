"""Confined steps in the foreground, where the list asks for it; in the unit each is (tests/system/test_confined.py)."""

import sys

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT
from worker import landlock

pytestmark = pytest.mark.skipif(landlock.version() == 0, reason="this kernel has no Landlock")
AGENTCTL = f"env PYTHONPATH={ROOT} {sys.executable} -m worker"

EXPLOITS = {
    "read the ledger": "cat $S/ledger.db",
    "write the ledger": "echo x >>$S/ledger.db",
    "replace the checkpoint": "echo x >$STATE_DIRECTORY/x; mv $STATE_DIRECTORY/x $S/checkpoint.json",
    "remove the lock": "rm $S/lock",
    "list the sockets": "ls $S/run",
    "plant a result": "echo x >$S/out/planted",
    "write another folder": "echo x >$S/steps/victim/x",
    "look through the worker": "ls /proc/$W/root/",
    "read the memory of the worker": "head -c 1 /proc/$W/mem",
    "read its descriptors": "readlink /proc/$W/fd/0",
    "look through another step": "ls /proc/$(cat $S/work/pid)/root/",
    "read the credentials of the unit": "cat $C/token",
}
SIGNALS = {"signal the worker": "kill -0 $W", "signal another step": "kill -0 $(cat $S/work/pid)"}


def test_s12_s13_a_confined_step_gets_at_nothing_that_is_not_its_own(
    worker: MakeWorker, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """
    S12, S13: each exploit is tried by a real step beside another one; its own credential is there.
    """
    credentials = tmp_path_factory.mktemp("credentials")
    (credentials / "token").write_text("mine\n")
    tried = EXPLOITS | (SIGNALS if landlock.version() >= landlock.WITH_SIGNALS else {})
    lines = "".join(
        f"      ({command}) >/dev/null 2>&1 && echo {name.replace(' ', '-')}\n" for name, command in tried.items()
    )
    w = worker("", environ={"CREDENTIALS_DIRECTORY": str(credentials)})
    w.config.write_text(
        "concurrency: 2\ndefaults: {confine: yes}\ntasks:\n"
        "  - id: victim\n"
        "    run: echo kept >$STATE_DIRECTORY/kept; echo $$ >pid; until [ -e over ]; do sleep 0.02; done\n"
        f"  - id: evil\n    secrets: [token]\n    run: |\n      S={w.state} C={credentials} W=$PPID\n"
        f"      until [ -s pid ]; do sleep 0.02; done\n{lines}"
        "      cat $CREDENTIALS_DIRECTORY/token; touch over\n"
    )
    assert w.run() == 0
    assert w.output("evil") == b"mine\n"


def test_a_confined_step_calls_agentctl(worker: MakeWorker) -> None:
    """
    Its messages, what it saves, its effects and the note about its last attempt.
    """
    w = worker(
        "defaults: {confine: yes, retry: {delay: 0s}}\ntasks:\n  - id: a\n    run: |\n"
        f'      a() {{ {AGENTCTL} "$@"; }}\n'
        '      if [ "$AGENT_ATTEMPT" = 1 ]; then echo kept | a save; a beat; a progress 1/2; a spend 1; exit 3; fi\n'
        "      a load; a once k -- echo once; a note status; echo out >/dev/stdout\n"
    )
    assert w.run() == 0
    assert w.output("a") == b"kept\nonce\n3\nout\n"


def test_what_cannot_be_confined_says_so_before_the_run(worker: MakeWorker) -> None:
    """
    A step that would work among the run's own files: 78 with what to do; with `confine: no` it runs.
    """
    w = worker("")
    entry = "tasks:\n  - {{id: a, cwd: {}, confine: {}, run: cat ledger.db}}\n"
    w.state.mkdir()
    w.config.write_text(entry.format(w.state, "yes"))
    assert w.run() == 78
    assert w.matching(
        r"list.yaml:2:\d+: cwd: '.*' holds the agent's own files, .*; use another folder, or 'confine: no'"
    )
    w.config.write_text(entry.format(w.state, "no"))
    assert w.run() == 0
    assert w.output("a").startswith(b"SQLite format 3")
