"""
Counts what one step walks through: calls of Python functions, and the files that they stand in; ``python -m benchmarks.walks [NAME]``.

A count tells what a time on a busy machine does not: whether a change made the way longer. It is the same on every machine, so
a test holds it. Counted are the functions of the package and those that are generated for it, each resumption of a generator as
one call; not the event loop, not what other threads do, such as writing to the disk. With a NAME, all functions of that walk
are listed; ``--json`` prints the calls and files of all walks.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

import stepengine
from benchmarks.engines import arguments
from benchmarks.engines.stepengine import Counting, add, until_done
from stepengine import AgentCall, AgentDefinition, Engine, Limits, Parallel, StepContext, Steps, ToolCall, tool
from stepengine.events import RunFinished
from stepengine.journal import FileJournal
from stepengine.permissions import Policy, Rule
from stepengine.redaction import GIVEN

STEPS = 20
PACKAGE = str(Path(stepengine.__file__).parent)
GENERATED = ("<attrs generated methods stepengine", "<string>")
Calls = Counter[tuple[str, str]]
"""How often each function was called, by file and qualified name."""


class Walk(NamedTuple):
    """
    What one step walks through.

    Attributes:
        functions: Calls by file and function.
        files: Calls by file of the package; those of generated code stand under ``"generated"``.
    """

    functions: dict[tuple[str, str], float]
    files: dict[str, float]

    @property
    def calls(self) -> int:
        """All calls."""
        return round(sum(self.files.values()))


def calling(steps: int) -> Callable[[StepContext], Steps]:
    """Return a handler that calls the tool itself."""

    def handler(_: StepContext) -> Steps:
        for number in range(steps):
            yield ToolCall("add", arguments(number))

    return handler


@tool(uses=[add])
def twice(a: int, b: int) -> Steps[str]:
    """Add in a body of its own."""
    added = yield ToolCall("add", {"a": a, "b": b})
    result = added.tool_result
    return "" if result is None else result.text


def calling_body(steps: int) -> Callable[[StepContext], Steps]:
    """Return a handler that calls a tool that yields, which calls another one."""

    def handler(_: StepContext) -> Steps:
        for number in range(steps):
            yield ToolCall("twice", arguments(number))

    return handler


def leading(steps: int) -> Callable[[StepContext], Steps]:
    """Return a handler that has two children at once, again and again."""

    def handler(_: StepContext) -> Steps:
        for _ in range(steps):
            yield Parallel(AgentCall("child", "go"), AgentCall("child", "go"))

    return handler


def engine_for(steps: int, handler: Callable[[StepContext], Steps], **options: Any) -> Engine:
    """Return an engine with an agent of this handler, and the child that it may have."""
    limits = Limits(max_steps=steps + 1, max_actions=steps + 1, max_total_children=2 * steps)
    model = Counting(0 if handler.__qualname__.startswith("leading") else steps)
    walker = AgentDefinition(
        "walker",
        model="counting/m",
        tools=[add, twice],
        spawnable_agents=["child"],
        limits=limits,
        handle_steps=handler,
    )
    return Engine([walker, AgentDefinition("child", model="counting/m")], models=model, pricing=None, **options)


async def bare_call(steps: int) -> None:
    """Run a handler that yields ``ToolCall``."""
    (await engine_for(steps, calling(steps)).run("walker")).unwrap()


async def body_call(steps: int) -> None:
    """Run a handler that yields a call of a tool that yields; its body calls a plain tool."""
    (await engine_for(steps, calling_body(steps)).run("walker")).unwrap()


async def bare_step(steps: int) -> None:
    """Run a handler that yields ``STEP``; each is a model call and the call of a tool."""
    (await engine_for(steps, until_done).run("walker")).unwrap()


async def watched_step(steps: int) -> None:
    """Run the same with an observer that looks at nothing."""
    (await engine_for(steps, until_done, observers=[lambda _: None]).run("walker")).unwrap()


async def streamed_step(steps: int) -> None:
    """Run the same, read from ``Engine.stream``."""
    async for event in engine_for(steps, until_done).stream("walker"):
        if type(event) is RunFinished:
            event.result.unwrap()


async def two_children(steps: int) -> None:
    """Run a handler that yields two children, each of which has one model call."""
    (await engine_for(steps, leading(steps)).run("walker")).unwrap()


async def recorded_step(steps: int) -> None:
    """Run what people run: ``STEP`` with a file journal, a policy and one observer."""
    options: dict[str, Any] = {"permissions": Policy(rules=[Rule.allow_tool("add")]), "observers": [lambda _: None]}
    with TemporaryDirectory() as folder:
        engine = engine_for(steps, until_done, **options)
        (await engine.run("walker", journal=FileJournal(Path(folder) / "run.jsonl"))).unwrap()


async def secret_step(steps: int) -> None:
    """Run the same where the process knows a key, which is kept out of events and records."""
    GIVEN.add("sk-walk-0123456789abcdef", "WALK_API_KEY")
    try:
        await recorded_step(steps)
    finally:
        GIVEN.clear()


WALKS = {
    "bare call": bare_call,
    "call with a body": body_call,
    "bare STEP": bare_step,
    "watched STEP": watched_step,
    "streamed STEP": streamed_step,
    "two children": two_children,
    "recorded STEP": recorded_step,
    "recorded STEP, a key": secret_step,
}


@contextmanager
def counted(calls: Calls) -> Iterator[None]:
    """Count the calls of functions in this thread."""

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith((PACKAGE, *GENERATED)):
            calls[code.co_filename.removeprefix(PACKAGE)[1:], code.co_qualname] += 1

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def walked(name: str) -> Walk:
    """Return what one step of a walk costs: what 2 N of them cost more than N."""
    run, sums = WALKS[name], [Calls(), Calls()]
    asyncio.run(run(2))
    for number, calls in enumerate(sums, 1):
        with counted(calls):
            asyncio.run(run(number * STEPS))
    once, twice = sums
    functions = {key: (count - once[key]) / STEPS for key, count in twice.items() if count - once[key] >= STEPS / 2}
    files: Counter[str] = Counter()
    for (file, _), count in functions.items():
        files[file if file.endswith(".py") else "generated"] += count  # type: ignore[assignment]
    return Walk(functions, dict(files))


def main() -> None:
    """Print all walks by file, or as JSON, or one by function."""
    if sys.argv[1:] == ["--json"]:
        print(json.dumps({name: [walk.calls, len(walk.files)] for name in WALKS if (walk := walked(name))}))
        return
    if sys.argv[1:]:
        for (file, function), count in sorted(walked(sys.argv[1]).functions.items(), key=lambda pair: -pair[1]):
            print(f"{count:7.1f}  {file}: {function}")
        return
    walks = {name: walked(name) for name in WALKS}
    order = sorted({file for walk in walks.values() for file in walk.files})
    for name, walk in walks.items():
        print(f"{name}: {walk.calls} calls in {len(walk.files)} files")
    print("\n| file | " + " | ".join(walks) + " |\n|---|" + "---:|" * len(walks))
    for file in order:
        print(f"| `{file}` | " + " | ".join([f"{walk.files.get(file, 0):.0f}" for walk in walks.values()]) + " |")


if __name__ == "__main__":
    main()
