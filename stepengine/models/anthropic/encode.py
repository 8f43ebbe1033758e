"""
Encode messages for Anthropic's Messages API. Pure: no SDK, no clock, no I/O.

Every message is encoded once and its bytes are cached (``Transcript.memo``); a request joins them. The results of one
batch of calls and the user messages after them become one user message, results first.

**Calls without thinking.** With a manual thinking budget the API rejects a last assistant turn with calls that do not
follow a thinking block. Calls of a handler, of another model or of a turn without thinking have none. Such calls and
their results are then sent as text, so the model sees both. The rule looks at one message at a time. A message is therefore
sent in the same form in every later request, and the prompt cache holds. Adaptive thinking has no such requirement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

import attrs
from attrs import frozen

from stepengine.data.json import compact
from stepengine.data.messages import (
    AssistantMessage,
    AssistantPart,
    CitationPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    Message,
    OpaquePart,
    RefusalPart,
    ResultPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    UserMessage,
)
from stepengine.data.models import ModelRequest
from stepengine.models._hidden_tools import find_loaded_tool_names, is_tool_search_part
from stepengine.models._json import find_objects, find_text
from stepengine.models._wire import (
    MADE,
    NUDGE,
    MessageEncoders,
    MessageJoiner,
    choose_wire_ids,
    continues_paused_reply,
    encode_base64,
    encode_comma_separated,
    encode_json,
    encode_turns,
    encode_wire_ids,
    format_call_as_text,
    get_arguments_to_send,
    get_media_kind,
    is_from_provider,
    list_generated_media,
    make_safe_tool_name,
    make_unsupported_part_error,
    require_accepted_image_type,
    require_file_of_provider,
)
from stepengine.models._wire import EncodedMessage as BaseTurn
from stepengine.models.anthropic.decode import find_calling_program_id

Json = dict[str, Any]


@frozen
class AnthropicEncodeOptions:
    """
    The options that the encoded form of a message depends on.

    Attributes:
        provider: Only ids, signatures and opaque parts of this provider are sent back.
        model: Only thinking of this model is sent back (ecosystem:EC99).
        manual: Whether thinking has a budget, so that calls without thinking are sent as text.
        container: Whether code runs in a container of the provider, which accepts uploaded files of any kind.
        hidden: The tools that the model can search for; ``None`` sends earlier searches unchanged.
    """

    provider: str
    model: str
    manual: bool = False
    container: bool = False
    hidden: frozenset[str] | None = None


@frozen
class AnthropicEncoded(BaseTurn):
    """
    One encoded message.

    Attributes:
        texts: The text in a user message for each call that is not sent as a call.
        as_text: The text in a user message for a result.
        waits: The ids of programs that wait for results of the calls.
        ends: The ids of programs whose results the message contains.
        container: The container of the programs.
    """

    texts: Mapping[str, bytes] = attrs.field(factory=dict)
    as_text: bytes = b""
    waits: frozenset[str] = frozenset()
    ends: frozenset[str] = frozenset()
    container: str = ""


# --- joining --------------------------------------------------------------------------------------------------------


def encode_messages(
    request: ModelRequest, options: AnthropicEncodeOptions, *, is_container_lost: bool = False
) -> tuple[bytes, str]:
    """
    Return (array, container): the ``messages`` array with alternating roles, and the container of the waiting program or ``""``.

    A waiting program receives only its results, so user messages of the tail are left out. A program is abandoned if a user
    message followed instead, or its container is lost. Its calls are then sent as text (providers:PV121).
    """
    turns = encode_turns(request, options, ENCODERS)
    if any(turn.waits for turn in turns if turn.role == "assistant"):
        turns = _replace_abandoned_turns(request, turns, options, is_container_lost=is_container_lost)
    joiner = _AnthropicJoiner()
    for turn in turns:
        joiner.append_turn(turn)
    return joiner.join(must_end_with_user=not continues_paused_reply(request)), joiner.container


def _replace_abandoned_turns(
    request: ModelRequest, turns: list[AnthropicEncoded], options: AnthropicEncodeOptions, *, is_container_lost: bool
) -> list[AnthropicEncoded]:
    """Return *turns*, with calls of abandoned programs and their results as text."""
    history = len(request.messages)
    gone, is_gone, found = (
        _find_abandoned_program_turns(turns, history, is_container_lost=is_container_lost),
        False,
        list[AnthropicEncoded](),
    )
    for index, turn in enumerate(turns):
        is_gone = index in gone or (is_gone and turn.role == "tool")
        message = request.messages[index] if index < history else request.tail[index - history]
        found.append(_encode_abandoned_message_as_text(message, options) if is_gone else turn)
    return found


def _find_abandoned_program_turns(
    turns: list[AnthropicEncoded], history_length: int, *, is_container_lost: bool
) -> set[int]:
    """Return the indices of *turns* with abandoned programs; the first *history_length* turns are of the history, the rest of the tail."""
    gone, follows = set[int](), frozenset[str]()
    is_last, is_spoken_over = True, False
    for index in range(len(turns) - 1, -1, -1):
        turn = turns[index]
        if turn.role == "user" and turn.body and index < history_length:
            is_spoken_over = True
        if turn.role != "assistant":
            continue
        is_alive = not is_spoken_over and (not is_container_lost if is_last else not turn.waits.isdisjoint(follows))
        if turn.waits and not is_alive:
            gone.add(index)
        follows = turn.ends | (frozenset() if index in gone else turn.waits)
        is_last = is_spoken_over = False
    return gone


THINKING = frozenset(("thinking", "redacted_thinking"))
NUDGE_BLOCK = encode_json({"type": "text", "text": NUDGE})
OPEN = {"user": b'{"role":"user","content":[', "assistant": b'{"role":"assistant","content":['}


class _AnthropicJoiner(MessageJoiner):
    def __init__(self) -> None:
        super().__init__(OPEN, NUDGE_BLOCK)
        self._ids: Mapping[str, bytes] = {}
        self._texts: Mapping[str, bytes] = {}
        self.container = ""
        self._waits = False

    def append_turn(self, turn: AnthropicEncoded) -> None:
        """Append an encoded message; user messages are left out while a program waits for results."""
        # Results are encoded without the id of their call, which depends on the provider of the message before. So the
        # bytes of a result can be cached for all providers.
        if turn.role == "tool":
            wire_id = self._ids.get(turn.call_id)
            if wire_id is None:
                self.append_content("user", self._texts[turn.call_id] + b"," + turn.as_text)
            else:
                self.append_content("user", b'{"type":"tool_result","tool_use_id":' + wire_id + turn.body)
            return
        if self._waits and turn.role == "user":
            return
        self.append_deferred_content()
        if turn.role == "assistant":
            self._ids, self._texts = turn.ids, turn.texts
            self._waits, self.container = bool(turn.waits), turn.container
        if turn.body:
            self.append_content(turn.role, turn.body)
        self.defer_to_user_turn(turn.after)


DIRECT = ("caller", {"type": "direct"})


# --- one message ----------------------------------------------------------------------------------------------------


def _encode_user(message: UserMessage, options: AnthropicEncodeOptions) -> AnthropicEncoded:
    return AnthropicEncoded(
        "user", encode_comma_separated([_encode_content_part(part, options) for part in message.content])
    )


def _encode_assistant(
    message: AssistantMessage,
    options: AnthropicEncodeOptions,
    with_provider_ids: bool,  # noqa: FBT001 - private
) -> AnthropicEncoded:
    """Encode a reply; with a thinking budget in tokens, calls in a reply that does not start with thinking become text."""
    calls = message.tool_calls
    ids = choose_wire_ids(calls, options.provider, with_provider_ids=with_provider_ids)
    blocks = [block for part in message.content if (block := _encode_assistant_block(part, options, ids)) is not None]
    made = list_generated_media(message)
    after = (
        encode_comma_separated([_encode_text(MADE), *[_encode_content_part(part, options) for part in made]])
        if made
        else b""
    )
    if not calls:
        return AnthropicEncoded(
            "assistant",
            encode_comma_separated(_drop_trailing_thoughts(_drop_unanswered_server_calls(blocks))),
            after=after,
            ends=_list_answered_server_call_ids(blocks),
        )
    waits = frozenset(filter(None, [find_calling_program_id(block) for block in blocks if block["type"] == "tool_use"]))
    # With a thinking budget the API requires thinking at the start of a turn with calls. A history from another
    # model has none, so its calls are sent as text.
    if options.manual and not waits and blocks[0]["type"] not in THINKING:
        said = encode_comma_separated([block for block in blocks if block["type"] != "tool_use"])
        return AnthropicEncoded("assistant", said, texts=_encode_calls_as_texts(calls), after=after)
    return AnthropicEncoded(
        "assistant",
        encode_comma_separated(blocks),
        ids=encode_wire_ids(ids),
        after=after,
        waits=waits,
        ends=_list_answered_server_call_ids(blocks),
        container=next(filter(None, [find_text(call.provider_data, "container") for call in calls]), "")
        if waits
        else "",
    )


def _encode_calls_as_texts(calls: tuple[ToolCallPart, ...]) -> dict[str, bytes]:
    """Return the encoded text block for each call, by our id of the call."""
    return {call.tool_call_id: encode_json(_encode_text(format_call_as_text(call))) for call in calls}


def _list_answered_server_call_ids(blocks: list[Json]) -> frozenset[str]:
    """Return the ids of calls of the provider's own tools that have a result in *blocks*."""
    return frozenset([block["tool_use_id"] for block in blocks if block.get("tool_use_id")])


