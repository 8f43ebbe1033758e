"""
codebuff's ``advanced-file-explorer``, ported: a handler without a model step; one file picker per part, all at the same time.

What had to be changed: the original sets a list where its schema says text. There the output is dropped with a message that nobody
reads; here it fails the run, so the entries are joined. A picker that failed has an ``error`` in its entry.
"""

from __future__ import annotations

from typing import Any

from stepengine import AgentDefinition, StepContext, Steps, ToolCall

PICKER = "codebuff/file-picker@0.0.1"


def handle_steps(ctx: StepContext) -> Steps[Any]:
    """Have every part explored, and return what the pickers found."""
    prompts = ctx.params["prompts"]
    agents = [
        {"agent_type": PICKER, "prompt": f"The goal is: {ctx.prompt} Find the files for this part of it: {prompt}"}
        for prompt in prompts
    ]
    spawned = yield ToolCall("spawn_agents", {"agents": agents})
    entries: Any = spawned.tool_result.data
    texts = [
        f"## {prompt}\n\n{entry['error'] if 'error' in entry else entry['output']}"
        for prompt, entry in zip(prompts, entries, strict=True)
    ]
    return {"results": "\n\n".join(texts)}


agent = AgentDefinition(
    "advanced-file-explorer",
    display_name="File Explorer",
    description="Explores several parts of a code base at the same time.",
    tools=["spawn_agents", "set_output"],
    spawnable_agents=[PICKER],
    input_schema={
        "prompt": "What is to be done with the files.",
        "params": {
            "type": "object",
            "properties": {
                "prompts": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "One to four parts of the code base to explore.",
                }
            },
            "required": ["prompts"],
            "additionalProperties": False,
        },
    },
    output_mode="structured_output",
    output_schema={
        "type": "object",
        "properties": {"results": {"type": "string"}},
        "required": ["results"],
        "additionalProperties": False,
    },
    handle_steps=handle_steps,
)
