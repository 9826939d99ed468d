"""What agentctl shows: the state of a run seen from outside, without disturbing it.

The ledger is read without a lock; a living worker is asked through its control socket.
"""

import contextlib
import io
import json
import os
import re
import sys
from typing import Any

from worker import (
    begun,
    budget,
    clock,
    config,
    confine,
    control,
    copies,
    files,
    folder,
    late,
    ledger,
    member,
    pause,
    plan,
    plural,
    sandbox,
    shelved,
    startup,
    status,
    swap,
    unit,
)
from worker import board as boards
from worker.begun import Unlisted
from worker.budget import Budget, number
from worker.clock import Now
from worker.errors import OK, OUT_OF_BUDGET, AgentError, ConfigError, StateError
from worker.folder import Places
from worker.installed import Installed
from worker.ledger import Ledger, Row
from worker.ledger.effects import UNKNOWN
from worker.ledger.sqlite import SqliteLedger
from worker.signs import printable
from worker.task import Glob, Lines, Task
from worker.timespan import show

_SECRET_HEADER = re.compile("authorization|cookie|key|token|secret|password", re.IGNORECASE)


def check(path: str, unit_name: str, installed: bool) -> int:
    """Say what is wrong with the task list at `path`, or that nothing is."""
    settings = config.load(path)
    steps = plan.build(settings)
    if installed:
        problems = unit.folder_problems(steps, unit_name) + unit.awake_problems(settings.keep_awake, unit_name)
        problems += unit.ping_problems(settings.contact.ping.secrets, settings.ping_mark, unit_name)
    else:
        problems = sandbox.folder_problems(steps) + sandbox.awake_problems(settings.keep_awake)
    if problems:
        raise ConfigError(problems)
    for problem in steps.empty:
        print(problem, file=sys.stderr)
    for hint in _hints(settings, steps):
        print(f"{path}: {hint}", file=sys.stderr)
    print(
        f"{path}: {plural.of(len(settings.tasks), 'task')}, {plural.of(len(steps.steps), 'step')}, run '{settings.run}'"
    )
    for line in confine.describe(settings.tasks, installed):
        print(line)
    return OK


def _hints(settings: config.Config, steps: plan.Plan) -> list[str]:
    """Return what is no mistake, and what most people would want otherwise."""
    hints = [_literal_secret(entry) for entry in steps.tasks.values() if entry.http is not None]
    if settings.ledger is not None:
        with contextlib.suppress(StateError):  # no psycopg here, or no address: its worker says so
            hints.append(member.exposure(settings))
    return [hint for hint in hints if hint]


def _literal_secret(entry: Task) -> str | None:
    """Return what to do about a header or a URL of a request that looks like a secret and stands in the list."""
    request = json.loads(entry.http or "{}")
    for name, value in request.get("headers", {}).items():
        if _SECRET_HEADER.search(name) and name.lower() != "idempotency-key" and value and "{secret:" not in value:
            what = f"the header '{printable(name)}' looks like a secret that everybody who may read the list can read"
            return f"{entry.id}: http: {what}; write {{secret:NAME}} in it, and NAME into 'secrets:'"
    if re.match(r"[a-z]+://[^/?#{}]*:[^/?#{}]+@", request["url"], re.IGNORECASE):
        what = "its URL has a password in it, which everybody who may read the list can read"
        return f"{entry.id}: http: {what}; write {{secret:NAME}} in its place, and NAME into 'secrets:'"
    return None


def show_plan(path: str) -> int:
    """Print the steps of the task list at `path` in order, each with its command."""
    steps = plan.build(config.load(path))
    for problem in steps.empty:
        print(problem, file=sys.stderr)
    for step in steps.steps:
        first, *more = _work(step).strip().splitlines()
        if step.task.id in steps.late and step.item is None:
            print(f"{step.id}\t(one for each {_items(step)}, once what it needs is done)")
            continue
        print(f"{step.id}\t{first}{' ...' if more else ''}")
    return OK


