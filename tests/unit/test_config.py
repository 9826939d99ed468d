"""The configuration: typed, complete, and every mistake of every file in one go."""

import gc
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from worker import config, plan
from worker.config import Config
from worker.contact import Contact, Ping
from worker.errors import CONFIG, ConfigError, Mark
from worker.task import Expect, Glob, Items, Lines, Range, Retry


def write(tmp_path: Path, content: str, **drop_ins: str) -> str:
    """Write config.yaml and config.d/NAME.yaml; return the path of the first."""
    (tmp_path / "config.yaml").write_text(content)
    for name, text in drop_ins.items():
        (tmp_path / "config.d").mkdir(exist_ok=True)
        (tmp_path / "config.d" / f"{name}.yaml").write_text(text)
    return str(tmp_path / "config.yaml")


def load(tmp_path: Path, content: str, **drop_ins: str) -> Config:
    return config.load(write(tmp_path, content, **drop_ins))


def refused(tmp_path: Path, content: str, **drop_ins: str) -> list[str]:
    """The lines that are said about a configuration, without the folder's name."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, content, **drop_ins)
    assert caught.value.exit_status == CONFIG == 78
    return str(caught.value).replace(f"{tmp_path}/", "").split("\n")


def test_everything_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Each key once, typed, absolute and marked.
    """
    monkeypatch.setenv("HOME", "/home/me")
    loaded = load(
        tmp_path,
        """\
run: release-981
concurrency: 1
on_failure: continue
budget: {restarts: 20, spend: 9.50}
alert: [./page.sh, now]
ping: {fail: "https://ping.example/x"}
keep_awake: ~/.sandboxer/keep-awake
tasks:
  - id: shard
    run: [./process, "--file={item}", ""]
    shell: [bash, -euc]
    env: {COUNTRY: no, EMPTY: ""}
    env_file: [a.env, /etc/b.env]
    cwd: ~/app
    foreach: {lines: ./files.txt}
    timeout: 1h 30min
    stall_after: infinity
    watchdog: 45s
    retry: {attempts: 5, delay: 0}
""",
    )
    assert loaded._replace(tasks=()) == (
        "release-981",
        1,
        "continue",
        "stop",
        "ask",
        None,
        (20.0, None, 9.5),
        60.0,
        Contact("release-981", ("./page.sh", "now"), str(tmp_path), Ping(fail="https://ping.example/x")),
        Mark(f"{tmp_path}/config.yaml", 6, 7),
        ("~/.sandboxer/keep-awake", Mark(f"{tmp_path}/config.yaml", 7, 13)),
        None,
        (),
        (f"{tmp_path}/config.yaml",),
        True,
        "stop",
    )
    (task,) = loaded.tasks
    assert task.run == ("./process", "--file={item}", "")
    assert task.shell == ("bash", "-euc")
    assert task.env == {"COUNTRY": "no", "EMPTY": ""}
    assert task.env_files == (f"{tmp_path}/a.env", "/etc/b.env")
    assert [mark.column for mark in task.env_file_marks] == [16, 23]
    assert (task.cwd, task.cwd_mark and task.cwd_mark.line) == ("/home/me/app", 14)
    assert (task.foreach, task.foreach_mark and task.foreach_mark.line) == (
        Lines(f"{tmp_path}/files.txt"),
        15,
    )
    assert (task.timeout, task.stall_after, task.watchdog) == (5400, None, 45)
    assert task.retry == Retry(attempts=5, delay=0)
    assert (task.mark.line, task.mark.column) == (9, 5)


def test_the_least_that_can_be_written(tmp_path: Path) -> None:
    """
    Defaults: the file's name, /bin/sh, three attempts ten seconds apart, no limits.
    """
    loaded = load(tmp_path, "tasks:\n- id: a\n  run: |\n    true\n")
    task = loaded.tasks[0]
    assert (loaded.run, loaded.concurrency, loaded.on_failure) == ("config", 1, "stop")
    assert (task.run, task.shell, task.env, task.env_files) == ("true\n", ("/bin/sh", "-c"), {}, ())
    assert (task.cwd, task.foreach, task.timeout, task.stall_after, task.watchdog) == (None,) * 5
    assert task.retry == Retry(3, 10.0)


