"""The bytes that go in and out of the sandbox: they are in the memory of this process, and so are limited there."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, tool
from stepengine.testing import ScriptedModel, text

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox, ProgramLimits, code_mode
from stepengine.sandbox.untrusted_handlers import load_source

from .programs import outputs, programs, run_programs

pytestmark = [pytest.mark.anyio, pytest.mark.leaks_allowed("what the sandbox opens once for a process stays")]

AGENT = """
from stepengine import STEP, AgentDefinition, Sleep, ToolCall

def handle_steps(ctx):
{body}

agent = AgentDefinition("a", model="test/m", handle_steps=handle_steps, tools=["echo"])
"""
MEBI = 1024 * 1024
LIMITS = ProgramLimits(seconds=60, turn=2 * MEBI, total=4 * MEBI)
HISTORY = "_se_" + "host"


@tool(category="read")
def echo(value: str) -> str:
    """Give it back."""
    return value


async def error_of(body: str, sandbox: MontySandbox, prompt: str = "go") -> str:
    lines = "\n".join([f"    {line}" for line in body.splitlines()])
    agent, *_ = load_source(AGENT.format(body=lines), limits=LIMITS, sandbox=sandbox)
    async with Engine([agent], tools=[echo], models=ScriptedModel([text("end")] * 30)) as engine:
        result = await engine.run(agent, prompt)
    assert result.status == "failed", result
    return f"{type(result.error).__name__}: {result.error}"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG44")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "for n in range(9):\n    ctx.random.sample(range(10**15), 50_000)\nyield STEP",
            "2,097,152 bytes went in and out",
        ),
        (
            f"for n in range(9):\n    try: eval('{HISTORY}(\"message_history\", 0)')\n    except BaseException: pass\n"
            "    eval('" + HISTORY + '("inherited_messages")\')\nyield STEP',
            "in one turn",
        ),
        (
            "for n in range(100):\n    ctx.random.sample(range(10**15), 10_000)\n    yield Sleep(0)",
            "4,194,304 bytes went in and out",
        ),
        (
            "for n in range(40):\n    ctx.random.randrange(2**4_000_000)\nyield STEP",
            "2,097,152 bytes went in and out",
        ),
        ("for n in range(100):\n    yield from ToolCall('echo', {'value': 'a' * 90_000})", "in all"),
    ],
)
async def test_a_handler_that_moves_too_many_bytes_is_ended(body: str, words: str, sandbox: MontySandbox) -> None:
    error = await error_of(body, sandbox, prompt="p" * 300_000)

    assert error.startswith("HandlerError")
    assert words in error


async def answers_of(*codes: str, tools: Any, journal: Any = None, **options: Any) -> list[str]:
    """Return what is answered to the programs of a run."""
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(*tools, **options)])
    return outputs(await run_programs(agent, *codes, journal=journal))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG44")
@pytest.mark.parametrize(
    "code",
    [
        "for n in range(100):\n    try: await echo('a' * 1_000_000)\n    except Exception: pass\n'done'",
        "for n in range(200):\n    await echo('a' * 90_000)\n'done'",
    ],
)
async def test_a_program_that_moves_too_many_bytes_is_ended(code: str, sandbox: MontySandbox, tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    (answer,) = await answers_of(code, tools=[echo], journal=journal, limits=LIMITS, sandbox=sandbox)

    assert "values of its calls have more than 4,194,304 bytes" in answer
    assert journal.stat().st_size < 12 * MEBI


TOO_MUCH = "TypeError: what is given to calls at once has more than 16,777,216 bytes"
LARGE = {
    "'a' * 500_000": TOO_MUCH,
    "{'a' * 500_000: 1}": TOO_MUCH,
    "ValueError('a' * 500_000)": "TypeError: a value of type ValueError is no JSON",
}


@tool
def accept(value: Any) -> str:
    """Take a value."""
    return "taken"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG44")
@pytest.mark.parametrize("value", LARGE)
async def test_too_many_calls_that_begin_together_end_the_program(value: str, sandbox: MontySandbox) -> None:
    """Each call has a copy of its arguments in this process, although they are one value inside."""
    code = f"import asyncio\nvalue = {value}\nawait asyncio.gather(*[accept(value) for n in range(300)])"
    (answer,) = await answers_of(
        code, tools=[accept], limits=ProgramLimits(seconds=60, memory=16 * MEBI), sandbox=sandbox
    )

    assert LARGE[value] in answer


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG44")
async def test_each_program_of_a_session_has_its_own_bytes(sandbox: MontySandbox) -> None:
    code = "for n in range(15):\n    await echo('a' * 90_000)\n'done'"

    assert ["done"] * 4 == await answers_of(*[code] * 4, tools=[echo], limits=LIMITS, sandbox=sandbox)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG44")
@pytest.mark.parametrize(
    "value", ["[10**4_000] * 20_000", "[b'a' * 1_000_000] * 20", "{10**4_000: [b'a' * 9_000_000]}"]
)
async def test_large_numbers_and_bytes_of_a_last_line_are_omitted(value: str, sandbox: MontySandbox) -> None:
    (answer,) = await answers_of(value, tools=[echo], sandbox=sandbox)

    assert "not shown: a value of more than 8,388,608 bytes" in answer


@tool(category="read")
def load(number: int) -> str:
    """Give a text of a million characters."""
    return f"{number:07}" * 150_000


@pytest.mark.memory
@pytest.mark.spec("programs:PG25")
async def test_ended_programs_of_a_recorded_run_leave_nothing_in_memory(sandbox: MontySandbox, tmp_path: Path) -> None:
    """What the calls of a program gave is in no message: it is needed until the program has ended, and then in the journal alone."""
    held: list[int] = []

    @tool(category="read")
    def look() -> str:
        """Note how much is held."""
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
        return "noted"

    code = "for n in range(16):\n    x = await load(n)\nawait look()"
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(load, look, sandbox=sandbox)])
    script = ScriptedModel([*programs(*[code] * 5), text("end")])
    tracemalloc.start()
    try:
        async with Engine([agent], models=script) as engine:
            await engine.run(agent, "go", journal=str(tmp_path / "run.jsonl"))
    finally:
        tracemalloc.stop()

    assert held[-1] - held[0] < 8 * MEBI
