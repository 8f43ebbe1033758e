"""The check of a program before it runs: bounded in time whatever its text is, stopped with its run, and alone in its worker."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
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

SOON = 1.5
"""Seconds, on a machine that is busy with other things too; what is measured takes a tenth of it."""
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
    nested(20, "async def f{n}():"): "functions are nested deeper than 6 levels",
    nested(MOST_FUNCTIONS + 1): "functions are nested deeper than 6 levels",
    "x = " + "lambda: " * (MOST_SCOPES + 1) + "1": "comprehensions are nested deeper than 12 levels",
    "x = " + "[" * 20 + "1" + " for y in z]" * 20: "comprehensions are nested deeper than 12 levels",
}
NEWER = "def first[T](x: T) -> T:\n    return x\n" + nested(20)
"""What a Python before 3.12 cannot read."""


@pytest.mark.speed
@pytest.mark.spec("programs:PG43")
@pytest.mark.parametrize("code", [*NESTED, NEWER, NEWER.replace("\n", "\r"), NEWER.replace("\n", "\r\n")])
async def test_nested_functions_are_refused_soon(code: str) -> None:
    sandbox = MontySandbox(1)
    began = time.monotonic()
    await ran(code, sandbox)
    seconds = time.monotonic() - began
    sandbox.close()

    assert seconds < SOON


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


@pytest.mark.speed
@pytest.mark.spec("programs:PG40", "programs:PG43")
def test_nested_functions_in_an_agent_file_are_refused_quickly() -> None:
    began = time.monotonic()
    with pytest.raises(DefinitionError):
        load_source(AGENT.format(body=nested(25, indent=4)))

    assert time.monotonic() - began < 1


async def beside_a_slow_check() -> tuple[str, bool, float, float]:
    """
    Return what a program answers beside a slow check, whether that still went on, how long the program took, and how long both.
    Both engines share one sandbox, and their programs its checks.
    """
    sandbox = MontySandbox(2)
    await ran("1", sandbox)  # workers that are there already
    began = time.monotonic()
    slow = asyncio.ensure_future(ran(SLOW, sandbox))
    await until(lambda: sandbox.checks.count > 0)
    asked = time.monotonic()
    answer = await answer_of("2 + 2", sandbox)
    seconds, is_slow = time.monotonic() - asked, not slow.done()
    await slow
    took = time.monotonic() - began
    sandbox.close()
    return answer, is_slow, seconds, took


@pytest.mark.deep
@pytest.mark.spec("programs:PG43")
async def test_a_slow_check_ends_and_makes_no_other_program_wait() -> None:
    answer, is_slow, _, _ = await beside_a_slow_check()

    assert (answer, is_slow) == ("4", True)


@pytest.mark.speed
@pytest.mark.spec("programs:PG43")
async def test_a_slow_check_ends_at_its_limit_without_delaying_others() -> None:
    _, _, seconds, took = await beside_a_slow_check()

    assert seconds < SOON
    assert took < LIMITS["max_turn_duration_secs"] + 2 * SOON


async def stopped(sandbox: MontySandbox, *codes: str) -> float:
    """Stop runs, whose checks have begun or wait for a worker, the last one first; return how long that takes."""
    await ran("1", sandbox)
    runs = []
    for number, code in enumerate(codes, 1):
        runs.append(asyncio.ensure_future(ran(code, sandbox)))
        await until(lambda number=number: sandbox.checks.count >= number)
    await asyncio.sleep(0.05 if len(codes) == 1 else 0)
    began = time.monotonic()
    for run in reversed(runs):
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    return time.monotonic() - began


@pytest.mark.spec("programs:PG21", "programs:PG43")
@pytest.mark.parametrize("codes", [[SLOW], [SLOW, SLOW + "\n"]], ids=["one", "one that waits for a worker"])
async def test_a_run_that_is_stopped_ends_its_check(codes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    # A check that ended by itself would end at no time of this test.
    monkeypatch.setitem(LIMITS, "max_turn_duration_secs", 3_000.0)
    sandbox = MontySandbox(1)
    await stopped(sandbox, *codes)
    answer = await answer_of("2 + 2", sandbox)
    sandbox.close()

    assert answer == "4"


@pytest.mark.speed
@pytest.mark.spec("programs:PG21", "programs:PG43")
@pytest.mark.parametrize(("codes", "most"), [([SLOW], SOON / 3), ([SLOW, SLOW + "\n"], SOON)])
async def test_runs_that_are_stopped_end_their_checks_at_once(codes: list[str], most: float) -> None:
    sandbox = MontySandbox(1)
    seconds = await stopped(sandbox, *codes)
    sandbox.close()

    assert seconds < most


def test_an_early_stop_signal_ends_later_work() -> None:
    from stepengine.sandbox.check_workers import StopSignal

    signal, ended = StopSignal(), list[str]()
    with signal.ending(lambda: ended.append("first")):
        sender = threading.Thread(target=signal.send)
        sender.start()
        sender.join()
    with signal.ending(lambda: ended.append("second")):
        pass
    signal.send()

    assert ended == ["first", "second"]
    assert signal.is_sent


async def test_a_pool_that_was_closed_starts_again() -> None:
    sandbox = MontySandbox(1)
    for number in range(2):
        assert await answer_of(f"{number} + 1", sandbox) == f"{number + 1}"
        sandbox.checks.close()
    sandbox.close()
