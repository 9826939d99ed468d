"""checkpoint.json: the run in one portable file, always whole, enough to go on from on another machine.

Written from the ledger, atomically; when, is the keeper's to say.  One attempt a line, so that it can be read with
`grep` as well.
"""

import base64
import errno
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from itertools import compress
from operator import ne
from typing import Any, NamedTuple, TypeGuard

from worker import __version__, clock, files
from worker.budget import GRANTED, USED
from worker.ledger import DONE, OUTCOMES, Holdings, Ledger, Row, Saved
from worker.ledger.effects import CLAIMED, COMMITTED, UNKNOWN, Effect
from worker.ledger.sqlite import SqliteLedger

FORMAT = 3
LARGEST = 1 << 30  # bytes: of some four million attempts
_READABLE = (1, 2, 3)  # format 1 had no effects; format 2 no saved files, no items and no digest
# Outputs travel in the checkpoint while they are small and few; the ledger and out/ have all of them.
_OUTPUT_MAX = 4 * 1024
_OUTPUTS_MAX = 8 * 1024 * 1024
_BATCH = 1000  # attempts in one piece

# The last line is `], "sha256": "..."}`: a digest of all lines before it.
_END = re.compile(rb'\], "sha256": "([0-9a-f]{64})"\}\n')
_END_2 = b"]}\n"  # that of older formats
_SEALED = 3
_END_MAX = 100
# What each reader of JSON takes for the same number, and each ledger can hold.
_COUNT_MAX = 2**53
_MOST = {"number": 2**31, "status": 2**31}
# Of the facts about a run, those that it needs to go on elsewhere: what is used of its budget is used.
AMOUNTS = (*USED.values(), *GRANTED.values())
_DECIMAL = re.compile(r"[0-9]{1,15}(\.[0-9]+)?(e[+-]?[0-9]{1,3})?")
_FACTS = ("counted_from", "state", *AMOUNTS)
_encode = json.JSONEncoder(ensure_ascii=False).encode  # json.dumps would make one for each line


class CheckpointError(Exception):
    """The file is not a whole checkpoint; the message says what is wrong with it."""


class Header(NamedTuple):
    """What a checkpoint says of itself."""

    run: str
    revision: int
    facts: dict[str, str]
    written: str = ""


def write(path: str, run: str, ledger: Ledger) -> None:
    """Replace the checkpoint at `path` by what `ledger` holds now.  Raises OSError with the old one whole."""
    files.replace(path, chunks(run, ledger))


def chunks(run: str, ledger: Ledger) -> Iterator[bytes]:
    """Yield the checkpoint of what `ledger` holds now, piece by piece."""
    digest = hashlib.sha256()
    for chunk in _content(run, ledger):
        digest.update(chunk)
        yield chunk
    yield b'], "sha256": "%s"}\n' % digest.hexdigest().encode()


def _content(run: str, ledger: Ledger) -> Iterator[bytes]:
    """Yield every line but the last one."""
    facts = {name: value for name in _FACTS if (value := ledger.fact(name)) is not None}
    head = {
        "format": FORMAT,
        "run": run,
        "revision": ledger.revision(),
        "written": clock.stamp(clock.wall()),
        "version": __version__,
        "facts": facts,
    }
    yield json.dumps(head)[:-1].encode()
    yield from _list("effects", map(_effect_entry, ledger.effects.all()))
    yield from _list("saved", map(_saved_entry, ledger.saved()))
    items = ledger.items()
    yield from _list("items", ({"task": task, "item": item} for task, added in items.items() for item in added))
    yield b',\n"attempts": ['
    batch: list[dict[str, object]] = []
    for entry in _entries(ledger):
        batch.append(entry)
        if len(batch) == _BATCH:
            yield _lines(batch) + b","
            batch = []
    # An empty object ends the list, so that no line needs to know whether it is the last one.
    yield b",".join([*([_lines(batch)] if batch else []), b"\n{}\n"])


def _list(name: str, entries: Iterable[dict[str, object]]) -> Iterator[bytes]:
    """Yield a list of which each entry is a line."""
    yield b',\n"%s": [' % name.encode()
    for entry in entries:
        yield b"\n" + _encode(entry).encode() + b","
    yield b"\n{}]"


def _entries(ledger: Ledger) -> Iterator[dict[str, object]]:
    """Yield the attempts, each with what is not as usual, and with its result as far as there is room."""
    # On a server there they are, one question each.
    results = ledger.results(_OUTPUT_MAX) if isinstance(ledger, SqliteLedger) else iter(())
    room = 0 if ledger.shared else _OUTPUTS_MAX
    for row in ledger.rows():
        entry: dict[str, object] = dict(compress(zip(Row._fields, row, strict=True), map(ne, row, _USUAL)))
        if row.outcome == DONE and 0 < row.output_size <= min(_OUTPUT_MAX, room):
            # One question for all of them, but for the last few: those that there is no room for are not read.
            output = next(results, None) if room >= _OUTPUT_MAX else ledger.output(row.seq)
            if output is not None:
                room -= row.output_size
                entry |= _packed(output)
        yield entry


