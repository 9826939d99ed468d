"""Steps live like services: back-off, patience, fresh starts, notes, progress, hooks, needs, parallel steps."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import MakeWorker
from tests.support import ROOT, Worker, alive

AGENTCTL = f"{sys.executable} -m worker"


def script(body: str) -> str:
    """Return the body of a `run:` block whose commands can call agentctl."""
    return "\n".join(f"      {line}" for line in [f"export PYTHONPATH={ROOT}", *body.strip().splitlines()])


def test_a_full_context_is_started_afresh_until_it_is_done(worker: MakeWorker) -> None:
    """
    An agent that fills its context three times saves a summary, exits 75, goes on with it at once, and ends.
    """
    w = worker(f"""
tasks:
  - id: agent
    retry: {{attempts: 1, delay: 1h}}
    run: |
{
        script('''
n=$(cat "$STATE_DIRECTORY/summary" 2>/dev/null || echo 0)
echo "part $n" >> "$AGENT_OUT/../parts"
if [ "$n" -lt 3 ]; then echo $((n + 1)) > "$STATE_DIRECTORY/summary"; exit 75; fi
echo finished
''')
    }
""")
    assert w.run() == 0
    assert (w.state / "parts").read_text().splitlines() == ["part 0", "part 1", "part 2", "part 3"]
    assert [row.outcome for row in w.rows()] == ["again", "again", "again", "done"]
    assert w.output("agent") == b"finished\n"


def test_progress_counts_as_getting_further_only_when_it_is_new(worker: MakeWorker) -> None:
    """
    75 with 1/3, 2/3 starts again at once; the same progress once more is "not now".
    """
    w = worker(f"""
tasks:
  - id: a
    retry: {{delay: 10ms, patience: 1min}}
    run: |
{
        script(f'''
case $AGENT_ATTEMPT in 1) n=1;; 2) n=2;; 3) n=2;; *) exit 0;; esac
{AGENTCTL} progress $n/3
exit 75
''')
    }
""")
    assert w.run() == 0
    assert [(row.outcome, row.progress) for row in w.rows()] == [
        ("again", 1.0),
        ("again", 2.0),
        ("deferred", 2.0),
        ("done", 0.0),
    ]


def test_not_now_for_ever_is_given_up_after_patience(worker: MakeWorker) -> None:
    """
    75 without progress backs off, is not counted, and ends when patience does; attempts do not matter.
    """
    w = worker("tasks:\n  - {id: a, run: exit 75, retry: {attempts: 1, delay: 20ms, max_delay: 100ms, patience: 1s}}\n")
    assert w.run() == 70
    rows = w.rows()
    assert len(rows) > 5
    assert {row.outcome for row in rows[:-1]} == {"deferred"}
    assert (rows[-1].outcome, bool(rows[-1].final)) == ("failed", True)
    assert w.matching("longer than its patience")


def test_a_back_off_is_not_forgotten_by_a_dead_worker(worker: MakeWorker) -> None:
    """
    A kill -9 in the middle of a wait: the next worker waits for the rest of it.
    """
    w = worker("tasks:\n  - {id: a, run: 'test $AGENT_ATTEMPT -gt 1', retry: {delay: 2s}}\n")
    w.start().until("a: attempt 1 exited with status 1; next in 2s")
    w.kill()
    assert w.run() == 0
    first, second = w.rows()
    assert first.ended is not None and second.started - first.ended >= 1.99


def test_a_back_off_is_not_begun_anew_by_the_next_worker(worker: MakeWorker) -> None:
    """
    A wait whose end has come while no worker lived is over.
    """
    w = worker("tasks:\n  - {id: a, run: 'test $AGENT_ATTEMPT -gt 1', retry: {delay: 1h, max_delay: 1h}}\n")
    w.start().until("a: attempt 1 exited with status 1; next in 1h")
    w.kill()
    with contextlib.closing(sqlite3.connect(w.state / "ledger.db")) as ledger, ledger:
        ledger.execute("UPDATE attempts SET ended = ended - 3600")
    assert w.start().until("a: started, attempt 2")


def test_codes_that_nothing_can_mend_fail_at_once(worker: MakeWorker) -> None:
    """
    retry.never.
    """
    w = worker("tasks:\n  - {id: a, run: exit 64, retry: {attempts: 5, never: [64]}}\n")
    assert w.run() == 70
    assert len(w.rows()) == 1


def test_a_loop_that_prints_and_gets_nowhere_is_ended_and_told_so(worker: MakeWorker) -> None:
    """
    Case M7: progress_every ends it although it prints; the second attempt reads the note and behaves.
    """
    w = worker(f"""
