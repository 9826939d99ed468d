"""Steps as real processes under a real worker in the foreground: their ends, their output, their limits."""

import json
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT, alive
from worker import control, report


def test_a_list_runs_to_its_end_and_then_there_is_nothing_to_do(worker: MakeWorker) -> None:
    """
    Outputs are kept byte for byte, later steps read them, and the second start starts nothing.
    """
    w = worker("""
run: demo
tasks:
  - {id: first, run: printf 'a\\0b'; echo note >&2}
  - {id: copy, foreach: [x/y, "a b"], run: 'cat "$AGENT_OUT/first"; printf %s "$AGENT_ITEM"'}
  - {id: arguments, run: [printf, "%s|", "$HOME", "*"]}
""")
    assert w.run() == 0
    assert w.done() == ["first", "copy@x-y", "copy@a\\x20b", "arguments"]
    assert w.output("first") == b"a\0b"
    assert w.output("copy@x-y") == b"a\0bx/y"
    assert w.output("arguments") == b"$HOME|*|"
    assert w.run() == 0
    assert len(w.matching(": started")) == 4
    assert w.lines[-1] == "run demo: nothing to do, all 4 steps are done"


def test_the_environment_of_a_step_is_small_and_stated(worker: MakeWorker) -> None:
    """
    Case W7: what the worker was given by systemd, or by a person's shell, stays with the worker.
    """
    given = {
        "LISTEN_FDS": "1", "LISTEN_PID": "1", "INVOCATION_ID": "x", "JOURNAL_STREAM": "1:2",
        "WATCHDOG_PID": "1", "CREDENTIALS_DIRECTORY": "/x", "SECRET": "s", "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    w = worker(
        "tasks:\n  - {id: a, run: env, watchdog: 3s, env: {COUNTRY: no, MODE: 0644}, env_file: extra.env}",
        environ=given,
    )
    (w.config.parent / "extra.env").write_text("FROM_FILE='x y'\nCOUNTRY=yes\n")
    assert w.run() == 0
    env = dict(line.split("=", 1) for line in w.output("a").decode().splitlines())
    for name in (
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "TZ",
        "TMPDIR",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    ):
        env.pop(name, None)
    notify = env.pop("NOTIFY_SOCKET")
    assert notify.startswith(str(w.state))
    assert env == {
        "AGENT_RUN": "list", "AGENT_STEP": "a", "AGENT_ATTEMPT": "1", "AGENT_KEY": "list:a", "AGENT_ACK": "1",
        "AGENT_OUT": f"{w.state}/out", "STATE_DIRECTORY": f"{w.state}/steps/a", "WATCHDOG_USEC": "3000000",
        "COUNTRY": "no", "MODE": "0644", "FROM_FILE": "x y", "LC_ALL": "C.UTF-8",
    }  # fmt: skip


def test_a_failed_step_is_tried_again_and_then_fails_for_good(worker: MakeWorker) -> None:
    """
    Counted attempts; the run stops with 70; starting it again gives new attempts with new numbers.
    """
    w = worker("""
tasks:
  - {id: a, run: "echo try $AGENT_ATTEMPT >&2; test -e ok", retry: {attempts: 2, delay: 10ms}, cwd: .}
  - {id: b, run: "true"}
""")
    assert w.run() == 70
    assert [(row.number, row.outcome, bool(row.final)) for row in w.rows()] == [
        (1, "failed", False),
        (2, "failed", True),
    ]
    (w.config.parent / "ok").touch()
    assert w.run() == 0
    assert [row.number for row in w.rows() if row.step == "a"] == [1, 2, 3]
    assert w.done() == ["a", "b"]


def test_with_continue_the_others_go_on(worker: MakeWorker) -> None:
    """
    on_failure: continue works through the rest, and still says 70.
    """
    w = worker("""
on_failure: continue
tasks:
  - {id: a, run: "exit 3", retry: {attempts: 1}}
  - {id: b, run: "true"}
""")
    assert w.run() == 70
    assert w.done() == ["b"]
    assert w.matching("a: failed for good: exited with status 3")


