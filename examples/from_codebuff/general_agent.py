"""
Codebuff's ``general-agent``: it reads files into the conversation, then prunes and takes a step until the model is done.

Changed: ``spawnable_agents`` names the pruner without a publisher, and the pruner gets all params, including ``file_paths``. The
original creates two agents with different models. Here the caller selects the model with ``--model``.
"""

from __future__ import annotations

from stepengine import STEP, AgentDefinition, ModelSettings, StepContext, Steps, Thinking, ToolCall

CACHE_EXPIRY_MS = 30 * 60 * 1_000


def handle_steps(ctx: StepContext) -> Steps:
    """Read the given files, then prune before every step."""
    params = ctx.params or {}
    if params.get("file_paths"):
        yield ToolCall("read_files", {"paths": params["file_paths"]})
    pruner = {"agent_type": "context-pruner", "params": {**params, "cache_expiry_ms": CACHE_EXPIRY_MS}}
    while True:
        yield ToolCall("spawn_agent_inline", pruner, include_tool_call=False)
        turn = yield STEP
        if turn.steps_complete:
            break


agent = AgentDefinition(
    "general-agent",
    display_name="General Agent",
    description="Solves any problem. It does not see the conversation: give it the context in the prompt and in file_paths.",
    tools=["spawn_agents", "read_files", "read_subtree", "str_replace", "write_file"],
    spawnable_agents=[
        "researcher-web",
        "researcher-docs",
        "file-picker",
        "code-searcher",
        "directory-lister",
        "glob-matcher",
        "basher",
        "context-pruner",
    ],
    input_schema={
        "prompt": "The problem to solve.",
        "params": {
            "type": "object",
            "properties": {
                "file_paths": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "Files to read first: all that could matter.",
                }
            },
        },
    },
    instructions_prompt="Spawn agents for what you need to know. Spawn those that do not depend on each other in one call.",
    settings=ModelSettings(thinking=Thinking("high")),
    handle_steps=handle_steps,
)
