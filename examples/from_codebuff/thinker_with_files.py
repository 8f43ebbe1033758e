"""
Codebuff's ``thinker-with-files``: it reads files into the conversation, then the model thinks once.

Changed: the original records calls of ``read_files`` although its ``toolNames`` are empty. Providers reject calls of tools that the
request does not define. So this port lists the tool, and ``StepWith(tool_choice="none")`` prevents the model from calling it.
"""

from __future__ import annotations

from stepengine import AgentDefinition, ModelSettings, StepContext, Steps, StepWith, Thinking, ToolCall

INPUT = {
    "prompt": "The problem.",
    "params": {
        "type": "object",
        "properties": {"file_paths": {"type": "array", "items": {"type": "string"}}},
        "required": ["file_paths"],
    },
}


def handle_steps(ctx: StepContext) -> Steps:
    """Read, then think."""
    if ctx.params["file_paths"]:
        yield ToolCall("read_files", {"paths": ctx.params["file_paths"]})
    yield StepWith(tool_choice="none")  # there: yield 'STEP'


agent = AgentDefinition(
    "thinker-with-files",
    description="Thinks about a problem with the files that it is given; it knows nothing else of the conversation.",
    tools=["read_files"],
    instructions_prompt="Think the problem through, then say in as few words as you can what follows.",
    input_schema=INPUT,
    settings=ModelSettings(thinking=Thinking("medium")),  # there: reasoningOptions: { effort: 'medium' }
    handle_steps=handle_steps,
)