def _encode_abandoned_message_as_text(message: Message, options: AnthropicEncodeOptions) -> AnthropicEncoded:
    """Encode a reply with an abandoned program, or a result for the program, with its calls as text."""
    if not isinstance(message, AssistantMessage):
        return ENCODERS.encode(message, attrs.evolve(options, manual=True))
    ids = choose_wire_ids(message.tool_calls, options.provider)
    blocks = [block for part in message.content if (block := _encode_assistant_block(part, options, ids)) is not None]
    answered = _list_answered_server_call_ids(blocks)
    said = [b for b in blocks if b["type"] != "tool_use" and (b["type"] != "server_tool_use" or b["id"] in answered)]
    return AnthropicEncoded(
        "assistant",
        encode_comma_separated(_drop_trailing_thoughts(said)),
        texts=_encode_calls_as_texts(message.tool_calls),
        ends=answered,
    )


def _drop_unanswered_server_calls(blocks: list[Json]) -> list[Json]:
    """Return *blocks* without unanswered calls of the provider's own tools, except a call in the last block."""
    # (providers:PV57)
    results = {block.get("tool_use_id") for block in blocks}
    last = len(blocks) - 1
    return [
        block
        for index, block in enumerate(blocks)
        if block["type"] != "server_tool_use" or index == last or block.get("id") in results
    ]