def _items(step: plan.Step) -> str:
    foreach = step.task.foreach
    if isinstance(foreach, Lines):
        return f"line of {foreach.path}"
    return f"match of {foreach.pattern}" if isinstance(foreach, Glob) else "item"


def _work(step: plan.Step) -> str:
    if step.task.http is not None:
        request = json.loads(step.task.http)
        return " ".join(["http:", *(request[key] for key in ("method", "url") if key in request)])
    if step.task.python is not None:
        return f"python: {step.task.python}"
    return step.task.run if isinstance(step.task.run, str) else " ".join(step.argv())


def show_status(root: str, installed: Installed | None, as_json: bool) -> int:
    """Print how the run in the state folder `root` stands."""
    found = look(root, installed)
    if installed is not None:
        found["unit"] = unit.state(installed.name)
        absent, failed = found["worker"]["state"] == "absent", (found["unit"] or {}).get("failed")
        if absent and failed and found["unit"]["status"] != OUT_OF_BUDGET:
            found["status"] = "failed"  # whatever an earlier start had achieved: the last one did not work
    found["other_runs"] = [entry._asdict() for entry in shelved.doubts(root)]
    paused = pause.read(root)
    found["paused"] = None if paused is None else paused._asdict()
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=startup.json_ascii()))
    else:
        _print_status(found)
        if paused is not None:
            print(f"{printable(str(paused))}; to go on: {pause.command(root, installed)}")
    return OK


def look(root: str, installed: Installed | None) -> dict[str, Any]:
    """Return how the run in `root` stands: what its living worker says, else what the ledger says.

    `worker.state` is "active", "silent" (it lives and does not answer: stopped or hanging), "closed" (it lives, and
    does not answer this user) or "absent".
    """
    pid, state = folder.holder(root), "absent"
    if pid is not None:
        try:
            answer, state = control.ask(Places("", root, folder.runtime(root)).control), "silent"
        except PermissionError:
            answer, state = None, "closed"
        except OSError:
            answer, state = None, "silent"
        if answer is not None and _can_be_shown(answer):
            return answer
    with contextlib.closing(open_ledger(root, installed)) as store:
        return _from_ledger(store, pid, root, state)


def _can_be_shown(answer: dict[str, Any]) -> bool:
    """Return whether an answer is a worker's: a step may have given it in the worker's place."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _print_status(answer)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return False
    return True


def open_ledger(root: str, installed: Installed | None, writable: bool = False) -> Ledger:
    """Return the ledger of the state folder `root`; whoever wants to write holds the folder's lock.

    Raises StateError with what to do when there is none, or it cannot be read.
    """
    path = Places("", root, "").ledger
    try:
        shared = member.look(root, installed, writable)
        if shared is not None:
            return shared
        return SqliteLedger.open(path, read_only=not writable)
    except FileNotFoundError:
        if not os.access(root, os.X_OK) and os.path.isdir(root):
            raise StateError(f"{root}: may not be read by this user", "use sudo, or join its group") from None
        command = f"systemctl start {installed.name}" if installed else f"agentctl run LIST --state {root}"
        if swap.pending(root):
            raise StateError(f"{root}: a restore was cut off in the middle", f"this finishes it: {command}") from None
        raise StateError(f"{root}: no run has been started here", f"start one: {command}") from None
    except ledger.LedgerAway as exc:
        raise StateError(
            f"the ledger's server cannot be reached: {exc}", "try again; the run goes on by itself"
        ) from exc
    except ledger.StorageFull as exc:
        raise StateError(f"{path}: cannot be read: {exc}", "use sudo, or join its group") from exc
    except ledger.LedgerCorrupt as exc:
        raise StateError(f"{path}: cannot be read: {exc}", "starting the agent sets it aside") from exc


def _from_ledger(store: Ledger, pid: int | None, root: str, worker: str) -> dict[str, Any]:
    """Return the same facts as a worker's own answer, from the rows alone."""
    rows = list(store.rows())
    current = [
        {"step": row.step, "attempt": row.number, "since": clock.stamp(row.started), "status": None}
        | ({"worker": row.worker} if row.worker else {})
        for row in rows
        if row.outcome is None and (pid is not None or store.shared)
    ]
    newest = max((row.ended or row.started for row in rows), default=None)
    state = store.fact("state") or "running"
    if pid is None and state == "running":
        state = "stopped"
    unlisted: list[Unlisted] = []
    try:
        board, unlisted = _board(store, rows, pid is not None)
        counts = status.counts(board)
        if state == "done" and counts["done"] == counts["total"] and store.fact("total"):
            counts = _counts_without_list(store, rows)  # what has left the world since was done all the same
    except AgentError:  # the list is gone or wrong by now: as it was when the worker last read it
        counts = _counts_without_list(store, rows)
    counts["waiting"] = max(0, counts["waiting"] - sum(not row.get("worker") for row in current))
    return {
        "run": store.fact("run"),
        "status": state,
        "steps": counts,
        "outcomes": json.loads(store.fact("outcomes") or "{}"),
        "current": current,
        "unlisted": [entry._asdict() for entry in unlisted],
        "waiting_for": None,
        "updated": clock.stamp(newest) if newest else None,
        "last_sign_age": None,
        "budget": budget.read(store, limits_of(store) or Budget()).show(),
        "copy": copies.describe(copies.read(root, store.fact("run") or ""), clock.wall()),
        "worker": {
            "state": worker,
            "pid": pid,
            "version": store.fact("version"),
        },
    }


