"""
The entries that a pruned history is made of, and the summary message that keeps them (generator-contract P12-P16, P20-P24).

Each entry is one part of the summary message and says of which role it is in the part's own data, so that a later prune
takes the list back as it was, whatever the texts say. A summary is known by its tag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from stepengine.context.pruning_calls import cut, line_of, result_of
from stepengine.context.summarizing import SUMMARY
from stepengine.context.truncating import GAP_TAG
from stepengine.data.messages import (
    AssistantMessage,
    ImagePart,
    Message,
    TextPart,
    ToolCallPart,
    UserMessage,
    UserPart,
    system_reminder,
)

__all__ = (
    "CONTINUE_TAG",
    "SILENT_TAGS",
    "SUMMARY_TAG",
    "SUMMARY_TAGS",
    "Caps",
    "Entry",
    "Memory",
    "continue_message",
    "entry_of",
    "entry_tokens",
    "fitting",
    "remembered",
    "summary_message",
)

SUMMARY_TAG = "CONVERSATION_SUMMARY"
SUMMARY_TAGS = frozenset({SUMMARY_TAG, SUMMARY})
"""What tells a summary, ours or one that the model wrote; never its text (generator-contract P28)."""
MEMORY_TAG = "MEMORY"
CONTINUE_TAG = "CONTINUE_PROMPT"
SILENT_TAGS = frozenset({"INSTRUCTIONS_PROMPT", "STEP_PROMPT", "AGENT_SPAWN_NOTICE", CONTINUE_TAG, GAP_TAG})
"""Messages that are not summarised, and that do not make a turn begin (generator-contract P10, P12)."""

SEPARATOR = "\n\n---\n\n"
HEADER = (
    "<conversation_summary>\nThis is your memory of the conversation so far. What is left out below is gone; look again "
    "if you need it. It is a memory, not a format: do not write like this yourself, call tools as usual."
)
FOOTER = "\n</conversation_summary>"
CONTINUE = system_reminder(
    "The conversation above was shortened to a summary in the middle of your work. Go on with the last request of the user "
    "that it holds, and do not repeat what is already done."
)


class Caps(NamedTuple):
    """
    How many tokens, at three characters each, new entries may have.

    Attributes:
        user: The text of a user.
        note: The text of a reply.
        work: All that a reply or a result leaves, calls included.
    """

    user: int = 13_000
    note: int = 1_300
    work: int = 1_000_000


class Entry(NamedTuple):
    """One remembered message; ``live`` is the request that the agent works on."""

    role: str
    text: str
    live: bool = False


class Memory(NamedTuple):
    """What is remembered of a history: its entries, oldest first, and the newest images that a user sent."""

    entries: tuple[Entry, ...]
    images: tuple[ImagePart, ...] = ()


def entry_tokens(entry: Entry) -> int:
    """Return the size of an entry in tokens of three characters (generator-contract P22)."""
    return -(-len(entry.text) // 3)


def _stored(message: UserMessage) -> list[Entry]:
    """Return the entries that a summary message holds."""
    entries = []
    for part in message.content:
        data = part.provider_data if type(part) is TextPart else None
        if type(part) is TextPart and data and data.get("provider") == "stepengine" and "entry" in data:
            entries.append(Entry(data["entry"], part.text.removeprefix(SEPARATOR), bool(data.get("live"))))
    return entries


def entry_of(
    message: Message, calls: Mapping[str, ToolCallPart], forgotten: frozenset[str], caps: Caps
) -> Entry | None:
    """Return what is remembered of a message, ``None`` for nothing; *calls* has the call of a result by its id."""
    if isinstance(message, UserMessage):
        text, images = message.text.strip(), sum(type(p) is ImagePart for p in message.content)
        note = f" (with {images} image{'s' if images > 1 else ''})" if images else ""
        speaker = "[EARLIER SUMMARY]" if SUMMARY_TAGS.intersection(message.tags) else "[USER]"
        return Entry("user", f"{speaker}{note}\n{cut(text, caps.user)}") if text else None
    if isinstance(message, AssistantMessage):
        text = cut(message.said.strip(), caps.note)
        lines = [*([f"Progress note: {text}"] if text else []), *map(line_of, message.tool_calls)]
        return Entry("assistant", cut("\n".join(lines), caps.work)) if lines else None
    text = result_of(message, calls[message.tool_call_id], forgotten)
    return Entry("assistant", cut(text, caps.work)) if text else None


def remembered(
    messages: Iterable[Message], live: Message | None, forgotten: frozenset[str], caps: Caps, *, keeps_mark: bool
) -> Memory:
    """
    Return the memory of *messages*; the entries of earlier summaries stand where those stood.

    Args:
        messages: What is to be summarised.
        live: The request that the agent works on, when it is one of them.
        forgotten: Agents whose outputs are not kept.
        caps: How large new entries may be.
        keeps_mark: Whether the live request of an earlier summary still is the live one.
    """
    entries: list[Entry] = []
    images: tuple[ImagePart, ...] = ()
    calls: dict[str, ToolCallPart] = {}
    for message in messages:
        if type(message) is AssistantMessage:
            calls = {call.tool_call_id: call for call in message.tool_calls}
        if type(message) is UserMessage:
            images = tuple([p for p in message.content if type(p) is ImagePart]) or images
            if SUMMARY_TAG in message.tags and (stored := _stored(message)):
                entries += stored if keeps_mark else [entry._replace(live=False) for entry in stored]
                continue
        entry = entry_of(message, calls, forgotten, Caps() if message is live else caps)
        if entry is not None:
            entries.append(entry._replace(live=message is live))
    return Memory(tuple(entries), images)


def fitting(entries: Sequence[Entry], user_budget: int, assistant_tool_budget: int) -> tuple[Entry, ...]:
    """
    Return the entries that fit, from the newest back (generator-contract P22, P23, P29).

    The first entry of a role that does not fit closes that role. The newest entry and the live request always stay; the
    latter counts for no budget.
    """
    left = {"user": user_budget, "assistant": assistant_tool_budget}
    kept: list[Entry] = []
    for entry in reversed(entries):
        if not entry.live:
            size = entry_tokens(entry)
            fits = size <= left[entry.role]
            left[entry.role] = left[entry.role] - size if fits else -1
            if not fits and kept:
                continue
        kept.append(entry)
    return tuple(reversed(kept))


def summary_message(memory: Memory) -> UserMessage:
    """Return the message that keeps a memory, one part per entry (generator-contract P24, P28)."""
    parts: list[UserPart] = [TextPart(HEADER)]
    for entry in memory.entries:
        data = {"provider": "stepengine", "entry": entry.role, **({"live": True} if entry.live else {})}
        parts.append(TextPart(SEPARATOR + entry.text, provider_data=data))
    return UserMessage((*parts, TextPart(FOOTER), *memory.images), (SUMMARY_TAG, MEMORY_TAG))


def continue_message() -> UserMessage:
    """Return the message that ends a history which was pruned in the middle of a turn (generator-contract P11)."""
    return UserMessage(CONTINUE, (CONTINUE_TAG,))
