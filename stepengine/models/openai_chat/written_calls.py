"""
Parse tool calls and thoughts in the text of a reply, for local servers without a parser for the model's format.

The text is untrusted, so it is searched for fixed words in one pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs

from stepengine.data.json import freeze
from stepengine.data.messages import AssistantPart, TextPart, ThinkingPart, ToolCallPart
from stepengine.data.models import ModelDelta, ModelReply, StopReason, TextChunk, ThinkingChunk
from stepengine.data.thoughts import TAGS, split_thoughts
from stepengine.machine.blocks import parse_codebuff_call
from stepengine.models._json import encode_utf8, make_call_part, parse_json

OPEN = re.compile(r"<(tool_call|codebuff_tool_call)>")
FUNCTION, PARAMETER = "<function=", "<parameter="
BRACKETS = ("[THINK]", "[/THINK]")
"""The tags around Magistral's thoughts."""
CLOSED_BY = {**{f"<{tag}>": f"</{tag}>" for tag in TAGS}, BRACKETS[0]: BRACKETS[1]}
ENDED = frozenset({StopReason.END_TURN, StopReason.STOP_SEQUENCE, StopReason.TOOL_USE})


def parse_written_calls(reply: ModelReply) -> ModelReply:
    """
    Return *reply* with the ``<tool_call>`` and ``<codebuff_tool_call>`` blocks of its text as calls.

    A block holds JSON, ``{"name": ..., "arguments": {...}}``, or Qwen's form, ``<function=name><parameter=at>...``, or
    codebuff's, ``{"cb_tool_name": ..., "path": ...}``. Any other block stays text. In a reply that was cut, all blocks stay text.
    """
    if reply.tool_calls or reply.stop_reason not in ENDED:
        return reply
    data = _get_provider_and_model(reply)
    content = [found for part in reply.content for found in _split_written_calls(part, data)]
    if not any(isinstance(part, ToolCallPart) for part in content):
        return reply
    return attrs.evolve(reply, content=tuple(content), stop_reason=StopReason.TOOL_USE)


def _get_provider_and_model(reply: ModelReply) -> dict[str, object]:
    """Return the members ``provider`` and ``model`` of a reply, for the provider data of its parts."""
    return {name: reply.provider_data[name] for name in ("provider", "model") if name in reply.provider_data}


def parse_written_thoughts(reply: ModelReply) -> ModelReply:
    """
    Return *reply* with the thoughts at the start of its text as a part of their own, which also stores their original text.

    Blank text next to thoughts or calls is left out (providers:PV76).
    """
    content: list[AssistantPart] = []
    said = False
    for part in reply.content:
        if not isinstance(part, TextPart) or said:
            content.append(part)
            continue
        said = bool(part.text.strip())
        thoughts, head = _split_leading_thoughts(part.text)
        if head:
            data = {**_get_provider_and_model(reply), "written": head}
            content.append(ThinkingPart("\n\n".join(thoughts), provider_data=freeze(data)))
        rest = part.text[len(head) :]
        if rest.strip():
            content.append(attrs.evolve(part, text=rest) if head else part)
    return attrs.evolve(reply, content=tuple(content)) if content else reply


def _split_leading_thoughts(text: str) -> tuple[tuple[str, ...], str]:
    """Return (thoughts, head): the thoughts at the start of *text*, and the part of *text* with them; ``((), "")`` for none."""
    begin, end = BRACKETS
    thoughts: tuple[str, ...]
    if text.lstrip().startswith(begin):
        inside, closed, _ = text.lstrip().removeprefix(begin).partition(end)
        after = text.index(begin) + len(begin) + len(inside) + len(closed)
        thoughts, said = (inside.strip(),), text[after:].strip()
    else:
        thoughts, said = split_thoughts(text)
        if said == text:
            return (), ""
    whole = text.rstrip()
    return thoughts, whole[: len(whole) - len(said)] if said else text


