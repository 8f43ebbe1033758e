"""
Encode messages as input items of the Responses API. Pure: no SDK, no clock, no I/O.

Every message is encoded once and its bytes are cached (``Transcript.memo``); a request joins them. The provider stores
nothing, so reasoning goes back with its encrypted content, directly before the item that followed it. Texts and calls of
the same provider and model go back under their own item ids. All others become plain messages, and calls with generated
ids, which the API accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from stepengine.models._hidden_tools import is_tool_search_part
from stepengine.models._json import encode_utf8, find_object, find_text
from stepengine.models._wire import (
    MADE,
    NUDGE,
    MessageEncoders,
    choose_wire_ids,
    continues_paused_reply,
    continues_text,
    encode_base64,
    encode_comma_separated,
    encode_json,
    encode_turns,
    encode_wire_ids,
    format_document_text,
    format_result_text,
    get_arguments_to_send,
    get_file_name_or_default,
    get_media_kind,
    get_url_or_data_url,
    is_from_provider,
    list_generated_media,
    make_safe_tool_name,
    make_unsupported_part_error,
    remove_blank_texts,
    remove_empty_texts,
    require_accepted_image_type,
    require_file_of_provider,
)
from stepengine.models._wire import EncodedMessage as BaseTurn

Json = dict[str, Any]


@frozen
class OpenAIEncodeOptions:
    """
    The options that the encoded form of a message depends on.

    Attributes:
        provider: Only call ids and opaque items of this provider are sent back.
        model: Only reasoning and item ids of this model are sent back (ecosystem:EC99).
        sources: Whether searches go back with their sources.
        hidden: The tools that the model can search for; ``None`` sends earlier searches unchanged.
        server_calls: Whether calls of the provider's own tools are sent back.
    """

    provider: str
    model: str
    sources: bool = True
    hidden: frozenset[str] | None = None
    server_calls: bool = True


@frozen
class ResponsesEncoded(BaseTurn):
    """
    One encoded message.

    Attributes:
        refers: The names of the tools in a result's references.
        callers: The encoded caller of each call by a program, by our id; its result repeats it.
        searches: Our ids of the calls that are tool searches, which are answered with definitions.
    """

    refers: tuple[str, ...] = ()
    callers: Mapping[str, bytes] = attrs.field(factory=dict)
    searches: frozenset[str] = frozenset()


NUDGE_ITEM = encode_json({"role": "user", "content": NUDGE})
SEARCHED = b'{"type":"tool_search_output","execution":"client","status":"completed","call_id":'
OUTPUT = b'{"type":"function_call_output","call_id":'


def encode_messages(
    request: ModelRequest, options: OpenAIEncodeOptions, get_definition: Callable[[str], Json] | None = None
) -> bytes:
    """
    Return the ``input`` array of history and tail, with a user message between two messages of the model.

    *get_definition* returns the definition of a hidden tool. A hidden tool that results refer to is defined once, after the results.
    """
    out: list[bytes] = []
    loading = _ToolDefinitions(options.hidden or frozenset(), get_definition)
    ids: Mapping[str, bytes] = {}
    callers: Mapping[str, bytes] = {}
    searches: frozenset[str] = frozenset()
    role = ""
    after = b""
    for turn in encode_turns(request, options, ENCODERS):
        if turn.role == "tool":
            role = "tool"
            if turn.call_id in searches:
                out.append(SEARCHED + ids[turn.call_id] + loading.mark_and_encode_found_tools(turn.refers))
                continue
            out.append(OUTPUT + ids[turn.call_id] + callers.get(turn.call_id, b"") + turn.body)
            if turn.refers:
                after = loading.prepend_new_definitions(after, turn.refers)
            continue
        # Media of the model that the API does not accept in its messages follow the results of its calls.
        for body, whose in ((after, "user"), (turn.body, turn.role)):
            if body and whose == role == "assistant":
                out.append(NUDGE_ITEM)
            out += [body] if body else []
            role = whose if body else role
        after = turn.after
        if turn.ids:
            ids, callers, searches = turn.ids, turn.callers, turn.searches
    return (
        b"["
        + b",".join([*out, *_make_final_items(after, role, must_end_with_user=not continues_paused_reply(request))])
        + b"]"
    )


def _make_final_items(deferred_items: bytes, role: str, *, must_end_with_user: bool) -> list[bytes]:
    """Return the last items: *deferred_items*; else ``NUDGE`` for an empty input or, if *must_end_with_user*, after a reply; else none."""
    if deferred_items:
        return [deferred_items]
    return [NUDGE_ITEM] if not role or (role == "assistant" and must_end_with_user) else []


class _ToolDefinitions:
    """Encodes the definitions of hidden tools that results refer to, each once."""

    def __init__(self, hidden: frozenset[str], get_definition: Callable[[str], Json] | None) -> None:
        self._waiting = set(hidden)
        self._get_definition = get_definition

    def mark_and_encode_found_tools(self, names: tuple[str, ...]) -> bytes:
        """Encode the definitions of the found tools, for the output of a tool search, and mark them as defined."""
        self._waiting.difference_update(names)
        get_definition = self._get_definition
        tools = (
            []
            if get_definition is None
            else [{**get_definition(name), "defer_loading": True} for name in dict.fromkeys(names)]
        )
        return b',"tools":' + encode_json(tools) + b"}"

    def prepend_new_definitions(self, items: bytes, names: tuple[str, ...]) -> bytes:
        """Return *items* after the definitions of those tools *names* that were not defined yet, and mark these as defined."""
        fresh = [name for name in dict.fromkeys(names) if name in self._waiting]
        self._waiting.difference_update(fresh)
        if not fresh or self._get_definition is None:
            return items
        tools = [self._get_definition(name) for name in fresh]
        item = encode_json({"type": "additional_tools", "role": "developer", "tools": tools})
        return item + b"," + items if items else item


# --- one message ----------------------------------------------------------------------------------------------------


def _encode_user(message: UserMessage, options: OpenAIEncodeOptions) -> ResponsesEncoded:
    """Encode a user message without blank texts; empty bytes if nothing remains."""
    parts = remove_blank_texts(message.content)
    if not parts:
        return ResponsesEncoded("user", b"")
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return ResponsesEncoded("user", encode_json({"role": "user", "content": parts[0].text}))
    content = [_encode_content_part(part, options) for part in parts]
    return ResponsesEncoded("user", encode_json({"role": "user", "content": content}))


def _encode_assistant(
    message: AssistantMessage,
    options: OpenAIEncodeOptions,
    with_provider_ids: bool,  # noqa: FBT001 - private
) -> ResponsesEncoded:
    """Encode a reply as items; reasoning without its following item is left out, and media of other providers follow as a user message."""
    ids = choose_wire_ids(message.tool_calls, options.provider, with_provider_ids=with_provider_ids)
    if _loses_reasoning(message, options):
        # The API answers 400, "was provided without its required 'reasoning' item", for a call without its reasoning.
        options = attrs.evolve(options, server_calls=False)
    items: list[Json] = []
    before: AssistantPart | None = None
    for part in message.content:
        if isinstance(part, CitationPart):
            continue
        _append_part(
            items,
            part,
            options,
            ids,
            is_new_paragraph=not continues_text(before, part),
            with_provider_ids=with_provider_ids,
        )
        before = part
    items = _drop_orphaned_reasoning(items)
    made = [part for part in list_generated_media(message) if not _encode_items_if_own(part, options)]
    moved = [{"type": "input_text", "text": MADE}, *[_encode_supported_media(part, options) for part in made]]
    after = encode_json({"role": "user", "content": moved}) if made else b""
    wire = encode_wire_ids(ids)
    searches = frozenset(
        [call.tool_call_id for call in message.tool_calls if _find_tool_search_item(call, options) is not None]
    )
    return ResponsesEncoded(
        "assistant",
        encode_comma_separated(items),
        ids=wire,
        after=after,
        callers=_encode_callers(message, options),
        searches=searches,
    )


def _loses_reasoning(message: AssistantMessage, options: OpenAIEncodeOptions) -> bool:
    """Return whether *message* has reasoning of the provider with an id that is not sent, such as that of another model."""
    return any(
        find_text(part.provider_data, "item", "id") and not _encode_reasoning_if_sendable(part, options)
        for part in message.content
        if isinstance(part, ThinkingPart) and is_from_provider(part.provider_data, options.provider)
    )


def _find_tool_search_item(call: ToolCallPart, options: OpenAIEncodeOptions) -> Mapping[str, Any] | None:
    """Return the tool search item behind a call, if the same model produced it; else ``None``."""
    data = call.provider_data
    found = data.get("search") if is_from_provider(data, options.provider, options.model) else None
    return found if isinstance(found, Mapping) else None


def _encode_callers(message: AssistantMessage, options: OpenAIEncodeOptions) -> dict[str, bytes]:
    """Return the encoded caller for the result of each call that a program made, by the id of the call."""
    return {
        call.tool_call_id: b',"caller":' + encode_json(caller)
        for call in message.tool_calls
        if is_from_provider(data := call.provider_data, options.provider, options.model)
        and (caller := find_object(data, "more", "caller")).get("type") == "program"
    }


def _drop_orphaned_reasoning(items: list[Json]) -> list[Json]:
    """
    Return *items* without reasoning that lost its following item, such as in a cut reply or before a changed text.

    The API answers 400, "was provided without its required following item". Servers without item ids have no such rule.
    """
    kept: list[Json] = []
    for item in reversed(items):
        after = kept[-1] if kept else {}
        if item.get("type") == "reasoning" and item.get("id") and not after.get("id"):
            continue
        kept.append(item)
    return kept[::-1]


def _append_part(
    items: list[Json],
    part: AssistantPart,
    options: OpenAIEncodeOptions,
    ids: Mapping[str, str],
    *,
    is_new_paragraph: bool,
    with_provider_ids: bool,
) -> None:
    """Append the items of a part of a reply; parts that are not sent back append nothing."""
    match part:
        case TextPart():
            _append_text(
                items, part, {"type": "output_text", "text": part.text}, options, is_new_paragraph=is_new_paragraph
            )
        case RefusalPart():
            _append_text(
                items, part, {"type": "refusal", "refusal": part.text}, options, is_new_paragraph=is_new_paragraph
            )
        case ThinkingPart():
            items += _encode_reasoning_if_sendable(part, options)
        case ToolCallPart():
            items.append(_encode_call(part, options, ids, with_provider_ids=with_provider_ids))
        case OpaquePart() | ImagePart() | DocumentPart():
            for item in _encode_items_if_own(part, options):
                _append_item(items, item)
        case CitationPart():
            return
        case _ as never:
            assert_never(never)


def _encode_items_if_own(part: OpaquePart | ImagePart | DocumentPart, options: OpenAIEncodeOptions) -> list[Json]:
    """Return the item of an opaque part or image of the same provider, unchanged; ``[]`` for others."""
    item = part.data if isinstance(part, OpaquePart) else find_object(part.provider_data, "item")
    is_call = find_text(item, "type").endswith("_call") and not is_tool_search_part(item)
    if is_call and find_text(item, "id") and not options.server_calls:
        return []
    if isinstance(part, OpaquePart):
        # Without hidden tools an earlier tool search is left out.
        is_over = options.hidden is not None and not options.hidden and is_tool_search_part(part.data)
        return (
            [_remove_output_only_members(part.data, options)]
            if part.provider == options.provider and not is_over
            else []
        )
    data = part.provider_data
    if part.data is None or not is_from_provider(data, options.provider) or not isinstance(data.get("item"), Mapping):
        return []
    return [{**data["item"], "result": encode_base64(part.data)}]


def _remove_output_only_members(data: Mapping[str, object], options: OpenAIEncodeOptions) -> Json:
    """Return an item without the members that the API sends but does not accept."""
    # (providers:PV58)
    item = {name: value for name, value in data.items() if name != "created_by"}
    action = item.get("action")
    if not options.sources and isinstance(action, Mapping):
        item["action"] = {name: value for name, value in action.items() if name != "sources"}
    return item


def _encode_reasoning_if_sendable(part: ThinkingPart, options: OpenAIEncodeOptions) -> list[Json]:
    """Return the reasoning item of the same model; ``[]`` without its content, because it is not stored at the provider."""
    data = part.provider_data
    item = data.get("item") if is_from_provider(data, options.provider, options.model) else None
    sendable = isinstance(item, Mapping) and (item.get("encrypted_content") or item.get("content"))
    return [dict(item)] if sendable and isinstance(item, Mapping) else []


def _append_text(
    items: list[Json],
    part: TextPart | RefusalPart,
    content: Json,
    options: OpenAIEncodeOptions,
    *,
    is_new_paragraph: bool,
) -> None:
    """Append a text to its own message item, or to a plain message; *is_new_paragraph* separates it from the text before."""
    data = part.provider_data
    last = items[-1] if items else {}
    own = data if is_from_provider(data, options.provider, options.model) else {}
    phase = {"phase": own["phase"]} if own.get("phase") else {}
    if not own.get("id"):
        if not part.text:
            return
        # Only a plain message has no type.
        if last.get("role") == "assistant" and "type" not in last and last.get("phase") == own.get("phase"):
            last["content"] += f"\n\n{part.text}" if is_new_paragraph else part.text
        else:
            items.append({"role": "assistant", "content": part.text, **phase})
        return
    content = {**own.get("more", {}), **content}
    if content["type"] == "output_text":
        content["annotations"] = own.get("annotations") or []
    item: Json = {"type": "message", "id": own["id"], "role": "assistant", "status": "completed", "content": [content]}
    _append_item(items, {**own.get("more_of_item", {}), **item, **phase})


def _append_item(items: list[Json], item: Json) -> None:
    """Append *item*, or only its content if it belongs to the message before it; the API accepts an id only once."""
    last = items[-1] if items else {}
    is_message = item.get("type") == last.get("type") == "message"
    if is_message and item.get("id") and item["id"] == last.get("id"):
        last["content"] = [*last["content"], *item["content"]]
    else:
        items.append(item)


def _encode_call(
    part: ToolCallPart, options: OpenAIEncodeOptions, ids: Mapping[str, str], *, with_provider_ids: bool
) -> Json:
    """Return the item of a call, or of the tool search behind it, with unknown members of the same model."""
    if (search := _find_tool_search_item(part, options)) is not None:
        return {**_remove_output_only_members(search, options), "call_id": ids[part.tool_call_id]}
    item: Json = {
        "type": "function_call",
        "call_id": ids[part.tool_call_id],
        "name": make_safe_tool_name(part.tool_name),
        "arguments": encode_utf8(compact(get_arguments_to_send(part))).decode(),
    }
    data = part.provider_data
    if is_from_provider(data, options.provider, options.model):
        item = {**data.get("more", {}), **item}
        if data.get("item_id") and with_provider_ids:
            item["id"] = data["item_id"]
    if is_from_provider(data, options.provider, None if options.hidden else options.model) and data.get("namespace"):
        item["namespace"] = data["namespace"]
    return item


def _encode_result(message: ToolMessage, options: OpenAIEncodeOptions) -> ResponsesEncoded:
    """Encode a result; references to hidden tools are left out if their definitions follow."""
    parts = remove_empty_texts(message.content)
    references = [part.tool_name for part in parts if isinstance(part, ToolReferencePart)]
    refers = tuple([name for name in references if options.hidden is not None and name in options.hidden])
    if refers and any(not isinstance(part, ToolReferencePart) for part in parts):
        # Definitions of these tools follow, so the references are left out.
        message = attrs.evolve(message, content=[p for p in parts if getattr(p, "tool_name", "") not in refers])
        parts = remove_empty_texts(message.content)
    output: str | list[Json]
    if any(isinstance(part, ImagePart | DocumentPart) for part in parts):
        output = [_encode_content_part(part, options) for part in parts]
        if message.is_error:
            output.insert(0, {"type": "input_text", "text": "Error:"})
    else:
        output = format_result_text(message)
    body = b',"output":' + encode_json(output) + b"}"
    return ResponsesEncoded("tool", body, call_id=message.tool_call_id, refers=refers)


def _encode_content_part(part: ResultPart, options: OpenAIEncodeOptions) -> Json:
    """Return the input of a part of a user message or result."""
    match part:
        case TextPart() | ToolReferencePart():
            return {"type": "input_text", "text": part.text}
        case JsonPart():
            return {"type": "input_text", "text": compact(part.value)}
        case ImagePart() | DocumentPart():
            return _encode_supported_media(part, options)
        case _ as never:
            assert_never(never)


def _encode_supported_media(part: ImagePart | DocumentPart, options: OpenAIEncodeOptions) -> Json:
    """Return the input of an image, document or text; raise ``ModelError`` for unsupported media."""
    require_file_of_provider(options.provider, part)
    kind = get_media_kind(part)
    if kind == "image":
        require_accepted_image_type(options.provider, part)
        where = {"image_url": get_url_or_data_url(part)} if part.file_id is None else {"file_id": part.file_id}
        return {"type": "input_image", "detail": "auto", **where}
    if kind not in {"pdf", "text", "office"}:
        raise make_unsupported_part_error(options.provider, part, "it accepts images, PDF, text and office files")
    if part.file_id is not None:
        return {"type": "input_file", "file_id": part.file_id}
    if part.data is None:
        return {"type": "input_file", "file_url": part.url}
    if kind == "text":
        return {"type": "input_text", "text": format_document_text(getattr(part, "name", ""), part.data)}
    return {"type": "input_file", "filename": get_file_name_or_default(part), "file_data": get_url_or_data_url(part)}


ENCODERS = MessageEncoders(_encode_user, _encode_assistant, _encode_result)
