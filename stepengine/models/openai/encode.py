"""
Our messages as input items of the Responses API. Pure: no SDK, no clock, no I/O.

Every message is encoded once and keeps its bytes (``Transcript.memo``); a request joins them. Nothing is stored at the
provider, so reasoning goes back with its encrypted content, and whole, directly before what followed it. Texts and
calls that this provider and model made go back under their own item ids; all others as plain messages and calls under
made ids, which the API takes from anybody: foreign calls need no further rule here.
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
from stepengine.models._deferring import is_search, referred
from stepengine.models._json import object_in, utf8
from stepengine.models._wire import (
    MADE,
    NUDGE,
    arguments_of,
    base64_of,
    cannot_take,
    check_holder,
    check_image,
    data_url,
    document_text,
    encoded,
    file_name,
    filled,
    goes_on,
    is_own,
    is_paused,
    joined,
    kind_of,
    made_by_model,
    result_text,
    safe_name,
    spoken,
    turns_of,
    wire_ids,
)
from stepengine.models._wire import EncodedMessage as BaseTurn

__all__ = ("Flags", "encode_message", "encode_messages")

Json = dict[str, Any]


@frozen
class Flags:
    """
    What the encoded form of a message depends on beside the message.

    Attributes:
        provider: Whose call ids and opaque items are sent back.
        model: Whose reasoning and item ids are sent back (ecosystem:EC99).
        sources: Whether searches go back with their sources.
        hidden: The tools that the model searches for; ``None`` leaves earlier searches as they came.
    """

    provider: str
    model: str
    sources: bool = True
    hidden: frozenset[str] | None = None


@frozen
class ResponsesEncoded(BaseTurn):
    """
    One encoded message.

    Attributes:
        refers: The tools that a result refers to.
        callers: Who made each call, as its result has to say, too; by our ids, for calls of programs.
        searches: Which calls, by our ids, are searches of tools, which are answered with definitions.
    """

    refers: tuple[str, ...] = ()
    callers: Mapping[str, bytes] = attrs.field(factory=dict)
    searches: frozenset[str] = frozenset()


NUDGE_ITEM = encoded({"role": "user", "content": NUDGE})
SEARCHED = b'{"type":"tool_search_output","execution":"client","status":"completed","call_id":'
OUTPUT = b'{"type":"function_call_output","call_id":'


def encode_messages(request: ModelRequest, flags: Flags, define: Callable[[str], Json] | None = None) -> bytes:
    """
    Return the ``input`` array: history and tail, with a word of the user where the model would follow itself.

    *define* gives the definition of a hidden tool; those that results refer to stand behind the results, once.
    """
    out: list[bytes] = []
    loading = _Loading(flags.hidden or frozenset(), define)
    ids: Mapping[str, bytes] = {}
    callers: Mapping[str, bytes] = {}
    searches: frozenset[str] = frozenset()
    role = ""
    after = b""
    for turn in turns_of(request, flags, encode_message):
        if turn.role == "tool":
            role = "tool"
            if turn.call_id in searches:
                out.append(SEARCHED + ids[turn.call_id] + loading.found(turn.refers))
                continue
            out.append(OUTPUT + ids[turn.call_id] + callers.get(turn.call_id, b"") + turn.body)
            if turn.refers:
                after = loading.behind(after, turn.refers)
            continue
        # What the model made and this wire does not take from it stands behind the results of its calls.
        for body, whose in ((after, "user"), (turn.body, turn.role)):
            if body and whose == role == "assistant":
                out.append(NUDGE_ITEM)
            out += [body] if body else []
            role = whose if body else role
        after = turn.after
        if turn.ids:
            ids, callers, searches = turn.ids, turn.callers, turn.searches
    return b"[" + b",".join([*out, *_end(after, role, is_over=not is_paused(request))]) + b"]"


def _end(after: bytes, role: str, *, is_over: bool) -> list[bytes]:
    """Return what ends the input: what is to stand there, else a word of the user where he must have the last one."""
    if after:
        return [after]
    return [NUDGE_ITEM] if not role or (role == "assistant" and is_over) else []


class _Loading:
    """Gives the tools that results refer to, each once, behind the results of a batch."""

    def __init__(self, hidden: frozenset[str], define: Callable[[str], Json] | None) -> None:
        self._waiting = set(hidden)
        self._define = define

    def found(self, names: tuple[str, ...]) -> bytes:
        """Return what the output of a search says beside its call: the definitions of the tools that it found."""
        self._waiting.difference_update(names)
        define = self._define
        tools = [] if define is None else [{**define(name), "defer_loading": True} for name in dict.fromkeys(names)]
        return b',"tools":' + encoded(tools) + b"}"

    def behind(self, after: bytes, names: tuple[str, ...]) -> bytes:
        """Return *after* behind the definitions of those tools that were not referred to before."""
        fresh = [name for name in dict.fromkeys(names) if name in self._waiting]
        self._waiting.difference_update(fresh)
        if not fresh or self._define is None:
            return after
        tools = [self._define(name) for name in fresh]
        item = encoded({"type": "additional_tools", "role": "developer", "tools": tools})
        return item + b"," + after if after else item


# --- one message ----------------------------------------------------------------------------------------------------


def encode_message(message: Message, flags: Flags, *, own_ids: bool = True) -> ResponsesEncoded:
    """Encode one message; *own_ids* false sends made ids in place of the provider's."""
    match message:
        case UserMessage():
            return ResponsesEncoded("user", _user(message, flags))
        case AssistantMessage():
            return _assistant(message, flags, own_ids)
        case ToolMessage():
            return _result(message, flags)
        case _ as never:
            assert_never(never)