def _counts_without_list(store: Ledger, rows: list[Row]) -> dict[str, int]:
    """Return the counts as far as the rows tell them, and the total as it was when a worker last read the list."""
    total, last = int(store.fact("total") or 0), _last(rows)
    done = max(0, sum(row.outcome == ledger.DONE for row in last.values()) - int(store.fact("done_left") or 0))
    counted_from = int(store.fact("counted_from") or 0)
    failed = sum(row.final and row.outcome != ledger.DONE and row.seq > counted_from for row in last.values())
    unknown = sum(row.outcome == ledger.UNKNOWN for row in last.values())
    if total:  # else no worker has read a list since a restore
        done = min(done, total)
        unknown = min(unknown, total - done)
        failed = min(failed, total - done - unknown)
    counts = {"total": total, "done": done, "failed": failed, "skipped": 0, "unknown": unknown, "elsewhere": 0}
    return counts | {"waiting": max(0, total - done - failed - unknown)}


def _last(rows: list[Row]) -> dict[str, Row]:
    """Return the last attempt of each step, of a done one that which did it."""
    last: dict[str, Row] = {}
    for row in rows:
        if row.outcome == ledger.DONE or row.step not in last or last[row.step].outcome != ledger.DONE:
            last[row.step] = row
    return last


def limits_of(store: Ledger) -> Budget | None:
    """Return what the run may use, by the configuration as it is now; None if that cannot be read."""
    try:
        return _settings(store).budget
    except AgentError:
        return None


def _settings(store: Ledger) -> config.Config:
    """Return the list as it is now; raises AgentError if it cannot be read, or is not known to be that of this run."""
    path = store.fact("config")
    if not path:
        raise AgentError("no worker has read it since the restore")
    settings = config.load(files.from_text(path))
    if settings.run != store.fact("run"):
        raise AgentError(f"{path}: is that of the run '{settings.run}' by now")
    return settings


