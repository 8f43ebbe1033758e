"""What untrusted handlers and programs give may be too long for a record: their callers can catch that, with and without a journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Perform, RunStatus, ToolCall, tool
from stepengine.data import record_sizes
from stepengine.journal import FileJournal, encoding
from stepengine.testing import ScriptedModel

pytest.importorskip("pydantic_monty", reason="needs the extra programs")

from stepengine.sandbox import code_mode, load_source

pytestmark = pytest.mark.leaks_allowed("what the sandbox opens once for a process stays")

LIMIT = 3_000
"""What stands for 16 MiB here."""
HANDLERS = {
    "error": "raise ValueError('x' * 20_000)",
    "value": "return 'x' * 20_000",
    "list": "return ['x' * 500] * 40",
    "call": "yield ToolCall('set_output', {'a': 'x' * 20_000})",
}
PROGRAMS = {
    "error": "raise ValueError('x' * 20_000)",
    "print": "print('x' * 20_000)",
    "value": "'x' * 20_000",
    "call": "await takes(text='x' * 20_000)",
}


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (record_sizes, encoding):
        monkeypatch.setattr(module, "MAX_VALUE_BYTES", LIMIT)
        monkeypatch.setattr(module, "MAX_INLINE_CHARS", 1_024)
    monkeypatch.setattr(encoding, "MAX_LINE_BYTES", LIMIT + 3_000)
    monkeypatch.setattr(record_sizes, "MAX_ERROR_CHARS", 900)


def ends_with_each_journal(agents: list[Any], seen: list[str], folder: Path, **more: Any) -> list[Any]:
    ends = []
    for journal in (None, FileJournal(folder / "run.jsonl")):
        with Engine(agents, models=ScriptedModel([]), pricing=None, **more) as engine:
            seen.clear()
            result = engine.run_sync("main", journal=journal)
            ended = result.status, result.output, str(result.error), [*seen]
            if journal is not None:
                seen.clear()
                again = engine.replay_sync(journal)
                assert (again.status, again.output, str(again.error), [*seen]) == ended
                assert engine.resume_sync(journal).status is result.status
        ends.append(ended)
    return ends


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:GN38")
@pytest.mark.parametrize("does", HANDLERS)
def test_parent_catches_the_end_of_an_untrusted_child(does: str, tmp_path: Path) -> None:
    child, *_ = load_source(
        "from stepengine import AgentDefinition, ToolCall\n"
        f"def steps(ctx):\n    {HANDLERS[does]}\n    yield ToolCall('set_output', {{'a': 1}})\n"
        "agent = AgentDefinition('child', handle_steps=steps, tools=['set_output'], output_mode='structured_output')\n"
    )
    seen: list[str] = []

    def handle_steps(ctx: Any) -> Any:
        try:
            yield from AgentCall("child")
        except Exception as error:
            seen.append(type(error).__name__)
        yield from Perform(int, "1")
        return "end"

    main = AgentDefinition("main", handle_steps=handle_steps, spawnable_agents=["child"])
    ends = ends_with_each_journal([main, child], seen, tmp_path)

    assert [(RunStatus.COMPLETED, "end", "None", ["ChildError"])] * 2 == ends


@tool(in_thread=False)
def takes(text: str) -> int:
    """Take."""
    return len(text)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:GN38")
@pytest.mark.parametrize("does", PROGRAMS)
def test_program_with_long_values_leaves_a_run_that_continues(does: str, tmp_path: Path) -> None:
    seen: list[str] = []

    def handle_steps(ctx: Any) -> Any:
        answer = yield ToolCall("run_code", {"code": PROGRAMS[does]})
        seen.append(answer.tool_result.status)
        yield from Perform(int, "1")
        return "end"

    main = AgentDefinition("main", handle_steps=handle_steps, tools=[code_mode(takes)])
    alone, recorded = ends_with_each_journal([main], seen, tmp_path)

    assert alone == recorded
    assert (RunStatus.COMPLETED, "end", "None") == alone[:3]
