"""Files that come from a machine: no more than is allowed, to the last byte what the machine said that it would send.

A file is first copied there, as the agent's user would read it: what his programs make of its name (a link, a device)
opens nothing to us that is closed to them.  The copy does not change while it is under way.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from worker import files
from worker.supervise import remote
from worker.supervise.provider import Hand
from worker.supervise.record import Machine
from worker.supervise.remote import Reply, Script

_SPARE = "/run/agent-supervise"  # where the disk is full
_OFFER = (
    remote.AS
    + """\
rm -f "$stage/$kind".* "$spare/$kind".*
as test -f "$path" || { echo "there is no such file, or not for '$user'" >&2; exit 1; }
for folder in "$stage" "$spare"; do
    (umask 077; mkdir -p "$folder") && as head -c "$((most + 1))" "$path" >"$folder/$name" || continue
    size=$(wc -c <"$folder/$name")
    [ "$size" -le "$most" ] || { echo "it is larger than $most bytes" >&2; rm -f "$folder/$name"; exit 1; }
    printf '\\nOffer=%s %s %s\\n' "$folder" "$((size))" "$(sha256sum <"$folder/$name" | cut -c-64)"
    break
done
[ -n "${size-}" ] || exit 1
"""
)
_OFFERED = re.compile(r"^Offer=(\S+) (\d{1,18}) ([0-9a-f]{64})\s*$", re.MULTILINE)


class Offer(NamedTuple):
    """What a machine is about to send."""

    path: str
    size: int
    digest: str

    def fault(self, incoming: str) -> str:
        """Return what is wrong with what has come, or ""."""
        try:
            return "" if remote.digest_of(incoming) == self.digest else "what came is not what was sent"
        except FileNotFoundError:
            return "nothing came"
        except OSError as exc:
            return f"{incoming}: {exc.strerror}"


def ask(machine: Machine, path: str, kind: str, most: int) -> tuple[Script, str]:
    """Return the script that has a file offered, and the name under which it is; the one before it of its kind goes."""
    name = f"{kind}.{os.urandom(4).hex()}"
    words = remote.define(path=path, kind=kind, name=name, spare=_SPARE, most=str(most))
    return remote.script(machine, words + _OFFER), name


def offered(reply: Reply, name: str, most: int) -> Offer | str:
    """Return what is offered, or why nothing is.  What to fetch is for us to say, not for the machine."""
    if not reply.ok:
        return reply.fault
    found = _OFFERED.search(reply.output)
    if found is None or found[1] not in (remote.STAGE, _SPARE) or int(found[2]) > most:
        return "the machine does not say what it sends"
    return Offer(f"{found[1]}/{name}", int(found[2]), found[3])


def get(hand: Hand, machine: Machine, path: str, incoming: str, kind: str, most: int) -> str:
    """Get a file from the machine; return "" or why it is not here, whole."""
    sent, name = ask(machine, path, kind, most)
    offer = offered(sent.reply(hand.script(machine, sent.text)), name, most)
    if isinstance(offer, str):
        return offer
    answer = hand.get(machine, offer.path, incoming, offer.size)
    return offer.fault(incoming) if answer.ok else answer.fault()


def fetch(hand: Hand, machine: Machine, results: Iterable[tuple[str, str]], root: str, most: int) -> Iterator[str]:
    """Get files from the machine, (path here, path there), each whole or not at all; yield what could not be got.

    Each comes to the state folder `root` first: a command would follow a link that lies beside the file's place.
    """
    come = f"{root}/result.incoming"
    for here, there in results:
        fault = get(hand, machine, there, come, "result", most)
        try:
            if not fault:
                _put_down(come, here)
        except OSError as exc:
            fault = f"{exc.filename or here}: {exc.strerror}"
        finally:
            with contextlib.suppress(OSError):
                os.unlink(come)
        if fault:
            yield f"{there} cannot be fetched: {fault}"


def _put_down(come: str, here: str) -> None:
    """Copy what has come to its place, which may be on another file system.  Raises OSError."""
    new = f"{here}.incoming"
    try:
        with open(files.open_plain(come), "rb") as source, open(files.make(new, 0o666), "wb") as target:
            shutil.copyfileobj(source, target)
        files.adopt(new, here)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
