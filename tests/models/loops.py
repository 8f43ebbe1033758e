"""
Closed loops of recorded traffic: what we decode from one exchange re-encodes to the next request (recorded use R7).

Both sides are brought to one
form that hides only what means the same (order of keys, absent and empty, arguments as JSON, bytes in base64). What still
differs must be one of the ``DIFFERENCES``, each with its reason, or the loop does not close.
"""

from __future__ import annotations

import copy
import json
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from stepengine.data.models import ModelRequest, ModelSettings, Thinking
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.models._wire import NUDGE
from stepengine.models.anthropic.encode import AnthropicEncodeOptions as AnthropicFlags
from stepengine.models.anthropic.encode import encode_messages as encode_anthropic
from stepengine.models.anthropic.families import get_family
from stepengine.models.anthropic.request import encode_thinking
from stepengine.models.google.encode import DUMMY_SIGNATURE, SIGNED_SINCE, parse_generation
from stepengine.models.google.encode import GoogleEncodeOptions as GoogleFlags
from stepengine.models.google.encode import encode_messages as encode_google
from stepengine.models.openai.encode import OpenAIEncodeOptions as ResponsesFlags
from stepengine.models.openai.encode import encode_messages as encode_responses
from stepengine.models.openai.request import encode_tool
from stepengine.models.openai_chat.encode import ChatEncodeOptions as ChatFlags
from stepengine.models.openai_chat.encode import encode_messages as encode_chat
from stepengine.models.presets import get_preset_or_safe_default
from tests.models.recorded import FOLDER, NAMES, Recording, index_of, recordings, take
from tests.models.requests import READERS, Json, Reader, as_list, envelope, from_base64

HISTORY = {
    "anthropic": "messages",
    "openai_chat": "messages",
    "openrouter": "messages",
    "google": "contents",
    "openai": "input",
}
NO_PART_FOR = {"tool_addition"}
"""What user messages and results of the recordings hold and ours cannot; such loops cannot be built from our types."""

BACKGROUND = "openai-responses/test_openai_responses__test_background_mode_with_tool_vcr.yaml"
"""Its reply is the one that was polled for, interaction 1 (recorded R8b)."""


@attrs.frozen
class Loop:
    """One reply and the request that contains it."""

    name: str
    first: Recording
    second: Recording


def loops(folder: Path = FOLDER) -> list[Loop]:
    """The closed loops that a folder lists; none where it has no such list."""
    listed = folder / "closed_loops.jsonl"
    if not listed.is_file():
        return []
    by_name = {r.name: r for r in recordings(folder)}
    index = {entry["file"]: entry for entry in index_of(folder)}
    found = []
    for line in listed.read_text(encoding="utf-8").splitlines():
        loop = json.loads(line)
        file = loop["file"]
        for a, b in pairwise(loop["steps"]):
            first, second = [by_name.get(f"{file}#{n}") or compatible(index[file], n, folder) for n in (a, b)]
            if file == BACKGROUND:
                first = attrs.evolve(first, reply=compatible(index[file], 1, folder, "openai-responses").reply)
            found.append(Loop(f"{file}#{a}-{b}", first, second))
    return found


def compatible(entry: Json, number: int, folder: Path, wire: str = "openai-chat") -> Recording:
    """Another provider's endpoint that speaks the wire (recorded R8c)."""
    return take(entry, number, {**entry["interactions"][number], "provider": wire}, folder)


# --- one form for both sides ----------------------------------------------------------------------------------------


def clean(value: Any) -> Any:
    """Leave out what is absent in other words, and what says nothing of the conversation."""
    if isinstance(value, list):
        return [clean(item) for item in value]
    if not isinstance(value, dict):
        return value
    dropped = {"cache_control", "detail", "prompt_cache_breakpoint"}
    return {k: clean(v) for k, v in value.items() if k not in dropped and v not in (None, [], False)}


def blocks_of(content: Any) -> list[Any]:
    blocks = [clean(block) for block in as_list(content or [])]
    for block in blocks:
        if block.get("type") == "tool_result":
            block["content"] = blocks_of(block.get("content"))
    return blocks


def normal_messages(messages: list[Json]) -> list[Json]:
    found: list[Json] = []
    for message in messages:
        item = {**clean(message), "content": blocks_of(message.get("content"))}
        for call in item.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if found and item["role"] == "user" == found[-1]["role"]:
            found[-1]["content"] += item["content"]
        else:
            found.append(item)
    return found


