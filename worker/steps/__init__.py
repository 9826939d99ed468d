"""Programs of ours that run as a step's process: `http:` and `python:` steps.

Each is started as `python -I -m worker.steps.NAME SPEC`, or by main(); SPEC is a JSON object, or "@" and the path
of a file that holds one, as the worker starts them: everybody on the machine can read a command line, and what a list
says to them may be a secret.  In its texts, `{secret:NAME}`, `{item}` and `{key}` stand for the secret of that name,
$AGENT_ITEM and $AGENT_KEY; other braces stay.
"""

from __future__ import annotations

import json
import os
import re
import sys

from worker import doubt, step

TYPE_CHECKING = False  # see worker/step.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

IN_FILE = "@"  # comes before the path of a SPEC
_PLACEHOLDER = re.compile(r"\{(item|key|secret:([A-Za-z0-9_][A-Za-z0-9_.-]*))\}")


class StepError(Exception):
    """The step has failed; the message says why."""

    exit_status = 1
    doubtful_status = doubt.FAILED
    clear_status = 0  # where there is no doubt; 0: what `run` was given

    def __init__(self, message: str, unsure: bool = False) -> None:
        """`unsure`: what the step was to do may have happened all the same."""
        super().__init__(message)
        self.unsure = unsure


class NotNow(StepError):
    """The step cannot be done now and may be tried again later."""

    exit_status = step.AGAIN
    doubtful_status, clear_status = doubt.NOT_NOW, step.AGAIN


class NoSuchHost(NotNow):
    """As NotNow, but it makes little sense to wait for long."""

    clear_status = doubt.NO_HOST


def main(arguments: list[str]) -> NoReturn:
    """Run the program that the first of `arguments` names on the SPEC that follows, and exit."""
    failed = StepError.exit_status
    if arguments[0] == "http":
        failed = doubt.REFUSED
        from worker.steps.http import fetch as program
    elif arguments[0] == "python":
        from worker.steps.python import call as program
    else:
        from worker.steps.matches import search as program
    sys.exit(run(program, arguments[1:], failed))


def run(program: Callable[[dict[str, Any]], None], arguments: list[str], failed: int = StepError.exit_status) -> int:
    """Run `program` on the one SPEC in `arguments`; return the exit status, the reason being on stderr.

    If the SPEC has "unsure" in it, as the worker's has, it says whether the end leaves a doubt, see
    worker/doubt.py: `failed` stands for a failure that leaves none.
    """
    asked = False
    try:
        spec = _spec(arguments)
        asked = "unsure" in spec
        program(spec)
    except StepError as exc:
        print(printable(mask(str(exc))), file=sys.stderr, flush=True)
        if not asked:
            return exc.exit_status
        return exc.doubtful_status if exc.unsure else exc.clear_status or failed
    return 0


def printable(text: str) -> str:
    """Return `text`, some of which a server may have written, without what could move a terminal's cursor.

    Lines stay lines; what else is no character to print is U+FFFD.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def fill(value: Any, lookup: Callable[[str], str]) -> Any:
    """Return `value` with each placeholder in its texts, however deep, replaced by what `lookup` returns."""
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda found: lookup(found[1]), value)
    if isinstance(value, dict):
        return {name: fill(inner, lookup) for name, inner in value.items()}
    if isinstance(value, list):
        return [fill(inner, lookup) for inner in value]
    return value


def fill_url(template: str, lookup: Callable[[str], str]) -> str:
    """Return a URL with its placeholders filled in: percent-encoded, except for one at the start."""
    from urllib.parse import quote

    head, brace, rest = template.partition("}") if template.startswith("{") else ("", "", template)
    return str(fill(head + brace, lookup)) + str(fill(rest, lambda name: quote(lookup(name), safe="")))


def lookup(name: str) -> str:
    """Return what the placeholder `{name}` stands for, or raise StepError."""
    if name.startswith("secret:"):
        try:
            return step.secret(name.removeprefix("secret:"))
        except LookupError as exc:
            raise StepError(str(exc)) from None
    found = os.environ.get(f"AGENT_{name.upper()}")
    if found is None:
        raise StepError(f"'{{{name}}}': this step has no {name}")
    return found


def secrets(value: Any) -> list[str]:
    """Return the names of the secrets that `value` refers to, for a look at them before they are needed."""
    names: dict[str, None] = {}

    def note(name: str) -> str:
        if name.startswith("secret:"):
            names[name.removeprefix("secret:")] = None
        return ""

    fill(value, note)
    return list(names)


def mask(text: str) -> str:
    """Return `text` with every secret of this step replaced by its placeholder, as in a URL or JSON too."""
    from urllib.parse import quote, quote_plus

    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    for name in sorted(os.listdir(folder)) if folder and os.path.isdir(folder) else []:
        try:
            value = step.secret(name)
        except (LookupError, ValueError, OSError):
            continue  # not text, so in no message either
        for form in {value, quote(value, ""), quote(value), quote_plus(value), json.dumps(value)[1:-1]} - {""}:
            text = text.replace(form, f"{{secret:{name}}}")
    return text


def _spec(arguments: list[str]) -> dict[str, Any]:
    try:
        (text,) = arguments
        if text.startswith(IN_FILE):
            with open(text.removeprefix(IN_FILE), encoding="utf-8") as file:
                text = file.read()
        spec = json.loads(text)
    except OSError as exc:
        raise StepError(f"its arguments cannot be read: {exc}") from None
    except ValueError as exc:
        raise StepError(f"needs one argument, a JSON object ({exc})") from None
    if not isinstance(spec, dict):
        raise StepError("needs one argument, a JSON object")
    return spec
