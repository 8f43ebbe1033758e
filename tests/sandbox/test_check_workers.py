"""The check of a program before it runs: bounded in time whatever its text is, stopped with its run, and alone in its worker."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from stepengine import AgentDefinition, RunResult, tool
from stepengine.errors import DefinitionError

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import MontySandbox, code_mode
from stepengine.sandbox.program_checks import LIMITS, MOST_FUNCTIONS, MOST_SCOPES
from stepengine.sandbox.untrusted_handlers import load_source
from tests.waits import until_async as until

from .programs import outputs, run_programs

pytestmark = [pytest.mark.anyio, pytest.mark.leaks_allowed("what the sandbox opens once for a process stays")]

SLOW = "c = await price('x')\nx = 0\n" + "\n".join([f"if c:\n    x = (x, {i})\nelse:\n    x = [x]" for i in range(60)])
"""The checker of the sandbox works on this for days: each branch doubles the types of `x`."""
AGENT = """
from stepengine import AgentDefinition

def handle_steps(ctx):
{body}
    yield "STEP"

agent = AgentDefinition("a", handle_steps=handle_steps)
"""


def nested(depth: int, head: str = "def f{n}():", last: str = "pass", indent: int = 0) -> str:
    lines = [" " * (indent + n) + head.format(n=n) for n in range(depth)]
    return "\n".join([*lines, " " * (indent + depth) + last])


def agent_of(sandbox: MontySandbox) -> AgentDefinition[Any]:
    @tool(category="read")
    def price(item: str) -> int:
        """What an item costs."""
        return len(item)

    return AgentDefinition("a", model="test/m", tools=[code_mode(price, sandbox=sandbox)])


async def ran(code: str, sandbox: MontySandbox) -> RunResult[Any]:
    return await run_programs(agent_of(sandbox), code)


async def answer_of(code: str, sandbox: MontySandbox) -> str:
    (answer,) = outputs(await ran(code, sandbox))
    return answer


NESTED = {
    nested(20): "functions are nested deeper than 6 levels",
    "x = " + "lambda: " * (MOST_SCOPES + 1) + "1": "comprehensions are nested deeper than 12 levels",
    "x = " + "[" * 20 + "1" + " for y in z]" * 20: "comprehensions are nested deeper than 12 levels",
}
NEWER = "def first[T](x: T) -> T:\n    return x\n" + nested(20)
"""What a Python before 3.12 cannot read."""


@pytest.mark.spec("programs:PG43")
@pytest.mark.parametrize(("code", "words"), NESTED.items())
async def test_nested_functions_are_refused_before_anything_is_compiled(
    code: str, words: str, sandbox: MontySandbox
) -> None:
    """The sandbox reads a nested definition three times for each one around it."""
    assert words in await answer_of(code, sandbox)


@pytest.mark.spec("programs:PG43")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="this Python can read it")
@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
async def test_deep_nesting_in_newer_syntax_is_refused_too(end: str, sandbox: MontySandbox) -> None:
    answer = await answer_of(NEWER.replace("\n", end), sandbox)

    assert "line 9, column 7: functions are nested deeper than 6 levels" in answer


@pytest.mark.spec("programs:PG43")
async def test_functions_nested_to_the_limit_run(sandbox: MontySandbox) -> None:
    inner = "\n".join([" " * n + f"return f{n}()" for n in reversed(range(1, MOST_FUNCTIONS))])
    code = nested(MOST_FUNCTIONS, last="return 7") + f"\n{inner}\nf0()"

    assert "7" == await answer_of(code, sandbox)


@pytest.mark.spec("programs:PG40", "programs:PG43")
def test_an_agent_file_with_nested_functions_is_refused() -> None:
    with pytest.raises(DefinitionError, match=r"<agent>:10: functions are nested deeper than 6 levels"):
        load_source(AGENT.format(body=nested(25, indent=4)))


@pytest.mark.deep
@pytest.mark.spec("programs:PG43")
async def test_a_slow_check_ends_and_makes_no_other_program_wait() -> None:
    """Both engines share one sandbox, and their programs its checks."""
    sandbox = MontySandbox(2)
    await ran("1", sandbox)  # workers that are there already
    slow = asyncio.ensure_future(ran(SLOW, sandbox))
    await until(lambda: sandbox.checks.count > 0)
    answer = await answer_of("2 + 2", sandbox)
    is_slow = not slow.done()
    await slow
    sandbox.close()

    assert (answer, is_slow) == ("4", True)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG21", "programs:PG43")
@pytest.mark.parametrize("codes", [[SLOW], [SLOW, SLOW + "\n"]], ids=["one", "one that waits for a worker"])
async def test_a_run_that_is_stopped_ends_its_check(codes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # A check that ended by itself would end at no time of this test.
    monkeypatch.setitem(LIMITS, "max_turn_duration_secs", 3_000.0)
    sandbox = MontySandbox(1)
    await ran("1", sandbox)
    runs = []
    for number, code in enumerate(codes, 1):
        runs.append(asyncio.ensure_future(ran(code, sandbox)))
        await until(lambda number=number: sandbox.checks.count >= number)
    await asyncio.sleep(0.05 if len(codes) == 1 else 0)
    for run in reversed(runs):
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    answer = await answer_of("2 + 2", sandbox)
    sandbox.close()

    assert answer == "4"