tasks:
  - id: loop
    progress_every: 1s
    retry: {{delay: 10ms}}
    run: |
{
        script(f'''
if [ -n "$AGENT_NOTE" ]; then cp "$AGENT_NOTE" "$AGENT_OUT/../note"; exit 0; fi
{AGENTCTL} progress 1/3
i=0
while :; do echo "step $i of nothing" >&2; i=$((i + 1)); sleep 0.01; done
''')
    }
""")
    assert w.run() == 0
    note = json.loads((w.state / "note").read_text())
    assert (note["attempt"], note["outcome"], note["cause"]) == (1, "stalled", "made no progress for 1s")
    assert note["progress"] == 1.0 and note["elapsed"] > 1 and note["attempts_left"] == 2
    assert note["patience_left"] == 7200.0
    assert len(note["log"]) == 50 and re.fullmatch(r"step \d+ of nothing", note["log"][-1])
    assert re.search(r"(sleep|sh) \(\d+\): State: ", note["doing"])
    assert (w.state / "note").stat().st_size < 64 * 1024


def test_a_step_is_believed_only_by_its_own_processes(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case W7: beats from a stranger do not keep a silent step alive.
    """
    w = worker("tasks:\n  - {id: a, run: 'echo up >&2; sleep 600', watchdog: 1s, retry: {attempts: 1}}\n")
    w.start().until("a: up")
    code = (
        "import socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "try:\n"
        "    while True: s.sendto(b'WATCHDOG=1', sys.argv[1]); time.sleep(0.05)\n"
        "except OSError: pass\n"
    )
    stranger = subprocess.Popen([sys.executable, "-c", code, str(*w.state.glob("run/notify.0.*/s"))])
    assert w.wait() == 70
    stranger.wait()
    assert w.rows()[0].cause == "sent no WATCHDOG=1 for 1s"


@pytest.mark.parametrize(
    ("task", "outcome", "cause"),
    [
        ("run: 'true', expect: {file: made}", "failed", "exited with status 0, but the expected file"),
        ("run: ': > made', expect: {file: made}", "failed", "is empty"),
        ("run: 'echo x > made', expect: {file: made}", "done", ""),
        ("run: echo loss=0.5, expect: {matches: '^loss=[0-9.]+$'}", "done", ""),
        ("run: echo nothing, expect: {matches: '^loss='}", "failed", "its output does not match '^loss='"),
        ("run: 'true', expect: {run: exit 3}", "failed", "expect: ended with status 3"),
        ("run: 'true', before: exit 4", "failed", "before: ended with status 4"),
        ("run: 'true', after: exit 5", "failed", "after: ended with status 5"),
        ("run: 'exit 1', after: touch never", "failed", "exited with status 1"),
        ("run: 'true', before: exit 75", "failed", "longer than its patience"),
    ],
)
def test_what_is_expected_must_hold(worker: MakeWorker, task: str, outcome: str, cause: str) -> None:
    """
    Case P8: a program that exits with 0 having done nothing has failed; so has a hook that fails.
    """
    retry = "retry: {attempts: 1, delay: 1ms, patience: 1ms}"
    w = worker(f"tasks:\n  - {{id: a, {task}, cwd: ., {retry}}}\n")
    assert w.run() == (0 if outcome == "done" else 70)
    assert w.rows()[-1].outcome == outcome
    assert cause in w.rows()[-1].cause or w.matching(f"a: {re.escape(cause)}")
    assert not (w.config.parent / "never").exists()


