"""
Decode replies of the Responses API. Pure: no SDK, no clock, no I/O.

The events of a stream are assembled into the response object of a request without a stream. ``decode`` handles both, so
they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.data.json import compact, freeze
from stepengine.data.messages import AssistantPart, CitationPart, OpaquePart, RefusalPart, TextPart, ThinkingPart
from stepengine.data.models import (
    ModelDelta,
    ModelReply,
    StopReason,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.tools import FIND_TOOLS
from stepengine.data.usage import Usage
from stepengine.models._byte_reader import Accumulator
from stepengine.models._call_arguments import ArgumentPieces
from stepengine.models._failures import RequestLabel, error_from_body, make_protocol_error, make_unanswerable_error
from stepengine.models._hidden_tools import SEARCH, find_loaded_tool_names
from stepengine.models._json import (
    find_objects,
    find_text,
    find_unknown_members,
    get_optional_object,
    get_optional_objects,
    get_optional_text,
    make_call_part,
    parse_json,
    require_index,
    usage_from_totals,
    wrap_unknown_members,
)
from stepengine.models._reply import (
    find_stated_cost,
    format_sources,
    get_cited_text,
    make_validated_reply,
    media_part_from_base64,
    select_members,
    shorten_text,
)

STOPS = {
    "completed": StopReason.END_TURN,
    "failed": StopReason.ERROR,
    "cancelled": StopReason.ERROR,
    "queued": StopReason.ERROR,
    "in_progress": StopReason.ERROR,
}
INCOMPLETE = {
    "max_output_tokens": StopReason.MAX_TOKENS,
    "max_messages": StopReason.MAX_TOKENS,
    "content_filter": StopReason.REFUSAL,
    "steered": StopReason.END_TURN,
}
KEPT = (
    *("service_tier", "status", "incomplete_details", "conversation", "previous_response_id", "moderation"),
    *("tool_usage", "input_transformations", "prompt_cache_diagnostics"),
)
# Listed, because unlisted members are reported as new.
ECHOES = (
    *(
        "access_programs",
        "background",
        "frequency_penalty",
        "image",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
    ),
    *("metadata", "parallel_tool_calls", "presence_penalty", "prompt", "prompt_cache_key", "prompt_cache_options"),
    *(
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "store",
        "temperature",
        "text",
        "tool_choice",
        "tools",
    ),
    *("top_logprobs", "top_p", "truncation", "user"),
)
"""The members of a response that repeat the request."""
IN_RESPONSE = frozenset(
    {"id", "object", "created_at", "completed_at", "error", "model", "output", "total_tokens", "usage", *ECHOES, *KEPT}
)
IN_MESSAGE = frozenset({"type", "id", "role", "status", "phase", "content"})
IN_TEXT = frozenset({"type", "text", "annotations", "logprobs"})
IN_REFUSAL = frozenset({"type", "refusal"})
"""The known members of a response, its messages and their content; unknown ones are stored unchanged."""
IN_CALL = frozenset({"type", "id", "call_id", "name", "arguments", "namespace", "status", "async", "created_by"})
FOR_THE_CLIENT = frozenset({"computer_call", "custom_tool_call", "local_shell_call", "mcp_approval_request"})
X_SEARCH = ("xai", "custom_tool_call")
FOR_THE_CLIENT_OR_SERVER = frozenset({"apply_patch_call", "shell_call"})
"""Calls that the provider's own containers answer in the same reply, if they run there."""

SAID: dict[str, type[TextChunk | ThinkingChunk] | None] = {
    "response.output_text.delta": TextChunk,
    "response.refusal.delta": TextChunk,
    "response.reasoning_summary_text.delta": ThinkingChunk,
    "response.reasoning_text.delta": ThinkingChunk,
    "response.function_call_arguments.delta": None,
}
"""The chunk class for each delta event inside an item; ``None`` for the arguments of a call."""

ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})

READ = frozenset(
    {
        *("response.created", "response.output_item.added", "response.output_item.done"),
        *("response.reasoning_summary_part.added", *SAID, *ENDS),
    }
)
IN_EVENT = frozenset(
    {
        *("type", "sequence_number", "response", "item", "part", "delta", "logprobs", "obfuscation"),
        *("item_id", "output_index", "content_index", "summary_index"),
    }
)
"""The known members of the events in ``READ``; unknown events and members are reported."""

