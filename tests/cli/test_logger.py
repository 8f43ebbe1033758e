"""
Loggers of a program: the one for a console, and what a logger that wants to know is told of agents.
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


@tool(requires_permission=False)
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def handle_steps(ctx: Any) -> Any:
    ctx.logger.warning("careful", why="it is late")
    yield from ()
    return "done"


CHILD = AgentDefinition("child", description="Helps.", handle_steps=handle_steps)
AGENT = AgentDefinition("adder", model="scripted/m", tools=[add, "spawn_agents"], spawnable_agents=[CHILD])
REPLIES = [
    tool_call("add", {"a": 1, "b": 2}),
    tool_call("spawn_agents", {"agents": [{"agent_type": "child", "prompt": "Help."}]}),
    text("Three."),
]


class Everything:
    """
    A log provider with all of seed 000's methods.
    """

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("debug", "info", "warn", "error", *LogObserver.METHODS):
            return lambda *args, **more: self.told.append((name, args, more))
        raise AttributeError(name)


@pytest.mark.spec("requirements:O2")
async def test_a_log_provider_is_told_of_calls_results_steps_and_the_end() -> None:
    provider = Everything()
    async with Engine([AGENT], models=ScriptedModel(REPLIES), logger=provider) as engine:
        result = await engine.run(AGENT, "1 + 2?")
    told = {name: [args for each, args, _ in provider.told if each == name] for name in LogObserver.METHODS}

    assert ("add", {"a": 1, "b": 2}) == told["on_tool_call"][0]
    assert ("add", "3") == (told["on_tool_result"][0][0], told["on_tool_result"][0][1].text)
    assert [0, 1, 2] == [step for step, _ in told["on_step"]]
    assert ["1 + 2?", result.state.message_history[-2].text] == [
        told["on_step"][0][1][0].text, told["on_step"][-1][1][-1].text,
    ]  # fmt: skip
    assert [(result,)] == told["on_complete"]
    assert [("careful", "child")] == [(a[0], m["agent_id"]) for name, a, m in provider.told if name == "warn"]


@pytest.mark.spec("requirements:O2")
async def test_a_provider_with_one_callback_is_told_of_that_alone_and_cannot_break_a_run() -> None:
    class Only:
        def info(self, message: str, **data: Any) -> None: ...

        debug = warning = error = info

        def on_complete(self, result: Any) -> None:
            ended.append(result.status.value)
            msg = "no disk"
            raise OSError(msg)

    ended: list[str] = []
    async with Engine([AGENT], models=ScriptedModel([text("Hi.")]), logger=Only()) as engine:
        result = await engine.run(AGENT, "Hi.")

    assert (["completed"], "Hi.") == (ended, result.output)
    assert LogObserver.of(io.StringIO()) is None


@pytest.mark.spec("requirements:O3", "requirements:O1")
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


@pytest.mark.spec("requirements:O3")
async def test_a_run_on_a_console_logger(capsys: pytest.CaptureFixture[str]) -> None:
    async with Engine([AGENT], models=ScriptedModel(REPLIES), logger=ConsoleLogger(level="debug")) as engine:
        result = await engine.run(AGENT, "1 + 2?")
    out, lines = capsys.readouterr()
    end = f"run_id={result.state.run_id} status=completed input_tokens=0 output_tokens=0"

    assert "" == out
    assert ["debug: step step=0 messages=2", 'debug: tool call data={"a": 1, "b": 2} tool=add'] == lines.splitlines()[
        :2
    ]
    assert f"info: run ended agent=adder {end}" == lines.splitlines()[-1]
    assert 'warn: careful why="it is late"' in lines


@pytest.mark.spec("reliability:UI09")
def test_no_text_makes_a_line_of_its_own_or_steers_the_terminal() -> None:
    out = io.StringIO()
    ConsoleLogger(file=out).info("a\nerror: fake %s {0}", {"x": "\x1b[2J"}, text="y" * 9_000)

    assert r"info: a\nerror: fake %s {0}" in out.getvalue()
    assert (1, 8_193) == (out.getvalue().count("\n"), len(out.getvalue()))
    assert "\x1b" not in out.getvalue()


def test_a_level_that_there_is_not_is_refused() -> None:
    with pytest.raises(DefinitionError, match="debug, info, warn, error"):
        ConsoleLogger(level="loud")
