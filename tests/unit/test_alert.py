"""What is told of a unit that is down, and of what: decisions, without systemd."""

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PATIENCE, ROOT
from worker import alert, contact, environment, postmortem, told
from worker.alert import Alert, Words
from worker.contact import Contact, Ping
from worker.task import Given

FAILED = Words(70, Alert("failed", "a: failed for good", "a", "last\nlines"))


def down(status: int, **more: str) -> dict[str, str]:
    return {"ActiveState": "failed", "SubState": "failed", "ExecMainCode": "1", "ExecMainStatus": str(status),
            "Result": "exit-code", "NRestarts": "0", **more}  # fmt: skip


@pytest.mark.parametrize(
    ("active", "sub"),
    [
        ("active", "running"),
        ("activating", "auto-restart"),
        ("activating", "auto-restart-queued"),
        ("activating", "start"),
        ("failed", "failed-before-auto-restart"),
        ("deactivating", "stop-post"),
        ("inactive", "dead"),
    ],
)
def test_a_unit_that_is_well_or_about_to_be_started_is_not_down(active: str, sub: str) -> None:
    assert not postmortem.down(down(1) | {"ActiveState": active, "SubState": sub})
    assert postmortem.down(down(1))


def test_the_last_words_are_believed_if_they_are_of_that_end() -> None:
    """
    An older worker's are not; what systemd knows is told then.
    """
    assert postmortem.examine("agent", down(70), FAILED, "") == FAILED.alert
    for words in (FAILED, None):
        found = postmortem.examine("agent", down(78), words, "")
        assert found == Alert("gave-up", "the configuration is wrong; 'journalctl -u agent' says more")
    found = postmortem.examine("agent", down(9, ExecMainCode="2", Result="signal"), FAILED, "")
    assert found == Alert(
        "gave-up", "it is not started again; the last worker: signal, signal 9; 'journalctl -u agent' says more"
    )


@pytest.mark.parametrize(
    ("status", "kind"), [(69, "out-of-budget"), (70, "failed"), (73, "gave-up"), (78, "gave-up"), (1, "gave-up")]
)
def test_each_end_has_its_kind(status: int, kind: str) -> None:
    found = postmortem.examine("agent", down(status), None, "")
    assert found is not None and found.kind == kind


def test_a_unit_that_met_another_worker_has_nothing_to_tell() -> None:
    assert postmortem.examine("agent", down(77), None, "", held=True) is None
    found = postmortem.examine("agent", down(77), None, "")
    assert found is not None and "none has it now" in found.cause


