"""
``output_cache``: trims old tool outputs, which can be read again by a reference id.

It changes only the view. The record contains every output, so nothing else is stored. The reference id is the id of the
tool call, and ``read_output`` finds the output in the record, also in a stored session. An output is lost if the record
itself is replaced (``set_messages``, ``replace_record=True``).
"""

from __future__ import annotations

import attrs
from attrs import frozen

from stepengine.context.masks import is_placeholder, make_result_placeholder
from stepengine.context.policy import COUNT, SHARE
from stepengine.data.definition import HookContext
from stepengine.data.estimate import CHARS_PER_TOKEN, MEDIA_TOKENS
from stepengine.data.hooks import Change
from stepengine.data.messages import DocumentPart, ImagePart, ToolMessage, ToolResult
from stepengine.data.state import AgentState
from stepengine.data.tools import READ_OUTPUT, ToolAnnotations
from stepengine.data.transcript import Transcript
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool

MEDIA_CHARS = MEDIA_TOKENS * CHARS_PER_TOKEN
"""The size of an image or document in characters, by its estimated tokens."""
MARK = "trimmed"
READ_CHARS = 10_000
"""About 2,500 tokens for each page of a stored output: several pages fit in a step, and a search term has its context."""


@tool(
    name=READ_OUTPUT,
    category="read",
    annotations=ToolAnnotations(read_only=True, idempotent=True),
    parallel_safe=True,
    requires_permission=False,
    in_thread=False,
    about=(),
)
def read_output(ctx: ToolContext, reference_id: str, offset: int = 1, limit: int = READ_CHARS) -> ToolResult:
    """
    Read an earlier tool output that was trimmed from the conversation.

    Usage:
        - Give the `reference_id` that stands where the output was; go on with the `offset` that a part ends with.

    Examples:
        {"reference_id": "c12"}
        {"reference_id": "c12", "offset": 10001}

    When not to use:
        - When what you need may have changed since, call the tool again that gave the output.

    Notes:
        - It is what the tool returned then, whole, whatever stands in the conversation now.

    Args:
        ctx: The call's context.
        reference_id: The id that stands in the place of the output.
        offset: The character to begin at, from 1.
        limit: How many characters to read.
    """
    found = find_output(ctx.agent_state, reference_id)
    if found is None:
        return ToolResult.error(f"There is no tool output with the reference id {reference_id!r}.")
    if offset < 1:
        return ToolResult.error(f"offset is {offset}; characters count from 1.")
    start, text = offset - 1, found.text
    end = start + max(1, limit)
    shown = text[start:end]
    if end < len(text):
        shown += f"\n[{len(text) - end:,} more characters; go on with offset={end + 1}]"
    media = [part for part in found.content if isinstance(part, ImagePart | DocumentPart)] if start == 0 else []
    return ToolResult.parts([shown, *media])


@frozen
class output_cache:  # noqa: N801 - a policy is called by its name, as a hook is
    """
    A ``pre_step`` hook that trims old tool outputs, with the tool to read them.

    ``cache = output_cache()``, then ``AgentDefinition(..., tools=[..., cache.read_output], hooks=Hooks(pre_step=[cache]))``.
    Outputs that the model has not seen yet are never trimmed; the oldest are trimmed first. Changes the view only.

    Attributes:
        max_chars: The most characters of all tool outputs in the view; an image counts 6,400.
        free_ratio: The share of *max_chars* that is freed at once, from 0 to below 1. It avoids a change, and a loss of the
            prompt cache, at every step.

    Raises:
        DefinitionError: for a negative number or an invalid share.
    """

    max_chars: int = attrs.field(default=200_000, validator=COUNT)
    free_ratio: float = attrs.field(default=0.25, validator=SHARE, kw_only=True)

    @property
    def read_output(self) -> Tool[..., ToolResult]:
        """The tool that reads trimmed outputs; add it to the tools of an agent."""
        return read_output

    def __call__(self, ctx: HookContext) -> Change | None:
        """Return the view with placeholders for the oldest outputs, or ``None`` if the outputs are within the limit."""
        view = ctx.state.view
        total = view.fold(
            "output_chars", lambda chars, one: chars + (_count_chars(one) if isinstance(one, ToolMessage) else 0), 0
        )
        if total <= self.max_chars:
            return None
        target = int(self.max_chars * (1 - self.free_ratio))
        trimmed: dict[str, ToolResult] = {}
        for message in view[: _find_first_unseen_result(view)]:
            if total <= target:
                break
            if not isinstance(message, ToolMessage) or is_placeholder(message, MARK):
                continue
            note = _make_trim_note(message)
            saved = _count_chars(message) - len(note.content[0].text)  # type: ignore[union-attr]
            if saved > 0:
                trimmed[message.tool_call_id] = note
                total -= saved
        return Change(view=view.replace_results(trimmed)) if trimmed else None


def find_output(state: AgentState, reference_id: str) -> ToolMessage | None:
    """Return the whole tool message with a reference id from the record; ``None`` if there is none."""
    for message in reversed(state.message_history):
        if isinstance(message, ToolMessage) and message.tool_call_id == reference_id:
            return message
    return None


def _count_chars(message: ToolMessage) -> int:
    """Return the size of a result in characters; each image and document counts 6,400."""
    media = sum(isinstance(part, ImagePart | DocumentPart) for part in message.content)
    return len(message.text) + media * MEDIA_CHARS


def _find_first_unseen_result(view: Transcript) -> int:
    """Return the position of the first result that the model has not seen: those at the end of *view*; its length if there is none."""
    start = len(view)
    while start and isinstance(view[start - 1], ToolMessage):
        start -= 1
    return start


def _make_trim_note(message: ToolMessage) -> ToolResult:
    """Return the note that replaces a trimmed output; it names the tool and the reference that show it again."""
    chars, reference = len(message.text), message.tool_call_id
    text = f"[Output trimmed: {chars:,} characters. read_output with reference_id {reference!r} shows it again.]"
    return make_result_placeholder(message, MARK, text)
