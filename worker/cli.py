"""agentctl: parse the command line, call one function, print.

Each command imports what it needs when it is called, so that the daemon's start is not slowed by the others.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from worker import __version__, startup, stepcli, terminal
from worker.errors import FAULT, OK, STATE_UNUSABLE, AgentError, ConfigError, Problem
from worker.ledger import LedgerCorrupt, StorageFull

if TYPE_CHECKING:
    from worker.installed import Installed

CONFIG_FOLDER = "/etc/agent"
STATE_FOLDER = "/var/lib"
DEFAULT_INSTANCE = "agent"
_RESULT_MAX = 64 * 2**20  # bytes that `settle --done -` takes


def main(arguments: Sequence[str]) -> int:
    """Run one command; return its exit status.  What a user did wrong is one line, never a traceback."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.command
    if command in (_settle, _restore, _alert, _pause, _resume) or (command is _budget and options.add):
        startup.let_output_fail()
    if command is _run:  # its lines are the journal's, which escapes them
        return _done(command, options)
    with terminal.kept_safe():
        return _done(command, options)


def _done(command: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Carry out a command; return its exit status, with what a user did wrong said in one line."""
    try:
        return command(options)
    except AgentError as exc:
        print(exc, file=sys.stderr)
        return exc.exit_status
    except LedgerCorrupt as exc:
        print(f"the ledger cannot be read as one: {exc}; starting the agent sets it aside", file=sys.stderr)
        return STATE_UNUSABLE
    except StorageFull as exc:
        print(f"the ledger cannot be read or written now: {exc}; try again", file=sys.stderr)
        return STATE_UNUSABLE
    except BrokenPipeError:
        startup.give_up_output()  # the reader has seen enough: `agentctl list | head`
        return OK
    except KeyboardInterrupt:
        return FAULT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="agentctl",
        description="Work through a YAML list of tasks, and see how that stands.",
        epilog=f"inside a step:\n{stepcli.listing()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"agent {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="work through the list (this is the daemon)")
    run.add_argument("config", nargs="?", metavar="CONFIG", help="the task list")
    _add_state(run, "; with CONFIG ~/.local/state/agent/RUN")
    run.set_defaults(command=_run)

    for name, command, text in (
        ("check", _check, "say what is wrong with a task list"),
        ("plan", _plan, "print the steps of a task list, in order"),
    ):
        sub = commands.add_parser(name, help=text)
        sub.add_argument("config", nargs="?", metavar="CONFIG", help="the task list")
        sub.add_argument("--instance", default="", metavar="NAME", help="the list of agent@NAME")
        sub.set_defaults(command=command)

    status = commands.add_parser("status", help="is it running, is it getting on, is it done")
    status.add_argument("--json", action="store_true", help="as one JSON object")
    _add_state(status)
    status.set_defaults(command=_status)

    steps = commands.add_parser("list", help="print every step and where it stands")
    _add_state(steps)
    steps.set_defaults(command=_list)

    log = commands.add_parser("log", help="print what a step wrote, attempt by attempt")
    log.add_argument("step", metavar="STEP")
    log.add_argument("--output", action="store_true", help="the result (standard output) byte for byte, instead")
    _add_state(log)
    log.set_defaults(command=_log)

    _add_telling(commands.add_parser)
    _add_pausing(commands.add_parser)
    _add_moving(commands.add_parser)
    _add_outside(commands.add_parser)
    return parser


def _add_telling(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add what a person tells the run."""
    budget = add("budget", help="print what the run has used of its budget, or let it have more")
    budget.add_argument(
        "--add", action="append", default=[], metavar="NAME=AMOUNT", help="so much more: restarts=5 hours=2 spend=10"
    )
    budget.add_argument("--id", help="with --add: a name for it, under which it counts once however often it is said")
    _add_state(budget)
    budget.set_defaults(command=_budget)

    settle = add("settle", help="say whether what was cut off had happened: a step, or an effect")
    settle.add_argument("name", metavar="STEP|KEY")
    said = settle.add_mutually_exclusive_group(required=True)
    said.add_argument("--done", nargs="?", const="", metavar="RESULT", help="it had, with this result (-: from stdin)")
    said.add_argument("--redo", action="store_true", help="it had not: it is done again")
    _add_state(settle)
    settle.set_defaults(command=_settle)


def _add_pausing(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add what holds the agent still."""
    pause = add("pause", help="begin no step, and hold those at work still, until 'agentctl resume'")
    pause.add_argument("--finish", action="store_true", help="let the steps at work go on to their end")
    _add_state(pause)
    pause.set_defaults(command=_pause)

    resume = add("resume", help="go on after 'agentctl pause'")
    _add_state(resume)
    resume.set_defaults(command=_resume)


def _add_moving(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add what takes the run to another machine."""
    export = add("export", help="write the run as it stands to a file, to go on from elsewhere")
    export.add_argument(
        "file", nargs="?", default="-", metavar="FILE", help="NAME.db: the ledger; - or none: to stdout"
    )
    _add_state(export)
    export.set_defaults(command=_export)

    restore = add("restore", help="go on from a checkpoint or a ledger that came from elsewhere")
    restore.add_argument("file", metavar="FILE", help="checkpoint.json or ledger.db (-: from stdin)")
    restore.add_argument("--force", action="store_true", help="also if what is here knows more; it is set aside")
    _add_state(restore)
    restore.set_defaults(command=_restore)

    verify = add("verify-copy", help="say whether a run could go on from a copy, and how old it is")
    verify.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint, a ledger, or a folder with both")
    _add_state(verify)
    verify.set_defaults(command=_verify)


def _add_outside(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add what looks at the worker from outside."""
    alert = add("alert", help="tell whom 'alert:' names if a unit is down (agent-alert@.service does)")
    alert.add_argument(
        "unit",
        nargs="?",
        default=DEFAULT_INSTANCE,
        metavar="UNIT",
        help="agent, or agent@NAME; with --test also a task list",
    )
    alert.add_argument(
        "--test", action="store_true", help="try it once, whatever state the run is in: nothing is noted"
    )
    alert.set_defaults(command=_alert)

    supervise = add("supervise", help="keep a run alive from outside, on machines that may be lost")
    supervise.add_argument("sandbox", metavar="FILE", help="what is to run, and on whose machines")
    supervise.add_argument("--state", metavar="DIR", help="where the supervisor keeps its record and its copy")
    supervise.add_argument("--status", action="store_true", help="say how it stands, and end")
    supervise.add_argument("--test-alert", action="store_true", help="try 'alert:' and 'ping:' of the file, and end")
    supervise.add_argument("--json", action="store_true", help="with --status: as one JSON object")
    supervise.set_defaults(command=_supervise)


def _add_state(parser: argparse.ArgumentParser, besides: str = "") -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--state", metavar="DIR", help=f"the state folder (default: the installed agent's{besides})")
    where.add_argument("--instance", default="", metavar="NAME", help="the installed agent@NAME")


def _absolute(path: str) -> str:
    """Return the whole path; raises ConfigError where there is no folder from which a part of one could count."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        what = f"'{path}' counts from the folder in which this was called, and that is gone"
        raise ConfigError([Problem(None, what, "cd elsewhere, or give the whole path")]) from None


def _config_path(options: argparse.Namespace) -> str:
    if options.config:
        return _absolute(options.config)
    return f"{CONFIG_FOLDER}/{options.instance or 'config'}.yaml"


def unit(instance: str) -> str:
    """Return the name of the installed unit, which its folders bear as well."""
    return f"{DEFAULT_INSTANCE}@{instance}" if instance else DEFAULT_INSTANCE


def _installed(options: argparse.Namespace) -> "Installed | None":
    """Return the unit that is asked about, None for a state folder that is no unit's."""
    if options.state:
        return None
    from worker import installed

    config_path = f"{CONFIG_FOLDER}/{options.instance or 'config'}.yaml"
    return installed.find(unit(options.instance), config_path, _state_folder(options))


def _state_folder(options: argparse.Namespace) -> str:
    if options.state:
        return _absolute(options.state)
    return f"{STATE_FOLDER}/{unit(options.instance)}"


def _foreground_state(options: argparse.Namespace, run: str, environ: Mapping[str, str]) -> str:
    """Return the state folder of a worker: named, given by systemd, the installed one, or the user's own."""
    if options.state or not (options.config or "STATE_DIRECTORY" in environ):
        return _state_folder(options)
    if "STATE_DIRECTORY" in environ:
        return _absolute(environ["STATE_DIRECTORY"].split(":")[0])
    return os.path.join(_own_state(environ), "agent", run)


def _own_state(environ: Mapping[str, str]) -> str:
    """Return where a person's programs keep their state.  Raises ConfigError where that cannot be known."""
    base = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    if base.startswith("~"):
        what = "there is no folder for the state: HOME is not set, and this user has no entry in the user database"
        raise ConfigError([Problem(None, what, "name one with --state DIR")])
    return _absolute(base)


def _run(options: argparse.Namespace) -> int:
    from worker import daemon

    return daemon.run(_config_path(options), lambda run: _foreground_state(options, run, os.environ), os.environ)


def _check(options: argparse.Namespace) -> int:
    from worker import report

    return report.check(_config_path(options), unit(options.instance), installed=not options.config)


def _plan(options: argparse.Namespace) -> int:
    from worker import report

    return report.show_plan(_config_path(options))


def _enter(options: argparse.Namespace) -> tuple[str, "Installed | None"]:
    """Return the state folder and the unit that are asked about; from here on we have its owner's rights, for good."""
    from worker import privileges

    root, unit = _state_folder(options), _installed(options)
    privileges.give_up(root)
    return root, unit


def _status(options: argparse.Namespace) -> int:
    from worker import report

    return report.show_status(*_enter(options), as_json=options.json)


def _list(options: argparse.Namespace) -> int:
    from worker import report

    return report.show_list(*_enter(options))


def _log(options: argparse.Namespace) -> int:
    from worker import report

    return report.show_log(*_enter(options), options.step, output=options.output)


def _budget(options: argparse.Namespace) -> int:
    from worker import grant, outside

    if options.id is not None and not options.add:
        raise AgentError("--id names what --add gives", "say what: agentctl budget --add spend=10 --id NAME")
    who = outside.user()
    where = _enter(options)
    print(grant.from_outside(*where, options.add, options.id, who) if options.add else grant.show(*where))
    return OK


def _given() -> bytes:
    """Return a result from standard input.  Raises AgentError if it has no end."""
    result = sys.stdin.buffer.read(_RESULT_MAX + 1)
    if len(result) > _RESULT_MAX:
        raise AgentError(
            f"standard input has more than {_RESULT_MAX // 2**20} MB, which is no result", "check the pipe"
        )
    return result


def _settle(options: argparse.Namespace) -> int:
    from worker import outside, settle

    result: bytes | None = None
    if not options.redo:
        result = _given() if options.done == "-" else os.fsencode(options.done)
    who = outside.user()
    print(settle.from_outside(*_enter(options), options.name, result, who))
    return OK


def _pause(options: argparse.Namespace) -> int:
    from worker import outside, pause

    who = outside.user()
    print(pause.from_outside(*_enter(options), pause.FINISH if options.finish else pause.HOLD, who))
    return OK


def _resume(options: argparse.Namespace) -> int:
    from worker import outside, pause

    who = outside.user()
    print(pause.from_outside(*_enter(options), None, who))
    return OK


def _export(options: argparse.Namespace) -> int:
    from worker import export

    said = export.export(options.file, _state_folder(options), _installed(options))
    if said:
        print(said)
    return OK


def _restore(options: argparse.Namespace) -> int:
    from worker import restore

    for line in restore.restore(options.file, _state_folder(options), _installed(options), force=options.force):
        print(line)
    return OK


def _verify(options: argparse.Namespace) -> int:
    from worker import verify

    return verify.verify(options.paths, _state_folder(options), _installed(options))


def _alert(options: argparse.Namespace) -> int:
    from worker import postmortem, privileges, rehearsal, told

    if options.test and ("/" in options.unit or options.unit.endswith((".yaml", ".yml"))):
        return rehearsal.of_list(options.unit, os.environ)
    name = str(options.unit).removesuffix(".service")
    instance = name.partition("@")[2]
    if name != unit(instance):
        raise AgentError(f"'{name}' is no unit of the agent's", f"name {DEFAULT_INSTANCE} or {DEFAULT_INSTANCE}@NAME")
    if options.test:
        return rehearsal.ask(name)
    config_path = f"{CONFIG_FOLDER}/{instance or 'config'}.yaml"
    root, folder = f"{STATE_FOLDER}/{name}", f"{told.FOLDER}/{name}"
    for place in (root, folder):  # what it runs may be a step's word, or what the user has left who tells
        privileges.give_up(place)
    return postmortem.tell(name, config_path, root, folder, os.environ)


def _supervise(options: argparse.Namespace) -> int:
    from worker.supervise import daemon

    sandbox = _absolute(options.sandbox)
    named = options.state or os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    of_unit = os.path.dirname(sandbox) == f"{CONFIG_FOLDER}/supervisor"  # what agent-supervisor@ keeps alive

    def folder(name: str) -> str:
        if named:
            return _absolute(named)
        if of_unit:
            return f"{STATE_FOLDER}/agent-supervisor/{os.path.splitext(os.path.basename(sandbox))[0]}"
        return os.path.join(_own_state(os.environ), "agent-supervisor", name)

    if options.test_alert:
        return daemon.rehearse(sandbox, os.environ)
    if options.status:
        return daemon.show_status(sandbox, folder, options.json, chosen=bool(named or of_unit))
    return daemon.run(sandbox, folder, os.environ, chosen=bool(named or of_unit))
