"""
Random programs, the agent that runs them, and how a run of them is brought to its end, by as many processes as it takes.

``python -m tests.sandbox.generated JOURNAL LEDGER SEED CALL`` runs those of a seed, and kills itself in the call with that number;
with -1 it goes on with what another one has left, and prints what the programs came to.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stepengine import AgentDefinition, Answer, Engine, Question, RunResult, RunStatus, Sleep, ToolCall, tool
from stepengine.journal import FileJournal
from stepengine.permissions import Call, Policy, Rule
from stepengine.sandbox import Sandbox, code_mode
from stepengine.testing import Clock, ScriptedModel, text, tool_call

ALLOWED = ("run_code", "look", "book", "fails")
POLICY = Policy(
    [Rule("deny", Call("forbidden")), Rule("ask", Call("careful")), *[Rule("allow", Call(name)) for name in ALLOWED]]
)
NAMES = ("v0", "v1", "v2", "v3")
MOST_DEEP = 2
MOST_RESUMED = 60
ALIKE = 20_000
"""From this seed on two runs come to the same, since no program draws numbers."""


class _Writer:
    """Writes one program."""

    def __init__(self, rng: random.Random, *, draws: bool) -> None:
        self.rng = rng
        self.draws = draws
        self.kinds = [
            *(self.call, self.gather, self.mixed, self.shown, self.caught, self.loop, self.loop, self.nested),
            *(
                self.asked,
                self.slept,
                self.drawn,
                self.collected,
                self.child,
                self.permitted,
                self.chosen,
                self.together,
            ),
        ]

    def lines(self, depth: int = 0) -> list[str]:
        found: list[str] = []
        for _ in range(self.rng.randint(1, 4 - depth)):
            kind = self.rng.choice(self.kinds)
            if depth < MOST_DEEP or kind not in (self.loop, self.nested, self.chosen, self.caught):
                found += kind(depth)
        return found or ["pass"]

    def below(self, depth: int) -> list[str]:
        return ["    " + line for line in self.lines(depth + 1)]

    def name(self) -> str:
        return self.rng.choice(NAMES)

    def number(self) -> int:
        return self.rng.randint(1, 9)

    def call(self, _: int) -> list[str]:
        return [f"{self.name()} = await look({self.number()})"]

    def gather(self, _: int) -> list[str]:
        calls = ", ".join([f"look({self.number()})" for _ in range(self.rng.randint(2, 5))])
        return [f"{self.name()} = sum(await asyncio.gather({calls}))"]

    def mixed(self, _: int) -> list[str]:
        name = self.name()
        return [
            f"one, two = await asyncio.gather(look({name}), book('b{self.number()}', {name}))",
            f"print(one, two, {name})",
        ]

    def together(self, _: int) -> list[str]:
        return [f"found = [await look(n) for n in range({self.number() % 4})]", f"{self.name()} += len(found)"]

    def shown(self, _: int) -> list[str]:
        return [f"print({self.number()}, {self.name()}, 'é\\n')"]

    def caught(self, depth: int) -> list[str]:
        error = self.rng.choice(["ToolError", "PermissionError", "Exception", "(PermissionError, ToolError)"])
        return [
            "try:",
            *self.below(depth),
            f"    {self.failing()}",
            f"except {error} as error:",
            f"    print({self.name()}, error)",
        ]

    def failing(self) -> str:
        return self.rng.choice(
            ["await fails('no')", "await forbidden(1)", "await asyncio.gather(look(1), fails('both'))", "1 / 0"]
        )

    def loop(self, depth: int) -> list[str]:
        return [f"for step{depth} in range({self.rng.randint(1, 3)}):", *self.below(depth)]

    def nested(self, depth: int) -> list[str]:
        return [
            f"async def work{depth}(n):",
            "    first = await look(n)",
            "    return first + await look(first)",
            f"{self.name()} = sum(await asyncio.gather(work{depth}(1), work{depth}(2), work{depth}({self.number()})))",
        ]

    def asked(self, _: int) -> list[str]:
        return [f"{self.name()} += len(await ask('Question {self.number()}?', ['yes', 'no']))"]

    def slept(self, _: int) -> list[str]:
        return [f"await asyncio.sleep({self.rng.choice([0, 60, 7200])})"]

    def drawn(self, _: int) -> list[str]:
        return [f"{self.name()} += random.randint(0, {5 if self.draws else 0})"]

    def collected(self, _: int) -> list[str]:
        return [f"print(sorted({{{self.name()}, {self.name()}, {self.number()}}}), {{'k': {self.name()}}})"]

    def child(self, _: int) -> list[str]:
        return [f"{self.name()} += len(await helper('{self.number()}'))"]

    def permitted(self, _: int) -> list[str]:
        return [
            "try:",
            f"    print(await careful({self.number()}))",
            "except PermissionError as error:",
            "    print('not', error)",
        ]

    def chosen(self, depth: int) -> list[str]:
        return [f"if {self.name()} % 2:", *self.below(depth), "else:", *self.below(depth)]


def calls_of(seed: int) -> list[dict[str, Any]]:
    """Return the inputs of the calls of ``run_code`` of one run: programs that go on from each other's variables."""
    rng, found = random.Random(seed), list[dict[str, Any]]()
    begin = ["import asyncio, random", "v0 = v1 = v2 = v3 = 1"]
    for n in range(rng.randint(1, 3)):
        writer = _Writer(rng, draws=seed < ALIKE)
        restart = n > 0 and rng.random() < 0.2
        lines = [*(begin if restart or not n else ()), *writer.lines()]
        if rng.random() < 0.15:
            lines.append(writer.failing())
        lines.append("[v0, v1, v2, v3]")
        found.append({"code": "\n".join(lines), **({"restart": True} if restart else {})})
    return found