def _user(message: UserMessage, flags: Flags) -> bytes:
    parts = spoken(message.content)
    if not parts:
        return b""
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return encoded({"role": "user", "content": parts[0].text})
    return encoded({"role": "user", "content": [_content(part, flags) for part in parts]})


def _assistant(message: AssistantMessage, flags: Flags, own_ids: bool) -> ResponsesEncoded:  # noqa: FBT001 - private
    ids = wire_ids(message.tool_calls, flags.provider, own=own_ids)
    items: list[Json] = []
    before: AssistantPart | None = None
    for part in message.content:
        if isinstance(part, CitationPart):
            continue
        _add(items, part, flags, ids, apart=not goes_on(before, part))
        before = part
    items = _drop_orphaned_reasoning(items)
    made = [part for part in made_by_model(message) if not _own_items(part, flags)]
    moved = [{"type": "input_text", "text": MADE}, *[_media(part, flags) for part in made]]
    after = encoded({"role": "user", "content": moved}) if made else b""
    wire = {ours: encoded(theirs) for ours, theirs in ids.items()}
    searches = frozenset([call.tool_call_id for call in message.tool_calls if _search_of(call, flags) is not None])
    return ResponsesEncoded(
        "assistant", joined(items), ids=wire, after=after, callers=_callers(message, flags), searches=searches
    )


def _search_of(call: ToolCallPart, flags: Flags) -> Mapping[str, Any] | None:
    """Return the search of tools that a call was made of, for the model that asked for it."""
    data = call.provider_data
    found = data.get("search") if is_own(data, flags.provider, flags.model) else None
    return found if isinstance(found, Mapping) else None


def _callers(message: AssistantMessage, flags: Flags) -> dict[str, bytes]:
    """Return what the results of calls of programs say of who made these."""
    return {
        call.tool_call_id: b',"caller":' + encoded(caller)
        for call in message.tool_calls
        if is_own(data := call.provider_data, flags.provider, flags.model)
        and (caller := object_in(data, "more", "caller")).get("type") == "program"
    }


def _drop_orphaned_reasoning(items: list[Json]) -> list[Json]:
    """
    Leave out reasoning whose follower is gone, such as that of a reply that was cut or of a text that was changed.

    The API answers 400, "was provided without its required following item". Servers without item ids have no such rule.
    """
    kept: list[Json] = []
    for item in reversed(items):
        after = kept[-1] if kept else {}
        if item.get("type") == "reasoning" and item.get("id") and not after.get("id"):
            continue
        kept.append(item)
    return kept[::-1]


def _add(items: list[Json], part: AssistantPart, flags: Flags, ids: Mapping[str, str], *, apart: bool) -> None:
    match part:
        case TextPart():
            _say(items, part, {"type": "output_text", "text": part.text}, flags, apart=apart)
        case RefusalPart():
            _say(items, part, {"type": "refusal", "refusal": part.text}, flags, apart=apart)
        case ThinkingPart():
            items += _reasoning(part, flags)
        case ToolCallPart():
            items.append(_call(part, flags, ids))
        case OpaquePart() | ImagePart() | DocumentPart():
            items += _own_items(part, flags)
        case CitationPart():
            return
        case _ as never:
            assert_never(never)


def _own_items(part: OpaquePart | ImagePart | DocumentPart, flags: Flags) -> list[Json]:
    """Return what this provider itself made, as it came."""
    if isinstance(part, OpaquePart):
        # A search of tools means nothing where there is none.
        is_over = flags.hidden is not None and not flags.hidden and is_search(part.data)
        return [_own_item(part.data, flags)] if part.provider == flags.provider and not is_over else []
    data = part.provider_data
    if part.data is None or not is_own(data, flags.provider) or not isinstance(data.get("item"), Mapping):
        return []
    return [{**data["item"], "result": base64_of(part.data)}]