def test_a_program_that_is_missing_is_named(worker: MakeWorker) -> None:
    """
    One clear line, no traceback.
    """
    w = worker("tasks:\n  - {id: a, run: [no-such-program], retry: {attempts: 1}}")
    assert w.run() == 70
    assert w.matching("program 'no-such-program' not found in PATH")
    assert not w.matching("Traceback")


def test_what_a_step_leaves_behind_is_ended_and_named(worker: MakeWorker) -> None:
    """
    Case P1: the step is over when its first process is; its result is whole.
    """
    w = worker("""
tasks:
  - {id: a, run: 'sleep 612.5 & echo hi'}
  - {id: b, run: 'pgrep -f "sleep 612[.]5" || echo none'}
""")
    began = time.monotonic()
    assert w.run() == 0
    assert time.monotonic() - began < 60
    assert w.output("a") == b"hi\n"
    assert w.output("b") == b"none\n"
    assert w.matching(r"a: ended and left processes behind; ending them: (sleep|sh) \(\d+\)")


def test_a_timeout_ends_the_whole_tree(worker: MakeWorker) -> None:
    """
    Case P5: a double-forked child with its own session, deaf to SIGTERM, is gone after the step's timeout.
    """
    w = worker("""
tasks:
  - id: a
    timeout: 2s
    retry: {attempts: 1}
    run: |
      (setsid sh -c 'trap "" TERM; echo $$ > "$STATE_DIRECTORY/pid"; while :; do sleep 1; done' &)
      sleep 600
""")
    assert w.run() == 70
    assert w.matching("took longer than its timeout of 2s; ending it")
    pid = int((w.state / "steps" / "a" / "pid").read_text())
    assert not alive(pid)


def test_a_step_that_stops_beating_is_ended_and_tried_again(worker: MakeWorker) -> None:
    """
    watchdog: the beats count, output does not; the second attempt beats and is done.
    """
    w = worker(f"""
tasks:
  - id: a
    watchdog: 1s
    retry: {{delay: 10ms}}
    env: {{PYTHONPATH: "{ROOT}"}}
    run:
      - {sys.executable}
      - -c
      - |
        import os, socket, time
        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(os.environ["NOTIFY_SOCKET"])
        for n in range(20):
            print(n, flush=True)
            if os.environ["AGENT_ATTEMPT"] == "2": s.send(b"WATCHDOG=1\\nSTATUS=%d/20" % n)
            time.sleep(0.1)
""")
    assert w.run() == 0
    assert [(row.outcome, row.cause) for row in w.rows()] == [
        ("stalled", "sent no WATCHDOG=1 for 1s"),
        ("done", ""),
    ]


@pytest.mark.parametrize(("work", "stalls"), [("while :; do :; done", False), ("sleep 600", True)])
def test_cpu_time_is_a_sign_of_life_and_sleep_is_not(worker: MakeWorker, work: str, stalls: bool) -> None:
    """
    Case W16: a step that burns CPU is not stalled, one that does nothing is, exactly once.
    """
    w = worker(f"tasks:\n  - {{id: a, run: '{work}', stall_after: 1s, timeout: 4s, retry: {{attempts: 1}}}}")
    assert w.run() == 70
    assert len(w.matching("ending it")) == 1
    assert w.rows()[0].cause == ("gave no sign of life for 1s" if stalls else "took longer than its timeout of 4s")


def test_random_bytes_arrive_exactly(worker: MakeWorker) -> None:
    """
    Case P3: a megabyte of noise; the lines shown are text.
    """
    w = worker("tasks:\n  - {id: a, run: 'head -c 1000000 /dev/urandom | tee copy', cwd: .}")
    assert w.run() == 0
    assert w.output("a") == (w.config.parent / "copy").read_bytes()
    assert not [line for line in w.lines if "\x1b" in line or "\r" in line]