def test_what_is_cut_off_is_checked_if_there_is_a_check(tmp_path: Path) -> None:
    """
    A check alone means redo: check; without one it is always, and a check that nobody asks is a mistake.
    """
    tasks = load(
        tmp_path, "tasks:\n- {id: a, run: x, check: y}\n- {id: b, run: x, redo: never}\n- {id: c, run: x}\n"
    ).tasks
    assert [(task.redo, task.check) for task in tasks] == [("check", "y"), ("never", None), ("always", None)]
    (only,) = refused(tmp_path, "tasks: [{id: a, run: x, redo: always, check: y}]")
    assert "check: would never be asked with 'redo: always'; take one of them out" in only


def test_defaults_stand_under_what_a_task_says(tmp_path: Path) -> None:
    """
    Environments, environment files and retries are merged; everything else is replaced, by infinity too.
    """
    first, second = load(
        tmp_path,
        """\
defaults: {env: {A: 1, B: 1}, env_file: d.env, timeout: 1h, shell: bash, retry: {attempts: 9}}
tasks:
  - {id: a, run: x}
  - {id: b, run: x, env: {B: 2}, env_file: t.env, timeout: infinity, shell: zsh, retry: {delay: 1s}}
""",
    ).tasks
    assert (first.env, first.timeout, first.shell, first.retry) == (
        {"A": "1", "B": "1"},
        3600,
        ("bash", "-c"),
        Retry(9, 10.0),
    )
    assert (second.env, second.timeout, second.shell) == ({"A": "1", "B": "2"}, None, ("zsh", "-c"))
    assert second.retry == Retry(9, 1)
    assert second.env_files == (f"{tmp_path}/d.env", f"{tmp_path}/t.env")


@pytest.mark.parametrize(
    "typed", ["no", "off", "on", "yes", "y", "1:10", "08:30", "0644", "08", "1.10", "1e3", "~", "null"]
)
def test_an_environment_holds_what_was_typed(tmp_path: Path, typed: str) -> None:
    """
    Y2, Y3, Y4, Y5.
    """
    assert load(tmp_path, f"tasks: [{{id: a, run: x, env: {{V: {typed}}}}}]").tasks[0].env == {"V": typed}


@pytest.mark.parametrize(
    "written, read",
    [
        ("{range: 1-40}", Range(1, 40, 0)),
        ("{range: 01-40}", Range(1, 40, 2)),
        ("{range: 1 - 040}", Range(1, 40, 3)),
        ("{range: 0-0}", Range(0, 0, 0)),
        ("{glob: /data/*.csv}", Glob("/data/*.csv")),
        ("{glob: '~/*'}", Glob("/home/[[]me]/*")),
    ],
)
def test_foreach_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, read: object) -> None:
    """
    Every kind of list; a folder's own brackets are not part of the pattern.
    """
    monkeypatch.setenv("HOME", "/home/[me]")
    assert load(tmp_path, f"tasks: [{{id: a, run: x, foreach: {written}}}]").tasks[0].foreach == read


def test_listed_items_keep_their_text_and_place(tmp_path: Path) -> None:
    """
    Y4 for items.
    """
    foreach = load(tmp_path, "tasks:\n- id: a\n  run: x\n  foreach: [01, no]\n").tasks[0].foreach
    assert isinstance(foreach, Items)
    assert foreach.texts == ("01", "no")
    assert [(mark.line, mark.column) for mark in foreach.marks] == [(4, 13), (4, 17)]


