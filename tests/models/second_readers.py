"""
The official SDKs as second readers: what they make of a recorded reply, beside what our codecs make of it.

Both are brought to one form, member by member. The SDKs get the recorded bytes through their own HTTP clients, so that their
parsers of streams and their accumulators are used, and not only their types.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from stepengine.data.json import thaw
from stepengine.data.messages import (
    AssistantPart,
    DocumentPart,
    ImagePart,
    OpaquePart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from stepengine.data.models import ModelReply
from stepengine.models._iterations import list_uncounted_iterations
from tests.models.recorded import NAMES, Recording

KEY = "sk-test"


@attrs.frozen(kw_only=True)
class Reading:
    """
    A reply as one reader understands it.

    Attributes:
        text: All that was said, refusals included.
        thinking: All that was thought and is shown.
        calls: Names, arguments and ids of the calls of our tools.
        others: The kinds of all else that stands in it.
        stop: The provider's word for why it ended.
        id: The reply's own id.
        prompt: Tokens of the prompt, cached ones included; ``None`` where it is not said.
        completion: Tokens of the completion, thinking included.
        cached: Tokens that were read from a cache.
        thought: Tokens of thinking.
    """

    text: str = ""
    thinking: str = ""
    calls: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    stop: str = ""
    id: str = ""
    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    thought: int | None = None


def differences(ours: Reading, theirs: Reading) -> dict[str, str]:
    """What two readers read otherwise, by member."""
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in attrs.fields_dict(Reading)}
    return {name: f"ours {short(a)}, the SDK {short(b)}" for name, (a, b) in pairs.items() if a != b}


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:50]}...{text[-27:]}"


def a_call(name: str, arguments: Any, wire_id: str | None) -> str:
    """A call as one word; arguments are compared as JSON."""
    try:
        given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    except ValueError:
        given = arguments
    return f"{name}({json.dumps(given, sort_keys=True)}) {wire_id or ''}".rstrip()


# --- ours -------------------------------------------------------------------------------------------------------------


def ours_of(reply: ModelReply) -> Reading:
    """What our codecs read; what ran beside the message of Anthropic is left out of its tokens, as its totals do."""
    usage, beside = reply.usage, list_uncounted_iterations(thaw(reply.provider_data.get("usage")))
    more = [sum(entry.get(name) or 0 for entry in beside) for name in COUNTED]
    return Reading(
        text="".join([p.text for p in reply.content if isinstance(p, TextPart | RefusalPart)]),
        thinking="".join([p.text for p in reply.content if isinstance(p, ThinkingPart)]),
        calls=tuple([called(p) for p in reply.content if isinstance(p, ToolCallPart) and not kind_of(p)]),
        others=tuple(filter(None, [kind_of(p) for p in reply.content])),
        stop=reply.raw_stop_reason or "",
        id=str(reply.provider_data.get("id") or ""),
        prompt=None if usage is None else usage.prompt_tokens - sum(more[:3]),
        completion=None if usage is None else usage.completion_tokens - more[3],
        cached=None if usage is None else usage.cache_read_tokens - more[1],
        thought=None if usage is None else usage.reasoning_tokens,
    )


COUNTED = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")


def called(part: ToolCallPart) -> str:
    given = part.raw_input if part.raw_input is not None else thaw(part.input)
    return a_call(part.tool_name, given, str((part.provider_data or {}).get("id") or ""))


def kind_of(part: AssistantPart) -> str:
    """The kind of a part that is neither said nor thought nor a call of a function."""
    if isinstance(part, ToolCallPart):
        return "tool_search_call" if "search" in (part.provider_data or {}) else ""
    if not isinstance(part, OpaquePart | ImagePart | DocumentPart):
        return ""
    data = part.data if isinstance(part, OpaquePart) else (part.provider_data or {}).get("item")
    if data is None:
        return "inlineData" if not (part.provider_data or {}).get("audio") else "audio"
    return str(data.get("type") or next(name for name in data if name not in {"thought", "thoughtSignature"}))


# --- the SDKs ---------------------------------------------------------------------------------------------------------


def theirs_of(recording: Recording) -> Reading:
    """What the SDK of the wire reads; whatever it raises is its word about the reply."""
    import httpx2

    kind = "text/event-stream" if recording.stream else "application/json"
    answer = httpx2.Response(200, content=recording.reply, headers={"content-type": kind})
    with httpx2.Client(transport=httpx2.MockTransport(lambda _: answer)) as client, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SDKS.get(NAMES[recording.wire], by_chat)(client, recording.stream)


def by_anthropic(http: Any, stream: bool) -> Reading:
    import anthropic

    asked: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": []}
    client = anthropic.Anthropic(api_key=KEY, http_client=http, max_retries=0)
    if stream:
        with client.beta.messages.stream(**asked) as events:
            message: Any = events.get_final_message()
    else:
        message = client.beta.messages.create(**asked)
    blocks, usage = message.content, message.usage
    written, read = usage.cache_creation_input_tokens or 0, usage.cache_read_input_tokens or 0
    details = usage.output_tokens_details
    return Reading(
        text="".join([b.text for b in blocks if b.type == "text"]),
        thinking="".join([b.thinking for b in blocks if b.type == "thinking"]),
        calls=tuple([a_call(b.name, b.input, b.id) for b in blocks if b.type == "tool_use"]),
        others=tuple([b.type for b in blocks if b.type not in {"text", "thinking", "redacted_thinking", "tool_use"}]),
        stop=message.stop_reason or "",
        id=message.id,
        prompt=usage.input_tokens + written + read,
        completion=usage.output_tokens,
        cached=read,
        thought=(details and details.thinking_tokens) or 0,
    )


def by_responses(http: Any, stream: bool) -> Reading:
    import openai

    client = openai.OpenAI(api_key=KEY, http_client=http, max_retries=0)
    if stream:
        with client.responses.stream(model="m", input="x") as events:
            for event in events:
                if event.type in {"response.completed", "response.incomplete", "response.failed"}:
                    response: Any = event.response
    else:
        response = client.responses.create(model="m", input="x")
    items, usage = response.output, response.usage
    said = [c for item in items if item.type == "message" for c in item.content]
    stop = response.incomplete_details.reason if response.status == "incomplete" else response.status
    return Reading(
        text="".join([c.text if c.type == "output_text" else c.refusal for c in said]),
        thinking="".join(["\n\n".join(thoughts(item)) for item in items if item.type == "reasoning"]),
        calls=tuple([a_call(i.name, i.arguments, i.call_id) for i in items if i.type == "function_call"]),
        others=tuple([i.type for i in items if i.type not in {"message", "reasoning", "function_call"}]),
        stop=stop or "",
        id=response.id,
        **in_totals(usage, "input_tokens", "output_tokens"),
    )


def thoughts(item: Any) -> list[str]:
    return [piece.text or "" for piece in item.summary or item.content or ()]


def by_chat(http: Any, stream: bool) -> Reading:
    import openai
    from openai.lib.streaming.chat import ChatCompletionStreamState

    client = openai.OpenAI(api_key=KEY, http_client=http, max_retries=0)
    if stream:
        state: Any = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(model="m", messages=[], stream=True):
            state.handle_chunk(chunk)
        completion: Any = state.current_completion_snapshot
    else:
        completion = client.chat.completions.create(model="m", messages=[])
    choice = completion.choices[0]
    message, more = choice.message, choice.message.model_extra or {}
    calls = message.tool_calls or []
    return Reading(
        text=spoken(message.content) + (message.refusal or ""),
        thinking=more.get("reasoning_content") or more.get("reasoning") or "",
        calls=tuple([a_call(c.function.name, c.function.arguments, c.id) for c in calls if c.type != "custom"]),
        others=("audio",) if message.audio and message.audio.data else (),
        stop=choice.finish_reason or "",
        id=completion.id or "",
        **in_totals(completion.usage, "prompt_tokens", "completion_tokens"),
    )


def spoken(content: Any) -> str:
    """The text of a message; Mistral writes it in pieces, of which the SDK knows nothing."""
    if isinstance(content, list):
        return "".join([piece.get("text") or "" for piece in content if piece.get("type") == "text"])
    return content or ""


def in_totals(usage: Any, prompt: str, completion: str) -> dict[str, int | None]:
    if usage is None:
        return {}
    inside, outside = getattr(usage, f"{prompt}_details", None), getattr(usage, f"{completion}_details", None)
    return {
        "prompt": getattr(usage, prompt),
        "completion": getattr(usage, completion),
        "cached": getattr(inside, "cached_tokens", None) or 0,
        "thought": getattr(outside, "reasoning_tokens", None) or 0,
    }


def by_google(http: Any, stream: bool) -> Reading:
    from google import genai

    client = genai.Client(api_key=KEY, http_options=genai.types.HttpOptions(httpx_client=http))
    asked: dict[str, Any] = {"model": "m", "contents": "x"}
    models = client.models
    chunks = list(models.generate_content_stream(**asked)) if stream else [models.generate_content(**asked)]
    first = [chunk.candidates[0] for chunk in chunks if chunk.candidates]
    parts = [part for one in first if one.content for part in one.content.parts or ()]
    stops = [one.finish_reason.value for one in first if one.finish_reason]
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata][-1:]
    calls = [part.function_call for part in parts if part.function_call]
    return Reading(
        text="".join([part.text for part in parts if part.text and not part.thought]),
        thinking="".join([part.text for part in parts if part.text and part.thought]),
        calls=tuple([a_call(call.name or "", call.args, call.id) for call in calls]),
        others=tuple(filter(None, map(other_of, parts))),
        stop=stops[-1] if stops else "",
        id=chunks[-1].response_id or "" if chunks else "",
        **gemini_totals(usage),
    )


def other_of(part: Any) -> str:
    """The kind of a Gemini part that is neither a text nor a call of ours."""
    plain = {"text", "function_call", "thought", "thought_signature", "part_metadata"}
    kinds = [part.model_fields[name].alias or name for name in part.model_fields_set - plain if getattr(part, name)]
    return "" if part.function_call or part.text else next(iter(sorted(kinds)), "")


def gemini_totals(usage: Iterable[Any]) -> dict[str, int | None]:
    for one in usage:
        thought = one.thoughts_token_count or 0
        return {
            "prompt": (one.prompt_token_count or 0) + (one.tool_use_prompt_token_count or 0),
            "completion": (one.candidates_token_count or 0) + thought,
            "cached": one.cached_content_token_count or 0,
            "thought": thought,
        }
    return {}


SDKS: dict[str, Callable[[Any, bool], Reading]] = {
    "anthropic": by_anthropic,
    "openai": by_responses,
    "google": by_google,
}
"""Who reads a wire; the others are forms of Chat Completions."""
