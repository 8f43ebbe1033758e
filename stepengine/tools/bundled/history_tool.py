"""
``recall_history``: the tool that searches the messages that a model no longer sees.

**Source.** The messages are read from the state of the run, never from its journal. A policy changes the view, and the record still
contains every message. If the record itself is replaced (``replace_record=True``, ``compact``, ``set_messages``), the removed
messages are stored in ``AgentState.left_out``, since the agent has this tool. So it also works without a journal and in stored
sessions, and returns the same after a resume, a replay or a fork.

**Cost.** None until it is called: the view and the record are compared then. A replaced record is compared once, when it is
replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from stepengine.data.json import compact
from stepengine.data.messages import (
    DocumentPart,
    ImagePart,
    Message,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    join_text_parts,
)
from stepengine.data.state import AgentState
from stepengine.data.tools import RECALL_HISTORY, ToolAnnotations
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool

ANSWER_CHARS = 10_000
"""About 2,500 tokens for an answer, and at most 10,000: a model can ask for the next part."""
MAX_ANSWER_CHARS = 40_000
"""About 10,000 tokens: more is rarely read to its end."""
QUERY_CHARS = 500
"""No useful query is longer."""
MAX_HITS = 10
"""A page of excerpts; a better query finds the others."""
BEFORE_CHARS = 100
"""About a line before the hit: who said it, and about what."""
EXCERPT_CHARS = 400
"""A short paragraph: enough to decide whether to read the message."""
TITLE_CHARS = 60
"""The counted characters of a message's title, so that many short messages do not exceed the requested length."""


def list_removed_messages(state: AgentState) -> tuple[Message, ...]:
    """
    Return the messages that the model no longer sees, oldest first.

    These are the messages that the view omits and, if the agent has ``recall_history``, those of a replaced record.
    """
    return state.left_out + state.message_history.find_missing_messages(state.view)


def message_to_text(message: Message) -> str:
    """Return a message as text: thoughts, calls with their input, and a placeholder for each image and document."""
    return "\n".join(_iterate_message_lines(message))


def _iterate_message_lines(message: Message) -> Iterator[str]:
    """Yield the parts of a message as text, after a heading for a tool result."""
    if isinstance(message, ToolMessage):
        yield f"[result of {message.tool_name} {message.tool_call_id}, {message.status}]"
    for part in message.content:
        match part:
            case ThinkingPart():
                yield f"[thought] {part.text}"
            case ToolCallPart():
                yield f"[call of {part.tool_name} {part.tool_call_id}] {compact(part.input)}"
            case ImagePart():
                yield "[image]"
            case DocumentPart():
                yield "[document]"
            case _:
                yield join_text_parts((part,))


def make_recall_tool() -> Tool:
    """Return the tool that looks up messages that were removed from the conversation."""

    @tool(
        name=RECALL_HISTORY,
        category="read",
        annotations=ToolAnnotations(read_only=True, idempotent=True),
        parallel_safe=True,
        requires_permission=False,
        in_thread=False,
        about=(),
        destinations=(),
    )
    def recall_history(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        query: Annotated[str, Field(max_length=QUERY_CHARS)] = "",
        place: Annotated[int, Field(ge=1)] = 1,
        offset: Annotated[int, Field(ge=1)] = 1,
        limit: Annotated[int, Field(ge=1, le=MAX_ANSWER_CHARS)] = ANSWER_CHARS,
    ) -> str:
        """
        Look up what was left out of this conversation when it became too long.

        Usage:
            - With `query`, messages that hold all of its words, each with its place and an excerpt.
            - Without, whole messages from a place on; go on where the answer says.

        Examples:
            {"query": "invoice 4711"}
            {"place": 12}
            {"place": 12, "offset": 10001}

        When not to use:
            - For what still stands in the conversation, or may have changed since: use the tool again that gave it.

        Notes:
            - Words are found as they are written, in capitals or not. Places may change when more is left out.

        Args:
            query: The words to look for; none reads.
            place: The message to begin at, from 1, the oldest.
            offset: The character of that message to begin at, from 1.
            limit: How many characters to answer with.
        """
        messages = list_removed_messages(ctx.agent_state)
        if not messages:
            return "Nothing was left out of this conversation."
        if place > len(messages):
            return f"There is no message {place}; {len(messages)} were left out."
        words = [_fold_case(word) for word in query.split()]
        shown = (
            _format_search_hits(messages, words, place)
            if words
            else _format_messages_from(messages, place, offset - 1, limit)
        )
        return "\n".join(shown)

    return recall_history


def _format_search_hits(messages: Sequence[Message], words: Sequence[str], first: int) -> Iterator[str]:
    """Yield an excerpt of each message from the number *first* on that contains all words; a note if there are more than ten, or none."""
    hits = 0
    for number in range(first, len(messages) + 1):
        text = message_to_text(messages[number - 1])
        folded = _fold_case(text)
        places = [folded.find(word) for word in words]
        if min(places) < 0:
            continue
        if hits == MAX_HITS:
            yield f"[more messages hold these words; go on with place={number}]"
            return
        hits += 1
        start = max(0, min(places) - BEFORE_CHARS)
        end = start + EXCERPT_CHARS
        cut = f" ... [{len(text):,} characters]" if start or end < len(text) else ""
        yield f"--- {_format_numbered_title(messages, number)}\n{'... ' if start else ''}{text[start:end]}{cut}"
    if not hits:
        yield f"None of the {len(messages) - first + 1} messages from place {first} on that were left out holds all of these words."


def _format_messages_from(messages: Sequence[Message], first: int, skip: int, limit: int) -> Iterator[str]:
    """Yield the messages from the number *first* on, without the first *skip* characters, up to *limit*, and where to continue."""
    left = limit
    for number in range(first, len(messages) + 1):
        text = message_to_text(messages[number - 1])
        if left <= 0:
            yield f"[{len(messages) - number + 1} more messages; go on with place={number}]"
            return
        end = skip + left
        yield f"--- {_format_numbered_title(messages, number)}\n{text[skip:end]}"
        if end < len(text):
            yield f"[{len(text) - end:,} more characters of it; go on with place={number}, offset={end + 1}]"
            return
        left -= max(0, len(text) - skip) + TITLE_CHARS
        skip = 0


def _format_numbered_title(messages: Sequence[Message], number: int) -> str:
    """Return a line with number, role and tags or tool of a message."""
    message = messages[number - 1]
    tags = "" if isinstance(message, ToolMessage) else " ".join(message.tags)[:TITLE_CHARS]
    return f"{number} of {len(messages)}: {message.role} {tags}".rstrip()


def _fold_case(text: str) -> str:
    """Return a text in lower case with the same length, so that offsets are valid in both."""
    lowered = text.lower()
    if len(lowered) == len(text) and "Σ" not in text:
        return lowered
    # A letter with a longer lower case is unchanged, and a letter has the same lower case at each position in a word.
    return "".join([small if len(small := letter.lower()) == 1 else letter for letter in text])
