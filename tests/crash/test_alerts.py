"""Alerts and pings of a real worker in the foreground, where no unit tells."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.crash.test_servers import Script, drop, send, serving
from tests.support import Worker
from worker import ping
from worker.settle import from_outside

ALERT = """
alert: |
  n=$(ls -d alert.* 2>/dev/null | wc -l); env > alert.$n; test ! -e refuse
"""


def alerts(w: Worker) -> list[dict[str, str]]:
    """Return the environment of each time that the command was run, in order."""
    found = []
    for n in range(len(list(w.config.parent.glob("alert.*")))):
        text, _, lines = (w.config.parent / f"alert.{n}").read_text().partition("AGENT_LINES=")
        found.append(dict(line.split("=", 1) for line in f"{text}AGENT_LINES=-\n{lines}".splitlines() if "=" in line))
    return found


def test_a_failed_run_is_told_with_all_that_one_wants_to_know(worker: MakeWorker) -> None:
    """
    Which run, why, where and the last lines; nothing of the worker's own environment; exit 70 all the same.
    """
    w = worker(
        f"run: r\n{ALERT}\ntasks:\n  - {{id: ok, run: 'true'}}\n"
        "  - {id: a, run: 'seq 200; exit 3', retry: {attempts: 2, delay: 0s}}\n",
        environ={"SECRET": "x"},
    )
    assert w.run() == 70
    (told,) = alerts(w)
    assert {name: told[name] for name in told if name.startswith("AGENT_") and name != "AGENT_LINES"} == {
        "AGENT_RUN": "r",
        "AGENT_ALERT": "failed",
        "AGENT_CAUSE": "a: failed for good: exited with status 3 (attempt 2)",
        "AGENT_STEP": "a",
        "AGENT_UNIT": "",
        "AGENT_HOST": os.uname().nodename,
    }
    lines = (w.config.parent / "alert.0").read_text().partition("AGENT_LINES=")[2].splitlines()
    assert lines[:50] == [str(n) for n in range(151, 201)]
    assert "SECRET" not in told
    assert w.matching("run r: failed: a: failed for good: exited with status 3 .attempt 2.; told")


def test_each_change_for_the_worse_is_told_once(worker: MakeWorker) -> None:
    """
    Tried again and failed again is told again; a state folder that cannot be used, each time for another reason, too.
    """
    w = worker(f"{ALERT}\ntasks:\n  - {{id: a, run: exit 3, retry: {{attempts: 1}}}}\n")
    assert [w.run(), w.run()] == [70, 70]
    assert [told["AGENT_CAUSE"][-11:] for told in alerts(w)] == ["(attempt 1)", "(attempt 2)"]
    w.config.write_text(w.config.read_text().replace("id: a,", "id: a, cwd: nowhere,"))
    assert [w.run(), w.run()] == [78, 78]
    w.config.write_text(w.config.read_text().replace("nowhere", "elsewhere"))
    assert w.run() == 78
    kinds = [(told["AGENT_ALERT"], told["AGENT_STEP"]) for told in alerts(w)]
    assert kinds == [("failed", "a")] * 2 + [("gave-up", "")] * 2
    assert ["nowhere" in told["AGENT_CAUSE"] for told in alerts(w)[2:]] == [True, False]


def test_a_run_that_failed_is_told_of_although_no_word_of_it_could_be_left(worker: MakeWorker) -> None:
    """
    A disk may have no space for it; the exit status says what kind of an end it was.
    """
    w = worker(f"{ALERT}\ntasks:\n  - {{id: a, run: exit 3, retry: {{attempts: 1}}}}\n")
    (w.state / "last-words").mkdir(parents=True)
    assert w.run() == 70
    (told,) = alerts(w)
    assert (told["AGENT_ALERT"], told["AGENT_CAUSE"]) == ("failed", "a step failed for good")


def test_whoever_meets_a_second_worker_tells_nothing(worker: MakeWorker) -> None:
    """
    77: the run is in good hands, and they have the say.
    """
    w = worker(f"{ALERT}\ntasks:\n  - {{id: a, run: 'sleep 600'}}\n")
    w.start().until("a: started")
    other = Worker(w.config.parent, w.config.read_text())
    assert other.run() == 77
    assert alerts(w) == []
    assert not (w.state / "last-words").exists()


def test_an_alert_that_fails_is_a_warning_and_is_told_later(worker: MakeWorker) -> None:
    """
    Tried twice; the run's exit status is its own; the next end that is the same is told, since nobody knows yet.
    """
    w = worker(f"{ALERT}\ntasks:\n  - {{id: a, run: 'true', cwd: nowhere}}\n")
    (w.config.parent / "refuse").touch()
    assert w.run() == 78
    assert len(w.matching("alert: '/bin/sh' exited with status 1; again in 2s")) == 1
    assert len(w.matching("alert: '/bin/sh' exited with status 1; giving up")) == 1
    (w.config.parent / "refuse").unlink()
    assert w.run() == 78
    assert len(alerts(w)) == 3
    assert w.run() == 78
    assert len(alerts(w)) == 3


def test_a_step_that_is_unknown_is_told_until_somebody_has_settled_it(worker: MakeWorker) -> None:
    """
    Once, although each start finds it again; and no more of it afterwards.
    """
    w = worker(
        f"{ALERT}\non_unknown: continue\ntasks:\n  - {{id: a, run: 'kill -9 $$', redo: never}}\n"
        "  - {id: b, run: exit 3, retry: {attempts: 1}, needs: [a]}\n"
    )
    assert [w.run(), w.run()] == [70, 70]
    (told,) = alerts(w)
    assert (told["AGENT_ALERT"], told["AGENT_STEP"]) == ("failed", "a")
    assert told["AGENT_CAUSE"].startswith("a: unknown: ")
    from_outside(str(w.state), None, "a", b"settled", "ann")
    assert w.run() == 70
    assert [told["AGENT_STEP"] for told in alerts(w)] == ["a", "b"]


@pytest.mark.parametrize(
    ("command", "what"), [("[./missing.sh]", "cannot be started: No such file"), ("kill -9 $$", "killed by signal 9")]
)
def test_a_command_that_does_not_work_is_named(worker: MakeWorker, command: str, what: str) -> None:
    w = worker(f"alert: {command}\ntasks:\n  - {{id: a, run: exit 3, retry: {{attempts: 1}}}}\n")
    assert w.run() == 70
    assert len(w.matching(f"alert: .*{what}")) == 2


def test_under_a_unit_that_tells_the_worker_does_not(worker: MakeWorker) -> None:
    """
    It leaves its last words, and whom to tell, for nobody else to read.
    """
    w = worker(
        f"run: r\n{ALERT}ping: {{fail: 'http://127.0.0.1:9/secret'}}\n"
        "tasks:\n  - {id: a, run: exit 3, retry: {attempts: 1}}\n",
        environ={"AGENT_UNIT": "agent.service"},
    )
    assert w.run() == 70
    assert alerts(w) == []
    said = json.loads((w.state / "last-words").read_text())
    assert said[:5] == [70, "failed", "a: failed for good: exited with status 3 (attempt 1)", "a", ""]
    kept = json.loads((w.state / "alert.json").read_text())
    assert kept["folder"] == str(w.config.parent)
    assert kept["ping"]["fail"].endswith("/secret")
    for name in ("last-words", "alert.json"):
        assert (w.state / name).stat().st_mode & 0o777 == 0o600


def test_a_dead_man_service_hears_of_begin_and_end(worker: MakeWorker) -> None:
    """
    start and finish, once each, while steps run; nothing where there was nothing to do.
    """
    script = Script((200, b""))
    with serving(script) as url:
        w = worker(_pings(url))
        assert w.run() == 0
        assert _paths(script) == ["/start", "/finish"]
        assert w.run() == 0
    assert _paths(script) == ["/start", "/finish"]


def test_an_end_is_made_known_although_the_worker_died_just_before(worker: MakeWorker) -> None:
    """
    The next one has nothing to do but that.
    """
    script = Script((200, b""))
    with serving(script) as url:
        w = worker(_pings(url))
        assert w.run() == 0
        (w.state / "pinged").write_text("begun\n")  # as if it had
        assert w.run() == 0
    assert _paths(script) == ["/start", "/finish", "/finish"]


def test_a_ping_that_fails_is_a_warning_without_the_secret(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Only the host is named; the run does not suffer, nor wait.
    """
    script = Script((503, b""), drop)
    with serving(script) as url:
        w = worker(_pings(url))
        assert w.run() == 0
    host = url.removeprefix("http://").rstrip("/")
    assert len(w.matching(f"ping: (start|finish): {host}: ")) == 2
    assert not any("/start" in line or "/finish" in line for line in w.lines)
    assert (w.state / "pinged").exists(), "the end is not known yet"


