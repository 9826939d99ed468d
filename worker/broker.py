"""The broker: claims and commits effects in the ledger for the steps that ask, and lets the others wait their turn.

    claim ─► the ledger ─► granted ─► begin ─► commit or release ─► the next in line
      │                       └ its connection ends: released before `begin`, else abandoned
      └ held by a step of ours: in line until that one is done;  held by another worker: asked about again

Requests come in as events, perhaps while the loop is waiting for the ledger already.  So events are only noted;
`work` does what they ask for, one ledger call after the other, and each is durable before it is answered.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, Protocol

from worker import clock, wire
from worker.control import Connection
from worker.errors import AgentError
from worker.ledger.effects import COMMITTED, GRANTED, HELD, RESULT_MAX, TAKEN_OVER, Answer, Effect, Effects

# How often a key is asked about that another machine holds.
_LOOK_EVERY = 0.5
# Of a claim that an earlier worker granted; whoever has it may have asked for another.
_INHERITED_LEASE = 60.0
# A lease is renewed when this share of it has passed.
_RENEW_AFTER = 1 / 3
# The loop has other things to do, and pings in between.
_SLICE = 0.2
_CLAIMANT_MAX = 64
_DIGITS = 18  # of a number that fits into 63 bits
_OUTCOMES = (wire.EXECUTED, wire.TAKEN_OVER, wire.FOUND)


class Persist(Protocol):
    """Return what the action returns, which is repeated while the ledger cannot take it."""

    def __call__(self, action: Callable[[], Any], /) -> Any: ...


class _Caller:
    """One connection's claim, or its wish for one."""

    __slots__ = (
        "begun", "claimant", "client", "key", "lease", "parameters", "renew_at", "step", "take_over", "token", "waited"
    )  # fmt: skip

    def __init__(self, client: Connection, request: dict[str, str]) -> None:
        """Raises KeyError or ValueError for a request that is none."""
        self.client = client
        self.key, self.step = request["key"], request["step"]
        self.parameters = request["parameters"]
        if not self.parameters.isalnum():
            raise ValueError("the parameters are no digest")
        self.claimant = _claimant(request)
        self.lease = float(request["lease"])
        _check(self.key, self.lease)
        self.take_over = request.get("take_over") == "yes"
        self.waited = request.get("waited") == "yes"
        self.token: int | None = None
        self.begun = False  # from now on nobody but the caller knows whether it has happened
        self.renew_at = math.inf


class _Heir:
    """Whoever has a claim in a step that has outlived the worker which granted it; it has no connection to us."""

    __slots__ = ("claimant", "key", "lease", "renew_at", "step", "token")

    def __init__(self, effect: Effect) -> None:
        self.key, self.step, self.token = effect.key, effect.step, effect.token
        self.claimant = effect.claimant
        self.lease = _INHERITED_LEASE
        self.renew_at = clock.monotonic() + self.lease * _RENEW_AFTER


class _Line:
    """Who has a key, and who waits for it, the first to come first."""

    __slots__ = ("holder", "look_at", "waiting")

    def __init__(self) -> None:
        self.holder: _Caller | _Heir | None = None
        self.waiting: deque[_Caller] = deque()
        self.look_at = math.inf  # when to ask again about a key that another worker holds


