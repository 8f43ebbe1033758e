"""Helpers of the encoders of all wires: names, ids, data URLs, and bodies joined from encoded members."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeGuard, TypeVar, assert_never

import attrs
from attrs import frozen

from stepengine.data.json import compact
from stepengine.data.media_types import IMAGES
from stepengine.data.messages import (
    AssistantMessage,
    AssistantPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    Message,
    ResultPart,
    TextPart,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    UserMessage,
    UserPart,
)
from stepengine.data.models import ModelRequest, ModelSettings
from stepengine.data.secret_names import is_secret_name
from stepengine.data.tools import ToolChoice, ToolSpec
from stepengine.errors import ModelError
from stepengine.models._json import encode_utf8

NUDGE = "Continue."
"""The text of a user message that an API requires and the history lacks; never recorded (ecosystem:EC100)."""

BETAS = "anthropic-beta"
RESERVED = frozenset({"headers", "body"})

TEXTS = frozenset({"application/json", "application/xml", "application/yaml", "application/x-yaml", "application/toml"})
"""Text types outside the family ``text/``."""
OFFICE_FAMILIES = ("application/vnd.openxmlformats-officedocument.", "application/vnd.oasis.opendocument.")
OFFICE = {
    f"{OFFICE_FAMILIES[0]}wordprocessingml.document": ".docx",
    f"{OFFICE_FAMILIES[0]}spreadsheetml.sheet": ".xlsx",
    f"{OFFICE_FAMILIES[0]}presentationml.presentation": ".pptx",
    f"{OFFICE_FAMILIES[1]}text": ".odt",
    f"{OFFICE_FAMILIES[1]}spreadsheet": ".ods",
    f"{OFFICE_FAMILIES[1]}presentation": ".odp",
    "application/msword": ".doc",
    "application/vnd.ms-excel": ".xls",
    "application/vnd.ms-powerpoint": ".ppt",
    "application/rtf": ".rtf",
}
"""Types of office files and their extensions."""
HOLDERS = {"openai_chat": "openai", "google_interactions": "google"}
"""Providers that share the files of another one, because both are the same service."""
MAX_ID_CHARS = 64
"""OpenAI documents 64 characters for the id of a call, the strictest limit among the providers."""
MAX_NAME_CHARS = 64
"""OpenAI and Anthropic document 64 characters for the name of a tool."""
UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


def encode_json(value: Any) -> bytes:
    """Return *value* as compact JSON in UTF-8."""
    return encode_utf8(compact(value))


def join_json_members(members: Mapping[str, bytes]) -> bytes:
    """Return the JSON object of already encoded *members*."""
    return b"{" + b",".join([encode_json(name) + b":" + value for name, value in members.items()]) + b"}"


def encode_comma_separated(values: Iterable[object]) -> bytes:
    """Return *values* as JSON joined by commas, without ``None``."""
    return b",".join([encode_json(value) for value in values if value is not None])


def is_from_provider(
    data: Mapping[str, object] | None, provider: str, model: str | None = None
) -> TypeGuard[Mapping[str, Any]]:
    """Return whether *data*, the ``provider_data`` of a part, is from *provider*, and from *model* if that is set."""
    return data is not None and data.get("provider") == provider and (model is None or data.get("model") == model)


def make_safe_tool_name(name: str) -> str:
    """Return *name* with ``_`` for characters that an API may reject, cut to 64; different names may become equal."""
    return UNSAFE.sub("_", name)[:MAX_NAME_CHARS] or "unknown"


def get_arguments_to_send(part: ToolCallPart) -> Mapping[str, object]:
    """Return the arguments of a past call; for unreadable arguments return an object with their text."""
    return {"unreadable_arguments": part.raw_input or ""} if part.input_error is not None else part.input


def format_call_as_text(call: ToolCallPart) -> str:
    """Return the text for a call that cannot be sent as a call; its result follows."""
    return f"The tool {call.tool_name} was called with {compact(get_arguments_to_send(call))}. Its result:"


def parse_extra_headers(settings: ModelSettings) -> dict[str, str]:
    """
    Return the HTTP headers in ``settings.extra["headers"]``; raise ``ModelError`` for invalid values and for names of secrets.

    Raises:
        ModelError: for values that are not texts, and for names of secrets such as keys, because settings are recorded.
    """
    headers = settings.extra.get("headers")
    if headers is None:
        return {}
    if not isinstance(headers, Mapping) or not all(isinstance(value, str) for value in headers.values()):
        msg = "ModelSettings.extra['headers'] must map header names to texts, such as {'x-title': 'my app'}"
        raise ModelError(msg, kind="settings")
    secret = sorted(name for name in headers if is_secret_name(name, "header"))
    if secret:
        msg = f"ModelSettings.extra['headers'] has {secret[0]!r}, but settings are recorded; pass keys to the provider"
        raise ModelError(msg, kind="settings")
    return dict(headers)


def merge_headers(*layers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of all *layers* with lower-case names; later layers replace earlier ones, and lists of betas are joined."""
    merged: dict[str, str] = {}
    for layer in layers:
        for name, value in layer.items():
            low = name.lower()
            merged[low] = f"{merged[low]},{value}" if low == BETAS and low in merged else value
    return merged