def normal_items(items: list[Json]) -> list[Json]:
    found: list[Json] = []
    for given in items:
        item = clean(given)
        if given.get("role") and "content" in given:
            content = given["content"]
            texts = [content] if isinstance(content, str) else [p.get("text", p) for p in clean(content)]
            item = {**item, "type": "message", "content": texts}
        if item["type"] == "function_call":
            item["arguments"] = json.loads(item["arguments"])
        if item["type"] == "function_call_output" and isinstance(item["output"], str):
            item["output"] = [{"type": "input_text", "text": item["output"]}]
        found.append(item)
    return found


def normal_contents(contents: list[Json]) -> list[Json]:
    found: list[Json] = []
    for content in contents:
        parts = [normal_part(clean(part)) for part in content["parts"]]
        if found and found[-1]["role"] == content["role"]:
            found[-1]["parts"] += parts
        else:
            found.append({"role": content["role"], "parts": parts})
    return found


def normal_part(part: Json) -> Json:
    if "thoughtSignature" in part:
        part["thoughtSignature"] = from_base64(part["thoughtSignature"])
    if "inlineData" in part:
        part["inlineData"]["data"] = from_base64(part["inlineData"]["data"])
    if "functionCall" in part:
        part["functionCall"].setdefault("args", {})
    return part


NORMAL = {
    "anthropic": normal_messages,
    "openai_chat": normal_messages,
    "openai": normal_items,
    "google": normal_contents,
}


# --- documented differences -----------------------------------------------------------------------------------------


def without(*members: str) -> Callable[[Any], Any]:
    """Leave out members wherever they stand."""

    def erase(value: Any) -> Any:
        if isinstance(value, list):
            return [erase(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {name: erase(item) for name, item in value.items() if name not in members}

    return erase


def without_in(kind: str, *members: str) -> Callable[[Any], Any]:
    """Leave out members of the items of one type."""
    return lambda items: [
        {n: v for n, v in item.items() if n not in members} if item.get("type") == kind else item for item in items
    ]


def without_chat_ids(messages: Any) -> Any:
    return [
        {
            **{name: value for name, value in message.items() if name != "tool_call_id"},
            **(
                {"tool_calls": [without("id")(call) for call in message["tool_calls"]]}
                if "tool_calls" in message
                else {}
            ),
        }
        for message in messages
    ]


def without_google_ids(contents: Any) -> Any:
    return each_part(
        contents, lambda part: {k: without("id")(v) if k.startswith("function") else v for k, v in part.items()}
    )


def without_dummy(contents: Any) -> Any:
    dummy = from_base64(DUMMY_SIGNATURE)
    return each_part(
        contents, lambda part: {k: v for k, v in part.items() if not (k == "thoughtSignature" and v == dummy)}
    )


def one_envelope(contents: Any) -> Any:
    def answer(part: Json) -> Json:
        if "functionResponse" not in part:
            return part
        _, value = envelope(part["functionResponse"]["response"])
        return {"functionResponse": {**part["functionResponse"], "response": {"output": value}}}

    return each_part(contents, answer)


def each_part(contents: Any, change: Callable[[Json], Json]) -> Any:
    return [{**content, "parts": [change(part) for part in content["parts"]]} for content in contents]


def without_nothing(contents: Any) -> Any:
    kept = [{**c, "parts": [p for p in c["parts"] if p.get("text") not in ("", NUDGE)]} for c in contents]
    return [content for content in kept if content["parts"]]


TYPOGRAPHY = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "..."}
)


def without_typography(value: Any) -> Any:
    if isinstance(value, str):
        return unicodedata.normalize("NFKC", value.translate(TYPOGRAPHY))
    if isinstance(value, list):
        return [without_typography(item) for item in value]
    return {k: without_typography(v) for k, v in value.items()} if isinstance(value, dict) else value


def without_empty(items: Any) -> Any:
    return [item for item in items if item.get("type") != "message" or "".join(map(str, item["content"]))]


DIFFERENCES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "anthropic": {},
    "openai_chat": {
        "the reply had an empty call id, and each client makes its own": without_chat_ids,
    },
    "google": {
        "the reply had no call id; the recording client made one, we answer by name and order": without_google_ids,
        "the recording client signs a foreign call, or an unsigned parallel one, in another place": without_dummy,
        "a result stands under 'output', where the recording client says 'return_value' or wraps it in nothing": one_envelope,
        "an empty user message is not a message; where the wire wants one, ours says something": without_nothing,
    },
    "openai": {
        "the recording client dropped the item id of a function_call": without_in("function_call", "id"),
        "the old recording client sent the item id as call_id (R8a)": without("call_id"),
        "JSON bodies of the recordings had their typographic characters replaced, streams had not (R3b)": without_typography,
        "the old recording client put an empty message before a call": without_empty,
        "the recording client reshaped arguments and tools of a tool search (R8d)": lambda items: without_in("tool_search_output", "tools")(without_in("tool_search_call", "arguments")(items)),
    },
}  # fmt: skip
"""What the recordings have otherwise and why that is not a fault of ours, by wire (recorded R7, R8)."""