class Broker:
    """The claims of the steps of this worker."""

    def __init__(
        self,
        effects: Effects,
        persist: Persist,
        vouches: Callable[[str], bool],
        tell: Callable[[str, str, str], None],
        told: Callable[[dict[str, str], bytes | None], str] | None = None,
        doubts: Callable[[str], Literal["no", "look", "ask"]] = lambda _key: "no",
        speaks_for: Callable[[Connection, str], bool] = lambda _client, _step: True,
    ) -> None:
        """`vouches` says whether a step runs here and is within its limits; `tell` is told a step, a key and
        what became of it: one of the outcomes in worker.wire.  `told` does what a person says in a request,
        given the result that came with it; returns a line, or raises AgentError, KeyError or ValueError.  `doubts`
        says whether an effect may have happened that the ledger does not know (worker.standing).  `speaks_for` says
        whether a client may claim for a step that runs here.
        """
        self._speaks_for = speaks_for
        self._effects = effects
        self._persist = persist
        self._vouches = vouches
        self._tell = tell
        self._told = told
        self._doubts = doubts
        self.changed: Callable[[], None] = lambda: None  # called when an effect was claimed
        self.committing = False  # an effect has happened, and the ledger has yet to take that
        self._queue: deque[tuple[Connection, dict[str, str] | None, bytes | None]] = deque()
        self._callers: dict[Connection, _Caller] = {}
        self._lines: dict[str, _Line] = {}

    # -- called by handlers of events

    def take(self, client: Connection, request: dict[str, str], result: bytes | None) -> None:
        self._queue.append((client, request, result))

    def gone(self, client: Connection) -> None:
        if client.unanswered or self.needs(client):
            self._queue.append((client, None, None))

    def needs(self, client: Connection) -> bool:
        return client in self._callers

    # -- called by the loop

    def due_at(self) -> float:
        """Return when `work` is to be called again (monotonic clock), inf if only an event makes it needed."""
        if self._queue:
            return 0.0
        lines = self._lines.values()
        renewals = (line.holder.renew_at for line in lines if line.holder)
        return min(*renewals, *(line.look_at for line in lines), math.inf, math.inf)

    def inherit(self, claims: Iterable[Effect]) -> None:
        """Take these claims, of steps that have outlived the worker which granted them, for held until they are
        committed or released, or their step ends.
        """
        for effect in claims:
            key, token = effect.key, effect.token
            if self._persist(partial(self._effects.renew, key, token, _INHERITED_LEASE)):
                self._lines.setdefault(key, _Line()).holder = _Heir(effect)

    def ended(self, step: str) -> None:
        """Note that a step is over: nobody holds what it has inherited."""
        for key, line in list(self._lines.items()):
            holder = line.holder
            if isinstance(holder, _Heir) and holder.step == step:
                self._persist(partial(self._effects.abandon, key, holder.token))
                self._end(key, holder.token, clock.monotonic())

    def look_again(self) -> None:
        """Ask again about keys that other workers hold, at the next `work`: they may have done something."""
        for line in self._lines.values():
            if line.look_at < math.inf:
                line.look_at = 0.0

    def waiting(self) -> set[str]:
        """Return the steps of ours that rightly wait: for an effect which another machine, or a living step, is at.

        One that waits for itself, or in a circle, is not among them: its own limits end it.
        """
        waits_for: dict[str, set[str]] = {}
        for line in self._lines.values():
            holder = line.holder.step if line.holder and self._vouches(line.holder.step) else None
            if holder is not None or line.look_at < math.inf:
                for caller in line.waiting:
                    waits_for.setdefault(caller.step, set()).update([holder] if holder is not None else [])
        return {step for step in waits_for if not _in_circle(step, waits_for)}

    def work(self, now: float) -> None:
        """Do what was asked for and what is due; what takes too long goes on at the next call."""
        until = clock.monotonic() + _SLICE
        while self._queue and clock.monotonic() < until:
            client, request, result = self._queue.popleft()
            if request is None:
                self._forget(client, now)
            else:
                client.unanswered -= 1
                self._handle(client, request, result, now)
        for key, line in list(self._lines.items()):
            if line.holder and line.holder.renew_at <= now:
                self._renew(line.holder, now)
            if line.look_at <= now:
                self._serve(key, now)

    # -- requests

    def _handle(self, client: Connection, request: dict[str, str], result: bytes | None, now: float) -> None:
        do = {"claim": self._claim, "begin": self._begin, "commit": self._commit, "release": self._release}
        try:
            what = self._hear_person if "once" not in request else do[request["once"]]
            what(client, request, result, now)
        except KeyError as exc:
            client.answer({"error": f"the request has no valid {exc}"})
        except ValueError as exc:
            client.answer({"error": str(exc)})

    def _claim(self, client: Connection, request: dict[str, str], _result: bytes | None, now: float) -> None:
        caller = _Caller(client, request)
        if client in self._callers:
            raise ValueError("this connection has a claim already, or waits for one")
        if not self._vouches(caller.step):
            raise ValueError(f"step '{caller.step}' is not running here")
        if client.closed:
            return
        if not self._speaks_for(client, caller.step):
            raise ValueError(f"another step than '{caller.step}' asks")
        self._callers[client] = caller
        line = self._lines.setdefault(caller.key, _Line())
        if isinstance(line.holder, _Heir) and caller.claimant and line.holder.claimant == caller.claimant:
            line.holder = None  # it never heard of its claim, so it comes before those who wait for that
            line.waiting.appendleft(caller)
        else:
            line.waiting.append(caller)
        if line.holder is not None:
            self._let_wait(caller, line.holder.step)
        elif line.look_at == math.inf:
            self._serve(caller.key, now)

    def _begin(self, client: Connection, _request: dict[str, str], _result: bytes | None, _now: float) -> None:
        caller = self._callers.get(client)
        if caller is not None:
            caller.begun = True

    def _commit(self, client: Connection, request: dict[str, str], result: bytes | None, now: float) -> None:
        key, token, claimant = _claim_of(request)
        step, outcome, size = request["step"], request["outcome"], _count(request["size"])
        kept = (result or b"") if request["kept"] == "yes" else None
        if outcome not in _OUTCOMES or (kept is not None and len(kept) != size):
            raise ValueError("the result is not what the request says")
        step = self._claimed_for(key, token) or step
        self.committing = True
        try:
            done = self._persist(lambda: self._effects.commit(key, token, kept, size, claimant))
        finally:
            self.committing = False
        self._tell(step, key, outcome if done else wire.LOST)
        client.answer({"verdict": wire.COMMITTED if done else wire.LOST})
        if self._is_claimants(key, claimant):
            self._end(key, token, now)

    def _release(self, client: Connection, request: dict[str, str], _result: bytes | None, now: float) -> None:
        key, token, claimant = _claim_of(request)
        self._persist(lambda: self._effects.release(key, token, claimant))
        client.answer({"verdict": wire.RELEASED})
        if self._is_claimants(key, claimant):
            self._end(key, token, now)

    def _claimed_for(self, key: str, token: int) -> str | None:
        """Return the step of a claim that we know of."""
        line = self._lines.get(key)
        return line.holder.step if line and line.holder and line.holder.token == token else None

    def _is_claimants(self, key: str, claimant: str) -> bool:
        """Return whether a claim that we know of is this claimant's to end."""
        line = self._lines.get(key)
        return line is not None and line.holder is not None and line.holder.claimant in ("", claimant)

    def _hear_person(self, client: Connection, request: dict[str, str], result: bytes | None, _now: float) -> None:
        if self._told is None:
            raise ValueError("this worker takes no orders")
        try:
            client.answer({"told": self._told(request, result)})
        except AgentError as exc:
            client.answer({"error": str(exc)})

    def _forget(self, client: Connection, now: float) -> None:
        """Give up the claim of a client that is gone, or its place in line."""
        caller = self._callers.pop(client, None)
        if caller is None:
            return
        key, token = caller.key, caller.token
        if token is None:
            self._lines[key].waiting.remove(caller)
            self._serve(key, now)
            return
        # Until it says that it begins, a claim that nobody had before it is as good as none.
        if caller.begun:
            self._persist(lambda: self._effects.abandon(key, token))
        else:
            self._persist(lambda: self._effects.release(key, token, caller.claimant))
        self._end(key, token, now)

    # -- lines

    def _serve(self, key: str, now: float) -> None:
        """Claim `key` for the first in line, until one has it or somebody else does."""
        line = self._lines[key]
        line.look_at = math.inf
        while line.waiting and line.holder is None:
            caller = line.waiting[0]
            terms = caller.parameters, caller.step, caller.lease, caller.take_over, caller.claimant
            answer: Answer = self._persist(partial(self._effects.claim, key, *terms))
            if answer.verdict == GRANTED:
                answer = self._doubted(caller, answer)
            if answer.verdict == HELD:
                line.look_at = now + _LOOK_EVERY
                for other in line.waiting:
                    self._let_wait(other, answer.effect.step)
                return
            line.waiting.popleft()
            self._answer(caller, answer)
        if line.holder is None:
            del self._lines[key]
            return
        for other in line.waiting:
            self._let_wait(other, line.holder.step)

    def _doubted(self, caller: _Caller, granted: Answer) -> Answer:
        """Return what an effect is to its first caller, if it may have happened all the same."""
        doubts = self._doubts(caller.key)
        if doubts == "no" or (doubts == "look" and not caller.take_over):
            return granted
        if caller.take_over:
            return granted._replace(verdict=TAKEN_OVER)
        key, token = caller.key, granted.effect.token
        self._persist(lambda: self._effects.abandon(key, token))
        claim = partial(self._effects.claim, key, caller.parameters, caller.step, caller.lease, False)
        unknown: Answer = self._persist(claim)
        return unknown

    def _answer(self, caller: _Caller, answer: Answer) -> None:
        effect, verdict = answer.effect, answer.verdict
        if verdict in (GRANTED, TAKEN_OVER):
            caller.token = effect.token
            caller.begun = verdict == TAKEN_OVER  # the one before it had
            caller.renew_at = clock.monotonic() + caller.lease * _RENEW_AFTER
            self._lines[caller.key].holder = caller
            self.changed()
            caller.client.answer({"verdict": verdict, "token": effect.token, "most": RESULT_MAX})
            return
        del self._callers[caller.client]
        if verdict == COMMITTED:
            outcome = wire.AWAITED if caller.waited else wire.SKIPPED
            self._tell(caller.step, caller.key, outcome)
            fields = {"outcome": outcome, "size": effect.size, "kept": effect.result is not None}
            caller.client.answer({"verdict": verdict, **fields}, effect.result)
            return
        self._tell(caller.step, caller.key, verdict)
        caller.client.answer({"verdict": verdict, "step": effect.step, "since": clock.stamp(effect.at)})

    def _let_wait(self, caller: _Caller, step: str) -> None:
        if not caller.waited:
            caller.waited = True
            caller.client.answer({"verdict": wire.WAITING, "step": step})

    def _end(self, key: str, token: int, now: float) -> None:
        """Let the next in line have `key` if the claim that has ended is the one we know of."""
        line = self._lines.get(key)
        if line is None or line.holder is None or line.holder.token != token:
            return
        if isinstance(line.holder, _Caller):
            self._callers.pop(line.holder.client, None)
        line.holder = None
        self._serve(key, now)

    def _renew(self, caller: _Caller | _Heir, now: float) -> None:
        """Extend a claim whose step is alive; one that is no longer ours is of no more concern."""
        key, token, lease = caller.key, caller.token or 0, caller.lease
        caller.renew_at = now + lease * _RENEW_AFTER
        if self._vouches(caller.step) and not self._persist(lambda: self._effects.renew(key, token, lease)):
            self._end(key, token, now)


def _in_circle(step: str, waits_for: dict[str, set[str]]) -> bool:
    """Return whether `step` waits, through others, for one that waits for itself."""
    seen: set[str] = set()
    left = [step]
    while left:
        for other in waits_for.get(left.pop(), ()):
            if other == step:
                return True
            if other not in seen:
                seen.add(other)
                left.append(other)
    return False


def _claim_of(request: dict[str, str]) -> tuple[str, int, str]:
    key = request["key"]
    _check(key, wire.LEASE_MIN)
    return key, _count(request["token"]), _claimant(request)


def _claimant(request: dict[str, str]) -> str:
    """Return the secret of the process that asks; empty for a program of an older version, which has none."""
    claimant = request.get("claimant", "")
    if claimant and not (claimant.isascii() and claimant.isalnum() and len(claimant) <= _CLAIMANT_MAX):
        raise ValueError("the claimant is no secret of 128 bits")
    return claimant


def _count(text: str) -> int:
    """Return the number; what no database can hold is none."""
    if not text.isdecimal() or len(text) > _DIGITS:
        raise ValueError(f"{text[:40]!r} is no number")
    return int(text)


def _check(key: str, lease: float) -> None:
    fault = wire.fault(key, lease)
    if fault:
        raise ValueError(fault)