def encode_body_members(
    request: ModelRequest, head: Mapping[str, object], tools: bytes, *, with_extra: bool = True
) -> dict[str, bytes]:
    """
    Return the encoded members of a body, except the conversation: *head* without ``None``, and *tools*.

    With *with_extra*, ``settings.extra`` is merged into them, objects member by member. Its members are all keys except
    ``"headers"`` and ``"body"``, and the keys of the object under ``"body"``. Its tools follow *tools*.
    """
    given: Mapping[str, object] = {name: value for name, value in head.items() if value is not None}
    own = request.settings.extra
    if with_extra and own:
        body = own.get("body")
        for more in ({name: value for name, value in own.items() if name not in RESERVED}, body):
            if isinstance(more, Mapping):
                given = {**_merge_objects(given, more), **_make_joined_tools_member(given, more)}
    members = {name: encode_json(value) for name, value in given.items()}
    if request.tools:
        more = given.get("tools")
        if isinstance(more, list) and more:
            tools = tools[:-1] + (b"," if len(tools) > len(b"[]") else b"") + encode_json(more)[1:]
        members["tools"] = tools
    return members


def _make_joined_tools_member(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Return only ``{"tools": [...]}`` with the tools of both bodies; ``{}`` unless both have a list."""
    lists = [tools for tools in (below.get("tools"), above.get("tools")) if isinstance(tools, list)]
    return {"tools": [*lists[0], *lists[1]]} if len(lists) > 1 else {}


def _merge_objects(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """Return both objects merged member by member; other values of *above* replace those of *below*."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        merged[name] = _merge_objects(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def make_schema_name(schema: Mapping[str, object]) -> str:
    """Return the title of *schema* as a safe name for structured output, else ``output``."""
    title = schema.get("title")
    return make_safe_tool_name(title) if isinstance(title, str) and title else "output"


def continues_paused_reply(request: ModelRequest) -> bool:
    """Return whether the last message is a paused reply, which the provider continues."""
    return bool(request.tail) and isinstance(request.tail[-1], AssistantMessage)


def choose_wire_ids(
    calls: Sequence[ToolCallPart],
    provider: str,
    *,
    with_provider_ids: bool = True,
    make_id: Callable[[str], str] | None = None,
) -> dict[str, str]:
    """
    Return the wire id of each call, by our id of the call (``tool_call_id``).

    The wire id (ecosystem:EC83) is the provider's own id if it made the call and the id is unique in this message. Otherwise it is generated from
    our id and never changes. *with_provider_ids* false generates all ids. *make_id* makes an id from ours, for APIs with a special format.
    """
    make_id = make_id or make_wire_id
    ids: dict[str, str] = {}
    used: set[str] = set()
    for call in calls:
        data = call.provider_data
        # The provider's own id, for its cache and logs, unless two calls have the same one.
        theirs = data.get("id") if with_provider_ids and is_from_provider(data, provider) else None
        wire_id = theirs if isinstance(theirs, str) and theirs and theirs not in used else make_id(call.tool_call_id)
        used.add(wire_id)
        ids[call.tool_call_id] = wire_id
    return ids


def encode_wire_ids(ids: Mapping[str, str]) -> dict[str, bytes]:
    """Return the wire ids as JSON, by our ids."""
    return {ours: encode_json(theirs) for ours, theirs in ids.items()}


def make_wire_id(call_id: str) -> str:
    """Return ``call_`` plus *call_id*, or plus a hash of *call_id* if the result were unsafe or longer than 64 characters."""
    # It depends only on our id, so it is the same in every request, and the prompt cache holds.
    plain = f"call_{call_id}"
    if len(plain) <= MAX_ID_CHARS and not UNSAFE.search(plain):
        return plain
    return f"call_{hashlib.sha256(encode_utf8(call_id)).hexdigest()[:32]}"


def encode_base64(data: bytes) -> str:
    """Return *data* as base64 text."""
    return base64.b64encode(data).decode("ascii")


Kind: TypeAlias = Literal["image", "audio", "video", "pdf", "text", "office", "other"]


def get_media_kind(part: ImagePart | DocumentPart) -> Kind:
    """Return the kind of medium of *part* by its MIME type, not by its class."""
    mime = part.mime_type.partition(";")[0].strip().lower()
    family = mime.partition("/")[0]
    if mime in TEXTS or family == "text":
        return "text"
    if mime in OFFICE or mime.startswith(OFFICE_FAMILIES):
        return "office"
    if mime == "application/pdf":
        return "pdf"
    return family if family in {"image", "audio", "video"} else "other"  # type: ignore[return-value]


def get_url_or_data_url(part: ImagePart | DocumentPart) -> str:
    """Return the part's own URL, or a data URL of its bytes."""
    return part.url if part.data is None else f"data:{part.mime_type};base64,{encode_base64(part.data)}"  # type: ignore[return-value]


def make_unsupported_part_error(provider: str, part: ImagePart | DocumentPart, reason: str) -> ModelError:
    """Return the error for a part that the provider does not accept."""
    name = getattr(part, "name", "") or part.url or part.file_id or ""
    msg = f"{provider} does not accept the {type(part).__name__}{f' {name!r}' if name else ''} of type {part.mime_type!r}: {reason}"
    return ModelError(msg, kind="unsupported_part")


def require_file_of_provider(provider: str, part: ImagePart | DocumentPart) -> None:
    """Raise ``ModelError`` for an uploaded file that is stored at another provider than *provider*."""
    if part.file_id is not None and HOLDERS.get(part.provider, part.provider) != HOLDERS.get(provider, provider):
        why = f"the file is stored at {part.provider}; pass its bytes or its URL, or upload it to {provider}"
        raise make_unsupported_part_error(provider, part, why)


def require_accepted_image_type(provider: str, part: ImagePart | DocumentPart) -> None:
    """Raise ``ModelError`` for image bytes of a type that the provider does not accept."""
    if part.data is not None and part.mime_type not in IMAGES:
        raise make_unsupported_part_error(provider, part, "it accepts JPEG, PNG, GIF and WebP")


def get_file_name_or_default(part: ImagePart | DocumentPart) -> str:
    """Return the name of a document; without a name return ``document`` with the extension of its office type, else ``.pdf``."""
    return getattr(part, "name", "") or f"document{OFFICE.get(part.mime_type, '.pdf')}"


def list_media(message: AssistantMessage | ToolMessage) -> list[ImagePart | DocumentPart]:
    """Return the images and documents of a message."""
    return [part for part in message.content if isinstance(part, ImagePart | DocumentPart)]


def list_generated_media(message: AssistantMessage) -> list[ImagePart | DocumentPart]:
    """Return the images and files of a reply, without audio that has its transcript as text."""
    return [part for part in list_media(message) if not (part.provider_data and part.provider_data.get("transcript"))]


MADE = "Images and files that the assistant made:"
"""The heading of media that go back in a user message, because the API does not accept them from the model."""


def format_document_text(name: str, data: bytes) -> str:
    """Return the text of a document, after its *name* and a line break if the name is not empty."""
    text = data.decode("utf-8", "replace")
    return f"{name}:\n{text}" if name else text


def remove_empty_texts(parts: Sequence[ResultPart]) -> list[ResultPart]:
    """Return *parts* without empty texts."""
    return [part for part in parts if not isinstance(part, TextPart) or part.text]


def remove_blank_texts(parts: Sequence[UserPart]) -> list[UserPart]:
    """Return *parts* of a user message without blank texts, which some servers reject."""
    return [part for part in parts if not isinstance(part, TextPart) or part.text.strip()]


def continues_text(before: AssistantPart | None, part: AssistantPart) -> bool:
    """
    Return whether *part* belongs to the same text as the part *before* it, so that it is not a new paragraph.

    Providers split a sentence at citations; separate items are paragraphs.
    """
    return type(before) is type(part) and _find_item_id(before) == _find_item_id(part)


def _find_item_id(part: object) -> object:
    """Return the provider's item id of a part; ``None`` without one."""
    return (getattr(part, "provider_data", None) or {}).get("id")


def join_non_media_text(parts: Iterable[ResultPart]) -> str:
    """Return texts, JSON values and tool references, one per line, without images and documents."""
    texts = [part for part in parts if isinstance(part, TextPart | JsonPart | ToolReferencePart)]
    return "\n".join([compact(part.value) if isinstance(part, JsonPart) else part.text for part in texts])


def format_result_text(message: ToolMessage) -> str:
    """Return the text of a tool result, for an error with ``Error:`` before it, for APIs without an error flag."""
    text = join_non_media_text(remove_empty_texts(message.content))
    return f"Error: {text}" if message.is_error and not text.lower().startswith("error") else text


def make_result_media_heading(message: ToolMessage) -> str:
    """Return the heading of images and documents that an API does not accept inside a result."""
    return f"Images and documents in the result of {message.tool_name} ({message.tool_call_id}):"


def resolve_tool_choice(request: ModelRequest) -> ToolChoice | None:
    """Return the tool choice of the request, else of its settings; ``None`` without one, or without tools of any kind."""
    has_tools = request.tools or request.settings.server_tools
    return (request.tool_choice or request.settings.tool_choice) if has_tools else None


class ToolsCache:
    """
    A cache of the encoded tools of the last request, because the steps of a run offer the same tools.

    Args:
        encode: Returns the definition of a tool.
        last: Additional members for the last visible definition, such as a cache mark.
        search: The definition of the provider's own tool search, for requests with hidden tools.
    """

    def __init__(
        self,
        encode: Callable[[ToolSpec], Any],
        last: Mapping[str, object] | None = None,
        search: Mapping[str, object] | None = None,
    ) -> None:
        self._encode = encode
        self._on_last = last or {}
        self._search = search
        self._last: tuple[tuple[ToolSpec, ...], bytes] = ((), b"[]")

    def __call__(self, tools: tuple[ToolSpec, ...]) -> bytes:
        """Return *tools* as an encoded JSON array."""
        # Compared by identity, one by one: the specs of a run are the same objects, but in a new tuple at each step.
        known, data = self._last
        if len(known) == len(tools) and all(a is b for a, b in zip(known, tools, strict=True)):
            return data
        definitions = [self._encode(tool) for tool in tools if not tool.defer_loading]
        hidden = [{**self._encode(tool), "defer_loading": True} for tool in tools if tool.defer_loading]
        if hidden and self._search is not None:
            definitions.append(self._search)
        if definitions and self._on_last:
            definitions[-1] = {**definitions[-1], **self._on_last}
        data = encode_json([*definitions, *hidden])
        self._last = (tools, data)
        return data


# --- the conversation -----------------------------------------------------------------------------------------------


@frozen
class EncodedMessage:
    """
    One encoded message; wires with more data have a subclass.

    Attributes:
        role: The role of the message.
        body: Its parts joined by commas; for a result, the bytes after its call's id. Empty if there is nothing to send.
        ids: The encoded wire id of each call.
        call_id: The id of the call that a result answers.
        after: Content for the next user message, which the API does not accept inside this one.
    """

    role: Literal["user", "assistant", "tool"]
    body: bytes
    ids: Mapping[str, bytes] = attrs.field(factory=dict)
    call_id: str = ""
    after: bytes = b""


T = TypeVar("T", bound=EncodedMessage)


@frozen
class MessageEncoders(Generic[T]):
    """
    The functions of a wire that encode messages, one for each role; their second argument are the wire's encode options.

    Attributes:
        user: Encodes a user message.
        assistant: Encodes a reply; the third argument is false if the provider's own ids must not be sent.
        result: Encodes a tool result.
    """

    user: Callable[[UserMessage, Any], T]
    assistant: Callable[[AssistantMessage, Any, bool], T]
    result: Callable[[ToolMessage, Any], T]

    def encode(self, message: Message, options: Hashable, *, with_provider_ids: bool = True) -> T:
        """Encode one message; *with_provider_ids* false sends generated ids of calls in place of the provider's own."""
        match message:
            case UserMessage():
                return self.user(message, options)
            case AssistantMessage():
                return self.assistant(message, options, with_provider_ids)
            case ToolMessage():
                return self.result(message, options)
            case _ as never:
                assert_never(never)


def encode_turns(request: ModelRequest, options: Hashable, encoders: MessageEncoders[T]) -> list[T]:
    """
    Return the encoded messages of history and tail; those of the history are cached for the same *options* (``Transcript.memo``).

    *options* are the wire's encode options. A message that repeats a provider id of an earlier one is encoded with
    ``with_provider_ids=False`` (ecosystem:EC83).
    """
    history = len(request.messages)
    turns = [*request.messages.memo(options, lambda message: encoders.encode(message, options))]
    turns += [encoders.encode(message, options) for message in request.tail]
    seen: set[bytes] = set()
    for index, turn in enumerate(turns):
        if turn.ids:
            ids = turn.ids.values()
            if not seen.isdisjoint(ids):
                message = request.messages[index] if index < history else request.tail[index - history]
                turns[index] = again = encoders.encode(message, options, with_provider_ids=False)
                ids = again.ids.values()
            seen.update(ids)
    return turns


class MessageJoiner:
    """
    Joins encoded messages into an array that starts with a user message, and merges adjacent user messages.

    Args:
        opening: The opening bytes of a message, for the roles ``"user"`` and ``"assistant"``.
        nudge: The encoded part with the text ``NUDGE``.
    """

    def __init__(self, opening: Mapping[str, bytes], nudge: bytes) -> None:
        self._opening = opening
        self._nudge = nudge
        self._out: list[bytes] = []
        self._role = ""
        self._after: list[bytes] = []

    def defer_to_user_turn(self, body: bytes) -> None:
        """Defer *body*, content that the API does not accept in a reply or result, to the next user message."""
        if body:
            self._after.append(body)

    def append_deferred_content(self) -> None:
        """Append the deferred content to the user message, and clear it."""
        kept, self._after = self._after, []
        for body in kept:
            self.append_content("user", body)

    def append_content(self, role: Literal["user", "assistant"], body: bytes) -> None:
        """Append encoded content of *role* to an open user message, or as a new message; the first message is always the user's."""
        out = self._out
        if role == self._role == "user":
            out.append(b",")
        else:
            if self._role:
                out.append(b"]},")
            if role == "assistant" and self._role != "user":
                out += (self._opening["user"], self._nudge, b"]},")
            out.append(self._opening[role])
            self._role = role
        out.append(body)

    def join(self, *, must_end_with_user: bool) -> bytes:
        """Return the array with the deferred content; *must_end_with_user* adds ``NUDGE`` if the last message is not the user's."""
        self.append_deferred_content()
        if not self._role or (must_end_with_user and self._role == "assistant"):
            self.append_content("user", self._nudge)
        return b"[" + b"".join(self._out) + b"]}]"