@attrs.frozen
class Verdict:
    """
    How a loop came out.

    Attributes:
        kind: Whether both sides are equal, differ in documented ways, differ otherwise, or cannot be built.
        reasons: The documented differences, or what our types cannot hold.
        ours: Our request in one form.
        theirs: The recorded one in the same form.
    """

    kind: str
    reasons: tuple[str, ...]
    ours: Any = None
    theirs: Any = None


def types_in(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*[types_in(item) for item in value])
    if isinstance(value, dict):
        return {str(value.get("type"))}.union(*[types_in(item) for item in value.values()])
    return set()


def history_of(recording: Recording) -> list[Json]:
    found = recording.request[HISTORY[NAMES[recording.wire]]]
    items = [{"role": "user", "content": found}] if isinstance(found, str) else found
    return [copy.deepcopy(item) for item in items if item.get("role") not in ("system", "developer") or "tools" in item]


def judge(loop: Loop) -> Verdict:
    """Decode the first exchange, add what the second one adds, encode, and compare."""
    first, second = loop.first, loop.second
    wire = "openai_chat" if NAMES[first.wire] == "openrouter" else NAMES[first.wire]
    before, after = history_of(first), history_of(second)
    alien = (types_in(before) | types_in(after)) & NO_PART_FOR
    if alien:
        return Verdict("cannot be built", (f"our messages cannot hold {', '.join(sorted(alien))}",))
    reader = Reader(first)
    READERS[wire](reader, before)
    reader.assistant(first.streamed(4096)[1] if first.stream else first.decoded())
    READERS[wire](reader, added(wire, after[len(before) :]))
    encoded = encoded_by(wire, first, second, Transcript(reader.messages))
    ours, theirs = NORMAL[wire](json.loads(encoded)), NORMAL[wire](after)
    if ours == theirs:
        return Verdict("equal", ())
    rules = DIFFERENCES[wire]
    if not agree(ours, theirs, list(rules.values())):
        return Verdict("different", (), ours, theirs)
    needed = [why for why in rules if not agree(ours, theirs, [rule for other, rule in rules.items() if other != why])]
    return Verdict("documented", tuple(needed))


def agree(ours: Any, theirs: Any, rules: list[Callable[[Any], Any]]) -> bool:
    for rule in rules:
        ours, theirs = rule(ours), rule(theirs)
    return ours == theirs


def added(wire: str, items: list[Json]) -> list[Json]:
    """What a request adds after the reply that it contains: the items that are not the assistant's."""
    if wire != "openai":
        return items[1:]
    mine = {"user"}
    start = next(
        (n for n, item in enumerate(items) if item.get("role") in mine or item.get("type") == "function_call_output"), 0
    )
    return items[start:]


def tools_in(recording: Recording, mark: str) -> list[str]:
    """The names of the tools of a request that bear a mark."""
    return [tool["name"] for tool in recording.request.get("tools") or () if tool.get(mark)]


def added_tools(item: Any) -> list[Json]:
    """The definitions that a request adds in the course of its input."""
    return item["tools"] if isinstance(item, dict) and item.get("type") == "additional_tools" else []


def spec_of(tool: Json) -> ToolSpec:
    return ToolSpec(
        tool["name"], tool["description"], tool["parameters"], strict=tool.get("strict") or False, defer_loading=True
    )


def encoded_by(wire: str, first: Recording, second: Recording, history: Transcript) -> str:
    request = ModelRequest(f"{wire}/x", "", history)
    match wire:
        case "anthropic":
            budget = (second.request.get("thinking") or {}).get("budget_tokens")
            settings = ModelSettings(thinking=Thinking("extended", budget)) if budget else ModelSettings()
            request = attrs.evolve(request, settings=settings)
            manual = (encode_thinking(request, first.model, get_family(first.model)) or {}).get("type") == "enabled"
            hidden = frozenset(tools_in(second, "defer_loading")) or None
            messages, _ = encode_anthropic(request, AnthropicFlags("anthropic", first.model, manual, hidden=hidden))
            return messages.decode()
        case "openai":
            later = {tool["name"]: tool for item in second.request["input"] for tool in added_tools(item)}
            flags = ResponsesFlags("openai", first.model, hidden=frozenset(later) or None)
            return encode_responses(request, flags, lambda name: encode_tool(spec_of(later[name]))).decode()
        case "google":
            signed = parse_generation(first.model) >= SIGNED_SINCE
            return encode_google(request, GoogleFlags("google", first.model, signed)).decode()
        case _:
            return encode_chat(
                request, ChatFlags(get_preset_or_safe_default(NAMES[first.wire], None), first.model)
            ).decode()
