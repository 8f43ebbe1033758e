"""
Model calls among recorded HTTP requests: the protocol of a request, and the request as a ``ModelRequest``.

Four protocols are read: OpenAI's Chat Completions and Responses, Anthropic's Messages and Google's generateContent. Requests come
from any program, so nothing in them is an error. An unknown part of a message becomes its JSON text. An unknown member of the body
stays in the settings, under ``extra``. What the model said earlier is decoded by the adapters that decode replies, because programs
send it back as they received it. Calls are numbered by position: the ids of a provider differ in every recording.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import attrs
from attrs import frozen

from stepengine.data.json import MAX_NUMBER, MIN_NUMBER, JsonDict, compact, freeze, is_text_nested_deeper
from stepengine.data.media_types import is_data_url, parse_data_url, resolve_media_type
from stepengine.data.messages import (
    AssistantMessage,
    AssistantPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    Message,
    OpaquePart,
    RefusalPart,
    ResultPart,
    ResultStatus,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    UserMessage,
    UserPart,
)
from stepengine.data.models import ModelReply, ModelRequest, ModelSettings
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, DefinitionError, ModelError
from stepengine.models._byte_reader import Accumulator, decode_or_raise_protocol_error
from stepengine.models._failures import RequestLabel
from stepengine.models._json import find_object, find_text, parse_json
from stepengine.models.anthropic.decode import decode as decode_anthropic
from stepengine.models.anthropic.stream import AnthropicAccumulator
from stepengine.models.google.decode import GoogleAccumulator
from stepengine.models.google.decode import decode as decode_google
from stepengine.models.keys import Credentials
from stepengine.models.openai.decode import ResponsesAccumulator
from stepengine.models.openai.decode import decode as decode_responses
from stepengine.models.openai_chat.decode import ChatAccumulator
from stepengine.models.openai_chat.decode import decode as decode_chat
from stepengine.models.presets import PRESETS
from stepengine.testing.cassette_files import RecordedRequest

Json: TypeAlias = Mapping[str, Any]
MAX_DEPTH = 100
NO_KEY = Credentials(None, "no key", "A recording holds no key.")
SHARED_HOSTS = frozenset({"api.openai.com", "localhost"})
SERVICES = {
    host: name
    for name, preset in PRESETS.items()
    if (host := urlsplit(preset.base_url or "").hostname or "") and host not in SHARED_HOSTS
}
"""The providers that answer at a host of their own."""
AZURE = (".openai.azure.com", ".services.ai.azure.com")
SYSTEM_ROLES = frozenset({"system", "developer"})
TEXT_KINDS = frozenset({None, "text", "input_text", "output_text"})
OUTPUT = "_output"
FROM_URL_SAFE = str.maketrans("-_", "+/")
SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "topP": "top_p",
    "seed": "seed",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "maxOutputTokens": "max_tokens",
    "stop": "stop_sequences",
    "stop_sequences": "stop_sequences",
    "stopSequences": "stop_sequences",
}
"""The members of a body that are settings of ours, by their names in the four protocols."""
CHOICES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


@frozen
class ToolOutput:
    """
    The result of a tool call in a request.

    Attributes:
        call_id: The provider's id of the call; ``""`` for none.
        name: The name of the tool; ``""`` where the protocol leaves it out.
        content: Its parts.
        is_error: Whether the program reports a failure.
        source: The JSON that it came from.
    """

    call_id: str
    name: str
    content: tuple[ResultPart, ...]
    is_error: bool
    source: Any


Entry: TypeAlias = "UserMessage | list[AssistantPart] | ToolOutput"
"""A message of the user or of the model, or the result of a tool that is not paired with its call."""


@frozen
class Protocol:
    """
    The format of requests and replies of one provider API.

    Attributes:
        provider: The provider of a host that is not known.
        azure: The provider of a host of Azure.
        path: The end of its paths.
        members: The members of a body, of which a request has at least one.
        decode: Decodes a whole reply.
        accumulator: Decodes a streamed reply.
        wrap: Makes a reply from the model's output in a request.
        read: Adds the messages of a body to a conversation, and returns the members that are left.
    """

    provider: str
    azure: str
    path: re.Pattern[str]
    members: tuple[str, ...]
    decode: Callable[[Json, RequestLabel, str, str | None], ModelReply]
    accumulator: type[Accumulator]
    wrap: Callable[[Sequence[Any]], Json]
    read: Callable[[Json, RequestMessages], dict[str, Any]]


@frozen
class ModelCall:
    """
    A recorded request to a model.

    Attributes:
        protocol: How it was sent.
        label: What errors say about it.
        model: The provider's name of the model.
        request: The request.
    """

    protocol: Protocol
    label: RequestLabel
    model: str
    request: ModelRequest


def parse_model_call(request: RecordedRequest) -> ModelCall | None:
    """Return the model call in *request*, or None if it is another HTTP request."""
    url = urlsplit(request.url)
    protocol = next((p for p in PROTOCOLS if p.path.search(url.path)), None)
    body = _parse_json_object_body(request.body) if protocol is not None and request.method == "POST" else None
    if protocol is None or body is None or not any(isinstance(body.get(name), list | str) for name in protocol.members):
        return None
    model = _find_model_name(body, url.path)
    host = url.hostname or ""
    provider = SERVICES.get(host, protocol.azure if host.endswith(AZURE) else protocol.provider)
    label = RequestLabel(provider=provider, model=f"{provider}/{model}", credentials=NO_KEY)
    conversation = RequestMessages(protocol, label, model)
    rest = protocol.read(body, conversation)
    for name in ("model", "stream", "stream_options"):
        rest.pop(name, None)
    if conversation.system_marks:
        rest["system"] = conversation.system_marks
    specs, choice = _pop_tools(rest), _pop_tool_choice(rest)
    made = ModelRequest(
        label.model,
        "\n\n".join(conversation.system),
        Transcript(_pair_calls_with_results(conversation.entries, provider)),
        specs,
        choice,
        settings=_make_settings(rest),
    )
    return ModelCall(protocol, label, model, made)


def _parse_json_object_body(content: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a body, or None for anything else."""
    if is_text_nested_deeper(content, MAX_DEPTH):
        return None
    try:
        value = _stringify_large_numbers(parse_json(content))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _stringify_large_numbers(value: Any) -> Any:
    """Return a JSON value with large integers and infinite floats as text."""
    if isinstance(value, dict):
        return {name: _stringify_large_numbers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [_stringify_large_numbers(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value) if isinstance(value, int) and not MIN_NUMBER <= value <= MAX_NUMBER else value


def _find_model_name(body: Json, path: str) -> str:
    """Return the model name of the body, else of the URL path; ``"unknown"`` if neither has one."""
    found = re.search(r"/(?:models|deployments)/([^/:]+)", path)
    return find_text(body, "model") or (unquote(found[1]) if found else "") or "unknown"


# --- messages ---------------------------------------------------------------------------------------------------------


@attrs.define
class RequestMessages:
    """
    The messages of a request, in their order.

    Attributes:
        protocol: The protocol.
        label: What errors say about the request.
        model: The provider's name of the model.
        system: The system prompt, in pieces.
        system_marks: The members of system prompt blocks other than the text, such as ``cache_control``.
        entries: Messages, and results of tools that are not paired with their calls.
    """

    protocol: Protocol
    label: RequestLabel
    model: str
    system: list[str] = attrs.Factory(list)
    system_marks: list[Any] = attrs.Factory(list)
    entries: list[Entry] = attrs.Factory(list)

    def add_system(self, content: object) -> None:
        """Add instructions: those at the start to the system prompt, others as a message with the tag ``SYSTEM``."""
        parts = _parse_user_parts(content)
        texts = [part.text for part in parts if isinstance(part, TextPart)]
        if self.entries or len(texts) < len(parts):
            self.entries.append(UserMessage(parts, ("SYSTEM",)))
        elif texts:
            self.system.append("\n\n".join(texts))
            self.system_marks += [part.provider_data for part in parts if part.provider_data]

    def add_user(self, content: object, extra_members: Json | None = None) -> None:
        """Add a user message; *extra_members*, for which our messages have no field, are added as JSON text."""
        parts = (*_parse_user_parts(content), *([_make_json_text_part(extra_members)] if extra_members else []))
        if parts:
            self.entries.append(UserMessage(parts))

    def add_unknown_as_json(self, value: object) -> None:
        """Add an item of unknown form as a user message with its JSON text."""
        self.entries.append(UserMessage((_make_json_text_part(value),)))

    def add_result(self, call_id: str, name: str, content: object, source: Json, known_members: frozenset[str]) -> None:
        """Add the result of a tool call; members of its *source* that are not *known_members* are added to it as JSON."""
        more = _get_unknown_members(source, known_members)
        parts = (*_parse_tool_result_parts(content), *([JsonPart(more)] if more else []))
        self.entries.append(ToolOutput(call_id, name, parts, source.get("is_error") is True, source))

    def add_assistant(self, items: Sequence[Any], *, continues: bool = False) -> None:
        """Add output of the model; *continues* adds it to the message before, if that is the model's, too."""
        parts = self._decode_model_output(items)
        last = self.entries[-1] if self.entries else None
        if continues and isinstance(last, list):
            last.extend(parts)
        elif parts:
            self.entries.append(list(parts))

    def _decode_model_output(self, items: Sequence[Any]) -> tuple[AssistantPart, ...]:
        """Return the parts of the model's *items*, decoded by the adapter; an item that it cannot decode becomes an opaque part."""
        protocol, label = self.protocol, self.label
        try:
            return decode_or_raise_protocol_error(
                label, lambda: protocol.decode(protocol.wrap(items), label, self.model, None)
            ).content
        except ModelError:
            if len(items) != 1:
                return tuple([part for item in items for part in self._decode_model_output([item])])
        data = items[0] if isinstance(items[0], dict) else {"value": items[0]}
        return (OpaquePart(label.provider, JsonDict(freeze(data)), text=compact(items[0])),)


def _pair_calls_with_results(entries: Sequence[Entry], provider: str) -> list[Message]:
    """
    Return messages in which each call has its result, as a transcript demands.

    A call without a result and a result without a call become JSON: a program can send them where the provider has the rest.
    """
    messages: list[Message] = []
    calls = position = 0
    while position < len(entries):
        entry = entries[position]
        position += 1
        following: list[ToolOutput] = [entry] if isinstance(entry, ToolOutput) else []
        while position < len(entries) and isinstance(output := entries[position], ToolOutput):
            following.append(output)
            position += 1
        outputs = _Outputs(following)
        if isinstance(entry, list):
            answered = _make_assistant_turn(entry, outputs, provider, calls)
            calls += len(answered) - 1
            messages += answered
        elif isinstance(entry, UserMessage):
            messages.append(entry)
        messages += [UserMessage((_make_json_text_part(output.source),)) for output in outputs.unmatched]
    return messages


def _make_assistant_turn(
    output_parts: Sequence[AssistantPart], outputs: _Outputs, provider: str, numbered_calls: int
) -> list[Message]:
    """Return the model's message and the results of its calls; ids continue behind *numbered_calls*."""
    parts: list[AssistantPart] = []
    results: list[Message] = []
    for part in output_parts:
        if not isinstance(part, ToolCallPart):
            parts.append(_remove_provider_data(part))
        elif (output := outputs.pop_output(part)) is None:
            parts.append(_opaque_part_from_call(part, provider))
        else:
            call_id = f"c{numbered_calls + len(results) + 1}"
            parts.append(attrs.evolve(part, tool_call_id=call_id, provider_data=None))
            status: ResultStatus = "error" if output.is_error else "ok"
            results.append(ToolMessage(call_id, part.tool_name, output.content, status))
    return [AssistantMessage(parts), *results]


class _Outputs:
    """
    Results of tools, by the ids of their calls, and by the names of tools where ids are missing.

    Args:
        outputs: The results that follow a message of the model.
    """

    def __init__(self, outputs: Sequence[ToolOutput]) -> None:
        self._left = dict(enumerate(outputs))
        self._places: dict[tuple[str, str], list[int]] = {}
        for place, output in reversed(self._left.items()):
            for kind, key in (("id", output.call_id), ("with id" if output.call_id else "without id", output.name)):
                self._places.setdefault((kind, key), []).append(place)

    @property
    def unmatched(self) -> list[ToolOutput]:
        """The results that belong to no call."""
        return list(self._left.values())

    def pop_output(self, call: ToolCallPart) -> ToolOutput | None:
        """Remove and return the result of a call: by the call's id, else by the tool's name; ``None`` if there is none."""
        call_id = find_text(call.provider_data, "id")
        keys = [("id", call_id)] if call_id else [("with id", call.tool_name), ("with id", "")]
        for key in (*keys, ("without id", call.tool_name), ("without id", "")):
            places = self._places.get(key, [])
            while places:
                output = self._left.pop(places.pop(), None)
                if output is not None:
                    return output
        return None


def _opaque_part_from_call(call: ToolCallPart, provider: str) -> OpaquePart:
    """Return a tool call that has no result as an opaque part with its name and input."""
    data = {"call": call.tool_name, "input": call.input if call.raw_input is None else call.raw_input}
    return OpaquePart(provider, JsonDict(freeze(data)), tool=call.tool_name, text=compact(data["input"]))


def _remove_provider_data(part: AssistantPart) -> AssistantPart:
    """Return a part of a request without its provider data. A signature stays: it distinguishes thoughts without text."""
    match part:
        case ThinkingPart():
            signature = find_text(part.provider_data, "signature")
            return attrs.evolve(part, provider_data={"signature": signature} if signature else None)
        case TextPart() | RefusalPart() | ImagePart() | DocumentPart():
            return attrs.evolve(part, provider_data=None)
        case _:
            return fill_text_of_opaque_part(part)


def fill_text_of_opaque_part(part: AssistantPart) -> AssistantPart:
    """Return *part*; an opaque part without text gets its JSON as text."""
    if isinstance(part, OpaquePart) and not part.text:
        return attrs.evolve(part, text=compact(part.data))
    return part


# --- parts ------------------------------------------------------------------------------------------------------------


def _make_json_text_part(value: object) -> TextPart:
    return TextPart(compact(value))


def _parse_user_parts(content: object) -> tuple[UserPart, ...]:
    """Return the parts of one content block or a list of them; nothing for None."""
    if content is None:
        return ()
    return tuple([_parse_user_part(block) for block in (content if isinstance(content, list) else [content])])


def _parse_user_part(block: object) -> UserPart:
    """Return the text or media of a content block; JSON text for a block of unknown form."""
    if isinstance(block, str):
        return TextPart(block)
    if not isinstance(block, dict):
        return _make_json_text_part(block)
    if isinstance(block.get("text"), str) and block.get("type") in TEXT_KINDS:
        more = {name: member for name, member in block.items() if name not in ("type", "text")}
        return TextPart(block["text"], provider_data=more or None)
    return _parse_openai_media(block) or _parse_other_media(block) or _make_json_text_part(block)


def _parse_openai_media(block: Json) -> UserPart | None:
    """Return an image or a file as Chat Completions or Responses has it; None for anything else."""
    match block:
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "input_image", "image_url": str(url)}:
            return _media_from_url(url, "image/png")
        case {"type": "input_audio", "input_audio": {"data": str(data), "format": str(form)}}:
            return _media_from_base64(data, f"audio/{form}")
        case {"type": "file", "file": {"file_data": str(url), **more}} | {
            "type": "input_file",
            "file_data": str(url),
            **more,
        }:
            return _media_from_url(url, "application/pdf", find_text(more, "filename"))
        case {"type": "input_file", "file_url": str(url)}:
            return _media_from_url(url, "application/pdf")
        case _:
            return None


def _parse_other_media(block: Json) -> UserPart | None:
    """Return an image or a file as Anthropic or Google has it; None for anything else."""
    match block:
        case {"type": "image" | "document", "source": {"type": "base64", "media_type": str(mime), "data": str(data)}}:
            return _media_from_base64(data, mime, find_text(block, "title"))
        case {"type": "image" | "document" as kind, "source": {"type": "url", "url": str(url)}}:
            return _media_from_url(
                url, "image/png" if kind == "image" else "application/pdf", find_text(block, "title")
            )
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return DocumentPart(data=text.encode(), mime_type="text/plain", name=find_text(block, "title"))
        case {"inlineData": {"mimeType": str(mime), "data": str(data)}}:
            return _media_from_base64(data, mime)
        case {"fileData": {"mimeType": str(mime), "fileUri": str(url)}}:
            return _media_from_url(url, mime)
        case _:
            return None


def _media_from_url(url: str, mime: str, name: str = "") -> UserPart | None:
    """Return the media at *url*, or the content of a data URL; None for an invalid data URL."""
    if is_data_url(url):
        try:
            stated, content = parse_data_url(url)
        except DataError:
            return None
        return _media_from_bytes(content, stated or mime, name)
    if mime.startswith("image/"):
        return ImagePart(url=url, mime_type=mime)
    return DocumentPart(url=url, mime_type=mime, name=name)


def _media_from_base64(data: str, mime: str, name: str = "") -> UserPart | None:
    try:
        # Google's SDK sends the alphabet for URLs.
        content = base64.b64decode(data.translate(FROM_URL_SAFE), validate=True)
    except (binascii.Error, ValueError):
        return None
    return _media_from_bytes(content, mime, name)


def _media_from_bytes(content: bytes, mime: str, name: str) -> UserPart:
    """Return an image part for the bytes of an image, else a document part."""
    if resolve_media_type(mime, content).startswith("image/"):
        return ImagePart(data=content, mime_type=mime)
    return DocumentPart(data=content, mime_type=mime, name=name)


def _parse_tool_result_parts(content: object) -> tuple[ResultPart, ...]:
    """Return the parts of a result: text and media, anything else as JSON."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(content),)
    if not isinstance(content, list):
        return (JsonPart(content),)
    return tuple([_parse_user_part(block) for block in content])


# --- the four protocols -----------------------------------------------------------------------------------------------

IN_MESSAGE = frozenset({"type", "id", "role", "status", "content"})
IN_CHAT_RESULT = frozenset({"role", "tool_call_id", "name", "content"})
IN_RESPONSES_RESULT = frozenset({"type", "id", "call_id", "output", "status"})
IN_ANTHROPIC_RESULT = frozenset({"type", "tool_use_id", "content", "is_error"})
IN_GOOGLE_RESULT = frozenset({"id", "name", "response"})
"""The members of messages and results that are read."""


def _add_chat_messages(body: Json, conversation: RequestMessages) -> dict[str, Any]:
    """Add the messages of a body of Chat Completions to *conversation*, and return the remaining members."""
    rest = dict(body)
    for message in _as_list(rest.pop("messages", None)):
        role = find_text(message, "role")
        if role in SYSTEM_ROLES:
            conversation.add_system(message.get("content"))
        elif role == "user":
            conversation.add_user(message.get("content"), _get_unknown_members(message, IN_MESSAGE))
        elif role == "assistant":
            conversation.add_assistant([message])
        elif role in ("tool", "function"):
            call_id, name = find_text(message, "tool_call_id"), find_text(message, "name")
            conversation.add_result(call_id, name, message.get("content"), message, IN_CHAT_RESULT)
        else:
            conversation.add_unknown_as_json(message)
    return rest


def _add_responses_messages(body: Json, conversation: RequestMessages) -> dict[str, Any]:
    """Add the messages of a body of Responses to *conversation*, and return the remaining members."""
    rest = dict(body)
    if isinstance(rest.get("instructions"), str):
        conversation.add_system(rest.pop("instructions"))
    for item in _as_list(rest.pop("input", None)):
        if isinstance(item, str):
            conversation.add_user(item)
        else:
            _add_responses_item(item, conversation)
    return rest


def _add_responses_item(item: Any, conversation: RequestMessages) -> None:
    """Add an item of the Responses API: a message, a tool result, or output of the model."""
    kind, role = find_text(item, "type"), find_text(item, "role")
    if kind == f"function_call{OUTPUT}":
        conversation.add_result(find_text(item, "call_id"), "", item.get("output"), item, IN_RESPONSES_RESULT)
    elif role in SYSTEM_ROLES:
        conversation.add_system(item.get("content"))
    elif role == "user":
        conversation.add_user(item.get("content"), _get_unknown_members(item, IN_MESSAGE))
    elif role == "assistant":
        content = item.get("content")
        said = [{"type": "output_text", "text": content}] if isinstance(content, str) else content
        conversation.add_assistant([{**item, "type": "message", "content": said}], continues=True)
    elif kind and not kind.endswith(OUTPUT):
        conversation.add_assistant([item], continues=True)
    else:
        conversation.add_unknown_as_json(item)


def _add_anthropic_messages(body: Json, conversation: RequestMessages) -> dict[str, Any]:
    """Add the messages of a body of Anthropic to *conversation*, and return the remaining members."""
    rest = dict(body)
    conversation.add_system(rest.pop("system", None))
    for message in _as_list(rest.pop("messages", None)):
        role = find_text(message, "role")
        blocks = _as_list(message.get("content")) if isinstance(message, dict) else []
        if role == "assistant":
            said = [{"type": "text", "text": b} if isinstance(b, str) else b for b in blocks]
            conversation.add_assistant(said, continues=True)
        elif role == "user":
            # The results of calls come first, so that they follow the calls.
            results = [block for block in blocks if find_text(block, "type") == "tool_result"]
            for block in results:
                call_id, content = find_text(block, "tool_use_id"), block.get("content")
                conversation.add_result(call_id, "", content, block, IN_ANTHROPIC_RESULT)
            others = [block for block in blocks if find_text(block, "type") != "tool_result"]
            conversation.add_user(others, _get_unknown_members(message, IN_MESSAGE))
        elif role in SYSTEM_ROLES:
            conversation.add_system(message.get("content"))
        else:
            conversation.add_unknown_as_json(message)
    return rest


def _add_google_messages(body: Json, conversation: RequestMessages) -> dict[str, Any]:
    """Add the messages of a body of Google to *conversation*, and return the remaining members."""
    rest = dict(body)
    for name in ("systemInstruction", "system_instruction"):
        system = rest.pop(name, None)
        conversation.add_system(system["parts"] if isinstance(system, dict) and "parts" in system else system)
    for content in _as_list(rest.pop("contents", None)):
        role = find_text(content, "role")
        if not isinstance(content, dict) or "parts" not in content or role not in ("", "user", "function", "model"):
            conversation.add_unknown_as_json(content)
            continue
        parts = _as_list(content["parts"])
        if role == "model":
            conversation.add_assistant(parts, continues=True)
            continue
        results = [part for part in parts if find_object(part, "functionResponse")]
        for part in results:
            result = part["functionResponse"]
            call_id, name = find_text(result, "id"), find_text(result, "name")
            conversation.add_result(call_id, name, result.get("response"), result, IN_GOOGLE_RESULT)
        conversation.add_user([part for part in parts if not find_object(part, "functionResponse")])
    return rest


def _as_list(value: object) -> list[Any]:
    """Return the items of a list; a single value is a list of one."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _get_unknown_members(source: Json, known_members: frozenset[str]) -> Json:
    """Return the members of *source* that are neither *known_members* nor null."""
    return {name: member for name, member in source.items() if name not in known_members and member is not None}


PROTOCOLS = (
    Protocol(
        "openai_chat",
        "azure",
        re.compile(r"/chat/completions\Z"),
        ("messages",),
        decode_chat,
        ChatAccumulator,
        lambda items: {"choices": [{"message": items[0], "finish_reason": "stop"}]},
        _add_chat_messages,
    ),
    Protocol(
        "openai",
        "azure_responses",
        re.compile(r"/responses\Z"),
        ("input", "instructions", "previous_response_id"),
        decode_responses,
        ResponsesAccumulator,
        lambda items: {"output": list(items), "status": "completed"},
        _add_responses_messages,
    ),
    Protocol(
        "anthropic",
        "foundry",
        re.compile(r"/messages\Z"),
        ("messages",),
        decode_anthropic,
        AnthropicAccumulator,
        lambda items: {"content": list(items), "stop_reason": "end_turn"},
        _add_anthropic_messages,
    ),
    Protocol(
        "google",
        "google",
        re.compile(r"/models/[^/:]+:(?:g|streamG)enerateContent\Z"),
        ("contents",),
        decode_google,
        GoogleAccumulator,
        lambda items: {"candidates": [{"content": {"parts": list(items)}, "finishReason": "STOP"}]},
        _add_google_messages,
    ),
)


# --- tools and settings -----------------------------------------------------------------------------------------------

SCHEMAS = ("parameters", "input_schema", "parametersJsonSchema", "parameters_json_schema")
IN_TOOL = frozenset({"type", "name", "description", *SCHEMAS})


def _pop_tools(rest: dict[str, Any]) -> tuple[ToolSpec, ...]:
    """Remove the function tools from the remaining members of a request, and return them; other entries stay."""
    specs: list[ToolSpec] = []
    left: list[Any] = []
    for entry in _as_list(rest.pop("tools", None)):
        functions = _list_declared_functions(entry)
        if not functions:
            left.append(entry)
        for function in functions:
            name = find_text(function, "name")
            schema = next((function[key] for key in SCHEMAS if function.get(key)), {"type": "object", "properties": {}})
            specs.append(ToolSpec(name, find_text(function, "description"), schema))
            if more := _get_unknown_members(function, IN_TOOL):
                left.append({"name": name, **more})
    if left:
        rest["tools"] = left
    return tuple(specs)


def _list_declared_functions(entry: Any) -> list[Json]:
    """Return the functions that an entry of the tools declares; none for a tool of the provider or an invalid entry."""
    kind = find_text(entry, "type")
    if find_object(entry, "function"):
        found: list[Any] = [{**entry["function"], **_get_unknown_members(entry, frozenset({"type", "function"}))}]
    elif isinstance(entry, dict) and entry.keys() == {"functionDeclarations"}:
        found = _as_list(entry["functionDeclarations"])
    else:
        found = [entry] if kind in ("", "function", "custom") else []
    is_sound = all(
        find_text(each, "name") and all(isinstance(each[key], dict) for key in SCHEMAS if each.get(key))
        for each in found
    )
    return found if is_sound else []


def _pop_tool_choice(rest: dict[str, Any]) -> str | None:
    """Remove the tool choice from the remaining members of a request, and return it; a choice of an unknown form stays."""
    name = "toolConfig" if "toolConfig" in rest else "tool_choice"
    choice: str | None = None
    match rest.get(name):
        case str(word):
            choice = CHOICES.get(word)
        case {"type": "function", "function": {"name": str(tool)}} | {"type": "function" | "tool", "name": str(tool)}:
            choice = tool
        case {"type": str(word), **more} | {"functionCallingConfig": {"mode": str(word), **more}} if not more:
            choice = CHOICES.get(word.lower())
    if choice is not None:
        del rest[name]
    return choice


def _make_settings(rest: dict[str, Any]) -> ModelSettings:
    """Return the model settings in the remaining members of a request; unknown members are stored under ``extra``."""
    known: dict[str, Any] = {}
    left: dict[str, Any] = {}
    for name, value in rest.items():
        config = value if name == "generationConfig" and isinstance(value, dict) else {name: value}
        beside = {member: kept for member, kept in config.items() if not _try_add_setting(member, kept, known)}
        if beside:
            left[name] = beside if config is value else value
    return ModelSettings(**known, extra={"body": left} if left else {})


def _try_add_setting(name: str, value: Any, settings: dict[str, Any]) -> bool:
    """Add a setting to *settings*; return False if it is unknown or has another form."""
    ours = SETTINGS.get(name)
    if ours is None or ours in settings:
        return False
    try:
        ModelSettings(**{ours: value})
    except (DefinitionError, TypeError):
        return False
    settings[ours] = value
    return True
