"""
Codebuff's ``advanced-file-explorer``: a handler without model steps that starts one file picker per part, all in parallel.

Changed: the original sets a list as output although its schema requires text. Codebuff ignores such an output, and stepengine fails
the run, so this port joins the entries. The entry of a failed picker has an ``error``.
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
