"""What agentctl prints: a terminal gets no orders from a step, nor from who has taken the worker's place."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support import ROOT
from worker import control, terminal

ANSWERS = [
    b'{"worker": {"state": "nonsense"}}\n',
    b'{"steps": []}\n',
    b"[" * 100_000,
    b"\xff\n",
    b"",
    b"x" * (17 << 20),
]


def test_s15_what_is_printed_gives_a_terminal_no_orders(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.kept_safe():
        print("\x1b]0;title\a\x1b[2J, \x9b2J, \u202e, ü, \tone\ntwo\r")
    said = capsys.readouterr().out
    assert said == "\\u001b]0;title\\u0007\\u001b[2J, \\u009b2J, \\u202e, ü, \tone\ntwo\\u000d\n"
    assert json.loads(terminal.safe(json.dumps("\x9b\x1b", ensure_ascii=False))) == "\x9b\x1b"


def test_s15_bytes_are_kept_for_a_file_and_made_safe_for_a_terminal() -> None:
    """
    As `agentctl log` prints them.
    """
    program = (
        "import sys; from worker import terminal\n"
        "with terminal.kept_safe(): sys.stdout.buffer.write(b'\\x1b[2J\\xff\\n'); sys.stdout.buffer.flush()"
    )
    argv = [sys.executable, "-c", program]
    assert subprocess.run(argv, cwd=ROOT, capture_output=True, check=True).stdout == b"\x1b[2J\xff\n"
    ours, theirs = pty.openpty()
    subprocess.run(argv, cwd=ROOT, stdout=theirs, check=True)
    os.close(theirs)
    assert os.read(ours, 100) == b"\\u001b[2J\\xff\r\n"
    os.close(ours)


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_s15_an_answer_that_no_worker_gives_is_none(tmp_path: Path, answer: bytes) -> None:
    """
    Neither to a question nor to an order: no traceback, no memory without end.
    """
    path = str(tmp_path / "control")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            for _ in range(2):
                connection, _address = listener.accept()
                with connection, io.BytesIO(answer) as said:
                    connection.recv(1000)
                    with contextlib.suppress(OSError):  # it has had enough
                        connection.sendall(said.read())

        serving = threading.Thread(target=serve)
        serving.start()
        asked = control.ask(path)
        assert asked is None or not {"run", "budget"} & set(asked)
        assert control.request(path, {"ask": "grant"}) is None
        serving.join()


def test_s15_one_byte_at_a_time_does_not_hold_anybody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The time limit is of the whole answer.
    """
    path = str(tmp_path / "control")
    monkeypatch.setattr(control, "_PATIENCE", 0.2)
    gone = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def drip() -> None:
            connection, _address = listener.accept()
            with connection:
                while not gone.wait(0.01):
                    try:
                        connection.sendall(b"x")
                    except OSError:
                        return

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert control.ask(path) is None
        gone.set()
        dripping.join()
