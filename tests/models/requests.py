"""Recorded requests read into our types; nothing in the package reads a wire's requests."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import attrs

from stepengine.data.messages import (
    AssistantMessage,
    DocumentPart,
    ImagePart,
    JsonPart,
    Message,
    TextPart,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    UserMessage,
)
from stepengine.data.models import ModelReply
from stepengine.models.anthropic.decode import decode as decode_anthropic
from stepengine.models.google.decode import decode as decode_google
from stepengine.models.openai.decode import decode as decode_responses
from stepengine.models.openai_chat.decode import decode as decode_chat
from tests.models.recorded import Recording

Json = dict[str, Any]


@attrs.define
class Reader:
    """Builds messages and numbers calls."""

    recording: Recording
    messages: list[Message] = attrs.field(factory=list)
    ids: dict[str, str] = attrs.field(factory=dict)
    waiting: list[str] = attrs.field(factory=list)
    results: dict[str, ToolMessage] = attrs.field(factory=dict)

    def assistant(self, reply: ModelReply) -> None:
        parts = []
        for given in reply.content:
            part = given
            if isinstance(given, ToolCallPart):
                ours = f"c{len(self.ids)}"
                theirs = (given.provider_data or {}).get("id") or f"none{len(self.ids)}"
                self.ids[theirs] = ours
                self.waiting.append(theirs)
                part = attrs.evolve(given, tool_call_id=ours)
            parts.append(part)
        last = self.messages[-1] if self.messages else None
        if self.waiting and isinstance(last, AssistantMessage) and last.tool_calls:
            # A client put a call of its own between a reply and its results: to us that is one message.
            self.messages[-1] = AssistantMessage((*last.content, *parts))
        else:
            self.messages.append(AssistantMessage(tuple(parts)))

    def result(self, theirs: str | None, content: list[Any], *, error: bool = False, name: str = "tool") -> None:
        if theirs not in self.ids:  # the reply had none, the recording client made one
            theirs = next(name for name in self.waiting if name not in self.results)
        self.results[theirs] = ToolMessage(self.ids[theirs], name, tuple(content), "error" if error else "ok")
        if set(self.results) == set(self.waiting):
            self.messages += [self.results[theirs] for theirs in self.waiting]
            self.waiting, self.results = [], {}

    def user(self, parts: list[Any]) -> None:
        if parts:
            self.messages.append(UserMessage(tuple(parts)))

    def decoded(self, decode: Callable[..., ModelReply], data: Json) -> None:
        self.assistant(decode(data, self.recording.call, self.recording.model, None))


def read_anthropic(reader: Reader, messages: list[Json]) -> None:
    for message in messages:
        blocks = as_list(message["content"])
        if message["role"] == "assistant":
            reader.decoded(decode_anthropic, {"content": blocks, "usage": {}, "stop_reason": None})
            continue
        parts: list[Any] = []
        for block in blocks:
            if block["type"] == "tool_result":
                content = [anthropic_part(b) for b in as_list(block.get("content") or [])]
                reader.result(block["tool_use_id"], content, error=block.get("is_error") or False)
            else:
                parts.append(anthropic_part(block))
        reader.user(parts)


def as_list(content: Any) -> list[Json]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def anthropic_part(block: Json) -> Any:
    if block["type"] == "text":
        return TextPart(block["text"])
    if block["type"] == "container_upload":
        return DocumentPart(mime_type="application/octet-stream", file_id=block["file_id"], provider="anthropic")
    if block["type"] == "tool_reference":
        return ToolReferencePart(block["tool_name"])
    source = block["source"]
    if source["type"] == "file":
        file = {"file_id": source["file_id"], "provider": "anthropic"}
        return ImagePart(**file) if block["type"] == "image" else DocumentPart(name=block.get("title") or "", **file)
    url = source.get("url")
    if block["type"] == "image":
        data = base64.b64decode(source["data"]) if url is None else None
        return ImagePart(url, data, source.get("media_type", "image/png"))
    data = None if url else source["data"].encode() if source["type"] == "text" else base64.b64decode(source["data"])
    return DocumentPart(url, data, source.get("media_type", "application/pdf"), block.get("title") or "")


def read_chat(reader: Reader, messages: list[Json]) -> None:
    for message in messages:
        content = message.get("content")
        if message["role"] == "assistant":
            reader.decoded(decode_chat, {"choices": [{"message": message}]})
        elif message["role"] == "tool":
            texts = [content] if isinstance(content, str) else [piece["text"] for piece in content]
            reader.result(message["tool_call_id"], [TextPart(text) for text in texts])
        else:
            reader.user([TextPart(content)] if isinstance(content, str) else [chat_part(piece) for piece in content])


def chat_part(piece: Json) -> Any:
    if piece["type"] == "text":
        return TextPart(piece["text"])
    if piece["type"] == "image_url":
        return ImagePart(piece["image_url"]["url"])
    if piece["type"] == "input_audio":
        sound = piece["input_audio"]
        return DocumentPart(
            data=base64.b64decode(sound["data"]), mime_type={"wav": "audio/wav", "mp3": "audio/mpeg"}[sound["format"]]
        )
    if "file_id" in piece["file"]:
        return DocumentPart(file_id=piece["file"]["file_id"], provider="openai")
    mime_type, data = opened(piece["file"]["file_data"])
    return DocumentPart(None, data, mime_type, piece["file"]["filename"])


def opened(url: str) -> tuple[str, bytes]:
    """The type and the bytes of a data URL."""
    head, _, data = url.partition(";base64,")
    return head.removeprefix("data:"), base64.b64decode(data)


def read_responses(reader: Reader, items: list[Json]) -> None:
    output: list[Json] = []

    def flush() -> None:
        if output:
            reader.decoded(decode_responses, {"output": list(output), "status": "completed"})
            output.clear()

    for item in items:
        if item.get("role") in ("user", "assistant") and isinstance(item["content"], str):
            content = [{"type": "output_text", "text": item["content"]}]
            if item["role"] == "assistant":
                output.append({"type": "message", "content": content})
                continue
            flush()
            reader.user([TextPart(item["content"])])
        elif item.get("role") == "user":
            flush()
            reader.user([responses_part(piece) for piece in item["content"]])
        elif item["type"] == "additional_tools":
            last = reader.messages[-1]
            references = [ToolReferencePart(tool["name"]) for tool in item["tools"]]
            reader.messages[-1] = attrs.evolve(last, content=(*last.content, *references))
        elif item["type"] == "function_call_output":
            flush()
            said = item["output"]
            reader.result(
                item["call_id"], [TextPart(said)] if isinstance(said, str) else [responses_part(p) for p in said]
            )
        else:
            output.append(item)
    flush()


def responses_part(piece: Json) -> Any:
    if piece["type"] == "input_text":
        return TextPart(piece["text"])
    if "file_id" in piece:
        kind = ImagePart if piece["type"] == "input_image" else DocumentPart
        return kind(file_id=piece["file_id"], provider="openai")
    if piece["type"] == "input_image":
        return ImagePart(piece["image_url"])
    if "file_url" in piece:
        return DocumentPart(piece["file_url"])
    mime_type, data = opened(piece["file_data"])
    return DocumentPart(None, data, mime_type, piece.get("filename") or "")


def read_google(reader: Reader, contents: list[Json]) -> None:
    for content in contents:
        if content["role"] == "model":
            reader.decoded(decode_google, {"candidates": [{"content": content}]})
            continue
        parts: list[Any] = []
        for part in content["parts"]:
            answer = part.get("functionResponse")
            if answer is None:
                parts.append(google_part(part))
                continue
            member, value = envelope(answer["response"])
            media = [google_part(p) for p in answer.get("parts", ())]
            said = [JsonPart(value) if not isinstance(value, str) else TextPart(value)]
            reader.result(answer.get("id"), [*said, *media], error=member == "error", name=answer["name"])
        reader.user(parts)


def envelope(response: Json) -> tuple[str, Any]:
    """What a result is wrapped in, and what it holds; a client may also wrap it in nothing."""
    if len(response) == 1:
        ((member, value),) = response.items()
        if member in ("return_value", "output", "error"):
            return member, value
    return "", response


def google_part(part: Json) -> Any:
    if "text" in part:
        return TextPart(part["text"])
    blob = part["inlineData"]
    data = from_base64(blob["data"])
    kind = ImagePart if blob["mimeType"].startswith("image/") else DocumentPart
    return kind(data=data, mime_type=blob["mimeType"])


def from_base64(text: str) -> bytes:
    """Bytes from either alphabet, padded or not."""
    return base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4))


READERS = {
    "anthropic": read_anthropic,
    "openai_chat": read_chat,
    "openai": read_responses,
    "google": read_google,
}