def _drop_trailing_thoughts(blocks: list[Json]) -> list[Json]:
    """Return *blocks* without thinking at the end, which the API rejects with status 400."""
    while blocks and blocks[-1]["type"] in THINKING:
        blocks = blocks[:-1]
    return blocks


def _encode_assistant_block(
    part: AssistantPart, options: AnthropicEncodeOptions, ids: Mapping[str, str]
) -> Json | None:
    """Return the block of a part of a reply; ``None`` for parts that are not sent back, such as thoughts of other models."""
    match part:
        case TextPart():
            block = _encode_text(
                part.text, part.provider_data if is_from_provider(part.provider_data, options.provider) else None
            )
            return block and {**_unwrap_unknown_members(part.provider_data, options), **block}
        case RefusalPart():
            return _encode_text(part.text)
        case ThinkingPart():
            return _encode_thinking_if_own(part, options)
        case ToolCallPart():
            return _encode_call(part, options, ids)
        case OpaquePart():
            return _encode_opaque_block(part.data, options) if part.provider == options.provider else None
        case CitationPart() | ImagePart() | DocumentPart():
            return None
        case _ as never:
            assert_never(never)


def _encode_call(part: ToolCallPart, options: AnthropicEncodeOptions, ids: Mapping[str, str]) -> Json:
    """Return the block of a call, with its unknown members except the default ``caller``."""
    more = _unwrap_unknown_members(part.provider_data, options)
    newer = {name: value for name, value in more.items() if (name, value) != DIRECT}
    name, given = make_safe_tool_name(part.tool_name), get_arguments_to_send(part)
    return {**newer, "type": "tool_use", "id": ids[part.tool_call_id], "name": name, "input": given}


def _unwrap_unknown_members(data: Mapping[str, Any] | None, options: AnthropicEncodeOptions) -> Mapping[str, object]:
    """Return the stored unknown members of a block, if the same model sent them; else ``{}``."""
    return data.get("more", {}) if is_from_provider(data, options.provider, options.model) else {}


def _encode_opaque_block(data: Mapping[str, Any], options: AnthropicEncodeOptions) -> Json | None:
    """Return a block unchanged, except a tool search: without tools that are no longer hidden, and ``None`` if no tool is hidden."""
    if options.hidden is None or not is_tool_search_part(data):
        return dict(data)
    if not options.hidden:
        return None
    if options.hidden.issuperset(find_loaded_tool_names(data)):
        return dict(data)
    content = data["content"]
    kept = [one for one in find_objects(content, "tool_references") if one.get("tool_name") in options.hidden]
    return {**data, "content": {**content, "tool_references": kept}}