MISTAKES = [
    ("id: a/b", "1:9: id: 'a/b' is not a name; use letters"),
    ("id: .a", "1:9: id: '.a' is not a name"),
    ("id: a@b", "1:9: id: 'a@b' is not a name"),
    ("id: " + "a" * 101, "1:9: id: '" + "a" * 57 + "...' is too long; use at most 100"),
    ("run:", "1:9: run: needs a value"),
    ("run: ''", "1:10: run: needs a value"),
    ("run: {a: b}", "1:10: run: wants a text for the shell or a list of arguments, found a mapping"),
    ("run: []", "1:10: run: the list is empty"),
    ("run: [a, {item}]", "1:14: item 2: wants a text, found a mapping; quote"),
    ("run: [a, 'x={item}']", "1:14: run: '{item}' stands for nothing without 'foreach'"),
    ('run: ["a\\0b"]', "1:11: item 1: a text may not contain NUL"),
    ("runs: x", "1:5: unknown key 'runs'; did you mean 'run'?"),
    ("stall-after: 3", "1:5: unknown key 'stall-after'; did you mean 'stall_after'?"),
    ("zzz: x", "1:5: unknown key 'zzz'; the keys here are: id, run,"),
    ("shell: ''", "1:12: shell: needs a value"),
    ("shell: ['']", "1:12: shell: the first item names the program, and is empty"),
    ("env: [A]", "1:10: env: wants a mapping of names to texts, found a list"),
    ("env: {A: }", '1:14: env: A: needs a value; write "" for an empty one'),
    ("env: {1A: x}", "1:11: env: '1A' is not a name for an environment variable"),
    ("env: {AGENT_STEP: x}", "1:11: env: 'AGENT_STEP' is set by the worker"),
    ("env: {NOTIFY_SOCKET: x}", "1:11: env: 'NOTIFY_SOCKET' is set by the worker"),
    ("env: {WATCHDOG_PID: x}", "1:11: env: 'WATCHDOG_PID' is set by the worker"),
    ("cwd: ~root", "1:10: cwd: only '~/' is understood, not '~root'"),
    ("timeout: 1:30", "1:14: timeout: '1:30' is not a time span; write it like"),
    ("timeout: 0", "1:14: timeout: must be longer than 0"),
    ("timeout: [1]", "1:14: timeout: wants a text, found a list"),
    ("watchdog: infinity", "1:15: watchdog: cannot be 'infinity'"),
    ("retry: 3", "1:12: retry: wants a mapping, found a text; its keys are: attempts, delay"),
    ("retry: {attempts: 0}", "1:23: attempts: wants a whole number from 1 on, found '0'"),
    ("retry: {attempts: 1.0}", "1:23: attempts: wants a whole number from 1 on, found '1.0'"),
    ("retry: {delay: infinity}", "1:20: delay: cannot be 'infinity'"),
    ("foreach: x", "1:14: foreach: wants a list, or exactly one of lines, glob, range; found a text"),
    (
        "foreach: {lines: a, glob: b}",
        "1:14: foreach: wants a list, or exactly one of lines, glob, range; found 2 keys",
    ),
    ("foreach: {line: a}", "1:15: unknown key 'line'; did you mean 'lines'?"),
    ("foreach: []", "1:14: foreach: the list is empty"),
    ("foreach: {range: 40-1}", "1:22: range: the range '40-1' runs backwards; write 1-40"),
    ("foreach: {range: 1..4}", "1:22: range: '1..4' is not a range"),
    ("redo: maybe", "1:11: redo: cannot be 'maybe'; write always or check or never"),
    ("redo: check", "1:5: redo: 'check' wants a command that finds out whether it had happened; add 'check:'"),
    ("key: 'pr-{number}'", "1:10: key: 'pr-{number}' has braces that stand for nothing; use {run}, {step} and {item}"),
    ("key: '{run}-{item}'", "1:5: key: '{item}' stands for nothing without 'foreach'"),
    ("foreach: {range: 1-9999999}", "1:22: range: the range '1-9999999' is too long"),
]


@pytest.mark.parametrize("line, said", MISTAKES)
def test_a_mistake_in_a_task_is_one_line(tmp_path: Path, line: str, said: str) -> None:
    """
    R4: where, what, and what to do; nothing else is said.
    """
    rest = "".join(f"    {other}\n" for other in ("id: a", "run: x") if not line.startswith(other.split(":")[0] + ":"))
    (only,) = refused(tmp_path, f"    {line}\n{rest}".replace("    ", "  - ", 1).join(("# \ntasks:\n", "")))
    place, _, words = said.partition(": ")
    assert only.startswith(f"config.yaml:{int(place.split(':')[0]) + 2}:{place.split(':')[1]}: {words}")


