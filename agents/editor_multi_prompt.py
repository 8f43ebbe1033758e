"""
``editor-multi-prompt``: has a change made in several ways at once, chooses the best, and makes only that one.

The ways compete as proposals; the files are touched once, by the edits of the winner.

``stepengine run editor-multi-prompt "Guard total() against None" \
    --params '{"prompts": ["raise an error", "count it as nothing"]}' --write``
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from stepengine import (
    AgentCall,
    AgentDefinition,
    ChildResult,
    StepContext,
    Steps,
    ToolCall,
    ToolResult,
    map_agents,
)
from stepengine.errors import ChildError

from .best_of_n_selector import agent as selector
from .editor_implementor import Proposal, join_diffs
from .editor_implementor import agent as implementor


class Strategies(BaseModel):
    """The ways to try."""

    model_config = ConfigDict(extra="forbid")

    prompts: list[str] = Field(min_length=1, max_length=10, description="One way to make the change each.")


class Chosen(BaseModel):
    """
    What was done.

    Attributes:
        strategy: The prompt whose implementation was made; empty when none was.
        reason: Why it was chosen, or why nothing was done.
        results: What each edit said, in order; one that failed says why.
        unified_diff: What was changed.
        suggested_improvements: What the selector would still do.
    """

    strategy: str = ""
    reason: str
    results: list[str] = []
    unified_diff: str = ""
    suggested_improvements: str = ""


def handle_steps(ctx: StepContext[Strategies]) -> Steps[Chosen]:
    """Let implementors propose edits at the same time, select a proposal, and make its edits."""
    prompts = ctx.params.prompts
    # The children take the conversation over; they see what is asked for, and not the params, which are for this agent.
    said = [*ctx.inherited_messages, *ctx.prompt_messages]
    yield ToolCall("set_messages", {"messages": said}, include_tool_call=False)
    children = yield from map_agents(implementor, prompts, prompt="Use this strategy: {}".format)
    proposals = dict(zip(ascii_uppercase, children, strict=False))
    usable = {letter: child.output for letter, child in proposals.items() if describe_proposal(child).startswith("---")}
    if not usable:
        return Chosen(reason=f"Nothing was changed. {' '.join(map(describe_proposal, children))}")
    listed = [
        {"id": letter, "strategy": way, "content": describe_proposal(child)}
        for (letter, child), way in zip(proposals.items(), prompts, strict=True)
    ]
    try:
        choice = yield from AgentCall(selector, params={"implementations": listed})
    except ChildError as error:
        return Chosen(reason=f"Nothing was changed, since none could be selected: {error}")
    chosen = choice.implementation_id.strip().upper()
    if chosen not in usable:
        return Chosen(reason=f"Nothing was changed: {chosen!r} was selected, which proposes nothing. {choice.reason}")
    edits = usable[chosen]["tool_calls"]
    results = yield from apply_edits(edits)
    return Chosen(
        strategy=prompts[ascii_uppercase.index(chosen)],
        reason=choice.reason,
        results=[result.text for result in results],
        unified_diff=join_diffs([edit for edit, result in zip(edits, results, strict=True) if not result.is_error]),
        suggested_improvements=choice.suggested_improvements,
    )


def describe_proposal(child: ChildResult[Proposal]) -> str:
    """Return the diff of an implementation, or why there is none."""
    if child.is_error:
        return f"It failed: {child.error.message if child.error else child.status}."
    return child.output["unified_diff"] or f"It proposed nothing: {child.output['summary']}"


def apply_edits(edits: Sequence[dict[str, Any]]) -> Steps[list[ToolResult]]:
    """Make the proposed edits in order and return all results; a failed edit does not stop the others."""
    results: list[ToolResult] = []
    for edit in edits:
        turn = yield ToolCall(edit["tool_name"].removeprefix("propose_"), edit["input"])
        results += turn.tool_results
    return results


agent = AgentDefinition(
    "editor-multi-prompt",
    description="Makes a change in the best of several ways, given as params; each way is first made as a proposal.",
    tools=[*implementor.tools, "str_replace", "write_file"],  # its children are shown its tools instead of theirs
    spawnable_agents=[implementor, selector],
    include_message_history=True,
    inherit_parent_system_prompt=True,
    input_schema=Strategies,
    output_schema=Chosen,
    handle_steps=handle_steps,
)