class WrittenThoughtFilter:
    """
    Separates the thoughts at the start of a streamed text from the answer.

    If the server removed the opening tag, thoughts are recognized only at their end. The stream has then shown them as text.
    It shows blocks after the first one as text, too, although ``parse_written_thoughts`` parses them as thoughts.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._begin = ""
        self._closing = ""
        self._is_behind = False
        self._said = False

    def convert_delta(self, delta: ModelDelta) -> list[ModelDelta]:
        """Return the deltas that subscribers receive for *delta*. Text that may be part of a tag is held back."""
        if not isinstance(delta, TextChunk):
            return [delta] if isinstance(delta, ThinkingChunk) else [*self.flush(), delta]
        if self._said:
            return [delta]
        if self._is_behind:
            return self._convert_text_after_thoughts(delta.text)
        return self._convert_text_in_thoughts(delta.text) if self._closing else self._convert_text_at_start(delta.text)

    def flush(self) -> list[ModelDelta]:
        """Return the deltas of the text that was held back, and clear it."""
        text, begin = "".join(self._held), self._begin
        self._held, self._begin = [], ""
        if self._closing:
            return [ThinkingChunk(text)] if text else []
        return [TextChunk(text)] if begin else []

    def _convert_text_at_start(self, text: str) -> list[ModelDelta]:
        """Return the deltas of a text at the start; it is held back while it may be a part of an opening tag."""
        self._held.append(text)
        self._begin = self._begin + text if self._begin else text.lstrip()
        opening = next((tag for tag in CLOSED_BY if self._begin.startswith(tag)), "")
        if opening:
            self._closing, inside = CLOSED_BY[opening], self._begin.removeprefix(opening)
            self._held, self._begin = [], ""
            return self._convert_text_in_thoughts(inside)
        if any(tag.startswith(self._begin) for tag in CLOSED_BY):
            return []
        self._said = True
        return self.flush()

    def _convert_text_in_thoughts(self, text: str) -> list[ModelDelta]:
        """Return thinking up to the closing tag, and the text after it; a possible start of the tag is held back."""
        text = "".join([*self._held, text])
        thought, closed, after = text.partition(self._closing)
        if closed:
            self._held, self._closing = [], ""
            thoughts: list[ModelDelta] = [ThinkingChunk(thought)] if thought else []
            return thoughts + self._convert_text_after_thoughts(after)
        safe = len(text) - len(self._closing) + 1
        self._held = [text[max(0, safe) :]]
        return [ThinkingChunk(text[:safe])] if safe > 0 else []

    def _convert_text_after_thoughts(self, text: str) -> list[ModelDelta]:
        """Return the delta of the first text after thoughts, without leading blanks; ``[]`` while only blanks came."""
        said = text.lstrip()
        self._is_behind, self._said = True, bool(said)
        return [TextChunk(said)] if said else []


def _split_written_calls(part: AssistantPart, data: Mapping[str, object]) -> list[AssistantPart]:
    """Return the texts and the calls in the text of *part*; blocks that are not calls stay text."""
    if not isinstance(part, TextPart) or OPEN.search(part.text) is None:
        return [part]
    # The split yields text, then pairs of a tag and the text after it.
    text, *pieces = OPEN.split(part.text)
    found: list[AssistantPart] = []
    for tag, block in zip(pieces[::2], pieces[1::2], strict=True):
        inside, _, after = block.partition(f"</{tag}>")
        call = _parse_call_block(tag, inside.strip(), data)
        if call is None:
            text += f"<{tag}>{block}"
            continue
        if text.strip():
            found.append(TextPart(text.strip()))
        found.append(call)
        text = after
    if text.strip():
        found.append(TextPart(text.strip()))
    return found


def _parse_call_block(tag: str, block: str, data: Mapping[str, object]) -> ToolCallPart | None:
    """Parse the tool call in a block with *tag*; return ``None`` if the text is not a call."""
    if tag == "tool_call" and block.startswith(FUNCTION):
        return _parse_function_block(block, data)
    try:
        value = parse_json(encode_utf8(block))
    except ValueError:
        return None
    if not isinstance(value, Mapping):
        return None
    if tag == "tool_call":
        name, given = value.get("name"), value.get("arguments", value.get("parameters"))
    else:
        name, given = parse_codebuff_call(value)
    return make_call_part(name, given, data) if isinstance(name, str) and name else None


def _parse_function_block(block: str, data: Mapping[str, object]) -> ToolCallPart | None:
    """Parse the tool call in a block of Qwen's form; return ``None`` if the text is not a call."""
    head, *given = block.removesuffix("</function>").split(PARAMETER)
    name, closed, rest = head.removeprefix(FUNCTION).partition(">")
    if not closed or not name.strip() or rest.strip():
        return None
    arguments: dict[str, object] = {}
    for entry in given:
        key, closed, value = entry.partition(">")
        if not closed:
            return None
        arguments[key.strip()] = _parse_parameter(value.rstrip().removesuffix("</parameter>"))
    return make_call_part(name.strip(), arguments, data)


def _parse_parameter(text: str) -> object:
    """Return the value of a parameter: an object or list is JSON, anything else is text between line breaks."""
    plain = text.removeprefix("\n").removesuffix("\n")
    if plain[:1] not in {"{", "["}:
        return plain
    try:
        return parse_json(encode_utf8(plain))
    except ValueError:
        return plain