@pytest.mark.parametrize(
    "content, said",
    [
        ("", "config.yaml:1:1: the file is empty"),
        ("- id: a\n", "config.yaml:1:1: a list at the top of the file; put 'tasks:' above it"),
        ("hello\n", "config.yaml:1:1: a text at the top of the file"),
        ("tasks:\n", "config.yaml:1:7: tasks: wants a list of tasks, found nothing"),
        ("tasks: []\n", "config.yaml:1:1: tasks: at least one is wanted"),
        ("run: x\n", "config.yaml:1:1: tasks: at least one is wanted"),
        ("tasks: [x]\n", "config.yaml:1:9: a task wants a mapping, found a text"),
        ("tasks: [{run: x}]\n", "config.yaml:1:9: 'id' is missing"),
        ("tasks: [{id: x}]\n", "config.yaml:1:9: 'run' is missing"),
        ("concurrency: 999\ntasks: [{id: x, run: x}]\n", "config.yaml:1:14: concurrency: 999 steps at a time"),
        ("concurrency: 0\ntasks: [{id: x, run: x}]\n", "config.yaml:1:14: concurrency: wants a whole number from 1"),
        (
            "on_failure: explode\n",
            "config.yaml:1:13: on_failure: cannot be 'explode'; write stop or continue",
        ),
        ("run: ../x\n", "config.yaml:1:6: run: '../x' is not a name"),
        ("on_unknown: guess\n", "config.yaml:1:13: on_unknown: cannot be 'guess'; write stop or continue"),
        (
            "ledger: mysql://me:planted@db/x\n",
            "config.yaml:1:9: ledger: this is not the address of a PostgreSQL server; write postgresql://",
        ),
        ("defaults: {id: x}\n", "config.yaml:1:12: unknown key 'id'"),
        ("tsaks: []\n", "config.yaml:1:1: unknown key 'tsaks'; did you mean 'tasks'?"),
    ],
)
def test_a_mistake_at_the_top_is_one_line(tmp_path: Path, content: str, said: str) -> None:
    """
    Y12: each its own message.
    """
    (only,) = refused(tmp_path, content)
    assert only.startswith(said)


def test_all_mistakes_of_all_files_come_at_once(tmp_path: Path) -> None:
    """
    In the order of files and lines, a broken drop-in beside the rest.
    """
    lines = refused(
        tmp_path,
        "concurrency: 0\ntasks:\n  - {id: a, run: x, retires: 1}\n  - {id: a, run: x}\n",
        one="tasks:\n  - {id: a, run: y}\n",
        two="tasks:\n\t- id: b\n",
    )
    assert [line.partition(": ")[0] for line in lines] == [
        "config.d/one.yaml:2:10",
        "config.d/two.yaml:2:1",
        "config.yaml:1:14",
        "config.yaml:3:21",
        "config.yaml:4:10",
    ]
    assert lines[0] == (
        "config.d/one.yaml:2:10: id: 'a' is already the id of the task at config.yaml:3:10; choose another"
    )


def test_drop_ins_add_tasks_in_the_order_of_their_names(tmp_path: Path) -> None:
    """
    The main file's defaults apply, paths count from the drop-in, hidden and other files are left alone.
    """
    path = write(
        tmp_path,
        "defaults: {timeout: 1h}\ntasks: [{id: a, run: x}]\n",
        b="tasks: [{id: c, run: x, cwd: here}]\n",
        a="tasks: [{id: b, run: x}]\n",
    )
    (tmp_path / "config.d" / ".hidden.yaml").write_text("!!")
    (tmp_path / "config.d" / "notes.txt").write_text("!!")
    (tmp_path / "config.d" / "z.yml").write_text("tasks: [{id: d, run: x}]")
    loaded = config.load(path)
    assert [task.id for task in loaded.tasks] == ["a", "b", "c", "d"]
    assert loaded.tasks[2].cwd == f"{tmp_path}/config.d/here"
    assert loaded.tasks[2].timeout == 3600
    assert [os.path.basename(file) for file in loaded.files] == ["config.yaml", "a.yaml", "b.yaml", "z.yml"]


def test_a_drop_in_holds_nothing_but_tasks(tmp_path: Path) -> None:
    """
    Settings in two places would be a riddle.
    """
    (only,) = refused(tmp_path, "tasks: [{id: a, run: x}]", more="on_failure: stop\ntasks: [{id: b, run: x}]")
    assert only.startswith("config.d/more.yaml:1:13: on_failure: has no place in a drop-in, which only adds tasks")


