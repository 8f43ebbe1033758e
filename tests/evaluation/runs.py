"""
Runs whose journals the tests of judging look at: children, failures, questions, hooks, pictures, pruned and hostile histories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Change,
    Engine,
    Hooks,
    Limits,
    Parallel,
    Perform,
    StepText,
    ToolCall,
    ToolResult,
    tool,
)
from stepengine.context import truncate
from stepengine.data.messages import ImagePart, ThinkingPart
from stepengine.data.usage import Usage
from stepengine.data.yields import make_program_parallel
from stepengine.errors import ToolError
from stepengine.journal import Journal, MemoryJournal
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel, failure, tool_call, tool_calls

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 40
KEY = "sk-ant-" + "api03-" + "Zx9" * 20


@tool(in_thread=False)
def read_file(path: str) -> ToolResult:
    """
    Read a file.
    """
    if "gone" in path:
        return ToolResult.error(f"there is no {path}")
    if "picture" in path:
        return ToolResult.parts([ImagePart(data=PNG)])
    return ToolResult.text(f"def main():\n    return {path!r}\n", change=Change(context={"last": path}))


def today() -> dict[str, Any]:
    return {"day": "Monday", "load": 0.4}


def count_messages(ctx: Any) -> Change:
    return Change(context={"seen": len(ctx.state.message_history)})


def tried(path: str) -> Iterator[Any]:
    tries = 0
    while True:
        tries += 1
        try:
            got = yield from ToolCall("read_file", {"path": path})
            return got.text
        except ToolError as error:
            if tries > 1:
                return str(error)


def review(ctx: Any) -> Iterator[Any]:
    findings = []
    password = "hunter22"  # noqa: F841 - a variable whose name tells
    draft = yield from Perform(today)
    for path in ctx.params.get("paths", ["a.py", "gone.py"]):
        yield STEP
        text = yield from tried(path)
        findings.append(len(text))
    del draft
    yield from Parallel(AgentCall("helper", "Check a.py"), AgentCall("helper", "Check b.py"))
    answer = yield from Ask("Open a ticket?", options=["yes", "no"])
    yield StepText(f"The ticket: {answer}.")
    yield STEP
    return {"findings": findings, "ticket": answer}


HELPER = AgentDefinition("helper", model="x/small", tools=[read_file], system_prompt="You look for bugs.")
REVIEWER = AgentDefinition(
    "reviewer", model="x/big", tools=[read_file], spawnable_agents=[HELPER], handle_steps=review, limits=Limits(max_steps=40),
    system_prompt="You review.\nBe terse.", hooks=Hooks(pre_step=[count_messages]),
)  # fmt: skip
READER = AgentDefinition(
    "reader",
    model="x/big",
    tools=[read_file],
    limits=Limits(max_steps=10_000),
    hooks=Hooks(pre_step=[truncate(max_tokens=400)]),
)


def said(text: str, *calls: ModelReply, thought: str = "", number: int = 1) -> ModelReply:
    thinking = [ThinkingPart(thought)] if thought else []
    parts = [*thinking, *([text] if text else []), *[part for call in calls for part in call.content]]
    usage = Usage(input_tokens=100 + number, cache_read_tokens=50 * number, output_tokens=10)
    return ModelReply(parts, usage=usage, cost=Decimal("0.001") * number)


def replies(last: str = "Done.") -> list[Any]:
    """
    Return what the reviewer and its helpers are told: by who asks, and how often it did.
    """
    mine = iter([
        said("I begin.", tool_call("read_file", {"path": "picture"}), thought="Small steps."),
        said("", tool_calls(tool_call("read_file", {"path": "b.py"}), tool_call("read_file", {"path": "gone.py"})), number=2),
    ])  # fmt: skip

    def reply(request: Any) -> ModelReply:
        if "bugs" in request.system_prompt:
            return said("No bug.", number=5)
        asked = any("ticket" in str(m.content) for m in request.messages)
        return next(mine, said(last, number=7) if asked else said("Read.", number=4))

    return [reply] * 20


def engine(said: list[Any]) -> Engine:
    return Engine([REVIEWER, READER], models=ScriptedModel(said))


def reviewed(journal: Journal | None = None, *, last: str = "Done.", answered: bool = True, **params: Any) -> Journal:
    """
    Record the reviewer: to its question, and with the answer to its end.
    """
    made = MemoryJournal() if journal is None else journal
    with engine(replies(last)) as running:
        waiting = running.run_sync("reviewer", "Review src.", params=params or None, journal=made)
        assert "suspended" == waiting.status, waiting.error
        if answered:
            (question,) = waiting.pending_questions
            assert "completed" == running.resume_sync(made, answers={question.id: "yes"}).status
    return made


def read_all(steps: int, make: Callable[[int], ModelReply] | None = None, journal: Journal | None = None) -> Journal:
    """
    Record the reader: so many steps, each but the last one reads a file; its history is pruned on the way.
    """
    made = MemoryJournal() if journal is None else journal
    numbers = iter(range(1, steps))

    def reply(_: Any) -> ModelReply:
        number = next(numbers, None)
        if number is None:
            return said("All read.", number=steps)
        if make is not None:
            return make(number)
        return said(f"Now module {number}.", tool_call("read_file", {"path": f"src/module_{number}.py"}), number=number)

    with engine([reply] * steps) as running:
        assert "completed" == running.run_sync("reader", "Read it all.", journal=made).status
    return made


HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><svg/onload=alert(1)>"
    "<a href='javascript:alert(1)'>go</a>javascript:alert(1) \u202egnp.exe\u2066 \x1b[31m\x00\x07\u2028 <!-- {script}{payload} '\"`${x}"
)


def programmed(code: str, *turns: tuple[list[Any], list[int]]) -> Journal:
    """
    Return a run that waits in a program: a tool that asks, turn by turn, for what a program would, each at its line.
    """

    @tool(in_thread=False)
    def price(item: str) -> int:
        """
        What an item costs.
        """
        if item == "gold":
            raise ValueError("nobody sells gold")
        return len(item) * 10

    @tool(name="run_code", uses=[price])
    def run_code(code: str, restart: bool = False) -> Any:
        """
        Run a program.
        """
        for calls, lines in turns:
            yield make_program_parallel(calls, lines)
        return "ended"

    journal = MemoryJournal()
    agent = AgentDefinition("buyer", model="x/y", tools=[run_code])
    with Engine([agent], models=ScriptedModel([tool_call("run_code", {"code": code}), said("done")])) as running:
        running.run_sync("buyer", "Buy tea.", journal=journal)
    return journal


def hostile_run() -> Journal:
    """
    Return a run that says hostile things wherever one can.
    """

    @tool(name="look", description=HOSTILE, in_thread=False)
    def look(where: str) -> ToolResult:
        return ToolResult.error(HOSTILE) if where == "x" else ToolResult.parts([HOSTILE, HOSTILE])

    def handler(ctx: Any) -> Any:
        yield STEP
        told = yield from Perform(lambda text: {text: text}, HOSTILE)
        yield STEP
        yield from Ask(HOSTILE, options=[HOSTILE, "no"])
        return told

    agent = AgentDefinition("mallory", model=f"x/{HOSTILE}", tools=[look], handle_steps=handler, system_prompt=HOSTILE)
    journal = MemoryJournal()
    answers = [
        said(HOSTILE, tool_call("look", {"where": "x", HOSTILE: HOSTILE}), thought=HOSTILE),
        said(HOSTILE, tool_call("look", {"where": HOSTILE}), tool_call(HOSTILE, {"x": HOSTILE})),
        said(HOSTILE),
        failure(RuntimeError(HOSTILE)),
        said("x"),
    ]
    with Engine([agent], models=ScriptedModel(answers)) as running:
        running.run_sync("mallory", HOSTILE, journal=journal, metadata={HOSTILE: HOSTILE})
    return journal