REPEATED = frozenset(
    {
        *("keepalive", "ping", "response.in_progress", "response.queued"),
        *("response.content_part.added", "response.content_part.done"),
        *("response.output_text.done", "response.output_text.annotation.added", "response.refusal.done"),
        *(
            "response.reasoning_summary_part.done",
            "response.reasoning_summary_text.done",
            "response.reasoning_text.done",
        ),
        *(
            "response.function_call_arguments.done",
            "response.mcp_call_arguments.delta",
            "response.mcp_call_arguments.done",
        ),
        *("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"),
        *("response.code_interpreter_call_code.delta", "response.code_interpreter_call_code.done"),
        *("response.shell_call_command.added", "response.shell_call_command.delta", "response.shell_call_command.done"),
        *("response.shell_call_output_content.delta", "response.shell_call_output_content.done"),
        "response.compaction.compacting",
        *(
            f"response.{item}.{stage}"
            for item, stages in {
                "code_interpreter_call": ("in_progress", "interpreting", "completed"),
                "file_search_call": ("in_progress", "searching", "completed"),
                "image_generation_call": ("in_progress", "generating", "partial_image", "completed"),
                "mcp_call": ("in_progress", "completed", "failed"),
                "mcp_list_tools": ("in_progress", "completed", "failed"),
                "web_search_call": ("in_progress", "searching", "completed"),
            }.items()
            for stage in stages
        ),
    }
)
"""Events of progress, or of a piece of an item, which are ignored because ``output_item.done`` has the whole item."""

TOOLS = {
    "web_search_call": "web_search",
    "code_interpreter_call": "code_execution",
    "file_search_call": "file_search",
    "image_generation_call": "image_generation",
    "mcp_call": "mcp",
    "program": "program",
    "program_output": "program",
    "tool_search_call": SEARCH,
    "tool_search_output": SEARCH,
}
"""Our names of the provider's tools, by type of item."""

Json = dict[str, Any]


def decode(data: Mapping[str, Any], call: RequestLabel, model: str, request_id: str | None) -> ModelReply:
    """
    Return the reply in the response object *data*; raise ``ModelError`` if the response contains an error.

    Raises:
        ModelError: when the response holds an error.
    """
    usage = parse_usage(data.get("usage"))
    if data.get("error"):
        raise error_from_body({"error": data["error"]}, None, {}, call, usage)
    if data.get("output") is None:
        raise make_protocol_error(call, "it holds no output", usage)
    items = get_optional_objects(data, "output")
    # A reply that waits for an unsupported action of the client (a click in a browser, a patch) cannot be continued: the
    # API rejects a conversation without the result. So the error is raised here and not by the next request.
    if waiting := _find_unanswered_item_types(items, call.provider):
        raise make_unanswerable_error(call, waiting, usage)
    mark: Json = {"provider": call.provider, "model": model}
    content = tuple([part for item in items for part in _decode_item(item, mark)])
    raw, stop = _parse_stop_reason(data)
    return make_validated_reply(
        content,
        call,
        model,
        stop_reason=stop,
        raw_stop_reason=raw,
        usage=usage,
        answering_model=get_optional_text(data, "model"),
        request_id=request_id,
        data_to_store={
            "id": data.get("id"),
            "usage": data.get("usage"),
            **select_members(data, *KEPT),
            **wrap_unknown_members(data, IN_RESPONSE),
            **_make_image_model_member(data),
            **_make_logprobs_member(items),
        },
        cost=find_stated_cost(data.get("usage")),
    )


def _make_image_model_member(data: Mapping[str, object]) -> Json:
    """Return the member with the name of the image model, whose tokens have their own price; else ``{}``."""
    # The reply names only the requested model.
    names = [
        find_text(tool, "model")
        for tool in find_objects(data, "tools")
        if find_text(tool, "type") == "image_generation"
    ]
    return {"image_model": names[0]} if names and names[0] else {}


def _make_logprobs_member(items: list[Mapping[str, object]]) -> Json:
    """Return the member with the log probabilities of the text; ``{}`` if they were not requested."""
    found = [
        token
        for item in items
        for content in find_objects(item, "content")
        for token in find_objects(content, "logprobs")
    ]
    return {"logprobs": found} if found else {}


def _find_unanswered_item_types(items: list[Mapping[str, object]], provider: str) -> list[str]:
    """
    Return the types of the items that wait for a result that the client does not support.

    xAI reports its own search of X as a custom call, and accepts no custom tools of a client.
    """
    answered = {item.get("call_id") for item in items if get_optional_text(item, "type").endswith("_output")}
    return [
        item["type"]
        for item in items
        if (item["type"] in FOR_THE_CLIENT and (provider, item["type"]) != X_SEARCH)
        or (item["type"] in FOR_THE_CLIENT_OR_SERVER and item.get("call_id") not in answered)
        or (item["type"] == "function_call" and item.get("async"))
    ]