def test_a_huge_line_neither_blocks_nor_grows_the_worker(worker: MakeWorker) -> None:
    """
    Case P2: 200 MB without a newline.
    """
    w = worker("""
tasks:
  - {id: before, run: 'grep VmHWM /proc/$PPID/status'}
  - {id: a, run: 'head -c 200000000 /dev/zero | tr "\\0" x'}
  - {id: after, run: 'grep VmHWM /proc/$PPID/status'}
""")
    assert w.run() == 0
    assert (w.state / "out" / "a").stat().st_size == 200_000_000
    before, after = (int(w.output(step).split()[1]) for step in ("before", "after"))
    assert after - before < 20_000, f"the worker grew by {after - before} kB"
    (line,) = w.matching("^a: xxx")
    assert len(line) < 8500 and "bytes left out" in line


def test_a_million_lines_are_whole_and_the_reader_is_spared(worker: MakeWorker) -> None:
    """
    Case J2: none is lost in the output, and every start and end line is there.
    """
    w = worker("tasks:\n  - {id: a, run: seq 1000000}\n  - {id: b, run: 'true'}")
    assert w.run() == 0
    assert w.output("a") == b"".join(b"%d\n" % n for n in range(1, 1_000_001))
    assert len(w.lines) < 20_000
    assert len(w.matching("^[ab]: (started|done)")) == 4
    assert w.matching(r"a: \[\d+ lines left out here; all of them are in out/a\]")


def test_a_thousand_steps_with_orphans_leave_no_zombie(worker: MakeWorker) -> None:
    """
    Case P6.
    """
    w = worker("""
tasks:
  - {id: a, foreach: {range: 1-1000}, run: '(true &) ; true'}
  - {id: zombies, run: 'ps -o stat= --ppid $PPID | grep ^Z; true'}
""")
    assert w.run() == 0
    assert w.output("zombies") == b""


def test_sigterm_ends_the_step_and_costs_it_nothing(worker: MakeWorker) -> None:
    """
    Exit 75 with work left; the attempt does not count; the next start goes on with that step.
    """
    w = worker("tasks:\n  - {id: a, run: 'test $AGENT_ATTEMPT = 1 && exec sleep 600; true', retry: {attempts: 1}}")
    w.start().until("a: started")
    assert w.kill(signal.SIGTERM) == 75
    assert [(row.outcome, bool(row.counted)) for row in w.rows()] == [("interrupted", False)]
    assert w.run() == 0


def test_sigterm_waits_for_a_step_that_tidies_up(worker: MakeWorker) -> None:
    """
    The step gets SIGTERM and time; ending with 0 because it was told to does not make it done.
    """
    w = worker("""
tasks:
  - id: a
    run: |
      trap 'echo tidy > "$STATE_DIRECTORY/tidied"; exit 0' TERM
      echo ready >&2
      while :; do sleep 0.1; done
""")
    w.start().until("a: ready")
    assert w.kill(signal.SIGTERM) == 75
    assert (w.state / "steps" / "a" / "tidied").read_text() == "tidy\n"
    assert w.done() == []


def test_a_worker_that_takes_its_step_down_every_time_does_not_do_so_for_ever(worker: MakeWorker) -> None:
    """
    Case R2: the death of the worker counts; after its attempts the step has failed for good.
    """
    w = worker("tasks:\n  - {id: a, run: 'kill -9 $PPID; sleep 600', retry: {attempts: 3}}")
    assert [w.run() for _ in range(3)] == [-9, -9, -9]
    assert w.run() == 70
    assert [row.cause for row in w.rows()] == ["the worker died with it"] * 3
    assert w.matching("a: failed for good")


