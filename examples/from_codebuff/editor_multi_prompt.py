"""
Codebuff's ``editor-multi-prompt`` with ``editor-implementor``: one proposal per strategy, of which it applies the best.

Changed: ``spawn_agents`` returns a plain list in the order of the requests, and each entry has ``output`` or ``error``. The engine
looks up agent ids among its own agents. ``best-of-n-selector`` is the bundled agent.
"""

from __future__ import annotations

from typing import Any

from stepengine import (
    STEP_ALL,
    AgentDefinition,
    AssistantMessage,
    StepContext,
    Steps,
    ToolCall,
    ToolMessage,
    load_agent,
)

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
REAL = {"propose_str_replace": "str_replace", "propose_write_file": "write_file"}


def implement(ctx: StepContext) -> Steps[Any]:
    """Let the model propose, and return what it called and what came of it."""
    before = len(ctx.agent_state.message_history)
    turn = yield STEP_ALL
    added = turn.agent_state.message_history[before:]
    calls = [call for message in added if isinstance(message, AssistantMessage) for call in message.tool_calls]
    results: list[Any] = [message.result.data for message in added if isinstance(message, ToolMessage)]
    diffs = [result["unified_diff"] for result in results if result and "unified_diff" in result]
    return {
        "tool_calls": [{"tool_name": call.tool_name, "input": call.input} for call in calls],
        "unified_diffs": "\n".join(diffs),
    }


def handle_steps(ctx: StepContext) -> Steps[Any]:
    """Have every strategy proposed, the best chosen, and that one made."""
    prompts = ctx.params["prompts"]
    history = list(ctx.agent_state.message_history)
    while history and history[-1].role == "user":  # its own prompt and instructions
        history.pop()
    yield ToolCall("set_messages", {"messages": history}, include_tool_call=False)

    agents = [{"agent_type": "editor-implementor", "prompt": f"Strategy: {prompt}"} for prompt in prompts]
    proposed = yield ToolCall("spawn_agents", {"agents": agents}, include_tool_call=False)
    children: Any = proposed.tool_result.data  # there: toolResult[0].value[0].value.value
    ideas = []
    for letter, prompt, child in zip(LETTERS, prompts, children, strict=False):
        made = child.get("output") or {}  # there: errorMessage where it failed
        content = f"Error: {child['error']}" if "error" in child else made["unified_diffs"] or "No changes proposed"
        ideas.append({"id": letter, "strategy": prompt, "content": content, "calls": made.get("tool_calls", ())})

    shown = [{name: idea[name] for name in ("id", "strategy", "content")} for idea in ideas]
    selector = {"agent_type": "best-of-n-selector", "params": {"implementations": shown}}
    selected = yield ToolCall("spawn_agents", {"agents": [selector]}, include_tool_call=False)
    choice: Any = selected.tool_result.data[0]  # type: ignore[index]
    if "error" in choice:
        return {"error": f"Selector failed: {choice['error']}"}
    chosen = next((idea for idea in ideas if idea["id"] == choice["output"]["implementation_id"]), None)
    if chosen is None:
        return {"error": f"Selector chose {choice['output']['implementation_id']!r}, which there is not"}

    applied = []
    for call in chosen["calls"]:
        if call["tool_name"] in REAL:
            edit = yield ToolCall(REAL[call["tool_name"]], call["input"])
            applied.append(edit.tool_result.text if edit.tool_result.is_error else edit.tool_result.data)
    return {
        "chosen_strategy": chosen["strategy"],
        "reason": choice["output"]["reason"],
        "tool_results": applied,
        "suggested_improvements": choice["output"]["suggested_improvements"],
    }


implementor = AgentDefinition(
    "editor-implementor",
    description="Proposes a change without making it.",
    tools=["propose_write_file", "propose_str_replace"],
    include_message_history=True,
    inherit_parent_system_prompt=True,
    output_mode="structured_output",
    instructions_prompt="Propose the whole change with the propose tools and nothing else. Nobody reads what you say beside.",
    handle_steps=implement,
)
agent = AgentDefinition(
    "editor-multi-prompt",
    description="Has a change proposed in several ways, one for each prompt, and makes the best.",
    tools=["spawn_agents", "str_replace", "write_file", "set_output"],
    spawnable_agents=[load_agent("best-of-n-selector"), implementor],
    include_message_history=True,
    inherit_parent_system_prompt=True,
    input_schema={
        "params": {
            "type": "object",
            "properties": {"prompts": {"type": "array", "items": {"type": "string"}, "minItems": 1}},
            "required": ["prompts"],
        }
    },
    output_mode="structured_output",
    handle_steps=handle_steps,
)