def is_client_tool_search(item: Mapping[str, object]) -> bool:
    """Return whether an item is a tool search that the client must execute, which ``find_tools`` does."""
    # (providers:PV122)
    return item.get("type") == "tool_search_call" and item.get("execution") == "client"


def _decode_tool_search(item: Mapping[str, object], mark: Json) -> AssistantPart:
    """Return a tool search of the model as a call of ``find_tools``, with all words of its arguments as the query."""
    # The schema of the search may have any form. The item itself is stored, and goes back unchanged.
    given = {"query": " ".join(_collect_search_words(item.get("arguments")))}
    return make_call_part(FIND_TOOLS, given, {**mark, "id": item.get("call_id"), "search": item})


def _collect_search_words(arguments: object) -> list[str]:
    """Return all strings in the *arguments* of a tool search, which may have any form; a text that is not JSON counts as one."""
    if isinstance(arguments, str):
        try:
            read = parse_json(arguments.encode())
        except ValueError:
            return [arguments]
        return [arguments] if isinstance(read, str) else _collect_search_words(read)
    inner = list(arguments.values()) if isinstance(arguments, Mapping) else arguments
    return [word for value in inner for word in _list_strings(value)] if isinstance(inner, list | tuple) else []


def _list_strings(value: object) -> list[str]:
    """Return a string, or the strings of a list, as a list; ``[]`` for other values."""
    if isinstance(value, str):
        return [value]
    return [word for word in value if isinstance(word, str)] if isinstance(value, list | tuple) else []


def _parse_stop_reason(data: Mapping[str, object]) -> tuple[str | None, StopReason | None]:
    """Return (the API's status, or its reason for an incomplete response; our stop reason for it, ``None`` if unknown)."""
    # (ecosystem:EC97)
    status = get_optional_text(data, "status")
    if status != "incomplete":
        return status or None, STOPS.get(status)
    reason = get_optional_text(get_optional_object(data, "incomplete_details"), "reason") or status
    return reason, INCOMPLETE.get(reason)


def _decode_item(item: Mapping[str, object], mark: Json) -> list[AssistantPart]:
    """Return the parts of an output item; an unknown item becomes an opaque part."""
    match item["type"]:
        case "message":
            contents = get_optional_objects(item, "content")
            return [
                part
                for content in contents
                for part in (_decode_message_content(content, item, mark), *_decode_citations(content))
            ]
        case "reasoning":
            # All members but `status`. The encrypted reasoning must go back with the calls that follow it.
            kept = {name: value for name, value in item.items() if value is not None and name != "status"}
            return [ThinkingPart(_extract_thought_text(item), provider_data=freeze({**mark, "item": kept}))]
        case "function_call":
            ids = {"id": item.get("call_id"), "item_id": item.get("id"), "namespace": item.get("namespace")}
            known = {**ids, "more": find_unknown_members(item, IN_CALL)}
            data = {**mark, **{name: value for name, value in known.items() if value}}
            return [make_call_part(get_optional_text(item, "name"), item.get("arguments"), data)]
        case "tool_search_call" if is_client_tool_search(item):
            return [_decode_tool_search(item, mark)]
        case "image_generation_call" if (made := _decode_image(item, mark)) is not None:
            return [made]
        case _:
            # Unknown items are stored whole and go back to this provider only (reliability:MP59), because a later item
            # may refer to them.
            tool = TOOLS.get(find_text(item, "type"), "")
            return [
                OpaquePart(mark["provider"], freeze(item), tool=tool, text=_describe_server_tool(item) if tool else "")
            ]


def _decode_image(item: Mapping[str, object], mark: Json) -> AssistantPart | None:
    """Return the generated image of an item; ``None`` if it is missing or unreadable."""
    rest = {name: value for name, value in item.items() if name != "result"}
    form = find_text(item, "output_format")
    return media_part_from_base64(item.get("result"), f"image/{form}" if form else "", {**mark, "item": rest})