def _own_item(data: Mapping[str, object], flags: Flags) -> Json:
    """Return an item as it came, but for what the API gives and does not take back (providers:PV58)."""
    item = {name: value for name, value in data.items() if name != "created_by"}
    action = item.get("action")
    if not flags.sources and isinstance(action, Mapping):
        item["action"] = {name: value for name, value in action.items() if name != "sources"}
    return item


def _reasoning(part: ThinkingPart, flags: Flags) -> list[Json]:
    """Return the reasoning item, which without its encrypted content would mean one that nobody has stored."""
    data = part.provider_data
    item = data.get("item") if is_own(data, flags.provider, flags.model) else None
    sendable = isinstance(item, Mapping) and (item.get("encrypted_content") or item.get("content"))
    return [dict(item)] if sendable and isinstance(item, Mapping) else []


def _say(items: list[Json], part: TextPart | RefusalPart, content: Json, flags: Flags, *, apart: bool) -> None:
    """Add a text to the message item that it came in, or to a plain message; *apart* is one that does not go on another."""
    data = part.provider_data
    last = items[-1] if items else {}
    own = data if is_own(data, flags.provider, flags.model) else {}
    phase = {"phase": own["phase"]} if own.get("phase") else {}
    if not own.get("id"):
        if not part.text:
            return
        if last.get("role") == "assistant" and "id" not in last and last.get("phase") == own.get("phase"):
            last["content"] += f"\n\n{part.text}" if apart else part.text
        else:
            items.append({"role": "assistant", "content": part.text, **phase})
        return
    content = {**own.get("more", {}), **content}
    if content["type"] == "output_text":
        content["annotations"] = own.get("annotations") or []
    if last.get("type") == "message" and last.get("id") == own["id"]:
        last["content"].append(content)
        return
    item: Json = {"type": "message", "id": own["id"], "role": "assistant", "status": "completed", "content": [content]}
    items.append({**own.get("more_of_item", {}), **item, **phase})


def _call(part: ToolCallPart, flags: Flags, ids: Mapping[str, str]) -> Json:
    if (search := _search_of(part, flags)) is not None:
        return {**_own_item(search, flags), "call_id": ids[part.tool_call_id]}
    item: Json = {
        "type": "function_call",
        "call_id": ids[part.tool_call_id],
        "name": safe_name(part.tool_name),
        "arguments": utf8(compact(arguments_of(part))).decode(),
    }
    data = part.provider_data
    if is_own(data, flags.provider, flags.model):
        item = {**data.get("more", {}), **item}
        if data.get("item_id"):
            item["id"] = data["item_id"]
    if is_own(data, flags.provider, None if flags.hidden else flags.model) and data.get("namespace"):
        item["namespace"] = data["namespace"]
    return item


def _result(message: ToolMessage, flags: Flags) -> ResponsesEncoded:
    refers = tuple([name for name in referred(message) if flags.hidden is not None and name in flags.hidden])
    parts = filled(message.content)
    if refers and any(not isinstance(part, ToolReferencePart) for part in parts):
        # The definitions that follow say it.
        message = attrs.evolve(message, content=[p for p in parts if getattr(p, "tool_name", "") not in refers])
        parts = filled(message.content)
    output: str | list[Json]
    if any(isinstance(part, ImagePart | DocumentPart) for part in parts):
        output = [_content(part, flags) for part in parts]
        if message.is_error:
            output.insert(0, {"type": "input_text", "text": "Error:"})
    else:
        output = result_text(message)
    body = b',"output":' + encoded(output) + b"}"
    return ResponsesEncoded("tool", body, call_id=message.tool_call_id, refers=refers)


def _content(part: ResultPart, flags: Flags) -> Json:
    match part:
        case TextPart() | ToolReferencePart():
            return {"type": "input_text", "text": part.text}
        case JsonPart():
            return {"type": "input_text", "text": compact(part.value)}
        case ImagePart() | DocumentPart():
            return _media(part, flags)
        case _ as never:
            assert_never(never)


def _media(part: ImagePart | DocumentPart, flags: Flags) -> Json:
    check_holder(flags.provider, part)
    kind = kind_of(part)
    if kind == "image":
        check_image(flags.provider, part)
        where = {"image_url": data_url(part)} if part.file_id is None else {"file_id": part.file_id}
        return {"type": "input_image", "detail": "auto", **where}
    if kind not in {"pdf", "text", "office"}:
        raise cannot_take(flags.provider, part, "it takes images, PDF, text and office files")
    if part.file_id is not None:
        return {"type": "input_file", "file_id": part.file_id}
    if part.data is None:
        return {"type": "input_file", "file_url": part.url}
    if kind == "text":
        return {"type": "input_text", "text": document_text(getattr(part, "name", ""), part.data)}
    return {"type": "input_file", "filename": file_name(part), "file_data": data_url(part)}