def test_an_earlier_stop_does_not_keep_a_later_end_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A worker that hung when it was told to stop is no news; a unit that could not start after that is.
    """
    monkeypatch.setattr(told, "STOPPED", str(tmp_path))
    assert not told.was_stopped("agent", "a1")
    (tmp_path / "agent").write_text("a1\n")
    assert told.was_stopped("agent", "a1")
    assert not told.was_stopped("agent", "b2")
    assert not told.was_stopped("agent", "")
    assert not told.was_stopped("agent@x", "a1")


UP, UP_AGAIN, NOT_UP = ({"ActiveEnterTimestampMonotonic": value} for value in ("5", "7", "0"))
GAVE_UP = Alert("gave-up", "the configuration is wrong")
SPENT = Alert("out-of-budget", "the budget is spent", mark="12.5")


@pytest.mark.parametrize(
    ("before", "unit_before", "now", "unit_now", "news"),
    [
        (GAVE_UP, UP, GAVE_UP, UP, False),
        (GAVE_UP, UP, GAVE_UP, NOT_UP, False),  # after a reboot, at which no worker came up
        (GAVE_UP, UP, GAVE_UP, UP_AGAIN, True),  # it was well in between
        (GAVE_UP, NOT_UP, GAVE_UP, UP, True),
        (GAVE_UP, UP, GAVE_UP._replace(cause="another"), UP, True),
        (SPENT, UP, SPENT, UP_AGAIN, False),  # started again without more, it ended at once
        (SPENT, UP, SPENT._replace(mark="13.5"), UP, True),  # a step ran in between
        (SPENT, UP, GAVE_UP, UP, True),
    ],
)
def test_s17_what_is_news_is_told_by_what_no_step_can_write(
    before: Alert, unit_before: dict[str, str], now: Alert, unit_now: dict[str, str], news: bool, tmp_path: Path
) -> None:
    """
    S17: the same is told once, until a worker has been up again, or a step has run.
    """
    told.note(str(tmp_path), told.record(before, "r", unit_before, {}))
    known = told.last(str(tmp_path))
    assert told.is_news(told.record(now, "r", unit_now, known), known) == news


def test_what_an_earlier_version_has_told_is_not_told_again(tmp_path: Path) -> None:
    (tmp_path / "alerted").write_text('{"run": "r", "kind": "failed", "step": "a", "cause": "a: failed for good"}')
    known = told.last(str(tmp_path))
    same = Alert("failed", "a: failed for good", "a", mark="1.5")
    assert not told.is_news(told.record(same, "r", UP, known), known)
    assert told.is_news(told.record(same, "another", UP, known), known)


def test_s17_whom_to_tell_is_not_a_steps_word(tmp_path: Path) -> None:
    """
    S17: while the list cannot be read it is whom it last named, nobody included; what the state folder says counts
    only as long as nothing is known.
    """
    kept, root, path = tmp_path / "kept", tmp_path / "state", tmp_path / "list.yaml"
    kept.mkdir()
    root.mkdir()
    forged = Contact("r", "cat $CREDENTIALS_DIRECTORY/*", "/")
    contact.save(str(root), forged)
    path.write_text("tasks: [")
    assert told.whom(str(path), str(kept), str(root)) == forged
    for alert_line, command in (("", None), ("alert: page-me\n", "page-me")):
        path.write_text(f"run: r\n{alert_line}tasks: [{{id: a, run: 'true'}}]\n")
        assert told.whom(str(path), str(kept), str(root)) == Contact("r", command, str(tmp_path))
        path.write_text("tasks: [")
        assert told.whom(str(path), str(kept), str(root)) == Contact("r", command, str(tmp_path))


def test_what_systemd_has_given_up_is_the_same_however_often_it_had_tried() -> None:
    """
    The cause has no count in it, which would make it another one.
    """
    causes = {
        postmortem.examine("agent", down(1, NRestarts=restarts), None, "watchdog, SIGABRT")
        for restarts in ("3", "9", "10")
    }
    (found,) = causes
    assert found is not None
    assert found.cause.startswith("systemd has given up after many starts in a row; the last worker: watchdog, SIGABRT")


@pytest.mark.parametrize("load", ["bad-setting", "error", "masked"])
def test_a_unit_that_systemd_cannot_use_any_more_is_named_as_that(load: str) -> None:
    """
    B4: its last worker died, and a drop-in that is wrong keeps it from coming back.
    """
    found = postmortem.examine("agent", down(9, ExecMainCode="2", Result="signal", LoadState=load), None, "")
    assert found is not None
    assert f"({load}); 'systemd-analyze verify agent.service' says where; the last worker: signal" in found.cause


def test_the_last_lines_are_few_short_and_text() -> None:
    """
    Whatever the bytes: 50 lines, 8 KiB, no NUL, which no environment can hold.
    """
    assert alert.last_lines(b"".join(b"%d\n" % n for n in range(100))).split("\n") == [str(n) for n in range(50, 100)]
    assert alert.last_lines(b"a\0b\xff") == "ab\N{REPLACEMENT CHARACTER}"
    assert len(alert.last_lines(b"x" * 100_000)) == 8 * 1024
    assert alert.last_lines(b"y" * 10_000 + b"\nend\n") == "end"
    assert alert.last_lines(b"") == ""


def test_whom_to_tell_is_kept_as_it_was_written(tmp_path: Path) -> None:
    """
    For one user's eyes; nothing is kept of nobody; what cannot be read is nobody.
    """
    for kept in (
        Contact("r", "text 'with' quotes", "/etc/agent", Ping(fail="https://host/secret")),
        Contact("r", ("./list", "é\udcff"), "/etc/agent", given=Given({"TOKEN": "x"}, ("/etc/agent/more.env",))),
    ):
        contact.save(str(tmp_path), kept)
        assert contact.load(str(tmp_path)) == kept
        assert (tmp_path / "alert.json").stat().st_mode & 0o777 == 0o600
    contact.save(str(tmp_path), Contact("r"))
    assert contact.load(str(tmp_path)) is None
    for text in ("", "{}", "[]", '{"run": 1, "command": null, "folder": "/", "ping": {"x": 1}}'):
        (tmp_path / "alert.json").write_text(text)
        assert contact.load(str(tmp_path)) is None


def test_a_file_that_has_gone_is_no_reason_to_tell_nobody(tmp_path: Path) -> None:
    """
    An env_file of `defaults:` is a warning then; what stands in the list itself is there all the same.
    """
    warnings: list[str] = []
    given = Given({"TOKEN": "x"}, (str(tmp_path / "gone.env"),))
    assert environment.own_anyhow({"PATH": "/bin", "OTHER": "y"}, given, warnings.append) == {
        "PATH": "/bin",
        "TOKEN": "x",
    }
    (said,) = warnings
    assert "gone.env" in said and said.endswith("going on without 'env_file'")


REHEARSE = """
import struct, sys
from worker import rehearsal
from worker.contact import Contact
rehearsal._RUN, rehearsal._PATIENCE = sys.argv[1], struct.pack("ll", 0, 10_000)
rehearsal.hold_if_asked(lambda: Contact("r", ("seq", "1000000")), "agent", {"PATH": "/usr/bin:/bin"})
print("gone on")
"""


@pytest.mark.parametrize("waiting", [0, 2], ids=["who does not read", "whom others wait for"])
def test_somebody_who_tries_an_alert_and_is_suspended_keeps_none_that_is_due(tmp_path: Path, waiting: int) -> None:
    """
    Whether what is printed finds no reader, or there is no place left among those who wait to be heard.
    """
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"{tmp_path}/agent-alert-test")
        listener.listen(1)
        for _ in range(waiting):
            opened.enter_context(socket.socket(socket.AF_UNIX)).connect(f"{tmp_path}/agent-alert-test")
        command = [sys.executable, "-c", REHEARSE, str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout.endswith("gone on\n")