def test_a_main_file_may_leave_the_tasks_to_drop_ins(tmp_path: Path) -> None:
    """
    Work is handed over by writing files.
    """
    assert len(load(tmp_path, "run: x\n", more="tasks: [{id: b, run: x}]").tasks) == 1


def test_a_file_name_that_cannot_name_the_run_says_so(tmp_path: Path) -> None:
    """
    The default for `run` is not always a name.
    """
    path = tmp_path / "my list.yaml"
    path.write_text("tasks: [{id: a, run: x}]")
    with pytest.raises(ConfigError, match="'my list' cannot name the run; add 'run:' and a name"):
        config.load(str(path))


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    """
    R4: no traceback, and the path first.
    """
    with pytest.raises(ConfigError) as caught:
        config.load(str(tmp_path / "no.yaml"))
    assert str(caught.value).startswith(f"{tmp_path}/no.yaml: cannot be read: No such file or directory; ")


def test_files_are_opened_once_and_for_reading_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    F9: a file that nobody may write to will do, and its time stamps stay.
    """
    path = write(tmp_path, "tasks: [{id: a, run: x}]")
    os.chmod(path, stat.S_IRUSR)
    before = os.stat(path)
    opened: list[tuple[object, ...]] = []
    real = open

    def noted(*args: Any, **options: Any) -> Any:
        opened.append(args)
        return real(*args, **options)

    monkeypatch.setattr("builtins.open", noted)
    config.load(path)
    assert opened == [(path, "rb")]
    assert os.stat(path)[:-3] == before[:-3] and os.stat(path).st_mtime_ns == before.st_mtime_ns


def test_garbage_is_collected_again_afterwards(tmp_path: Path) -> None:
    """
    After a load that fails, too.
    """
    refused(tmp_path, "")
    assert gc.isenabled()


def test_secrets_in_the_wrong_place_are_not_repeated(tmp_path: Path) -> None:
    """
    The message goes to the journal.
    """
    assert "hunter2" not in "".join(refused(tmp_path, "tasks: [{id: a, run: x, env: PASSWORD=hunter2}]"))


_KEYS = st.sampled_from(["run", "tasks", "id", "env", "foreach", "range", "retry", "timeout", "defaults", "<<", "x"])
_VALUES = st.recursive(
    st.sampled_from(["", "a", "~", "1-3", "0", "'{item}'", "!x y", "&a b", "*a", "''", "5s", '"\\0"']),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.lists(st.tuples(_KEYS, inner), max_size=4).map(
            lambda pairs: "{" + ", ".join(f"{key}: {value}" for key, value in pairs) + "}"
        ),
    ),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.tuples(_KEYS, _VALUES), max_size=4))
def test_any_shape_is_a_config_or_a_config_error(tmp_path: Path, top: list[tuple[str, str]]) -> None:
    """
    Whatever stands where something else belongs, the answer is a list of lines.
    """
    try:
        loaded = load(tmp_path, "".join(f"{key}: {value}\n" for key, value in top))
    except ConfigError as exc:
        assert all(str(problem).startswith(f"{tmp_path}/config.yaml:") for problem in exc.problems)
    else:
        assert loaded.tasks


GOOD = """
concurrency: 4
defaults: {secrets: [common], retry: {max_delay: 1min, patience: 3h, never: [2, 64]}}
tasks:
  - id: ask
    http: {method: POST, url: "https://localhost/x", headers: {A: b}, json: {n: 1.10, yes: true, text: "1", no: no}}
    expect: {status: [200, 201], json: {ok: true}}
    secrets: [token]
  - id: call
    python: pkg.mod:train
    args: {epochs: 3, version: 1.10, when: 2026-01-01, nothing: ~, deep: [{a: 0644}]}
    needs: [ask]
    progress_every: 15min
    before: ./get.sh
    after: [git, push]
    expect: {file: model.bin, matches: "loss=[0-9.]+", run: test -s model.bin}