def test_the_step_of_a_dead_worker_is_ended_before_it_is_tried_again(worker: MakeWorker) -> None:
    """
    Case S11, without systemd: the old process, in a session of its own, is gone when the new one starts.
    """
    w = worker("""
tasks:
  - id: a
    run: |
      if [ -e "$STATE_DIRECTORY/pid" ]; then
        grep -q "^State:.[^ZX]" /proc/$(cat "$STATE_DIRECTORY/pid")/status && echo still there || echo gone
        exit 0
      fi
      echo $$ > "$STATE_DIRECTORY/pid"; echo ready >&2; exec sleep 600
""")
    w.start().until("a: ready")
    w.kill()
    pid = int((w.state / "steps" / "a" / "pid").read_text())
    assert alive(pid), "nothing was left behind: the test shows nothing"
    assert w.run() == 0
    assert w.output("a") == b"gone\n"


def test_status_answers_from_a_living_a_stopped_and_a_dead_worker(worker: MakeWorker, tmp_path: Path) -> None:
    """
    One call says whether it runs, whether it gets on, and whether it is done.
    """

    def status() -> dict[str, Any]:
        command = [sys.executable, "-m", "worker", "status", "--json", "--state", str(w.state)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        found = json.loads(shown.stdout)
        assert {"run", "status", "steps", "current", "updated"} <= set(found)
        assert set(found["steps"]) == {"total", "done", "failed", "skipped", "unknown", "elsewhere", "waiting"}
        return dict(found)

    w = worker(f"""
tasks:
  - {{id: a, run: "true"}}
  - id: b
    run:
      - {sys.executable}
      - -c
      - |
        import os, socket, time
        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.connect(os.environ["NOTIFY_SOCKET"])
        s.send(b"STATUS=half way"); os.write(2, b"said\\n"); time.sleep(600)
""")
    w.start().until("b: said")
    found = status()
    (current,) = found["current"]
    assert (found["status"], found["worker"]["state"], found["worker"]["pid"]) == ("running", "active", w.pid)
    assert (current["step"], current["attempt"], current["status"]) == ("b", 1, "half way")
    assert found["last_sign_age"] is not None

    w.process.send_signal(signal.SIGSTOP)
    assert status()["worker"]["state"] == "silent"
    w.process.send_signal(signal.SIGCONT)

    w.kill(signal.SIGTERM)
    found = status()
    assert (found["status"], found["worker"]["state"]) == ("stopped", "absent")
    assert found["steps"]["done"] == 1


def test_the_list_may_grow_while_it_is_worked_through(worker: MakeWorker) -> None:
    """
    A drop-in that comes before the end is taken in at the end; a broken one changes nothing.
    """
    w = worker("tasks:\n  - {id: a, run: 'echo ready >&2; while ! [ -e go ]; do sleep 0.05; done', cwd: .}")
    folder = w.config.parent / "list.d"
    folder.mkdir()
    w.start().until("a: ready")
    (folder / "10-more.yaml").write_text("tasks:\n  - {id: b, run: 'true'}\n")
    (w.config.parent / "go").touch()
    assert w.wait() == 0
    assert w.done() == ["a", "b"]
    (folder / "20-broken.yaml").write_text("tasks:\n  - {id: a, run: 'true'}\n  - {id: c}\n")
    assert w.run() == 78
    assert len(w.matching("20-broken.yaml:[23]:")) == 2
    assert w.done() == ["a", "b"]


def test_a_reload_that_fails_keeps_the_former_list(worker: MakeWorker) -> None:
    """
    Every error is named, and the run goes on.  (With a NOTIFY_SOCKET, as under systemd, SIGHUP reloads.)
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    w = worker("tasks:\n  - {id: a, run: 'echo ready >&2; while ! [ -e go ]; do sleep 0.05; done', cwd: .}")
    path = str(w.config.parent / "notify")
    listening.bind(path)
    w.environ["NOTIFY_SOCKET"] = path
    w.start().until("a: ready")
    good = w.config.read_text()
    w.config.write_text("tasks: 3\n")
    w.process.send_signal(signal.SIGHUP)
    w.until("the configuration is wrong; the former one stays")
    w.config.write_text(good + "\n  - {id: b, run: 'true'}\n")
    w.process.send_signal(signal.SIGHUP)
    w.until("read again: 2 steps")
    (w.config.parent / "go").touch()
    assert w.wait() == 0
    assert w.done() == ["a", "b"]
    listening.setblocking(False)
    said = [listening.recv(4096).split(b"\n")[0] for _ in range(6)]
    assert said[2:] == [b"READY=1", b"STATUS=0/1 done \xc2\xb7 a, attempt 1", b"RELOADING=1", b"READY=1"]


def test_a_second_worker_is_refused(worker: MakeWorker) -> None:
    """
    Case R3: exit 77 with the pid of the first, which goes on.
    """
    w = worker("tasks:\n  - {id: a, run: 'echo ready >&2; exec sleep 600'}")
    w.start().until("a: ready")
    second = subprocess.run(
        [sys.executable, "-m", "worker", "run", str(w.config), "--state", str(w.state)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert second.returncode == 77
    assert f"process {w.pid}" in second.stderr
    assert control.ask(f"{w.state}/run/control") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "list.yaml:1:1: "),
        ("tasks:\n\t- {id: a}\n", "list.yaml:2:1: .*tab"),
        (
            "tasks:\n  - {id: a, run: x, retires: 3}\n",
            "list.yaml:2:21: unknown key 'retires'; did you mean 'retry'",
        ),
        ("tasks:\n  - {id: a, run: x, cwd: /no/such}\n", "list.yaml:2:[0-9]+: cwd: '/no/such' is not there"),
    ],
)
def test_a_mistake_in_the_yaml_costs_one_line(worker: MakeWorker, text: str, message: str) -> None:
    """
    Case R4: exit 78, where and what and what to do, no traceback, no ledger.
    """
    w = worker(text)
    assert w.run() == 78
    assert w.matching(message), w.lines
    assert not w.matching("Traceback")
    assert not (w.state / "ledger.db").exists()


def test_a_ledger_that_is_locked_for_long_is_waited_for(worker: MakeWorker) -> None:
    """
    Somebody holds the database for 9 s while one step ends and the next is to begin: nothing is redone.
    """
    wait = "echo up >&2; while ! [ -e go ]; do sleep 0.05; done"
    w = worker(f"tasks:\n  - {{id: a, run: '{wait}', cwd: .}}\n  - {{id: b, run: 'true'}}\n")
    w.start().until("a: up")
    holder = sqlite3.connect(w.state / "ledger.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    (w.config.parent / "go").touch()
    w.until("another program has locked it.; waiting for the program that has locked it, nothing is lost")
    assert control.ask(f"{w.state}/run/control") is not None
    holder.execute("ROLLBACK")
    holder.close()
    assert w.wait() == 0
    assert [(row.step, row.outcome) for row in w.rows()] == [("a", "done"), ("b", "done")]


def test_a_running_step_may_be_taken_off_the_list(worker: MakeWorker, tmp_path: Path) -> None:
    """
    It goes on, keeps its place, is recorded when it ends, and nobody is mistaken for what it left behind.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(tmp_path / "notify"))
    wait = "echo up >&2; while ! [ -e go ]; do sleep 0.05; done"
    a, b = f"  - {{id: a, run: '{wait}', cwd: .}}\n", "  - {id: b, run: echo done, retry: {attempts: 1}}\n"
    w = worker(f"tasks:\n{a}{b}", environ={"NOTIFY_SOCKET": str(tmp_path / "notify")})
    w.start().until("a: up")
    w.config.write_text(f"tasks:\n{b}")
    w.process.send_signal(signal.SIGHUP)
    w.until("read again: 1 step")
    assert not w.matching("b: started")
    (w.config.parent / "go").touch()
    assert w.wait() == 0
    assert w.done() == ["a", "b"]
    assert w.lines.index("b: started") > w.lines.index(w.matching("a: done")[0])
    assert not w.matching("left processes behind")
    listening.close()


