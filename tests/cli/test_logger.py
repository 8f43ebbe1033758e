"""
The logger for a console.
"""

from __future__ import annotations

import io
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine
from stepengine.cli import ConsoleLogger
from stepengine.errors import DefinitionError

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