def _describe_server_tool(item: Mapping[str, object]) -> str:
    """Return a readable text of the input and the result of a tool of the provider."""
    action = item.get("action")
    asked = [find_text(action, "query"), find_text(action, "url"), find_text(item, "code"), find_text(item, "result")]
    arguments = item.get("arguments")
    for queries in (item.get("queries"), arguments.get("paths") if isinstance(arguments, Mapping) else None):
        asked += [query for query in queries if isinstance(query, str)] if isinstance(queries, list | tuple) else []
    outputs = [find_text(output, "logs") or find_text(output, "url") for output in find_objects(item, "outputs")]
    names = [find_text(result, "filename") for result in find_objects(item, "results")] + find_loaded_tool_names(item)
    found = format_sources([(name, "") for name in names])
    return shorten_text("\n".join([text for text in (*asked, *outputs, found) if text]))


def _decode_citations(content: Mapping[str, object]) -> list[CitationPart]:
    text = find_text(content, "text")
    return [_decode_citation(annotation, text) for annotation in find_objects(content, "annotations")]


def _decode_citation(annotation: Mapping[str, object], text: str) -> CitationPart:
    """Return the citation of an annotation, with the part of *text* between its offsets."""
    title = find_text(annotation, "title") or find_text(annotation, "filename")
    said = get_cited_text(annotation, text)
    return CitationPart(find_text(annotation, "url"), title, said=said, source=find_text(annotation, "file_id"))


def _decode_message_content(content: Mapping[str, Any], item: Mapping[str, object], mark: Json) -> AssistantPart:
    """Return a text or refusal with its unknown members; other content becomes an opaque part with its message."""
    refuses = content["type"] == "refusal"
    if not refuses and content["type"] != "output_text":
        # Unknown content is stored within its message, because the API does not accept content alone as input.
        return OpaquePart(mark["provider"], freeze({"type": "message", **item, "content": [content]}))
    origin = {
        "id": item.get("id"),
        "phase": item.get("phase"),
        "annotations": None if refuses else content.get("annotations"),
        "more": find_unknown_members(content, IN_REFUSAL if refuses else IN_TEXT),
        "more_of_item": find_unknown_members(item, IN_MESSAGE),
    }
    # The other members go back with the text. `phase`, for example, tells newer models comments from answers.
    data = freeze({**mark, **{name: value for name, value in origin.items() if value}})
    return (
        RefusalPart(content["refusal"], provider_data=data)
        if refuses
        else TextPart(content["text"], provider_data=data)
    )


def _extract_thought_text(item: Mapping[str, object]) -> str:
    """Return the text of the summaries; else the text of the reasoning itself, which some servers send."""
    pieces = get_optional_objects(item, "summary") or get_optional_objects(item, "content")
    return "\n\n".join([get_optional_text(piece, "text") for piece in pieces])


def parse_usage(raw: object) -> Usage | None:
    """Parse the API's usage; ``None`` if *raw* has no token counts."""
    return usage_from_totals(raw, "input_tokens", "output_tokens")


