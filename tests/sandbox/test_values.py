"""What goes into a program and comes out of it: variables, values of all kinds, and those that are none of JSON's."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import AgentDefinition, tool
from stepengine.errors import ToolError
from stepengine.journal import MemoryJournal

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import ProgramLimits, code_mode

from .programs import outputs, run_programs

pytestmark = pytest.mark.anyio


@tool
def echo(x: Any) -> Any:
    """Give back what is given."""
    return x


async def said(*codes: str, tools: Any = (echo,)) -> list[str]:
    """Return what the programs of one run come to, each a result; a replay comes to the same."""
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(*tools)])
    return outputs(await run_programs(agent, *codes, journal=MemoryJournal()))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG27")
async def test_a_failed_program_keeps_its_variables() -> None:
    found = await said("x = 1\n1 / 0", "x + 1", "y = await echo(2)\nawait echo()", "y = await echo(2)\n[][0]", "x + y")

    assert "ZeroDivisionError" in found[0]
    assert "2" == found[1]
    assert "Nothing was run" in found[2]
    assert "3" == found[4]


@tool
def found(n: int) -> dict[str, int] | None:
    """Find something, or nothing."""
    return {"n": n} if n else None


@pytest.mark.spec("programs:PG20")
async def test_an_empty_tool_result_is_none_in_a_program() -> None:
    code = "[one is None for one in (await found(0), await found(1), await echo(None), await echo('null'), await echo(''))]"

    assert ["[true, false, true, false, false]"] == await said(code, tools=[found, echo])


DOUBLED = "x = [1]\nfor _ in range({n}):\n    x = [x, x]\n"
NESTED = "x = 1\nfor _ in range({n}):\n    x = [x]\n"


@pytest.mark.deep
@pytest.mark.spec("programs:PG21")
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        # Three lines make a value of 2^40 members, which nobody has ever written down.
        (DOUBLED.format(n=40), "a value of more than 8,388,608 bytes; one may have 8,388,608"),
        (NESTED.format(n=200), "a value that is nested deeper than 200 levels"),
        ("x = 10**5_000", "Exceeds the limit (4300 digits)"),
    ],
)
async def test_too_large_or_deep_values_are_refused_at_their_call(code: str, expected: str) -> None:
    caught = "\ntry:\n    await echo(x)\nexcept TypeError as error:\n    print(error)\n'and on'"
    (found,) = await said(code + caught)

    assert found.startswith(expected)
    assert found.endswith("and on")


@pytest.mark.spec("programs:PG21")
@pytest.mark.parametrize(
    "code",
    [
        DOUBLED.format(n=40) + "x",
        NESTED.format(n=5_000) + "x",
        "[10**5_000]",
    ],
)
async def test_an_unshowable_last_value_is_reported_after_the_output(code: str) -> None:
    (found,) = await said(f"print('printed')\n{code}")

    assert found.startswith("printed\nThe value of its last line is not shown: ")
    assert len(found) < 300


@pytest.mark.spec("programs:PG23")
async def test_an_overlong_sleep_is_an_error_at_its_line() -> None:
    code = "import asyncio\ntry:\n    await asyncio.sleep(10**12)\nexcept ValueError as error:\n    print(error)"

    assert ["asyncio.sleep takes seconds, from 0 to a hundred years, not 9223372036.854774"] == await said(code)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("programs:PG21")
async def test_a_program_receives_a_long_result_in_full() -> None:
    code = "found = await echo({'a': ['b' * 98] * 10_000})\n[len(found['a']), len(found['a'][-1])]"

    assert ["[10000, 98]"] == await said(code)


@pytest.mark.spec("programs:PG24", "programs:PG27")
async def test_variables_made_by_exec_last_until_later_programs() -> None:
    assert "5" == (await said("run = exec\nrun('qq' + ' = 5')", "qq"))[1]


@tool
def fails(n: int) -> str:
    """Fail with a text."""
    raise ToolError("x" * n)


@pytest.mark.spec("programs:PG44")
async def test_a_text_of_an_error_above_the_limit_stays_outside() -> None:
    agent = AgentDefinition("a", model="test/m", tools=[code_mode(fails, limits=ProgramLimits(value=1_000))])
    code = """
        for n in (10, 100_000):
            try:
                await fails(n)
            except ToolError as error:
                print("x" * 10 in str(error), len(str(error)) < 1_000, "one may have 1,000" in str(error))
        """
    result = await run_programs(agent, code, journal=MemoryJournal())

    assert ["True True False\nFalse True True"] == outputs(result)
