"""
Kills processes in the middle of recorded runs and resumes them: `python -m tests.e2e.kills --rounds 200`.

One round: a run of 40 effects in a process of its own, which gets SIGKILL at a random moment; another process resumes it and
may be killed too; the last one comes to the end. What was done in the world stands in a file that every deed appends one line
to, outside of the engine. A round is good when the end is that of an undisturbed run, no deed with a recorded result was done
again, and a deed that is not idempotent was done exactly once.

Half of the kills wait for a deed, and come at a random moment after it: however slow the machine is, they hit a run under way. The
others come at a random moment after the process has begun, when stores are made and opened.

Processes are forked from this one, which has imported everything, so a round costs what the run costs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from stepengine import STEP, AgentDefinition, Engine, Parallel, Perform, RunStatus, Tool, ToolCall
from stepengine.data.codec import to_json
from stepengine.data.json import thaw
from stepengine.data.outcomes import Value
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import UnknownOutcome
from stepengine.journal import FileJournal, Journal, SqliteJournal, check
from stepengine.testing import ScriptedModel, text

STORES = ("file", "sqlite")
TURNS = 10
EFFECTS = 4 * TURNS
DEEDS = 3 * TURNS
MAX_KILLS = 3
MAX_TRIES = 10
PATIENCE = 60.0
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@attrs.frozen
class World:
    """
    The outside of one run: the file that deeds are appended to.
    """

    log: Path

    def deed(self, name: str) -> str:
        """
        Do something; it is done when one line has been appended.
        """
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, f"{name}\n".encode())
        finally:
            os.close(descriptor)
        time.sleep(0.0005)
        return name

    def done(self) -> Counter[str]:
        """
        Return how often each deed was done.
        """
        return Counter(self.log.read_text().split("\n")[:-1] if self.log.exists() else [])

    def agent(self) -> AgentDefinition[Any]:
        """
        Return an agent of 40 effects. A payment must not happen twice, so when nobody knows, it asks the world.
        """

        def paid(n: int) -> bool:
            return f"pay {n}" in self.done()

        def pay(n: int) -> Any:
            while True:
                try:
                    return (yield from ToolCall("pay", {"n": n}, include_tool_call=False)).text
                except UnknownOutcome:
                    if (yield from Perform.idempotent(paid, n)):
                        return f"pay {n}"

        def handle_steps(ctx: Any) -> Any:
            total: list[Any] = []
            for n in range(TURNS):
                note = ToolCall("note", {"n": n}, include_tool_call=False)
                noted, stamped = yield from Parallel(note, Perform.idempotent(self.deed, f"stamp {n}"))
                total += [noted.text, stamped, (yield from pay(n))]
                yield STEP
            return total

        def tool(name: str, **options: Any) -> Tool:
            run = lambda given: self.deed(f"{name} {given['n']}")  # noqa: E731
            return Tool(name=name, description="d", input_schema=SCHEMA, run=run, in_thread=False, **options)

        safe = ToolAnnotations(idempotent=True)
        return AgentDefinition(
            "payer", model="test/m", tools=[tool("pay"), tool("note", annotations=safe)], handle_steps=handle_steps
        )


@attrs.frozen
class Place:
    """
    Where one round happens.
    """

    folder: Path
    store: str

    @property
    def world(self) -> World:
        return World(self.folder / "world.log")

    @property
    def journal(self) -> Journal:
        return (
            SqliteJournal(self.folder / "runs.db", "run")
            if self.store == "sqlite"
            else FileJournal(self.folder / "run.jsonl")
        )

    def work(self) -> None:
        """
        Run, or go on with what was recorded, and leave the end in a file; this is what a forked process does.
        """
        model = ScriptedModel([lambda request: text(f"said {len(request.messages)}")] * EFFECTS)
        agent, journal = self.world.agent(), self.journal
        with Engine([agent], models=model, pricing=None) as engine:
            begun = bool(journal.records())
            result = engine.resume_sync(journal) if begun else engine.run_sync(agent, "go", journal=journal)
        if result.status is not RunStatus.COMPLETED:
            raise result.error or RuntimeError(result.status)
        history = [to_json(message) for message in result.state.message_history]
        (self.folder / "end.json").write_text(json.dumps([thaw(result.output), history]))

    def end(self) -> Any:
        """
        Return how the run ended.
        """
        return json.loads((self.folder / "end.json").read_text())


@attrs.frozen
class Kill:
    """
    When a process is killed.

    Attributes:
        world: Where its deeds stand.
        deeds: How many there are first.
        seconds: How long after that.
    """

    world: World
    deeds: int
    seconds: float

    def strike(self, pid: int) -> None:
        """
        Kill a child process at the moment, or leave it alone if it has ended before.
        """
        while self.world.done().total() < self.deeds:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(0.001)
        time.sleep(self.seconds)
        os.kill(pid, signal.SIGKILL)


def process(work: Callable[[], None], kill: Kill | None = None) -> bool:
    """
    Do *work* in a forked process, and kill it at a moment after it said that it begins; return whether that ended it.
    """
    sys.stdout.flush()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writes, b"!")
            work()
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writes)
    os.read(reads, 1)
    os.close(reads)
    if kill is not None:
        kill.strike(pid)
    status = waited(pid, time.monotonic() + PATIENCE)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        msg = f"a run ended with code {os.WEXITSTATUS(status)}"
        raise AssertionError(msg)
    return os.WIFSIGNALED(status)


def waited(pid: int, deadline: float) -> int:
    """
    Return the status of a process that ends before *deadline*.
    """
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            msg = f"a run did not end within {PATIENCE:.0f} s"
            raise AssertionError(msg)
        time.sleep(0.001)


@attrs.define
class Tally:
    """
    What happened in all rounds of one store.
    """

    store: str
    rounds: int = 0
    kills: int = 0
    begun: int = 0
    committed: int = 0
    in_doubt: int = 0
    done_again: int = 0

    def __str__(self) -> str:
        return (
            f"{self.store}: {self.rounds} rounds, {self.kills} processes killed, {self.begun} of them after the run had "
            f"begun, {self.committed} committed deeds found after kills and none done again, {self.in_doubt} deeds in doubt, of which "
            f"{self.done_again} idempotent ones were done again; every end equal to the undisturbed one"
        )


def round_of(place: Place, expected: Any, seconds: float, dice: random.Random, tally: Tally) -> bool:
    """
    Kill one run up to three times, let it end, and check everything; return whether any kill hit a run under way.
    """
    settled: Counter[str] = Counter()
    begun = tally.begun
    for _ in range(dice.randint(1, MAX_KILLS)):
        if not process(place.work, drawn(place.world, seconds, dice)):
            break
        tally.kills += 1
        settled = survived(place, settled, tally)
    else:
        process(place.work)
    counts = place.world.done()
    check_settled(counts, settled)
    assert place.end() == expected, "the end is not that of an undisturbed run"
    assert len(counts) == DEEDS, f"{len(counts)} of {DEEDS} deeds were done"
    twice = [deed for deed, count in counts.items() if count > 1]
    assert not [deed for deed in twice if deed.startswith("pay")], f"done twice: {twice}"
    tally.done_again += len(twice)
    report = check(place.journal)
    assert report, report.problems
    assert report.is_complete
    return tally.begun > begun


def drawn(world: World, seconds: float, dice: random.Random) -> Kill:
    """
    Return a moment of a run that takes so many seconds: after one of the deeds to come, or any.
    """
    done = world.done().total()
    if done < DEEDS and dice.random() < 0.5:
        return Kill(world, dice.randint(done + 1, DEEDS), dice.uniform(0, seconds / DEEDS))
    return Kill(world, 0, dice.uniform(0, seconds))


def survived(place: Place, settled: Counter[str], tally: Tally) -> Counter[str]:
    """
    Return how often each deed whose result outlived the kill was done, after checking those of the kills before.
    """
    counts, history = place.world.done(), place.journal.history()
    check_settled(counts, settled)
    found: Counter[str] = Counter()
    tally.begun += bool(history.intents)
    for address, intent in history.intents.items():
        name = deed_of(history.form(intent))
        known = history.results.get(address)
        if not name:
            continue
        if known is None:
            tally.in_doubt += 1
        elif type(history.outcome(known)) is Value:  # else it says that nobody knows
            assert counts[name], f"{name} has a result, but was never done"
            found[name] = counts[name]
    tally.committed += len(found)
    return found


def check_settled(counts: Counter[str], settled: Counter[str]) -> None:
    """
    Check that nothing with a recorded result was done again.
    """
    again = {name: (count, counts[name]) for name, count in settled.items() if counts[name] != count}
    assert not again, f"recorded, and done again: {again}"


def deed_of(form: Any) -> str:
    """
    Return what an effect does to the world; `""` for one that does nothing.
    """
    if form["type"] == "tool_call":
        return f"{form['tool_name']} {form['input']['n']}"
    return str(form["args"][0]) if form["type"] == "perform" and form["name"].endswith("deed") else ""


def rounds(store: str, count: int, seed: int) -> Tally:
    """
    Kill and resume *count* runs; a round in which no kill hit a run under way does not count. Failures name their seed.
    """
    tally = Tally(store)
    with tempfile.TemporaryDirectory() as folder:
        expected, seconds = undisturbed(Path(folder), store)
        for number in range(count * MAX_TRIES):
            place = Place(Path(folder) / str(number), store)
            place.folder.mkdir()
            try:
                hit = round_of(place, expected, seconds, random.Random(f"{seed}:{store}:{number}"), tally)
            except AssertionError as error:
                error.add_note(f"round {number} of {store}, seed {seed}")
                raise
            tally.rounds += hit
            if tally.rounds == count:
                return tally
    msg = f"only {tally.rounds} of {count * MAX_TRIES} runs were hit by a kill"
    raise AssertionError(msg)


def undisturbed(folder: Path, store: str) -> tuple[Any, float]:
    """
    Return the end of a run that nobody disturbs, and the seconds that one takes, from the quickest of three.
    """
    taken: list[float] = []
    for name in ("first", "second", "third"):
        place = Place(folder / name, store)
        place.folder.mkdir()
        begun = time.monotonic()
        process(place.work)
        taken.append(time.monotonic() - begun)
    return place.end(), min(taken)


def main() -> None:
    """
    Read the command line, do the rounds, and print what came out.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.kills", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="rounds for each store (200)")
    parser.add_argument("--store", choices=[*STORES, "both"], default="both")
    parser.add_argument("--seed", type=int, default=0, help="what the moments depend on (0)")
    given = parser.parse_args()
    for store in STORES if given.store == "both" else [given.store]:
        print(rounds(store, given.rounds, given.seed), flush=True)


if __name__ == "__main__":
    main()