class ResponsesAccumulator(Accumulator):
    """
    Assembles the events of one stream into the completed reply.

    Items are taken from ``output_item.done``. Encrypted reasoning may be partial in ``output_item.added``, and may differ in
    the end event.
    """

    decoder = staticmethod(decode)
    usage_parser = staticmethod(lambda data: parse_usage(data.get("usage")))

    def __init__(self, call: RequestLabel, model: str, request_id: str | None) -> None:
        super().__init__(call, model, request_id)
        self._open: dict[int, Mapping[str, Any]] = {}
        self._copy_items: dict[int, Mapping[str, Any]] = {}
        # Our deltas number only the calls; the API numbers all items.
        self._calls: dict[int, int] = {}
        self._arguments: dict[int, ArgumentPieces] = {}

    def add_event(self, name: str, data: bytes) -> list[ModelDelta]:
        """
        Add one event to the reply, and return its deltas; raise ``ModelError`` for an error event or an impossible order.

        Raises:
            ModelError: for an error event, and for events in an impossible order.
        """
        event = parse_json(data)
        kind = event.get("type") or name
        if kind == "error":
            raise self._make_stream_error(event)
        # Known events without new content are ignored silently. Unknown ones are ignored and reported by name.
        if kind in REPEATED:
            return []
        if kind not in READ:
            self._record_unknown_names(kind)
            return []
        if not IN_EVENT.issuperset(event):
            self._record_unknown_names(*[f"{kind}.{member}" for member in find_unknown_members(event, IN_EVENT)])
        return self._apply_known_event(kind, event)

    def _apply_known_event(self, kind: str, event: Json) -> list[ModelDelta]:
        """Add an event of a known type to the reply, and return its deltas."""
        if kind == "response.created":
            self._start_response(get_optional_object(event, "response"))
        elif kind in ENDS:
            self._finish_response(get_optional_object(event, "response"))
        elif kind == "response.output_item.added":
            return self._open_item(require_index(event, "output_index"), get_optional_object(event, "item"))
        elif kind == "response.output_item.done":
            return self._close_item(require_index(event, "output_index"), get_optional_object(event, "item"))
        elif kind == "response.reasoning_summary_part.added":
            return [ThinkingChunk("\n\n")] if event.get("summary_index") else []
        else:
            # A delta for an item that is not open is a gap in the stream. The call must be retried (reliability:MP28).
            index = require_index(event, "output_index")
            if index not in self._open:
                self._raise_protocol_error(f"a delta for item {index}, which is not open")
            return self._apply_item_delta(SAID[kind], event)
        return []

    def _start_response(self, response: Mapping[str, object]) -> None:
        """Store the new response; raise an error for a second response."""
        if self._data:
            self._raise_protocol_error("a second response.created")
        self._data = {**response, "output": []}

    def _apply_item_delta(self, chunk: type[TextChunk | ThinkingChunk] | None, event: Json) -> list[ModelDelta]:
        """Return the deltas for a text or thinking event. For *chunk* ``None``, the event holds a piece of a call's arguments."""
        text = get_optional_text(event, "delta")
        if not text:
            return []
        if chunk is not None:
            return [chunk(text)]
        index = event["output_index"]
        new = self._arguments.setdefault(index, ArgumentPieces()).append_and_flush_certain(text)
        return [ToolCallChunk(self._calls[index], new)] if new and index in self._calls else []

    def _open_item(self, index: int, item: Mapping[str, object]) -> list[ModelDelta]:
        """Store a new item and return the start of a call; raise for an item out of order."""
        newest = max((*self._open, *self._copy_items), default=-1)
        if index <= newest:  # missing numbers are no error: the end event has all items
            self._raise_protocol_error(f"item {index} starts after item {newest}")
        self._open[index] = item
        if item["type"] != "function_call" and not is_client_tool_search(item):
            return []
        self._calls[index] = len(self._calls)
        return [ToolCallStarted(self._calls[index], get_optional_text(item, "name") or FIND_TOOLS)]

    def _close_item(self, index: int, item: Mapping[str, object]) -> list[ModelDelta]:
        """Store a complete item and return the last deltas of a call; raise for an item without a start."""
        if self._open.pop(index, None) is None:
            self._raise_protocol_error(f"item {index} ends without a start")
        if index in self._calls and item["type"] == "function_call" and not item.get("arguments"):
            item = {**item, "arguments": self._get_streamed_arguments(index)}
        self._copy_items[index] = item
        if index not in self._calls:
            return []
        number, given = self._calls[index], list[ModelDelta]()
        if is_client_tool_search(item):
            given = [ToolCallChunk(number, compact({"query": " ".join(_collect_search_words(item.get("arguments")))}))]
        return [*given, ToolCallEnded(number)]

    def _get_streamed_arguments(self, index: int) -> str:
        """Return the streamed arguments of a call, ``""`` for none; raise if they are ambiguous."""
        pieces = self._arguments.get(index)
        if pieces is not None and pieces.is_undecided:
            self._raise_protocol_error(
                f"ambiguous arguments of item {index}: both the joined pieces and the last piece are complete"
            )
        return "" if pieces is None else pieces.text

    def _finish_response(self, response: Mapping[str, Any]) -> None:
        """Store the response of the end event, with the content of the done items; raise if an item is incomplete."""
        items = [self._copy_items[index] for index in sorted(self._copy_items)]
        done = {item.get("id"): item for item in items if item.get("id")}
        # The end event repeats all items, but encrypted reasoning may be partial in it. So its order counts, and the
        # content of the done events. If its output is empty or has other ids, the done events count alone.
        output = [done.pop(item.get("id"), item) for item in get_optional_objects(response, "output")]
        whole = bool(output) and not done
        if self._open and not whole:
            self._raise_protocol_error(f"it ends while item {min(self._open)} is open")
        self._data = {**response, "output": output if whole else items}
        self.is_done = True

    def finish(self, tail: bytes, *, is_clean: bool = True) -> ModelReply:
        """
        Return the assembled reply; raise ``TruncatedReply`` if its end event is missing.

        Raises:
            TruncatedReply: when the end event is missing or incomplete (reliability:MP20).
        """
        if not self.is_done:
            self._raise_truncated_error("its response.completed is missing")
        return self._decode_message(self._data)
