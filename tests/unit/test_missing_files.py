"""A file that a command was given is not there: its whole path, and a command that helps, are in the one line."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT


@pytest.mark.parametrize(
    "command, path, helps",
    [
        ("restore gone.json", "gone.json", "agentctl export {here}/gone.json"),
        ("restore no/gone.json", "no/gone.json", "ls -l {here}"),
        ("verify-copy gone.json", "gone.json", "agentctl export {here}/gone.json"),
        ("verify-copy no/gone.json", "no/gone.json", "ls -l {here}"),
        ("verify-copy empty", "empty", "agentctl export {here}/empty/checkpoint.json"),
        ("export no/run.json", "no", "mkdir -p {here}/no"),
        ("export no/run.db", "no", "mkdir -p {here}/no"),
    ],
)
def test_a_missing_file_is_named_with_its_whole_path_and_what_helps(
    worker: MakeWorker, tmp_path: Path, command: str, path: str, helps: str
) -> None:
    """
    Also for a path that was given relative to the folder in which the command runs.
    """
    w = worker("tasks: [{id: a, run: 'true'}]")
    assert w.run() == 0
    here = tmp_path / "it is here"
    (here / "empty").mkdir(parents=True)
    argv = [sys.executable, "-m", "worker", *command.split(), "--state", str(w.state)]
    done = subprocess.run(argv, env={**w.environ, "PYTHONPATH": str(ROOT)}, cwd=here, capture_output=True, text=True)
    assert done.returncode != 0
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith(f"{here / path}: ")
    assert " ".join(shlex.quote(word.format(here=here)) for word in helps.split(" ")) in line