def _print_status(found: dict[str, Any]) -> None:
    steps, worker = found["steps"], found["worker"]
    of = f"/{steps['total']}" if steps["total"] else ""  # no worker has read a list since a restore
    line = f"run {found['run']}: {found['status']}, {steps['done']}{of} done"
    if steps["failed"]:
        line += f", {steps['failed']} failed"
    if steps["unknown"]:
        line += f", {steps['unknown']} unknown"
    print(line)
    pid = f", process {worker['pid']}" if worker["pid"] else ""
    version = f", version {worker['version']}" if worker["version"] else ""
    print(f"worker: {_WORKER[worker['state']]}{pid}{version}")
    for step in found["current"]:
        said = f" · {printable(step['status'])}" if step["status"] else ""
        age = step.get("last_sign_age")
        sign = f" · last sign of life {show(age)} ago" if age is not None else ""
        whose = f" with {step['worker']}" if step.get("worker") else ""
        print(f"  {step['step']}, attempt {step['attempt']}{whose}, since {step['since']}{sign}{said}")
    for step in found.get("unlisted", ()):
        doubt = "; nobody knows whether it has happened" if step["doubt"] else ""
        how = f"attempt {step['attempt']} {step['outcome']}: {step['cause']}{doubt}"
        print(f"no longer in the list: {step['step']}, {how}")
    for step in found.get("other_runs", ()):
        print(shelved.Shelved(**step).line())
    if any(found["outcomes"].values()):
        print("outcomes: " + ", ".join(f"{count} {name}" for name, count in found["outcomes"].items() if count))
    limited = {name: entry for name, entry in found["budget"].items() if entry["limit"] is not None}
    if limited:
        parts = (f"{number(entry['used'])} of {number(entry['limit'])} {name}" for name, entry in limited.items())
        print("budget: " + ", ".join(parts))
    if found["waiting_for"]:
        print(f"waiting for: {found['waiting_for']}")
    if found.get("copy"):
        print(f"copied: {copies.line(found['copy'])}")
    unit_state = found.get("unit")
    if unit_state and unit_state.get("hint"):
        print(f"unit: {unit_state['state']}; {unit_state['hint']}")
    print(f"updated: {found['updated'] or 'never'}")


_WORKER = {
    "active": "working",
    "silent": "does not answer (stopped, or hanging)",
    "closed": "cannot be asked by this user (use sudo); this is what the ledger knows",
    "absent": "not running",
}


def _board(store: Ledger, rows: list[Row], alive: bool) -> tuple[boards.Board, list[Unlisted]]:
    """Return where every step stands by the ledger's rows, and those that were begun and are in the list no more.

    `alive`: there is a worker, at whose steps nothing has been cut off yet.
    Raises AgentError if there is no list.
    """
    steps = late.known(plan.build(_settings(store)), store.items())
    counted_from = int(store.fact("counted_from") or 0)
    found = boards.replay(steps, rows, counted_from, Now(0.0, 0.0), store.worker)
    kept = begun.keep(late.settled(steps, found.board.due()), found.left)
    if kept is not steps:
        found = boards.replay(kept, rows, counted_from, Now(0.0, 0.0), store.worker)
    running = {row.step for row in rows if row.outcome is None and (alive or row.worker != store.worker)}
    return found.board, begun.unlisted(kept, found.left, running)


def show_list(root: str, installed: Installed | None) -> int:
    """Print every step of the list, and those the ledger knows besides, with its state."""
    store = open_ledger(root, installed)
    try:
        rows = list(store.rows())
        alive = folder.holder(root) is not None
        last = _last(rows)
        names = list(last)
        waiting = {name for name, row in last.items() if not row.final}
        doubted = {name for name, row in last.items() if row.outcome == ledger.UNKNOWN}
        unknown = [effect for effect in store.effects.all() if effect.state == UNKNOWN]
        unlisted = set[str]()
        try:
            board, left = _board(store, rows, alive)
        except AgentError as exc:
            print(f"without the task list, these are the steps tried so far: {exc}", file=sys.stderr)
        else:
            listed = [step.id for step in board.steps]
            waiting = {name for name in listed if board.state(name) == boards.WAITING}
            doubted |= {name for name in listed if board.state(name) == boards.UNKNOWN}
            doubted |= {entry.step for entry in left if entry.doubt}
            unlisted = {entry.step for entry in left}
            names = listed + [name for name in last if name not in set(listed)]
        for name in names:
            row_ = last.get(name)
            mine = row_ is not None and row_.worker == store.worker
            state = "removed" if name in unlisted else "waiting" if name in waiting else "failed"
            line = _list_line(name, row_, state, alive or not mine, name in doubted)
            print(f"{line} (no longer in the list)" if name in unlisted else line)
        for effect in unknown:
            print(f"unknown  effect '{effect.key}' of {effect.step}, since {clock.stamp(effect.at)}")
        if unknown or doubted:
            print(f"unknown: {status.settling('NAME')}", file=sys.stderr)
    finally:
        store.close()
    return OK