def _lines(entries: list[dict[str, object]]) -> bytes:
    """Return attempts as JSON, one a line; encoding them one by one takes twice as long."""
    # No string can have this in it: a quotation mark inside has a backslash before it.
    return b"\n" + _encode(entries)[1:-1].replace('}, {"seq": ', '},\n{"seq": ').encode()


# What a claim has to do with the processes that hold it is of no use elsewhere, and the claimant is a secret.
_HOLDERS = ("result", "token", "worker", "claimant", "taken")


def _effect_entry(effect: Effect) -> dict[str, object]:
    entry = {name: value for name, value in effect._asdict().items() if name not in _HOLDERS}
    return entry if effect.result is None else entry | _packed(effect.result)


def _saved_entry(saved: Saved) -> dict[str, object]:
    entry: dict[str, object] = {"step": saved.step, "name": saved.name, "size": saved.size, "at": saved.at}
    return entry if saved.content is None else entry | _packed(saved.content)


def _packed(output: bytes) -> dict[str, str]:
    try:
        return {"output": output.decode()}
    except UnicodeDecodeError:
        return {"output_base64": base64.b64encode(output).decode()}


def header(path: str) -> Header:
    """Return what the checkpoint at `path` says of itself, reading only its first and last line.

    Raises FileNotFoundError, or CheckpointError if it is not whole.
    """
    with open(files.open_plain(path), "rb") as file:
        first = file.readline()
        file.seek(max(0, file.seek(0, 2) - _END_MAX))
        last = file.read().rpartition(b"\n{}\n")[2]
    if not (last == _END_2 or _END.fullmatch(last)) or not first.endswith(b",\n"):
        raise CheckpointError("it is cut short")
    return _header(first.rstrip().removesuffix(b",") + b"}")


class Checkpoint(NamedTuple):
    """What a checkpoint holds: attempts, each with its result as far as it travels along, effects, and what else."""

    header: Header
    attempts: list[tuple[Row, bytes | None]]
    effects: list[Effect]
    saved: list[Saved]
    items: dict[str, list[str]]

    def holdings(self, run: str) -> Holdings:
        """Return what a ledger is made of that goes on from here, as of that run unless the facts say another."""
        facts = {"run": run} | self.header.facts
        return Holdings(self.attempts, facts, self.effects, self.header.revision, self.saved, self.items)


def load(path: str) -> Checkpoint:
    """Return the checkpoint at `path`.  Raises FileNotFoundError or CheckpointError."""
    try:
        return parse(files.read(path, LARGEST))
    except OSError as exc:
        if exc.errno != errno.EFBIG:
            raise
        raise CheckpointError(f"it {exc.strerror}, and no checkpoint is") from exc


def parse(data: bytes) -> Checkpoint:
    """Return the checkpoint that `data` is.  Raises CheckpointError."""
    try:
        content = json.loads(data)
        attempts = [_row(entry) for entry in content.pop("attempts") if entry]
        effects = [_effect(entry) for entry in content.pop("effects", ()) if entry]
        saved = [_saved(entry) for entry in content.pop("saved", ()) if entry]
        items: dict[str, list[str]] = {}
        for entry in content.pop("items", ()):
            if entry:
                items.setdefault(_text(entry, "task"), []).append(_text(entry, "item"))
    except KeyError as exc:
        raise CheckpointError(f"it is not a checkpoint (it has no {exc})") from exc
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(f"it is not a checkpoint ({exc})") from exc
    head = _header(json.dumps(content).encode())
    _check_digest(data, content["format"])
    return Checkpoint(head, attempts, effects, saved, items)


def _check_digest(data: bytes, version: int) -> None:
    """Raise CheckpointError unless the last line is what it is to be."""
    lines, _, last = data.rpartition(b"\n{}\n")
    said = _END.fullmatch(last)
    if said is None and version >= _SEALED:
        raise CheckpointError("it is cut short")
    if said is not None and hashlib.sha256(lines + b"\n{}\n").hexdigest().encode() != said[1]:
        raise CheckpointError("its content is not what was written: the digest in its last line differs")