def test_the_checkpoint_alone_brings_small_results_back(worker: MakeWorker) -> None:
    """
    On a fresh machine the next step finds what the earlier ones printed.
    """
    tasks = """
tasks:
  - {id: files, run: echo one two}
  - {id: use, run: 'echo up >&2; test -e go || sleep 600; cat "$AGENT_OUT/files"', cwd: .}
"""
    w = worker(tasks)
    w.start().until("use: up")
    w.kill()
    fresh = worker(tasks, folder="fresh")
    fresh.state.mkdir()
    (fresh.state / "checkpoint.json").write_bytes((w.state / "checkpoint.json").read_bytes())
    (fresh.config.parent / "go").touch()
    assert fresh.run() == 0
    assert fresh.output("use") == b"one two\n"
    assert fresh.matching("1 result written again from the ledger")
    assert not fresh.matching("files: started")


def test_what_a_step_tears_down_is_there_for_the_next(worker: MakeWorker) -> None:
    """
    The notify socket, the results, the folder for work, the log's folder: the run goes on.
    """
    w = worker("""
tasks:
  - {id: first, run: echo first}
  - {id: socket, run: rm "$NOTIFY_SOCKET"}
  - {id: out, run: 'rm -rf "$AGENT_OUT" "$PWD"'}
  - {id: log, run: 'rm -rf "$AGENT_OUT/../log"; head -c 200000 /dev/zero >&2'}
  - id: beats
    watchdog: 5s
    run: 'cat "$AGENT_OUT/first"; test -S "$NOTIFY_SOCKET"'
""")
    assert w.run() == 0
    assert w.output("beats") == b"first\n"
    assert (w.state / "log" / "log.1").stat().st_size == 200_000