def test_a_ping_that_the_list_has_got_meanwhile_makes_the_end_known(worker: MakeWorker) -> None:
    """
    A service that has been told of no begin waits for the end all the same.
    """
    script = Script((200, b""))
    with serving(script) as url:
        w = worker("tasks:\n  - {id: a, run: mv ../../next.yaml ../../list.yaml}\n")
        (w.config.parent / "next.yaml").write_text(f"ping: {{finish: '{url}finish'}}\n{w.config.read_text()}")
        assert w.run() == 0
    assert _paths(script) == ["/finish"]
    assert not (w.state / "pinged").exists()


def test_a_secret_in_a_ping_is_found_nowhere(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case J8: the server sees it, and nobody else: no line, no file of the state folder, no process by its command line
    or its environment, neither when all is well nor in what is said of a server that refuses.
    """
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "uuid").write_text("planted/51d0\n")
    processes: list[bytes] = []

    def refuse(handler: BaseHTTPRequestHandler) -> None:
        processes.extend(_in_proc("cmdline") + _in_proc("environ"))
        send(handler, 404)

    script = Script((200, b""), refuse)
    with serving(script) as url:
        (credentials / "url").write_text(f"{url}planted-51d1")
        w = worker(
            f"{ALERT}\nping: {{start: '{url}start/{{secret:uuid}}', fail: '{{secret:url}}/fail'}}\n"
            "copy: {command: env > copied}\n"
            "tasks:\n  - {id: a, run: exit 3, retry: {attempts: 1}}\n",
            environ={"CREDENTIALS_DIRECTORY": str(credentials)},
        )
        assert w.run() == 70
        shown = subprocess.run(
            [sys.executable, "-m", "worker", "status", "--json", "--state", str(w.state)],
            env=w.environ, capture_output=True, check=True,
        )  # fmt: skip
    assert _paths(script)[0] == "/start/planted%2F51d0"
    assert set(_paths(script)[1:]) == {"/planted-51d1/fail"}
    host = url.removeprefix("http://").rstrip("/")
    assert w.matching(f"ping: {host}: answered with 404")
    files = [path.read_bytes() for path in w.config.parent.rglob("*") if path.is_file() and path.parent != credentials]
    assert any(b"{secret:url}" in data for data in files), "whom to tell is not kept"
    assert any(b"worker.ping" in data or b"import ping" in data for data in processes), "no ping was looked at"
    for data in [*processes, *files, shown.stdout, "\n".join(w.lines).encode()]:
        assert b"planted" not in data


def test_a_secret_that_is_not_there_is_a_mistake_in_the_list(worker: MakeWorker) -> None:
    """
    Before any work, as for a step's; to a ping that cannot be sent it is a warning.
    """
    w = worker("ping: {start: 'http://host/{secret:uuid}'}\ntasks:\n  - {id: a, run: 'true'}\n")
    w.environ.pop("CREDENTIALS_DIRECTORY", None)
    assert w.run() == 78
    assert w.matching("list.yaml:1:7: ping: the unit has no credential 'uuid'; add LoadCredential=uuid:")
    assert ping.send("http://host/{secret:uuid}", {})[1].startswith(
        "host: the unit has no credential 'uuid'; add LoadCre"
    )
    assert ping.send("{secret:url}/fail", {})[1].startswith("{secret:url}: the unit has no credential 'url'")


def test_fail_comes_with_the_alert(worker: MakeWorker) -> None:
    """
    With or without a command.
    """
    script = Script((200, b""))
    with serving(script) as url:
        w = worker(_pings(url).replace("'true'", "exit 3, retry: {attempts: 1}"))
        assert w.run() == 70
    assert _paths(script) == ["/start", "/fail"]


def test_a_server_that_answers_a_byte_at_a_time_holds_no_end_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Each byte comes within the time limit of a socket; the whole never does.
    """
    monkeypatch.setattr(ping, "LONGEST", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = f"127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=_drip, args=(server,), daemon=True).start()
        assert ping.send(f"http://{host}/secret", {})[1].startswith(f"{host}: took longer than ")


def test_pings_go_by_the_proxy_that_the_worker_was_given(worker: MakeWorker) -> None:
    """
    Those that begin and finish as well as those that fail.
    """
    script = Script((200, b""))
    with serving(script) as proxy:
        w = worker(
            _pings("http://away.example/").replace("'true'", "exit 3, retry: {attempts: 1}"),
            environ={"http_proxy": proxy},
        )
        assert w.run() == 70
    assert _paths(script) == ["http://away.example/start", "http://away.example/fail"]


def test_commands_of_the_worker_find_what_the_list_gives_to_every_step(worker: MakeWorker) -> None:
    """
    A proxy and a token, for an alert, a copy and a ping; the unit's own proxy has no say then.
    """
    script = Script((200, b""))
    with serving(script) as proxy:
        w = worker(
            f"{ALERT}\ncopy: {{command: env > copied}}\nping: {{fail: 'http://away.example/fail'}}\n"
            f"defaults: {{env: {{http_proxy: '{proxy}'}}, env_file: more.env, retry: {{attempts: 1}}}}\n"
            "tasks:\n  - {id: a, run: exit 3}\n",
            environ={"HTTP_PROXY": "http://127.0.0.1:9/", "CREDENTIALS_DIRECTORY": "/nonexistent"},
        )
        (w.config.parent / "more.env").write_text("TOKEN=x\n")
        assert w.run() == 70
    assert _paths(script) == ["http://away.example/fail"]
    (told,) = alerts(w)
    copied = dict(line.split("=", 1) for line in (w.config.parent / "copied").read_text().splitlines())
    for found in (told, copied):
        assert (found["http_proxy"], found["TOKEN"]) == (proxy, "x")
        assert found["CREDENTIALS_DIRECTORY"] == "/nonexistent"
        assert "HTTP_PROXY" not in found


def rehearse(w: Worker, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker", *arguments]
    return subprocess.run(command, env=w.environ, capture_output=True, text=True, check=False)


def test_an_alert_can_be_tried_before_it_is_needed(worker: MakeWorker) -> None:
    """
    What the command printed, how it ended and what each server answered; that it is a test; nothing is noted, and
    what is told later is told as ever.
    """
    script = Script((200, b""), (404, b""))
    with serving(script) as url:
        w = worker(
            f"run: r\n{ALERT.replace('test ! -e', 'echo said by it; test ! -e')}\n"
            f"ping: {{start: '{url}start', fail: '{url}fail'}}\n"
            "tasks:\n  - {id: a, run: exit 3, retry: {attempts: 1}}\n"
        )
        host = url.removeprefix("http://").rstrip("/")
        done = rehearse(w, "alert", "--test", str(w.config))
        assert (done.returncode, done.stdout.splitlines()) == (
            1,
            [
                "said by it",
                "alert: '/bin/sh' exited with status 0",
                f"ping: start: {host}: answered with 200",
                f"ping: fail: {host}: answered with 404",
            ],
        )
        script.answers = [(200, b"")]
        assert rehearse(w, "alert", "--test", str(w.config)).returncode == 0
        (w.config.parent / "refuse").touch()
        done = rehearse(w, "alert", "--test", str(w.config))
        assert (done.returncode, "alert: '/bin/sh' exited with status 1" in done.stdout) == (1, True)
        assert not w.state.exists()
        told = alerts(w)[0]
        assert (told["AGENT_RUN"], told["AGENT_ALERT"], told["AGENT_CAUSE"][:14]) == ("r", "test", "this is a test")
        (w.config.parent / "refuse").unlink()
        assert w.run() == 70
    assert alerts(w)[-1]["AGENT_ALERT"] == "failed"


def test_who_has_nobody_to_tell_is_told_so(worker: MakeWorker) -> None:
    """
    The same for a sandbox file, whose alert is the supervisor's.
    """
    w = worker("tasks:\n  - {id: a, run: 'true'}\n")
    done = rehearse(w, "alert", "--test", str(w.config))
    assert (done.returncode, done.stdout) == (1, "there is nobody to tell: neither 'alert:' nor 'ping:' is given\n")
    sandbox = w.config.parent / "box.yaml"
    sandbox.write_text(f"config: {w.config}\nprovider: ssh\nvariables: {{HOSTS: h}}\nalert: echo $AGENT_ALERT $TOKEN\n")
    w.environ["TOKEN"] = "x"
    done = rehearse(w, "supervise", "--test-alert", str(sandbox))
    assert (done.returncode, done.stdout) == (0, "test x\nalert: '/bin/sh' exited with status 0\n")


def _in_proc(name: str) -> list[bytes]:
    """Return that file of every process but ours."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        with contextlib.suppress(OSError):
            if path.parent.name != str(os.getpid()):
                found.append(path.read_bytes())
    return found


def _drip(server: socket.socket) -> None:
    """Answer one client, and never come to an end."""
    client, _address = server.accept()
    with client, contextlib.suppress(OSError):
        client.send(b"HTTP/1.0 200 OK\r\nX: ")
        client.settimeout(0.1)
        while True:
            client.send(b"x")
            with contextlib.suppress(TimeoutError):
                if client.recv(4096) == b"":
                    return


def _pings(url: str) -> str:
    return (
        f"ping: {{start: '{url}start', finish: '{url}finish', fail: '{url}fail'}}\ntasks:\n  - {{id: a, run: 'true'}}\n"
    )


def _paths(script: Script) -> list[str]:
    return [seen[":path"] for seen in script.seen]