def _header(data: bytes) -> Header:
    try:
        content = json.loads(data)
        version, found = content["format"], _said(content)
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise CheckpointError(f"its first line is not a checkpoint's ({exc})") from exc
    if version not in _READABLE:
        raise CheckpointError(f"it has format {version}, this program knows {FORMAT}")
    sound = isinstance(found.run, str) and _is_count(found.revision) and isinstance(found.facts, dict)
    if not (sound and all(isinstance(value, str) for value in found.facts.values())):
        raise CheckpointError("its first line is not a checkpoint's")
    if not found.facts.get("counted_from", "0").isdecimal():
        raise CheckpointError("its 'counted_from' is not a number")
    for name in AMOUNTS:
        if not _DECIMAL.fullmatch(found.facts.get(name, "0")):
            raise CheckpointError(f"its '{name}' is not a number")
    return found


def _said(content: dict[str, Any]) -> Header:
    return Header(content["run"], content["revision"], content["facts"], str(content.get("written", "")))


def _row(entry: dict[str, object]) -> tuple[Row, bytes | None]:
    values = {name: entry.get(name, default) for name, default in _DEFAULT_VALUES.items()}
    for name, value in values.items():
        if not isinstance(value, _TYPES[name]) or (
            isinstance(value, int) and abs(value) >= _MOST.get(name, _COUNT_MAX)
        ):
            raise ValueError(f"'{name}' is {str(value)[:40]!r}")
        if isinstance(value, float) and not math.isfinite(value):  # JSON as Python reads it has such numbers
            raise ValueError(f"'{name}' is {value!r}")
    if values["outcome"] not in (None, *OUTCOMES):
        raise ValueError(f"'outcome' is {values['outcome']!r}")
    _entry(entry, "step")
    return Row(**values), _output(entry)  # type: ignore[arg-type]


def _effect(entry: dict[str, object]) -> Effect:
    values = {name: entry[name] for name in ("key", "parameters", "state", "step", "at", "size")}
    for name, value in values.items():
        if not isinstance(value, {"at": (int, float), "size": int}.get(name, str)):  # type: ignore[arg-type]
            raise ValueError(f"an effect's '{name}' is {value!r}")
    if values["state"] not in (CLAIMED, COMMITTED, UNKNOWN) or not _is_count(values["size"]):
        raise ValueError(f"an effect's 'state' and 'size' are {values['state']!r} and {str(values['size'])[:40]}")
    if not math.isfinite(values["at"]):  # type: ignore[arg-type]
        raise ValueError(f"an effect's 'at' is {values['at']!r}")
    _entry(entry, "step")
    return Effect(token=0, worker="", result=_output(entry), **values)  # type: ignore[arg-type]


def _saved(entry: dict[str, object]) -> Saved:
    size, at = entry["size"], entry["at"]
    if not _is_count(size) or not isinstance(at, int | float) or not math.isfinite(at):
        raise ValueError(f"a saved file's 'size' and 'at' are {size!r} and {at!r}")
    return Saved(_entry(entry, "step"), _entry(entry, "name"), _output(entry), size, at)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < _COUNT_MAX


def _text(entry: dict[str, object], name: str) -> str:
    value = entry[name]
    if not isinstance(value, str):
        raise ValueError(f"'{name}' is {value!r}")
    return value


def _entry(entry: dict[str, object], name: str) -> str:
    """Return what becomes the name of a file; raises ValueError for what would be a path."""
    value = _text(entry, name)
    if not files.is_plain_name(value):
        raise ValueError(f"'{name}' is {value!r}, which is no name of a file")
    return value


def _output(entry: dict[str, object]) -> bytes | None:
    text, packed = entry.get("output"), entry.get("output_base64")
    if isinstance(text, str):
        return text.encode()
    return base64.b64decode(packed, validate=True) if isinstance(packed, str) else None


_NONE = type(None)
_TYPES: dict[str, tuple[type, ...]] = {
    "seq": (int,),
    "step": (str,),
    "number": (int,),
    "definition": (str,),
    "started": (int, float),
    "boot": (str,),
    "outcome": (str, _NONE),
    "counted": (bool, int),
    "final": (bool, int),
    "cause": (str,),
    "status": (int, _NONE),
    "ended": (int, float, _NONE),
    "took": (int, float),
    "delay": (int, float),
    "progress": (int, float),
    "spend": (int, float),
    "detail": (str,),
    "output_size": (int,),
    "log_size": (int,),
    "unsure": (bool, int),
    "key": (str,),
    "worker": (str,),
    "item": (str, _NONE),
    "digest": (str,),
}
_DEFAULT_VALUES: dict[str, object] = dict.fromkeys(Row._fields) | {
    "counted": 0,
    "final": 0,
    "cause": "",
    "took": 0,
    "delay": 0,
    "progress": 0,
    "spend": 0,
    "detail": "",
    "output_size": 0,
    "log_size": 0,
    "unsure": 0,
    "key": "",
    "worker": "",
    "digest": "",
}
_USUAL = tuple(_DEFAULT_VALUES[name] for name in Row._fields)
