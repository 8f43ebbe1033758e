"""
``editor-implementor``: makes a change as a proposal. Nothing is written; what comes out are edits and their diff.

``editor-multi-prompt`` runs several of these side by side, which is safe because none of them touches a file.

``stepengine run editor-implementor "Rename total to subtotal in shop.py"``
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

from stepengine import (
    STEP_ALL,
    AgentDefinition,
    Change,
    HookContext,
    Hooks,
    StepContext,
    Steps,
    ToolCallPart,
    ToolResult,
)

ACCEPTED = "accepted_proposals"
PROPOSING = ("propose_str_replace", "propose_write_file")

INSTRUCTIONS = """\
You make the change now, the whole of it, as proposals: propose_str_replace for files that exist, propose_write_file for new
ones. Nothing is written, but later proposals build on earlier ones; reading a file shows it without them. When all edits are
proposed, say in a sentence or two what they do."""


class Proposal(TypedDict):
    """
    A change that could be made.

    Attributes:
        tool_calls: The proposals that were accepted, in order: ``{tool_name, input, unified_diff}``.
        unified_diff: Their diffs, one after another.
        summary: The model's last words.
    """

    tool_calls: list[dict[str, Any]]
    unified_diff: str
    summary: str


def handle_steps(_: StepContext) -> Steps[Proposal]:
    """Let the model propose edits, and return the accepted ones."""
    turn = yield STEP_ALL
    accepted = list(turn.agent_state.context.get(ACCEPTED, ()))
    return Proposal(tool_calls=accepted, unified_diff=join_diffs(accepted), summary=turn.text)


def record_accepted_proposal(ctx: HookContext, call: ToolCallPart, result: ToolResult) -> Change | None:
    """Append an accepted proposal, with its final input and diff, to the context."""
    if call.tool_name not in PROPOSING or result.is_error:
        return None
    data: Any = result.data
    edit = {"tool_name": call.tool_name, "input": call.input, "unified_diff": data["unified_diff"]}
    return Change(context={ACCEPTED: [*ctx.state.context.get(ACCEPTED, ()), edit]})


def clear_accepted_proposals(_: HookContext) -> Change:
    """Remove the proposals that an earlier run stored in the context."""
    return Change(context={ACCEPTED: None})


def join_diffs(calls: Iterable[dict[str, Any]]) -> str:
    """Return the diffs of proposed edits, one after another."""
    return "".join([call["unified_diff"] for call in calls])


agent = AgentDefinition(
    "editor-implementor",
    description="Makes a change as a proposal: edits and a diff, without writing a file.",
    tools=["read_files", *PROPOSING],
    include_message_history=True,
    inherit_parent_system_prompt=True,
    instructions_prompt=INSTRUCTIONS,
    output_mode="structured_output",
    handle_steps=handle_steps,
    hooks=Hooks(pre_run=[clear_accepted_proposals], post_tool=[record_accepted_proposal]),
)
