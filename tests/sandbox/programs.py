"""Runs of programs that a scripted model writes."""

from __future__ import annotations

import textwrap
from typing import Any

from stepengine import AgentDefinition, Engine, RunResult
from stepengine.testing import ScriptedModel, text, tool_call


def programs(*codes: str, **more: Any) -> list[Any]:
    """Return the replies of a model that runs programs, one after the other."""
    return [tool_call("run_code", {"code": textwrap.dedent(code), **more}) for code in codes]


async def run_programs(agent: AgentDefinition[Any], *codes: str, journal: Any = None, **options: Any) -> RunResult[Any]:
    """Run programs one after the other; a replay of the journal, if there is one, has the same result."""
    async with Engine([agent], models=ScriptedModel([*programs(*codes), text("end")]), **options) as engine:
        result = await engine.run(agent, "go", journal=journal)
        if journal is not None:
            assert result == await engine.replay(journal)
    return result


def outputs(result: RunResult[Any]) -> list[str]:
    """Return the text of the result of each program."""
    return [one.result.text for one in result.tool_calls]
