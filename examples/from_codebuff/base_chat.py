"""
Codebuff's ``base-chat``: it shortens the conversation before each step to fit the context window of the model.

Changed: an agent id with publisher and version selects the engine's agent with this name, or else the bundled one. ``gravity_index``
and ``render_ui`` are missing, because they are tools of that product.

The loop is the original one. Without a handler, ``Hooks(pre_step=[prune_to_summary(...)])`` does the same.
"""

from __future__ import annotations

from stepengine import STEP, AgentDefinition, StepContext, Steps, ToolCall

CONTEXT_WINDOWS = {"scripted/model": 500_000}
DEFAULT_CONTEXT_WINDOW = 131_072
BUDGET = 0.4
CACHE_EXPIRY_MS = 24 * 60 * 60 * 1_000


def handle_steps(ctx: StepContext) -> Steps:
    """Prune, take a step, until the model has said what it had to say."""
    window = CONTEXT_WINDOWS.get(ctx.model or "", DEFAULT_CONTEXT_WINDOW)
    budgets = {"max_context_length": int(window * BUDGET), "cache_expiry_ms": CACHE_EXPIRY_MS}
    pruner = {"agent_type": "context-pruner", "params": budgets}
    while True:
        yield ToolCall("spawn_agent_inline", pruner, include_tool_call=False)
        turn = yield STEP
        if turn.steps_complete:
            break


agent = AgentDefinition(
    "base-chat",
    display_name="Chat",
    description="Talks with people, and looks things up where it has to.",
    tools=["spawn_agents", "suggest_followups"],
    spawnable_agents=[
        "codebuff/researcher-web@0.0.1",
        "codebuff/thinker@0.0.1",
        "codebuff/context-pruner@0.0.1",
    ],
    system_prompt="You talk with somebody in a chat that shows Markdown.",
    instructions_prompt="Be short. Have questions of today looked up. At the end suggest what could be asked next.",
    handle_steps=handle_steps,
)
