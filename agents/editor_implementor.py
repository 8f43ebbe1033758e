"""
``editor-implementor``: makes a change as a proposal. Nothing is written; what comes out are edits and their diff.

``editor-multi-prompt`` runs several of these side by side, which is safe because none of them touches a file.

``stepengine run editor-implementor "Rename total to subtotal in shop.py"``
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

from stepengine import STEP_ALL, AgentDefinition, StepContext, Steps

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


def handle_steps(ctx: StepContext) -> Steps[Proposal]:
    """Let the model propose, then collect what was accepted."""
    start = len(ctx.agent_state.message_history)
    turn = yield STEP_ALL
    return proposal_in(turn.agent_state.message_history[start:])


def proposal_in(messages: Iterable[Any]) -> Proposal:
    """Return the accepted proposals of some messages."""
    calls: dict[str, dict[str, Any]] = {}
    accepted: list[dict[str, Any]] = []
    summary = ""
    for message in messages:
        if message.role == "assistant":
            summary = message.said.strip() or summary
            calls |= {c.tool_call_id: {"tool_name": c.tool_name, "input": c.input} for c in message.tool_calls}
        elif message.role == "tool" and message.tool_name in PROPOSING and not message.is_error:
            accepted.append({**calls[message.tool_call_id], "unified_diff": message.result.data["unified_diff"]})
    return Proposal(tool_calls=accepted, unified_diff=diff_of(accepted), summary=summary)


def diff_of(calls: Iterable[dict[str, Any]]) -> str:
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
)