"""


def test_every_kind_of_task_comes_out_typed(tmp_path: Path) -> None:
    """
    JSON is typed as JSON types it, and args stay as they were typed (case Y5).
    """
    ask, call = load(tmp_path, GOOD).tasks
    spec = json.loads(ask.http or "")
    assert spec["json"] == {"n": 1.1, "yes": True, "text": "1", "no": "no"}
    assert spec["expect"] == {"status": [200, 201], "json": {"ok": True}}
    assert ask.secrets == ("common", "token")
    assert ask.retry == Retry(max_delay=60.0, patience=10800.0, never=(2, 64))
    assert json.loads(call.args) == {
        "epochs": "3",
        "version": "1.10",
        "when": "2026-01-01",
        "nothing": "~",
        "deep": [{"a": "0644"}],
    }
    assert (call.python, call.needs, call.progress_every) == ("pkg.mod:train", ("ask",), 900.0)
    assert (call.before, call.after) == ("./get.sh", ("git", "push"))
    assert call.expect == Expect(file="model.bin", matches="loss=[0-9.]+", run="test -s model.bin")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("{id: a, run: x, http: {url: 'http://localhost/'}}", "a task has one of run, http, python, not run and http"),
        ("{id: a}", "'run' is missing"),
        ("{id: a, run: x, args: {b: c}}", "args: only 'python' takes them"),
        ("{id: a, python: nothing}", "names no function; write MODULE:FUNCTION"),
        ("{id: a, http: {}}", "'url' is missing"),
        ("{id: a, http: {url: 'ftp://x/'}}", "http: "),
        ("{id: a, http: {url: 'http://localhost/', headers: {'bad name': x}}}", "http: "),
        ("{id: a, run: x, expect: {matches: '['}}", "is not a regular expression"),
        ("{id: a, run: x, expect: {status: [200]}}", "'status' and 'json' are for http tasks"),
        ("{id: a, run: x, retry: {never: [256]}}", "256 is not an exit code"),
        ("{id: a, run: x, retry: {unsure: [600]}}", "600 is neither an exit code nor a status of HTTP"),
        ("{id: a, run: x, retry: {success: [75]}}", "75 means 'not now', and cannot mean 'done'"),
        ("{id: a, run: x, retry: {success: [3], never: [3]}}", "3 is in both 'success' and 'never'"),
    ],
)
def test_a_mistake_in_a_task_is_known_before_the_run(tmp_path: Path, task: str, said: str) -> None:
    """
    One line, at the place.
    """
    (only,) = refused(tmp_path, f"tasks:\n  - {task}\n")
    assert said in only


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("shell: bash -euo pipefail -c", "write a list: [bash, -euo, pipefail, -c]"),
        ("shell: /bin/bash -eu", "write a list: [/bin/bash, -eu, -c]"),
        ("shell: [bash -eu, -c]", "write each word as an item of its own: [bash, -eu, ...]"),
        ("check: [test -e x]", "write each word as an item of its own: [test, -e, x, ...]"),
    ],
)
def test_e5_several_words_are_no_program(tmp_path: Path, line: str, said: str) -> None:
    """E5: known before the run, with the list to write."""
    (only,) = refused(tmp_path, f"tasks:\n  - id: a\n    run: echo\n    {line}\n")
    assert only.endswith(said)


def test_e5_a_shell_whose_path_has_a_blank_is_one(tmp_path: Path) -> None:
    """E5: if it is there."""
    (tmp_path / "my sh").symlink_to("/bin/sh")
    (loaded,) = load(tmp_path, f"tasks:\n  - {{id: a, run: echo, shell: {tmp_path}/my sh}}\n").tasks
    assert loaded.shell == (f"{tmp_path}/my sh", "-c")


@pytest.mark.parametrize("key", ["timeout", "stall_after", "watchdog", "progress_every", "retry: {delay", "lease"])
@pytest.mark.parametrize(
    "value", ["9999999999y", "infinity", "1e400", "99999999999999999999999999s", "-1", "1 2 3 lightyears"]
)
def test_e8_the_advice_for_a_span_is_one_that_helps(tmp_path: Path, key: str, value: str) -> None:
    """E8: 'infinity' is not advised where it is refused."""
    written = f"{key}: {value}{'}' if '{' in key else ''}"
    top, task = (f"{written}\n", "") if key == "lease" else ("", f"    {written}\n")
    content = f"{top}tasks:\n  - id: a\n    run: echo\n{task}"
    if value == "infinity" and key in ("timeout", "stall_after"):
        load(tmp_path, content)
        return
    (only,) = refused(tmp_path, content)
    assert "use 'infinity'" not in only and "; " in only


def test_lists_of_defaults_can_be_taken_back(tmp_path: Path) -> None:
    """
    F17: `retry` is merged key by key; an empty list means none, whatever the defaults say.
    """
    (tmp_path / "more.env").write_text("A=1\n")
    one, other = load(
        tmp_path,
        """