def _encode_thinking_if_own(part: ThinkingPart, options: AnthropicEncodeOptions) -> Json | None:
    """Return the block of signed or redacted thinking of the same model; ``None`` for other thoughts."""
    data = part.provider_data
    # Only the model that produced thinking accepts its signature; for others its text would become part of the answer
    # (ecosystem:EC99).
    if not is_from_provider(data, options.provider, options.model):
        return None
    if data.get("redacted"):
        return {**_unwrap_unknown_members(data, options), "type": "redacted_thinking", "data": data["redacted"]}
    signature = data.get("signature")
    newer = _unwrap_unknown_members(data, options)
    return {**newer, "type": "thinking", "thinking": part.text, "signature": signature} if signature else None


def _encode_text(text: str, data: Mapping[str, Any] | None = None) -> Json | None:
    """Return a text block; ``None`` for blank text, which the API rejects."""
    if not text.strip():
        return None
    block: Json = {"type": "text", "text": text}
    if data is not None and data.get("citations"):
        # The API rejects this member of its own replies (providers:PV57).
        block["citations"] = [
            {name: value for name, value in citation.items() if name != "file_id"}
            if isinstance(citation, Mapping)
            else citation
            for citation in data["citations"]
        ]
    return block


def _encode_result(message: ToolMessage, options: AnthropicEncodeOptions) -> AnthropicEncoded:
    """Encode a result; with a manual thinking budget also as text, for a call that is sent as text."""
    blocks = [block for part in message.content if (block := _encode_content_part(part, options)) is not None]
    rest: Json = {}
    if len(blocks) == 1 and blocks[0]["type"] == "text":
        rest["content"] = blocks[0]["text"]
    elif blocks:
        rest["content"] = blocks
    if message.is_error:
        rest["is_error"] = True
    members = encode_json(rest)[1:]
    as_text = b""
    if options.manual:
        # Outside a tool result the API rejects references to tools, so they are text there.
        plain = attrs.evolve(options, hidden=None)
        shown = [block for part in message.content if (block := _encode_content_part(part, plain)) is not None]
        as_text = encode_comma_separated(shown or [_encode_text("(nothing)")])
    return AnthropicEncoded("tool", (b"," if rest else b"") + members, call_id=message.tool_call_id, as_text=as_text)


def _encode_content_part(part: ResultPart, options: AnthropicEncodeOptions) -> Json | None:
    """Return the block of a part of a user message or result; ``None`` for blank text."""
    match part:
        case TextPart():
            return _encode_text(part.text)
        case JsonPart():
            return _encode_text(compact(part.value))
        case ToolReferencePart(tool_name=name):
            known = options.hidden is not None and name in options.hidden
            return {"type": "tool_reference", "tool_name": name} if known else _encode_text(part.text)
        case ImagePart() | DocumentPart():
            return _encode_supported_media(part, options)
        case _ as never:
            assert_never(never)


def _encode_supported_media(part: ImagePart | DocumentPart, options: AnthropicEncodeOptions) -> Json:
    """Return the block of an image, a PDF, a text or an uploaded file; raise ``ModelError`` for unsupported media."""
    require_file_of_provider(options.provider, part)
    kind = get_media_kind(part)
    if kind == "image":
        require_accepted_image_type(options.provider, part)
        return {"type": "image", "source": _encode_media_source(part)}
    if part.file_id is not None and kind not in {"pdf", "text"} and options.container:
        return {"type": "container_upload", "file_id": part.file_id}
    if part.file_id is not None and kind == "office":
        raise make_unsupported_part_error(
            options.provider,
            part,
            "it accepts office files only together with CodeExecution(), else only PDF and plain text",
        )
    if kind not in {"pdf", "text"}:
        raise make_unsupported_part_error(options.provider, part, "it accepts images, PDF and plain text")
    if part.url is not None and kind == "text":
        raise make_unsupported_part_error(
            options.provider, part, "it accepts text as bytes or as an uploaded file; only images and PDF can be URLs"
        )
    block: Json = {"type": "document", "source": _encode_media_source(part)}
    name = getattr(part, "name", "")
    return {**block, "title": name} if name else block


def _encode_media_source(part: ImagePart | DocumentPart) -> Json:
    """Return the source of an image or document: an uploaded file, a URL, a text or base64."""
    if part.file_id is not None:
        return {"type": "file", "file_id": part.file_id}
    if part.data is None:
        return {"type": "url", "url": part.url}
    if get_media_kind(part) == "text":
        return {"type": "text", "media_type": "text/plain", "data": part.data.decode("utf-8", "replace")}
    return {"type": "base64", "media_type": part.mime_type, "data": encode_base64(part.data)}


ENCODERS = MessageEncoders(_encode_user, _encode_assistant, _encode_result)