def test_a_pattern_that_never_ends_is_ended_by_the_timeout(worker: MakeWorker) -> None:
    """
    It runs in a process of its own: the worker answers meanwhile.
    """
    w = worker("""
tasks:
  - id: a
    run: echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab
    expect: {matches: "^(a+)+$"}
    timeout: 2s
    retry: {attempts: 1}
""")
    assert w.run() == 70
    assert w.rows()[0].cause == "took longer than its timeout of 2s"


def test_hooks_print_to_the_log_and_never_into_the_result(worker: MakeWorker) -> None:
    """
    The result is the step's own standard output, and the order is before, run, expect, after.
    """
    w = worker("""
tasks:
  - {id: a, before: echo one, run: echo two, expect: {run: echo three}, after: 'echo four; cat "$AGENT_OUT/a"; true'}
""")
    assert w.run() == 0
    assert w.output("a") == b"two\n"
    shown = [line for line in w.lines if line in ("a: one", "a: two", "a: three", "a: four")]
    assert shown == ["a: one", "a: two", "a: three", "a: four"]


def test_a_commit_and_a_push_for_each_step_and_none_twice(worker: MakeWorker, tmp_path: Path) -> None:
    """
    after: commits and pushes before the step is recorded; killed anywhere, each change is there once.
    """
    origin, checkout = tmp_path / "origin.git", tmp_path / "app"
    subprocess.run(["git", "init", "-q", "--bare", str(origin)], check=True)
    subprocess.run(["git", "clone", "-q", str(origin), str(checkout)], check=True, capture_output=True)
    w = worker(f"""
defaults:
  cwd: {checkout}
  retry: {{attempts: 50, delay: 0}}
  env:
    GIT_AUTHOR_NAME: a
    GIT_AUTHOR_EMAIL: a@localhost
    GIT_COMMITTER_NAME: a
    GIT_COMMITTER_EMAIL: a@localhost
tasks:
  - id: edit
    foreach: {{range: 1-6}}
    before: rm -f .git/*.lock .git/refs/heads/*.lock
    run: echo "$AGENT_ITEM" > "file-$AGENT_ITEM"
    after: |
      git add -A
      git diff --cached --quiet || git commit -qm "$AGENT_KEY"
      git push -q origin HEAD
""")
    chance = random.Random(7)
    status = None
    while status != 0:
        w.start().until("edit@.: started")
        time.sleep(chance.uniform(0, 0.15))  # where in commit and push the kill falls is what chance decides
        status = w.kill() if chance.random() < 0.7 else w.wait()
    log = subprocess.run(
        ["git", "-C", str(origin), "log", "--format=%s", "--reverse", "--all"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert log.stdout.splitlines() == [f"list:edit@{n}" for n in range(1, 7)]


def test_a_graph_of_two_hundred_steps_keeps_its_order_under_kills(worker: MakeWorker) -> None:
    """
    needs and concurrency: 4 under random kill -9: no step starts before what it needs is done, each is
    committed once, and never more than four run together.
    """
    chance = random.Random(11)
    needs = {n: sorted(chance.sample(range(n), min(n, chance.randint(0, 3)))) for n in range(200)}
    tasks = "".join(
        f"  - {{id: s{n}, run: sleep 0.0{n % 4}, needs: [{', '.join(f's{m}' for m in needs[n])}]}}\n"
        if needs[n]
        else f"  - {{id: s{n}, run: sleep 0.0{n % 4}}}\n"
        for n in range(200)
    )
    w = worker(f"concurrency: 4\ndefaults: {{retry: {{attempts: 99, delay: 0}}}}\ntasks:\n{tasks}")
    status = None
    for _ in range(25):
        w.start()
        time.sleep(chance.uniform(0.3, 0.6))
        if w.process.poll() is None:
            w.kill()
    status = w.run()
    assert status == 0
    assert sorted(w.done()) == sorted(f"s{n}" for n in range(200))
    ended = {row.step: row.ended or 0.0 for row in w.rows() if row.outcome == "done"}
    for row in w.rows():
        early = [m for m in needs[int(row.step[1:])] if ended[f"s{m}"] > row.started]
        assert not early, f"{row.step}, attempt {row.number}, was started before {early} were done"
    running: set[str] = set()
    for at, line in enumerate(w.lines):
        if line.startswith("run list"):
            running.clear()  # a new worker
        elif found := re.match(r"(s\d+): (started|done|attempt)", line):
            step, what = found.groups()
            running = running | {step} if what == "started" else running - {step}
            assert len(running) <= 4, "\n".join(w.lines[max(0, at - 30) : at + 1])


def test_one_stalled_step_is_ended_alone(worker: MakeWorker) -> None:
    """
    Of four parallel steps one is stopped with SIGSTOP: it is ended and tried again, the others go on.
    """
    w = worker("""
concurrency: 4
tasks:
  - id: s
    foreach: {range: 1-4}
    stall_after: 2s
    retry: {delay: 10ms}
    run: |
      echo $$ > "$STATE_DIRECTORY/pid"
      for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.3; done
""")
    w.start()
    for n in range(1, 5):
        w.until(f"s@{n}: 1$") if not w.matching(f"s@{n}: 1$") else None
    os.kill(int((w.state / "steps" / "s@2" / "pid").read_text()), signal.SIGSTOP)
    assert w.wait() == 0
    assert [(row.step, row.outcome) for row in w.rows() if row.outcome != "done"] == [("s@2", "stalled")]
    assert w.output("s@2") == b"".join(b"%d\n" % n for n in range(1, 11))


def test_parallel_steps_hold_nothing_of_each_other(worker: MakeWorker) -> None:
    """
    Case P11, and orphans: what one step leaves behind is ended, what the other runs is not.
    """
    w = worker("""
concurrency: 2
tasks:
  - {id: long, run: 'sleep 2 & wait; ls /proc/self/fd | wc -l'}
  - {id: short, run: '(setsid sleep 600 &); echo $!; exit 0'}
""")
    assert w.run() == 0
    assert w.matching(r"short: ended and left processes behind; ending them: \w+ \(\d+\)$")
    assert not w.matching("long: ended and left")
    assert w.output("long") == b"4\n"  # 0, 1, 2, and the folder that ls reads


def test_interrupted_in_parallel_every_step_is_ended(worker: MakeWorker) -> None:
    """
    SIGTERM ends all that runs; all of it is tried again, none of it counted.
    """
    w = worker("""
concurrency: 3
tasks:
  - id: s
    foreach: [a, b, c]
    run: echo $$ > "$STATE_DIRECTORY/pid"; echo up; test $AGENT_ATTEMPT -gt 1 || sleep 600
""")
    w.start()
    for item in "abc":
        w.until(f"s@{item}: up") if not w.matching(f"s@{item}: up") else None
    pids = [int((w.state / "steps" / f"s@{item}" / "pid").read_text()) for item in "abc"]
    assert w.kill(signal.SIGTERM) == 75
    assert not any(alive(pid) for pid in pids)
    assert {row.outcome for row in w.rows()} == {"interrupted"}
    assert w.run() == 0


def test_secrets_reach_the_step_that_names_them_and_nothing_else(worker: MakeWorker, tmp_path: Path) -> None:
    """
    Case J8: in the step's CREDENTIALS_DIRECTORY only; not in the ledger, the checkpoint, the journal, the note.
    """
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "token").write_text("planted-secret-7f3a")
    (credentials / "other").write_text("planted-other-9c1b")
    w = worker(
        """
tasks:
  - {id: a, secrets: [token], run: 'ls "$CREDENTIALS_DIRECTORY"; wc -c < "$CREDENTIALS_DIRECTORY/token"'}
  - {id: b, run: 'echo "${CREDENTIALS_DIRECTORY-none}"'}
""",
        environ={"CREDENTIALS_DIRECTORY": str(credentials)},
    )
    assert w.run() == 0
    assert w.output("a") == b"token\n19\n"
    assert w.output("b") == b"none\n"
    found = subprocess.run(["grep", "-rl", "planted-", str(w.state)], capture_output=True, text=True, check=False)
    assert found.stdout == ""
    assert not w.matching("planted-")


def test_a_secret_that_the_unit_lacks_is_known_before_the_run(worker: MakeWorker) -> None:
    """
    Exit 78, with the line to add.
    """
    w = worker("tasks:\n  - {id: a, run: 'true', secrets: [token]}\n")
    assert w.run() == 78
    assert w.matching(r"list.yaml:2:\d+: secrets: the unit has no credential 'token'; add LoadCredential=token:")


def test_a_step_mended_while_it_runs_gets_its_attempts_anew(worker: MakeWorker, tmp_path: Path) -> None:
    """
    The failure of what was edited meanwhile does not count against what is there now.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.bind(str(tmp_path / "notify"))
    w = worker(
        """
tasks:
  - {id: a, run: 'echo up; while ! [ -e go ]; do sleep 0.05; done; false', cwd: ., retry: {attempts: 1}}
""",
        environ={"NOTIFY_SOCKET": str(tmp_path / "notify")},
    )
    w.start().until("a: up")
    w.config.write_text("tasks:\n  - {id: a, run: echo mended, cwd: ., retry: {attempts: 1}}\n")
    w.process.send_signal(signal.SIGHUP)
    w.until("read again")
    (w.config.parent / "go").touch()
    assert w.wait() == 0
    assert w.output("a") == b"mended\n"
    listening.close()


def test_what_a_step_does_to_its_surroundings_ends_no_other(worker: MakeWorker, tmp_path: Path) -> None:
    """
    A folder in place of its result, junk among its credentials, no socket folder, no part file: a failure at most.
    """
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "x").write_text("planted")
    w = worker(
        """
on_failure: continue
defaults: {retry: {attempts: 1}, secrets: [x]}
tasks:
  - {id: folder, run: 'mkdir -p "$AGENT_OUT/folder"'}
  - {id: junk, secrets: [x], run: 'chmod u+w "$CREDENTIALS_DIRECTORY" && mkdir "$CREDENTIALS_DIRECTORY/d"'}
  - {id: sockets, run: 'rm -rf "$(dirname "$NOTIFY_SOCKET")"'}
  - {id: part, run: 'head -c 200000 /dev/zero; sleep 0.3; rm -f "$AGENT_OUT"/.part-*', expect: {matches: x}}
  - {id: last, run: 'test -S "$NOTIFY_SOCKET" && ls "$CREDENTIALS_DIRECTORY"'}
""",
        environ={"CREDENTIALS_DIRECTORY": str(credentials)},
    )
    assert w.run() == 70
    assert w.done() == ["junk", "sockets", "last"]
    assert w.output("last") == b"x\n"
    assert w.matching("folder: failed for good: it has made a folder where its result belongs")


def test_the_last_words_of_a_program_are_heard(worker: MakeWorker) -> None:
    """
    A message sent just before the exit counts, without any barrier.
    """
    w = worker(f"""
concurrency: 4
tasks:
  - id: s
    foreach: {{range: 1-12}}
    retry: {{attempts: 1, delay: 1h}}
    run:
      - {sys.executable}
      - -c
      - |
        import os, socket
        n = int(os.environ["AGENT_ATTEMPT"])
        s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        s.sendto(b"X_AGENT_PROGRESS=%d" % n, os.environ["NOTIFY_SOCKET"])
        os._exit(0 if n == 3 else 75)
""")
    assert w.run() == 0
    assert [row.outcome for row in w.rows()].count("again") == 24


def test_a_lock_file_that_was_removed_lets_no_second_worker_in(worker: MakeWorker) -> None:
    """
    The first one goes on, with its step; the second ends with 77.
    """
    w = worker("tasks: [{id: a, run: 'echo up >&2; while ! [ -e ../go ]; do sleep 0.02; done; echo x'}]")
    w.start().until("a: up")
    (w.state / "lock").unlink()
    second = Worker(w.config.parent, w.config.read_text())
    assert second.run() == 77
    assert second.matching("another worker is at work here, although its lock file has gone")
    (w.state / "go").touch()
    assert w.wait() == 0
    assert [(row.outcome, row.number) for row in w.rows()] == [("done", 1)]
