"""A `python:` step's process: calls one function of the user's and prints what it returns as JSON.

SPEC: {call: "module:function", args: {...}, cwd: FOLDER, unsure: [CODE, ...]}.  `cwd`, by default where the process
was started, comes first on sys.path; then the packages of the worker's own interpreter.  A project with an
environment of its own is better run as `run: [venv/bin/python, -m, ...]`.

Standard output is the result and nothing else: what the function or its children print goes to standard
error.  None prints nothing.  An async function is awaited.  SystemExit keeps its code; step.again() works.  A
time-out or a broken connection that is raised leaves a doubt (worker/doubt.py), also with one of the statuses
`unsure` in it.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys

from worker import doubt, plural
from worker.steps import StepError, fill, lookup, run

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Of a traceback's lines.
_HEAD, _TAIL = 4, 16
_MACHINERY = (__file__, "<frozen ", importlib.__file__, os.path.join(os.path.dirname(os.__file__), "asyncio"))


def problem(call: str, cwd: str) -> str | None:
    """Return what is wrong with `call`, as far as can be seen without importing the user's code, or None."""
    if not _is_name(call):
        return f"'{call}' does not name a function; write it as 'package.module:function'"
    from importlib import machinery, util

    top = call.partition(":")[0].partition(".")[0]
    from worker import distant

    if not distant.answers(cwd) or not os.path.isdir(cwd):
        return None  # an earlier step may make it
    if top in sys.modules or machinery.PathFinder.find_spec(top, [cwd]) or util.find_spec(top):
        return None
    return _missing(top, cwd)


def call(spec: dict[str, Any]) -> None:
    """Call the function and print its result; raise StepError with a short traceback if it raises."""
    results = _keep_output_clean()
    faulthandler.enable()  # SIGABRT, as from a watchdog, prints where every thread is
    target, args = spec.get("call"), spec.get("args") or {}
    if not isinstance(target, str) or not _is_name(target) or not isinstance(args, dict):
        raise StepError("needs {call: 'package.module:function', args: {NAME: VALUE}}")
    sys.path.insert(0, os.path.abspath(spec.get("cwd") or "."))
    args = fill(args, lookup)
    try:
        result = _find(*target.split(":"))(**args)
        if hasattr(result, "__await__"):
            result = _wait_for(result)
    except StepError:
        raise
    except Exception as exc:
        raise StepError(_short_traceback(exc), doubt.of_error(exc, spec.get("unsure", ()))) from None
    if result is not None:
        _print(result, target, results)


def _keep_output_clean() -> int:
    """Return a descriptor of standard output, while descriptor 1 itself is standard error from now on."""
    results = os.dup(1)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a line is a sign of life
    return results


def _find(module: str, path: str) -> Callable[..., Any]:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name and f"{module}.".startswith(f"{exc.name}."):
            raise StepError(_missing(exc.name, sys.path[0])) from None
        raise
    where = getattr(found, "__file__", None) or module
    for name in path.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise StepError(f"there is no function '{path}' in {where}")
    function: Callable[..., Any] = found
    return function


def _is_name(call: str) -> bool:
    return call.count(":") == 1 and all(map(str.isidentifier, call.replace(":", ".").split(".")))


def _missing(module: str, cwd: str) -> str:
    return f"there is no module '{module}' in {cwd}, nor among the installed packages"


def _wait_for(result: Any) -> Any:
    import asyncio

    async def main() -> Any:
        return await result

    return asyncio.run(main())


def _print(result: Any, target: str, results: int) -> None:
    try:
        data = json.dumps(result, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as exc:
        raise StepError(f"{target} returned what JSON cannot hold: {exc}", unsure=True) from None
    try:
        with open(results, "wb") as file:
            file.write(data)
    except OSError as exc:
        raise StepError(f"what {target} returned cannot be written: {exc.strerror}", unsure=True) from None


def _short_traceback(exc: Exception) -> str:
    """Return the traceback without the frames that are ours or machinery of Python's, cut in its middle."""
    import traceback

    report = traceback.TracebackException.from_exception(exc)
    chain = [report]
    for link in chain:
        link.stack = traceback.StackSummary.from_list(
            [frame for frame in link.stack if not frame.filename.startswith(_MACHINERY)]
        )
        chain += [other for other in (link.__cause__, link.__context__) if other]
    lines = "".join(report.format() if report.stack else report.format_exception_only()).splitlines()
    if len(lines) > _HEAD + _TAIL:
        lines[_HEAD:-_TAIL] = [f"[{plural.of(len(lines) - _HEAD - _TAIL, 'line')} left out]"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(call, sys.argv[1:]))
