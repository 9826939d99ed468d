"""The language of the control socket: one line a request, one line an answer, fields NAME=VALUE with tabs between.

    ask=status                                         the snapshot as one JSON text, and the end
    once=claim key= parameters= step= lease= take_over=yes|no waited=yes|no claimant=
        verdict=waiting step=                          another is at it; another answer follows
        verdict=granted|taken-over token= most=        the effect is the caller's to do; results up to `most` are kept
        verdict=committed outcome=skipped|awaited size= kept=yes|no, and the result
        verdict=unknown|conflict step= since=
    once=begin key= token=                             no answer: from now on nobody knows whether it has happened
    once=commit key= token= claimant= step= outcome= size= kept=yes|no, and the result
        verdict=committed|lost                         lost: another has the claim by now
    once=release key= token= claimant=                 it did not happen
        verdict=released
    settle=STEP|KEY who= kept=yes|no, and the result   a person says that it has happened, or with kept=no that not
        settled=TEXT
    error=TEXT                                         instead of any of these

A result travels beside its line, in a memfd (memfd_create(2)): that of size 0 in none.  A connection that ends
while it has a claim gives it up: before `begin` nothing has happened, after it nobody can tell.  A token is good on
any connection, so that an effect which outlived the worker can be committed to the next one, but only together with
the secret of 128 random bits that came with the claim (claimant).  A claim that was granted and whose answer was lost
is granted again to the claimant that has it.

This is imported by what a step calls, so it imports nothing (see worker/step.py); the verdicts are the words of
worker/ledger/effects.py.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Verdicts.
GRANTED, TAKEN_OVER, COMMITTED = "granted", "taken-over", "committed"
CONFLICT, UNKNOWN = "conflict", "unknown"
WAITING, LOST, RELEASED = "waiting", "lost", "released"
# Outcomes, besides TAKEN_OVER, CONFLICT, UNKNOWN and LOST: what an effect or a caller of it came to.
EXECUTED, SKIPPED, AWAITED, FOUND = "executed", "skipped", "awaited", "found"

LINE_MAX = 8192
_KEY_MAX = 1024
LEASE_MIN, LEASE_MAX = 1.0, 30 * 86400.0  # seconds


def encode(fields: Mapping[str, object]) -> bytes:
    """Return the line for these fields; what would end a field or the line becomes a space."""
    texts = (f"{name}={_word(value)}" for name, value in fields.items())
    return "\t".join(text.replace("\t", " ").replace("\n", " ") for text in texts).encode(errors="replace") + b"\n"


def decode(line: bytes) -> dict[str, str]:
    """Return the fields of a line; nonsense has fields that nobody asks for.  Raises ValueError if it is not UTF-8."""
    return {name: value for name, _, value in (text.partition("=") for text in line.decode().split("\t"))}


def fault(key: str, lease: float) -> str | None:
    """Return what is wrong with a key or a lease, or None."""
    if not key or not key.isprintable() or len(key.encode(errors="replace")) > _KEY_MAX:
        return f"{key[:40]!r} is no key: it must be one line of printable text, of {_KEY_MAX} bytes at most"
    if not LEASE_MIN <= lease <= LEASE_MAX:
        return f"a lease of {lease:g} s is not between {LEASE_MIN:g} s and {LEASE_MAX / 86400:g} days"
    return None


def _word(value: object) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)