def test_an_output_that_cannot_be_kept_is_a_failure_and_no_wait(worker: MakeWorker) -> None:
    """
    Only a full disk is waited out; anything else is said, and the step's limits go on.
    """
    w = worker("""
tasks:
  - id: a
    retry: {attempts: 1}
    run: 'rm -rf "$AGENT_OUT/../log"; touch "$AGENT_OUT/../log"; head -c 300000 /dev/zero >&2'
""")
    assert w.run() == 70
    assert "could not be kept" in w.rows()[0].cause


def test_the_dead_are_not_shown_as_running(worker: MakeWorker) -> None:
    """
    After kill -9 nothing runs, and list and status say so.
    """
    w = worker("tasks:\n  - {id: a, run: 'echo up >&2; sleep 600'}\n  - {id: b, run: 'true'}\n")
    w.start().until("a: up")
    w.kill()
    listed = subprocess.run(
        [sys.executable, "-m", "worker", "list", "--state", str(w.state)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    ).stdout.splitlines()  # fmt: skip
    assert listed[0].startswith("cut off  a  attempt 1")
    assert listed[1] == "waiting  b"
    found = report.look(str(w.state), None)
    assert (found["status"], found["current"], found["steps"]["waiting"]) == ("stopped", [], 2)


def test_nohup_is_respected(worker: MakeWorker) -> None:
    """
    A hangup stops a worker in a terminal; one that was started with it ignored goes on.
    """
    w = worker("tasks:\n  - {id: a, run: 'echo up >&2; while ! [ -e go ]; do sleep 0.05; done', cwd: .}\n")
    w.start("nohup").until("a: up")
    w.process.send_signal(signal.SIGHUP)
    (w.config.parent / "go").touch()
    assert w.wait() == 0


def test_a_wait_of_a_month_is_one(worker: MakeWorker) -> None:
    """
    poll(2) takes 24 days at most.
    """
    w = worker("tasks:\n  - {id: a, run: exit 1, retry: {delay: 60d, max_delay: 60d}}\n")
    w.start().until("next in 60d")
    assert control.ask(f"{w.state}/run/control") is not None
    assert w.kill(signal.SIGTERM) == 75
