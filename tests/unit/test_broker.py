"""Effects that happen once: who does them, who waits, and what is known when somebody dies.

Everything here is real: processes, sockets, SIGKILL, SQLite.  The effect is a line added to a file.
"""

import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.keeper import Gate, Keeper, Raw, end, read_until
from tests.support import PATIENCE
from worker import once, wire
from worker.ledger import effects

CHECK = ["--check", "cat effects; test -s effects"]  # prints a line for each time that it happened
_X = once.digest("text", [b"x"])  # of --parameters x
HAPPEN = ["sh", "-c", "echo x >> effects; echo done"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    made = Keeper(tmp_path_factory.mktemp("keeper"))
    yield made
    made.close()


@pytest.fixture
def keeper(kept: Keeper, tmp_path: Path) -> Keeper:
    return kept.use(tmp_path)


@pytest.fixture
def gate(keeper: Keeper) -> Iterator[Gate]:
    made = Gate(keeper)
    yield made
    made.close()


def until(process: subprocess.Popen[bytes], words: str) -> None:
    """Return when a client has said `words` on standard error."""
    assert process.stderr is not None
    read_until(process, process.stderr.fileno(), words)


def test_the_words_on_the_wire_are_those_of_the_ledger() -> None:
    """
    What a step calls does not import the ledger, so it has its words a second time.
    """
    names = ("GRANTED", "TAKEN_OVER", "COMMITTED", "CONFLICT", "UNKNOWN")
    assert [getattr(wire, name) for name in names] == [getattr(effects, name) for name in names]


def test_it_happens_once_and_its_result_is_there_ever_after(keeper: Keeper) -> None:
    """
    The first caller does it; any other, from another step or after the worker was started anew, gets the result.
    """
    first = keeper.once("k", "--", *HAPPEN)
    assert (first.returncode, first.stdout, first.stderr) == (0, b"done\n", b"agentctl once: 'k': executed\n")
    keeper.until("executed a k")
    again = keeper.once("k", "--", *HAPPEN, step="b")
    assert (again.returncode, again.stdout, again.stderr) == (0, b"done\n", b"agentctl once: 'k': skipped\n")
    keeper.until("skipped b k")
    keeper.kill()
    keeper.start()
    assert keeper.once("k", "--", *HAPPEN).stdout == b"done\n"
    assert keeper.happened() == 1


def test_of_two_callers_one_does_it_and_the_other_awaits_the_result(keeper: Keeper, gate: Gate) -> None:
    """
    They come at the same moment; the second gets the first one's result when that is committed, and runs nothing.
    """
    words = ["k", "--", "sh", "-c", f"{gate.COMMAND}; echo x >> effects; echo $word"]
    callers = [keeper.begin(*words, step=step) for step in "ab"]
    said = [caller.stderr for caller in callers if caller.stderr is not None]
    ready, _, _ = select.select(said, [], [], PATIENCE)
    late = said.index(ready[0])  # the one that says that it waits
    gate.open()
    ends = [end(caller) for caller in callers]
    assert [done.stdout for done in ends] == [b"go\n"] * 2
    assert [b"awaited" in done.stderr for done in ends] == [late == 0, late == 1]
    assert keeper.happened() == 1


def test_those_who_wait_are_served_in_the_order_in_which_they_came(keeper: Keeper, gate: Gate) -> None:
    """
    When one gives up because it failed, the next in line has its try.
    """
    script = f"{gate.COMMAND}; echo $0 >> order; exit 3"
    callers = [keeper.begin("k", "--parameters", "x", "--", "sh", "-c", f"echo started >&2; {script}", "1")]
    until(callers[0], "started")
    for name in "234":
        callers.append(keeper.begin("k", "--parameters", "x", "--", "sh", "-c", script, name))
        until(callers[-1], "waiting")
    for _ in callers:
        gate.open()
    assert [end(caller).returncode for caller in callers] == [3] * 4
    assert (keeper.cwd / "order").read_text().split() == list("1234")


def test_of_three_callers_the_first_is_killed_and_the_next_finds_out(keeper: Keeper, gate: Gate) -> None:
    """
    The second asks its check, which finds nothing, and does it; the third awaits that.
    """
    command = ["k", *CHECK, "--parameters", "x", "--", "sh", "-c"]
    first = keeper.begin(*command, f"echo started >&2; {gate.COMMAND}")
    until(first, "started")
    others = []
    for step in "bc":
        others.append(keeper.begin(*command, "echo x >> effects; echo done", step=step))
        until(others[-1], "waiting")
    first.kill()
    gate.open()  # what it had started ends, without having done anything
    ends = [end(caller) for caller in others]
    assert [done.stdout for done in ends] == [b"done\n"] * 2
    assert [done.stderr.split()[-1] for done in ends] == [b"taken-over", b"awaited"]
    assert keeper.happened() == 1


DIES = {
    "before the claim": "once-asking",
    "after the claim": "once-claimed",
    "after the effect": "once-happened",
    "after the commit": "once-committed",
    "during the effect": "",
}
AFTERWARDS = {  # with a check, and without: what the next caller says, and how often it has happened then
    "before the claim": (("executed", 1), ("executed", 1)),
    "after the claim": (("taken-over", 1), ("unknown", 0)),
    "during the effect": (("found", 1), ("unknown", 1)),
    "after the effect": (("found", 1), ("unknown", 1)),
    "after the commit": (("skipped", 1), ("skipped", 1)),
}
_KILLED = "import os, signal; from worker import points; "
_KILLED += "points.at = lambda point: point == {point!r} and os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.mark.parametrize("checked", [True, False], ids=["check", "no check"])
@pytest.mark.parametrize("when", DIES)
def test_a_command_is_killed_and_it_happens_once_or_is_known_to_be_unknown(
    keeper: Keeper, when: str, checked: bool
) -> None:
    """
    S9: wherever the caller is killed, the next one sees the effect exactly once with a check; without, at most once,
    and unknown where nobody can tell.
    """
    inside = "" if DIES[when] else "kill -9 $PPID; "
    words = ["k", *(CHECK if checked else []), "--", "sh", "-c", f"echo x >> effects; {inside}echo done"]
    code = f"{_KILLED.format(point=DIES[when])}from worker.stepcli import main; main({['once', *words]!r})"
    first = end(keeper.spawn("-c", code))
    assert first.returncode == -signal.SIGKILL, first.stderr

    again = keeper.once(*words)
    outcome, times = AFTERWARDS[when][not checked]
    keeper.until(f"{outcome} a k")
    assert keeper.happened() == times
    assert again.returncode == (76 if outcome == "unknown" else 0), again.stderr
    if checked:
        assert again.stdout == (b"x\n" if outcome == "found" else b"done\n")
        assert keeper.once(*words).stdout == again.stdout
        assert keeper.happened() == 1


@pytest.mark.parametrize("when", DIES)
def test_a_program_is_killed_and_the_next_one_finds_out(keeper: Keeper, when: str) -> None:
    """
    S9, for step.once() with a check.
    """
    keeper.script(f"""
import os, signal
from worker import points
points.at = lambda point: point == {DIES[when]!r} and os.kill(os.getpid(), signal.SIGKILL)
def effect():
    happen()
    {"" if DIES[when] else "os.kill(os.getpid(), signal.SIGKILL)"}
step.once('k', effect)
""")
    check = "lambda: open('effects').read() or None"
    again = keeper.script(f"step.once('k', lambda: happen('done'), check={check}, tell=print)")
    assert again.stdout.decode() == AFTERWARDS[when][0][0] + "\n", again.stderr
    assert keeper.happened() == 1


def test_a_command_that_outlives_its_caller_is_not_raced(keeper: Keeper, gate: Gate) -> None:
    """
    The next caller does not ask its check while the command of a killed one is still at work.
    """
    words = ["k", *CHECK, "--", "sh", "-c", f"echo $PPID >&2; {gate.COMMAND}; echo x >> effects"]
    first = keeper.begin(*words)
    until(first, str(first.pid))
    first.kill()
    first.wait(PATIENCE)
    second = keeper.begin(*words)
    until(second, "waiting")
    gate.open()
    done = end(second)
    assert (done.returncode, done.stdout) == (0, b"x\n")
    assert b"found" in done.stderr
    assert keeper.happened() == 1


def test_a_claim_that_its_caller_never_began_is_as_good_as_none(keeper: Keeper) -> None:
    """
    Killed before it could know of its claim, it has done nothing: the next one needs no check.
    """
    raw = Raw(keeper)
    assert raw.claim("k")["verdict"] == wire.GRANTED
    raw.close()
    assert b"executed" in keeper.once("k", "--parameters", "x", "--", *HAPPEN).stderr


def test_a_claim_that_was_begun_is_unknown_when_its_caller_is_gone(keeper: Keeper) -> None:
    """
    The other way round: what was said to begin may have happened, whatever its caller was.
    """
    raw = Raw(keeper)
    token = raw.claim("k")["token"]
    raw.say(once="begin", key="k", token=token).close()
    raw = Raw(keeper)
    assert raw.claim("k")["verdict"] == wire.UNKNOWN
    raw.close()


def test_a_claim_that_was_taken_over_stays_open_until_somebody_knows(keeper: Keeper) -> None:
    """
    Whoever takes it over and is killed before it begins has not made undone what the one before may have done.
    """
    for _ in range(2):
        raw = Raw(keeper)
        answer = raw.claim("k", take_over=True)
        raw.say(once="begin", key="k", token=answer["token"]).close()
        raw = Raw(keeper)
        assert raw.claim("k", take_over=True)["verdict"] == wire.TAKEN_OVER
        raw.close()
    raw = Raw(keeper)
    assert raw.claim("k")["verdict"] == wire.UNKNOWN
    raw.close()


def test_the_worker_dies_in_between_and_the_next_one_takes_the_commit(keeper: Keeper, gate: Gate) -> None:
    """
    An effect that outlives the worker is committed to the next one, and not done again.
    """
    words = ["k", "--", "sh", "-c", f"echo started >&2; {gate.COMMAND}; echo x >> effects; echo done"]
    caller = keeper.begin(*words)
    until(caller, "started")
    keeper.kill()
    gate.open()
    keeper.start()
    done = end(caller)
    assert (done.returncode, done.stdout) == (0, b"done\n")
    keeper.until("executed a k")
    assert keeper.once(*words).stdout == b"done\n"
    assert keeper.happened() == 1


def test_the_worker_dies_before_it_can_say_that_it_is_committed(keeper: Keeper) -> None:
    """
    The commit was durable: the caller learns that from the next worker, and has its result.
    """
    keeper.kill()
    keeper.start(die_after="commit")
    caller = keeper.begin("k", "--", *HAPPEN)
    assert keeper.wait() == -signal.SIGKILL
    keeper.start()
    done = end(caller)
    assert (done.returncode, done.stdout) == (0, b"done\n")
    assert keeper.happened() == 1


def test_who_has_lost_its_claim_meanwhile_gets_the_others_result(keeper: Keeper, gate: Gate) -> None:
    """
    The token of a claim that was taken over commits nothing, so all callers see one result.
    """
    words = ["k", "--redo", "--parameters", "x", "--", "sh", "-c"]
    first = keeper.begin(*words, f"echo started >&2; {gate.COMMAND}; echo first")
    until(first, "started")
    keeper.kill()
    keeper.start()
    assert keeper.once(*words, "echo second", step="b").stdout == b"second\n"
    keeper.until("taken-over b k")
    gate.open()
    done = end(first)
    keeper.until("lost a k")
    assert (done.returncode, done.stdout) == (0, b"second\n")
    assert b"awaited" in done.stderr


def test_what_has_happened_is_not_done_again_when_its_claim_was_lost_for_nothing(keeper: Keeper, gate: Gate) -> None:
    """
    The one that took it over failed: the first one's own result is the one that counts.
    """
    words = ["k", "--redo", "--parameters", "x", "--", "sh", "-c"]
    first = keeper.begin(*words, f"echo started >&2; {gate.COMMAND}; echo x >> effects; echo first")
    until(first, "started")
    keeper.kill()
    keeper.start()
    assert keeper.once(*words, "exit 3", step="b").returncode == 3
    gate.open()
    done = end(first)
    keeper.until("lost a k")
    assert (done.returncode, done.stdout, keeper.happened()) == (0, b"first\n", 1)
    assert keeper.once(*words, "echo second", step="b").stdout == b"first\n"


def test_a_worker_that_stops_leaves_the_claims_as_they_are(keeper: Keeper, gate: Gate) -> None:
    """
    They are given up neither as failed nor as cut off: their callers may still commit.
    """
    caller = keeper.begin("k", "--", "sh", "-c", f"echo started >&2; {gate.COMMAND}; echo x >> effects")
    until(caller, "started")
    keeper.kill(signal.SIGTERM)
    assert keeper.effect("k").state == effects.CLAIMED
    keeper.start()
    gate.open()
    assert end(caller).returncode == 0
    keeper.until("executed a k")


def test_a_key_that_another_worker_holds_is_asked_about_until_it_is_free(keeper: Keeper) -> None:
    """
    Nobody tells us when another machine is done, so the worker looks.
    """
    with keeper.effects() as elsewhere:
        token = elsewhere.claim("k", "p", "far", 60.0, False).effect.token
        raws = [Raw(keeper) for _ in range(2)]
        assert [raw.claim("k") for raw in raws] == [{"verdict": wire.WAITING, "step": "far"}] * 2
        elsewhere.commit("k", token, b"done", 4)
    for raw in raws:
        answer = raw.hear()
        assert (answer["verdict"], answer["outcome"], answer["size"]) == (wire.COMMITTED, wire.AWAITED, "4")
        raw.close()


def test_many_callers_with_keys_of_their_own_do_not_wait_for_each_other(keeper: Keeper) -> None:
    """
    64 at once: all are at it at the same time, and each key is done once.
    """
    done = keeper.script("""
import threading
together, results = threading.Barrier(64), []
def effect():
    together.wait(60)
    return happen()
def caller(number):
    results.append(step.once(f'k{number}', effect))
threads = [threading.Thread(target=caller, args=[number]) for number in range(64)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(results))
""")
    assert done.stdout == b"64\n", done.stderr
    assert keeper.happened() == 64


@pytest.mark.parametrize("inherited", [True, False], ids=["its step is known", "its step is not known"])
@pytest.mark.parametrize("taken_over", [True, False], ids=["taken over", "new"])
def test_a_claim_whose_answer_was_lost_is_granted_again_to_who_asked(
    keeper: Keeper, taken_over: bool, inherited: bool
) -> None:
    """
    C13: the worker dies between the claim's commit and its answer.  The one who asked lives and knows that it has not
    begun, so the effect happens, without a person; what may have been begun before it is looked for first.
    """
    check = CHECK if taken_over else []
    words = ["k", *check, "--parameters", "x", "--", *HAPPEN]
    if taken_over:  # somebody was killed in it
        raw = Raw(keeper)
        raw.say(once="begin", key="k", token=raw.claim("k", parameters=_X)["token"]).close()
    keeper.kill()
    keeper.start(die_after="claim")
    caller = keeper.begin(*words)
    assert keeper.wait() == -signal.SIGKILL
    keeper.start(inherit="yes" if inherited else "")
    done = end(caller)
    assert (done.returncode, done.stdout) == (0, b"done\n"), done.stderr
    keeper.until(f"{'taken-over' if taken_over else 'executed'} a k")
    assert keeper.happened() == 1


def test_a_release_whose_answer_was_lost_is_repeated(keeper: Keeper) -> None:
    """
    C13: the command failed; the worker dies when that is recorded.  The next caller may do it.
    """
    keeper.kill()
    keeper.start(die_after="release")
    failing = keeper.begin("k", "--parameters", "x", "--", "sh", "-c", "exit 3")
    assert keeper.wait() == -signal.SIGKILL
    keeper.start()
    assert end(failing).returncode == 3
    assert b"executed" in keeper.once("k", "--parameters", "x", "--", *HAPPEN).stderr


def test_nobody_else_ends_a_claim(keeper: Keeper, gate: Gate) -> None:
    """
    S14: another process that says the right key and token, on a connection of its own, neither commits nor releases it.
    """
    caller = keeper.begin("k", "--", "sh", "-c", f"echo started >&2; {gate.COMMAND}; echo x >> effects; echo true")
    until(caller, "started")
    token = keeper.effect("k").token
    for claimant in ("", "0" * 32):
        raw = Raw(keeper)
        fields = {"key": "k", "token": token, "claimant": claimant}
        forged = {**fields, "step": "b", "outcome": "executed", "size": 0, "kept": True}
        assert raw.say(once="commit", **forged).hear() == {"verdict": wire.LOST}
        raw.say(once="release", **fields).hear()
        raw.close()
    raw = Raw(keeper)
    assert raw.claim("k", parameters=keeper.effect("k").parameters)["verdict"] == wire.WAITING
    raw.close()
    gate.open()
    done = end(caller)
    assert (done.returncode, done.stdout) == (0, b"true\n")
    keeper.until("executed a k")
