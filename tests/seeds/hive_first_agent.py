"""
Seed 000, "Basic Usage", "Tool System", "Think/Plan Mode", "Context Management", "System Prompt Builder".

One agent of a messenger: a logger, a model that thinks, a tool with a rich description that reads a file in portions and knows
how much room is left, a system prompt of parts, old messages cut off. The caller keeps the history.
"""

import io
import tempfile
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from stepengine import AgentDefinition, Engine, Hooks, LogObserver, ModelSettings, ToolContext, tool
from stepengine.cli import ConsoleLogger
from stepengine.context import Environment, SystemPrompt, truncate
from stepengine.data.models import Thinking
from stepengine.models import ModelReply, ModelRequest
from stepengine.testing import ScriptedModel, text, tool_call, with_thinking

ROOM: list[int | None] = []
FOLDER = Path(tempfile.mkdtemp())


@tool(category="read")
def read_file(
    ctx: ToolContext,
    file_path: Annotated[str, Field(description='Name of the file, such as "notes.txt".')],
    offset: int = 0,
    limit: int = 500,
) -> dict[str, Any]:
    """
    Read a file in portions.

    Usage:
        - Use offset and limit for large files.

    When NOT to use:
        - For folders.

    Examples:
        {"file_path": "notes.txt", "offset": 100, "limit": 50}

    Args:
        file_path: The file.
        offset: Line to start from, counted from 0.
        limit: Lines at most.
    """
    ROOM.append(ctx.remaining_tokens)
    lines = (FOLDER / file_path).read_text().splitlines()
    chunk = lines[offset : offset + limit]
    return {
        "content": "\n".join(chunk), "total_lines": len(lines), "offset": offset,
        "has_more": offset + limit < len(lines),
    }  # fmt: skip


assistant = AgentDefinition(
    "assistant",
    model="anthropic/claude-sonnet-4-5",
    tools=[read_file],
    settings=ModelSettings(thinking=Thinking("extended", 10_000)),
    hooks=Hooks(pre_step=[truncate(max_tokens=2_000)]),
    system_prompt=SystemPrompt(
        identity="You are a helpful assistant of a messenger.",
        constraints=("Never invent a file.",),
        environment=Environment(working_directory="/srv/bot", platform="linux", custom_vars={"channel": "chat"}),
        reminders=("Be brief.",),
    ),
)


def reply(request: ModelRequest) -> ModelReply:
    last = request.messages[-1]
    if last.role == "tool":
        return with_thinking("The file is long.", text("It has 900 lines."))
    if "notes" in last.text:
        return tool_call("read_file", {"file_path": "notes.txt", "offset": 100, "limit": 50})
    return text("Hello!")


def main() -> None:
    (FOLDER / "notes.txt").write_text("".join(f"line {n}\n" for n in range(900)))
    log, model = io.StringIO(), ScriptedModel([reply] * 20)
    logger = ConsoleLogger(level="debug", file=log)
    with Engine([assistant], models=model, logger=logger, observers=[LogObserver(logger)]) as engine:
        first = engine.run_sync(assistant, "Good morning!")  # stateless: the result holds the history
        second = engine.run_sync(assistant, "How long is notes?", previous=first.state)
        state = second.state
        for words in ("word " * 900, "word " * 900, "And now?"):
            last = engine.run_sync(assistant, words, previous=state)
            state = last.state
    print(first.output, second.output)
    print(log.getvalue().splitlines()[0])

    assert ("Hello!", "It has 900 lines.") == (first.output, second.output)
    assert ["Good morning!", "Hello!", "How long is notes?"] == [m.text for m in model.calls[1].messages]
    assert ("The file is long.",) == second.thinking
    assert Thinking("extended", 10_000) == model.calls[0].settings.thinking
    call = second.tool_calls[0]
    assert (False, 900, True) == (call.is_error, call.result.data["total_lines"], call.result.data["has_more"])
    assert call.result.data["content"].startswith("line 100\n")
    assert len(ROOM) == 1
    assert ROOM[0] is None or ROOM[0] > 0
    described = model.calls[0].tools[0].description
    assert "When NOT to use" in described
    assert "Use offset and limit" in described
    for part in ("# Identity", "Never invent a file.", "/srv/bot", "channel: chat", "<system-reminder>"):
        assert part in first.state.system_prompt, part
    assert not any(m.text == "How long is notes?" for m in model.calls[-1].messages), "old messages were not cut off"
    assert any(m.text == "How long is notes?" for m in state.message_history), "the record lost something"
    for line in ("debug: tool call", "debug: tool result", "debug: step", "info: run ended"):
        assert line in log.getvalue()


if __name__ == "__main__":
    main()