defaults: {secrets: [x], env_file: more.env, retry: {never: [1], unsure: [28], success: [3], attempts: 5}}
tasks:
- {id: a, run: x}
- {id: b, run: x, secrets: [], env_file: [], retry: {never: [], unsure: [], success: [], delay: 1s}}
""",
    ).tasks
    assert (one.retry.never, one.retry.unsure, one.retry.success) == ((1,), (28,), (3,))
    assert (one.secrets, one.env_files) == (("x",), (f"{tmp_path}/more.env",))
    assert other.retry == Retry(attempts=5, delay=1.0)
    assert (other.secrets, other.env_files) == ((), ())


def test_needs_that_are_not_there_or_go_in_a_circle_are_named(tmp_path: Path) -> None:
    """
    A step that waits for itself would wait for ever.
    """

    def planned(tasks: str) -> list[str]:
        (tmp_path / "config.yaml").write_text(f"tasks:\n{tasks}")
        with pytest.raises(ConfigError) as caught:
            plan.build(config.load(str(tmp_path / "config.yaml")))
        return [problem.what for problem in caught.value.problems]

    assert planned("  - {id: a, run: x, needs: [b]}\n") == ["needs: there is no task 'b'"]
    assert planned("  - {id: a, run: x, needs: [a]}\n") == ["needs: these wait for each other: a needs a"]
    assert planned(
        "  - {id: a, run: x, needs: [c]}\n  - {id: b, run: x, needs: [a]}\n  - {id: c, run: x, needs: [b]}\n"
        "  - {id: d, run: x, needs: [d]}\n  - {id: e, run: x, needs: [a]}\n"
    ) in (
        ["needs: these wait for each other: a needs c needs b needs a", "needs: these wait for each other: d needs d"],
        ["needs: these wait for each other: b needs a needs c needs b", "needs: these wait for each other: d needs d"],
        ["needs: these wait for each other: c needs b needs a needs c", "needs: these wait for each other: d needs d"],
    )


def test_whom_to_tell_is_checked_like_all_else_and_a_secret_url_is_not_shown(tmp_path: Path) -> None:
    """
    The message says what a URL should be, not what was written.
    """
    said = refused(
        tmp_path,
        """\
alert: {run: x}
ping: {start: "ftp://host/secret", finish: "https://user:secret@host/", end: "https://host/"}
keep_awake: ""
tasks: [{id: a, run: x}]
""",
    )
    assert [line.partition(";")[0] for line in said] == [
        "config.yaml:1:8: alert: wants a text for the shell or a list of arguments, found a mapping",
        "config.yaml:2:15: start: this is not the URL of a page",
        "config.yaml:2:44: finish: this is not the URL of a page",
        "config.yaml:2:73: unknown key 'end'",
        "config.yaml:3:13: keep_awake: needs a value",
    ]
    assert "secret" not in "".join(said)
    said = refused(
        tmp_path,
        'ping: {start: "{secret:url}x", finish: "http://{item}/{secret:x}", fail: "{secret:a b}"}\n'
        "tasks: [{id: a, run: x}]\n",
    )
    assert [line.partition(";")[0] for line in said] == [
        "config.yaml:1:40: finish: braces in this URL stand for nothing",
        "config.yaml:1:74: fail: braces in this URL stand for nothing",
    ]
    for key in ("alert: x", "ping: {}", "keep_awake: x"):
        (line,) = refused(tmp_path, "tasks: [{id: a, run: x}]\n", extra=f"{key}\n")
        assert "has no place in a drop-in" in line
