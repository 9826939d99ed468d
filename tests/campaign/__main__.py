"""`python -m tests.campaign`: run cases, print a table of what they came to, and the smallest one that failed."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import postgres
from tests.campaign import work
from tests.campaign.case import ERRORS, KILL, POSTGRES, SQLITE, TWICE, Case, Outcome, Place

_SAMPLE = 60
_SEED = 20


def main() -> int:
    """Run what CASE or CASES of the environment ask for; return 1 if a case failed."""
    if shutil.which("strace") is None:
        print("skipped: no strace here (apt-get install strace)")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server goes, too
    reason = postgres.why_not()
    if reason:
        print(f"without a ledger on a server: {reason}")
    server = None if reason else postgres.Server().start()
    recipient = work.Recipient()
    folder = Path(tempfile.mkdtemp(prefix="agent-campaign-"))
    try:
        place = Place(folder, recipient, server.dsn() if server else "")
        one = os.environ.get("CASE")
        cases = [Case.parse(one)] if one else _cases(place, [SQLITE, *([POSTGRES] if server else [])])
        failed = _run(place, cases, verbose=bool(one))
    finally:
        recipient.close()
        if server is not None:
            server.remove()
    if not failed:
        shutil.rmtree(folder)
        return 0
    print(f"what they have left is in {folder}")
    return 1


def _cases(place: Place, ledgers: list[str]) -> list[Case]:
    """Return the cases, each kind of fault at each call, or a sample of them that is the same each time."""
    kinds: list[list[Case]] = []
    for ledger in ledgers:
        for (call, may_fail), numbers in place.calls(ledger).items():
            faults = (KILL, TWICE, *ERRORS) if may_fail else (KILL, TWICE)
            kinds += [[Case(ledger, call, nth, fault) for nth in numbers] for fault in faults]
    for kind in kinds:
        random.Random(_SEED).shuffle(kind)
    # One of each kind, then the next of each.
    mixed = [case for turn in itertools.zip_longest(*kinds) for case in turn if case is not None]
    if shard := os.environ.get("SHARD"):  # 2/4: the second of four parts, each a mixture
        part, parts = map(int, shard.split("/"))
        mixed = mixed[part - 1 :: parts]
    wanted = os.environ.get("CASES") or str(_SAMPLE)
    if wanted != "all" and int(wanted) < len(mixed):
        print(f"{wanted} of {len(mixed)} cases; CASES=all for every one", flush=True)
        mixed = mixed[: int(wanted)]
    return mixed


def _run(place: Place, cases: list[Case], verbose: bool) -> list[Case]:
    """Work through cases and print what they came to; return those that failed."""
    counts: Counter[tuple[str, ...]] = Counter()
    failed: dict[Case, Outcome] = {}
    began = time.monotonic()
    for case in cases:
        outcome = place.run(case)
        print("F" if outcome.faults else "." if outcome.hit else "-", end="", flush=True)
        kind = case.ledger, case.call, case.fault
        counts[(*kind, "cases")] += 1
        counts[(*kind, "met")] += outcome.hit
        if outcome.faults:
            failed[case] = outcome
            counts[(*kind, "failed")] += 1
            print(f"{case}: {'; '.join(outcome.faults)}", flush=True)
        if verbose:
            print("\n".join(outcome.said))
    print(f"\n{'ledger':9} {'call':10} {'fault':7} {'cases':>6} {'met':>6} {'failed':>6}")
    for ledger, call, fault in sorted({(key[0], key[1], key[2]) for key in counts}):
        cells = (counts[ledger, call, fault, name] for name in ("cases", "met", "failed"))
        print(f"{ledger:9} {call:10} {fault:7} " + " ".join(f"{cell:6}" for cell in cells))
    took = time.monotonic() - began
    print(f"{len(cases)} cases in {took:.0f} s, {len(failed)} failed")
    if failed:
        smallest = min(failed, key=lambda case: (case.nth, case))
        print(f"the smallest one that failed: make crash CASE={smallest}")
        print("\n".join(f"    {line}" for line in failed[smallest].said[-20:]))
    return list(failed)


if __name__ == "__main__":
    sys.exit(main())