def _list_line(name: str, row: Row | None, state: str, alive: bool, doubted: bool) -> str:
    """Return what is printed of a step; `state`: what it is in if it is not running, done, nor doubted."""
    if row is None:
        return f"waiting  {name}"
    if row.outcome is None:
        state = "running" if alive else "cut off"
        whose = f" with {row.worker}" if row.worker else ""
        return f"{state:<8} {name}  attempt {row.number}{whose} since {clock.stamp(row.started)}"
    if row.outcome == ledger.DONE:
        return f"done     {name}  {clock.stamp(row.ended or 0)} in {_took(row)}{_tries(row)}"
    if doubted:
        return f"unknown  {name}  attempt {row.number}: {row.cause}"
    return f"{state:<8} {name}  attempt {row.number} {row.outcome}: {row.cause}"


def _took(row: Row) -> str:
    return show(row.took)


def _tries(row: Row) -> str:
    return f", attempt {row.number}" if row.number > 1 else ""


def show_log(root: str, installed: Installed | None, step: str, output: bool) -> int:
    """Print what `step` wrote to standard error, attempt by attempt; or its result, byte for byte."""
    store = open_ledger(root, installed)
    try:
        rows = [row for row in store.rows() if row.step == step]
        if not rows:
            raise AgentError(f"'{step}': no attempt of this step is in {root}", "see 'agentctl list'")
        places = Places("", root, "")
        if output:
            _copy_output(store, places, rows)
        else:
            for row in rows:
                _print_log(store, places, row)
    finally:
        store.close()
    return OK


def _copy_output(store: Ledger, places: Places, rows: list[Row]) -> None:
    """Print the result of a step byte for byte; of one that is not done, what its last attempt left."""
    row = next((row for row in rows if row.outcome == ledger.DONE), rows[-1])
    if row.outcome is None:
        raise AgentError(f"'{row.step}': attempt {row.number} has not ended; its result is kept when it has")
    _copy(store.output(row.seq), places.output(row.step))


def _print_log(store: Ledger, places: Places, row: Row) -> None:
    """Print how an attempt ended and what it wrote to standard error; a failed one's output as well."""
    sys.stdout.write(f"== attempt {row.number}, {clock.stamp(row.started)}: {_ended(row)}\n")
    sys.stdout.flush()
    log = store.log(row.seq)
    _copy(log if len(log) == row.log_size else None, places.log(row.step, row.number))
    if row.detail:
        print(f"-- what it was doing:\n{row.detail}")
    if row.outcome == ledger.DONE and row.output_size:
        print(f"-- its result, {plural.of(row.output_size, 'byte')}: agentctl log --output {row.step}")
    elif row.output_size:
        sys.stdout.write("-- standard output:\n")
        sys.stdout.flush()
        _copy(store.output(row.seq), places.output(row.step))


def _ended(row: Row) -> str:
    if row.outcome is None:
        return "running, or cut off; its log is kept when it ends"
    cause = f": {row.cause}" if row.cause else ""
    took = f" in {_took(row)}" if row.took else ""  # cut off: nobody knows
    return f"{row.outcome}{took}{cause}"


def _copy(data: bytes | None, path: str) -> None:
    """Write `data`, or the file at `path` if that is where it lies, to standard output."""
    out = sys.stdout.buffer
    if data is not None:
        out.write(data)
    else:
        try:
            with open(files.open_plain(path), "rb") as file:
                while chunk := file.read(1 << 20):
                    out.write(chunk)
        except OSError as exc:
            print(f"[{path}: {exc.strerror}]", file=sys.stderr)
    out.flush()