def agent_of(seed: int, note: Callable[[str], None], sandbox: Sandbox | None = None) -> AgentDefinition[Any]:
    """Return the agent of a seed; *note* is told of each call that really happens."""

    @tool(parallel_safe=True, category="read")
    async def look(n: int) -> int:
        """Look; those that are asked for together come back in any order."""
        note(f"look {n}")
        await asyncio.sleep(random.Random().random() * 0.002)  # what it gives does not depend on it
        return (n * 7 + seed) % 11

    @tool
    def book(item: str, at: int) -> str:
        """Book."""
        note(f"book {item}")
        return f"{item} at {at}"

    @tool
    def careful(n: int) -> int:
        """Be careful."""
        note(f"careful {n}")
        return n

    @tool
    def fails(why: str) -> str:
        """Fail."""
        raise ValueError(why)

    @tool
    def forbidden(n: int) -> str:
        """Be forbidden."""
        return str(n)

    def help_(ctx: Any) -> Any:
        result = yield from ToolCall("look", {"n": int(ctx.prompt)})
        yield from Sleep(0)
        return "x" * result.data

    helper = AgentDefinition("helper", tools=[look], handle_steps=help_)
    made = code_mode(look, book, careful, fails, forbidden, agents=[helper], ask=True, sandbox=sandbox)
    return AgentDefinition("writer", model="test/m", tools=[made])


def model_of(seed: int) -> ScriptedModel:
    """Return a model that makes the next call of the seed, whichever process asks it."""
    calls = calls_of(seed)

    def reply(request: Any) -> Any:
        n = sum(message.role == "tool" for message in request.messages)
        return tool_call("run_code", calls[n]) if n < len(calls) else text("end")

    return ScriptedModel(reply)


def answer_to(question: Question) -> Any:
    """Return what a person says, which depends on the question alone."""
    given: Any = question.details
    if question.tool_name is None:
        return "yes" if len(question.text) % 2 else "no"
    return [True, False, Answer(edited_input={"n": 100 + given["n"]})][given["n"] % 3]


def said(result: RunResult) -> list[str]:
    """Return what the programs of a run came to."""
    return [f"{one.result.status}: {one.result.text}" for one in result.tool_calls]


async def to_end(seed: int, agent: AgentDefinition[Any], journal: Path) -> RunResult:
    """Bring a run to its end, each time in an engine that knows nothing of those before; one that is in the journal is gone on with."""
    clock = Clock(datetime(2026, 1, 1, tzinfo=UTC))
    answers: dict[str, Any] = {}
    for _ in range(MOST_RESUMED):
        async with Engine([agent], models=model_of(seed), permissions=POLICY, clock=clock) as engine:
            if FileJournal(journal).records():
                result = await engine.resume(journal, answers=answers, in_doubt="retry")
            else:
                result = await engine.run(agent, "go", journal=journal)
        if result.status is not RunStatus.SUSPENDED:
            return result
        answers = {question.id: answer_to(question) for question in result.pending_questions}
        clock.advance(hours=3)
    msg = f"the run of seed {seed} does not end"
    raise AssertionError(msg)


def main() -> None:
    """Run, and be killed, or go on; see the module."""
    journal, ledger, seed, at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    count = 0

    def note(what: str) -> None:
        nonlocal count
        with ledger.open("a") as log:
            print(what, file=log)
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    result = asyncio.run(to_end(seed, agent_of(seed, note), journal))
    print(json.dumps(said(result)))


if __name__ == "__main__":
    main()
