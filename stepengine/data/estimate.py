"""How large messages are, in tokens, without a tokenizer: a quarter of their characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from stepengine.data.json import compact
from stepengine.data.messages import CitationPart, DocumentPart, ImagePart, JsonPart, Message, OpaquePart, ToolCallPart
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript

CHARS_PER_TOKEN = 4
"""For English text and code, as OpenAI and Anthropic document it; other languages have fewer, and no tokenizer is available."""
MEDIA_TOKENS = 1_600
"""About the count of Anthropic for an image at the largest size without scaling down."""
MESSAGE_TOKENS = 8
"""
A guess for the role and the separators that providers put around each message; too many costs little, too few adds
up.
"""


def estimate_tokens(value: object) -> int:
    """Return the length of *value* divided by four, rounded up: of a string its characters, else its compact JSON."""
    return -(-len(value if isinstance(value, str) else compact(value)) // CHARS_PER_TOKEN)


def message_tokens(message: Message) -> int:
    """Return the estimated size of one message in tokens; an image or document counts as 1,600."""
    chars, tokens = 0, MESSAGE_TOKENS
    for part in message.content:
        if isinstance(part, ImagePart | DocumentPart):
            tokens += MEDIA_TOKENS
        elif isinstance(part, ToolCallPart):
            chars += len(part.tool_name) + len(part.raw_input or compact(part.input))
        elif isinstance(part, JsonPart):
            chars += len(compact(part.value))
        elif isinstance(part, OpaquePart):
            chars += len(compact(part.data))
        elif not isinstance(part, CitationPart):  # which is never sent
            chars += len(part.text)
    return tokens - (-chars // CHARS_PER_TOKEN)


def transcript_tokens(transcript: Transcript) -> int:
    """Return the estimated size of a transcript in tokens; each message is measured once."""
    return transcript.fold("tokens", lambda total, message: total + message_tokens(message), 0)


def estimate_continued_prompt_tokens(view: Transcript, sent: Transcript, reported_tokens: int) -> int | None:
    """
    Return the estimated tokens of the prompt *view*, from the *reported_tokens* of *sent*, which it continues; else ``None``.

    The messages after *sent* are estimated; ``None`` if *view* does not continue it. O(1).
    """
    if view.shared_prefix_length(sent) < len(sent):
        return None
    return reported_tokens + transcript_tokens(view) - transcript_tokens(sent)


def tool_tokens(tools: Iterable[ToolSpec]) -> int:
    """Return the estimated tokens of tool definitions, without those that a model searches for; each is measured once."""
    return sum([-(-tool.char_count // CHARS_PER_TOKEN) for tool in tools if not tool.defer_loading])


class Measured(NamedTuple):
    """A provider's token count for one prompt: system prompt and messages."""

    system_prompt: str
    messages: Transcript
    tokens: int

    def estimate_next_prompt_size(self, system_prompt: str, view: Transcript) -> int | None:
        """Return the estimated size of the next prompt, or ``None`` if it does not continue this one."""
        if system_prompt != self.system_prompt:
            return None
        return estimate_continued_prompt_tokens(view, self.messages, self.tokens)
