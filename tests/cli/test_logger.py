"""
The logger for a console.
"""

from __future__ import annotations

import io
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, LogObserver, tool
from stepengine.cli import ConsoleLogger
from stepengine.errors import DefinitionError
from stepengine.testing import ScriptedModel, text, tool_call

pytestmark = pytest.mark.anyio


def handle_steps(ctx: Any) -> Any:
    ctx.logger.warning("careful", why="it is late")
    ctx.logger.debug("small")
    yield from ()
    return "done"


AGENT = AgentDefinition("worker", handle_steps=handle_steps)


@pytest.mark.spec("requirements:O1")
@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("debug", ["debug", "info", "warn", "error"]),
        ("info", ["info", "warn", "error"]),
        ("warn", ["warn", "error"]),
        ("error", ["error"]),
    ],
)
def test_lines_below_the_level_are_left_out(level: str, expected: list[str]) -> None:
    out = io.StringIO()
    logger = ConsoleLogger(level=level, file=out)
    for name in ("debug", "info", "warn", "error"):
        getattr(logger, name)("hello", {"n": 1}, step=2)

    assert [f'{name}: hello data={{"n": 1}} step=2' for name in expected] == out.getvalue().splitlines()


@pytest.mark.spec("requirements:O1", "requirements:O4")
async def test_a_handler_logs_on_a_console_logger(capsys: pytest.CaptureFixture[str]) -> None:
    async with Engine([AGENT], logger=ConsoleLogger()) as engine:
        result = await engine.run(AGENT, "Go.")

    assert (f'warn: careful why="it is late" run_id={result.state.run_id} agent_id=worker step=0\n', "") == (
        *reversed(capsys.readouterr()),
    )


@tool(requires_permission=False)
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.mark.spec("requirements:O2", "requirements:O1")
async def test_log_observer_logs_steps_calls_results_and_end() -> None:
    adder = AgentDefinition("adder", model="scripted/m", tools=[add])
    out = io.StringIO()
    log = ConsoleLogger(level="debug", file=out)
    model = ScriptedModel([tool_call("add", {"a": 1, "b": 2}), text("Three.")])
    async with Engine([adder], models=model, observers=[LogObserver(log)]) as engine:
        result = await engine.run(adder, "1 + 2?")

    assert [
        "debug: step step=0 messages=1",
        'debug: tool call data={"a": 1, "b": 2} tool=add',
        "debug: tool result tool=add status=ok text=3",
        "debug: step step=1 messages=3",
        f"info: run ended agent=adder run_id={result.state.run_id} status=completed input_tokens=0 output_tokens=0",
    ] == out.getvalue().splitlines()


@pytest.mark.spec("reliability:UI09")
def test_log_text_stays_on_one_line_without_control_characters() -> None:
    out = io.StringIO()
    ConsoleLogger(file=out).info("a\nerror: fake %s {0}", {"x": "\x1b[2J"}, text="y" * 9_000)

    assert r"info: a\nerror: fake %s {0}" in out.getvalue()
    assert (1, 8_193) == (out.getvalue().count("\n"), len(out.getvalue()))
    assert "\x1b" not in out.getvalue()


def test_a_level_that_there_is_not_is_refused() -> None:
    with pytest.raises(DefinitionError, match="debug, info, warn, error"):
        ConsoleLogger(level="loud")
