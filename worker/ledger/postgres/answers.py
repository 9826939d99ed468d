"""What a server answers is a row only if it can be one: whoever may write to its tables decides what it says."""

from collections.abc import Iterable, Sequence
from typing import Any

from worker import files
from worker.errors import StateError
from worker.ledger import Row, Saved
from worker.ledger.effects import Effect

_HINT = "nothing was written; find out who may write to that database"
_TYPES = {"int": int, "float": float, "str": str, "bool": bool, "bytes": bytes, "None": type(None)}


class _Form:
    """Which types the fields of a NamedTuple may have."""

    def __init__(self, row: Any) -> None:
        hints = [str(getattr(hint, "__name__", hint)) for hint in row.__annotations__.values()]
        self._kinds = [{_TYPES[name] for name in hint.split(" | ")} for hint in hints]
        self._floats = [place for place, kinds in enumerate(self._kinds) if float in kinds]
        self._fit: set[tuple[type, ...]] = set()  # as rows have come so far: there are few

    def check(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the values of a row; raises StateError if it cannot have them."""
        types = tuple(map(type, values))
        if types not in self._fit:
            if len(types) != len(self._kinds) or not all(map(set.__contains__, self._kinds, types)):
                raise StateError("the ledger on the server has a row with values that it cannot have", _HINT)
            self._fit.add(types)
        if any(values[place] != values[place] for place in self._floats):
            raise StateError("the ledger on the server has a row with a number that is none", _HINT)
        return values


_ROW, _SAVED, _EFFECT = _Form(Row), _Form(Saved), _Form(Effect)


def rows(found: Iterable[Sequence[Any]]) -> list[Row]:
    """Return attempts; raises StateError for what is none.

    An id that is a path is no step's: ids become names of files.
    """
    return [_named(Row._make(_ROW.check(values))) for values in found]


def saved(found: Iterable[Sequence[Any]]) -> list[Saved]:
    """Return files that steps keep; raises StateError for what is none."""
    return [Saved._make(_SAVED.check(values)) for values in found]


def effect(values: Sequence[Any]) -> Effect:
    """Return an effect; raises StateError for what is none."""
    return Effect._make(_EFFECT.check(values))


def _named(row: Row) -> Row:
    if not files.is_plain_name(row.step):
        what = f"the ledger on the server has a step with the id {row.step!a}, which the agent gives to none"
        raise StateError(what, _HINT)
    return row
