"""Identity: which list a run in a state folder is that of.

A run has a name, and a list without `run:` has that of its file.  Two lists may have one name; then the second
would find its steps done that were the first one's.  So the state remembers its list's path, and a list at another
path has to be a list that was moved: it names its run itself, and where it was before there is no list any more.  A
state folder that was moved or copied is a person's own doing, and goes with the list that it is given.
"""

import os

from worker import files
from worker.config import Config
from worker.errors import ConfigError, Mark, Problem
from worker.ledger import Ledger


def check(settings: Config, store: Ledger, root: str) -> str | None:
    """Return what to tell of a list that was moved, or None; raises ConfigError if the run is another list's.

    The ledger is that of the state folder `root`, and nothing in it is changed.
    """
    known, path = store.fact("config"), settings.files[0]
    before = files.from_text(known) if known else None
    if not before or before == path or store.shared or _same(before, path):
        return None
    moved = settings.named and not os.path.lexists(before)
    if moved or store.fact("home") not in (None, files.as_text(root)):
        return f"the list was {before} before, and is {path} now"
    ways = [] if settings.named else [f"write 'run: {settings.run}' into it"]
    ways += [f"take {before} away first"] if os.path.lexists(before) else []
    what = f"the run '{settings.run}' was begun by another list, {before} (its state is in {root})"
    hint = "write 'run:' and another name into it, or name another folder with --state DIR; to go on with that run, "
    raise ConfigError([Problem(Mark(path, 1, 1), what, hint + " and ".join(ways))])


def _same(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
