"""What a server gave for a call, as the result of a tool; everything here is JSON as it came over the wire."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs

from stepengine.data.json import canonical, compact, freeze
from stepengine.data.messages import (
    CUT_OFF,
    DocumentPart,
    ImagePart,
    JsonPart,
    ResultPart,
    SideEffect,
    TextPart,
    ToolResult,
)
from stepengine.data.visible import visible
from stepengine.errors import DataError, DefinitionError, ToolError, ToolServerError
from stepengine.mcp._caps import ERROR_CHARS, PARTS
from stepengine.tooling.conversion import DOCUMENT_BYTES, IMAGE_BYTES, RESULT_CHARS, as_result, cut
from stepengine.tooling.schemas import JsonSchema

__all__ = ("content_parts", "cut_off_result", "error_result", "failed_result", "misfit", "result_of")

IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")
PDF = "application/pdf"
SHOWN = "[shown beside this]"
HELD_DEPTH = 3
"""How deep a value is looked into for what the texts beside it say."""


def error_result(text: str) -> ToolResult:
    """Return an error result whose text, which may be a server's, has nothing hidden in it and an end."""
    return ToolResult.error(cut(visible(text), ERROR_CHARS))


def failed_result(server: str, error: ToolError) -> ToolResult:
    """Return the result of a call that failed with *error*; one whose *server* is gone is told from one that was refused."""
    if isinstance(error, ToolServerError):
        return cut_off_result(server, error.message)
    return error_result(error.message)


def cut_off_result(server: str, text: str) -> ToolResult:
    """Return the error result of a call whose *server* is gone."""
    return attrs.evolve(error_result(text), side_effects=(SideEffect(CUT_OFF, server),))


def result_of(raw: Mapping[str, Any]) -> ToolResult:
    """Return the result of a call; media are kept within the caps of all tools, links stay text."""
    parts = content_parts(raw.get("content") or ())
    structured = raw.get("structuredContent")
    if structured is not None:
        parts = _with_structured(parts, structured, raw.get("content") or ())
    if raw.get("isError"):
        texts = [
            p.text if isinstance(p, TextPart) else compact(p.value) for p in parts if isinstance(p, TextPart | JsonPart)
        ]
        return error_result("\n".join(texts) or "the server says that the call failed, and not why")
    return as_result(ToolResult(tuple(parts)))


def _with_structured(
    parts: Sequence[ResultPart], structured: object, content: Sequence[Mapping[str, object]]
) -> list[ResultPart]:
    """
    Return *parts* with the value of a result, each thing once: servers say the same in texts for clients that know nothing else.

    Texts that the value holds are left out. A value that is nothing but the text, or the content itself, is left out in its
    turn, so that a model reads a file as it is. A plain value comes in an object with the one member ``result``; where the
    text says it without, so does this. Media stay what they are, and are no text in the value.
    """
    others = [part for part in parts if not isinstance(part, TextPart)]
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    if isinstance(structured, Mapping) and len(structured) == 1:
        (plain,) = structured.values()
        if (isinstance(plain, str) and texts == [plain]) or _is_content(plain, content):
            return list(parts)
        if "result" in structured and (
            _says(texts, plain) or (isinstance(plain, list | tuple) and _says_each(texts, plain))
        ):
            return [JsonPart(freeze(plain)), *others]
    value = freeze(_without_media(structured, {data for block in content if (data := _data_of(block))}))
    if _says(texts, structured):
        return [JsonPart(value), *others]
    held = set(_held(value, HELD_DEPTH))
    return [JsonPart(value), *[p for p in parts if not (isinstance(p, TextPart) and _form(p.text) & held)]]


def _held(value: object, depth: int) -> Iterator[str]:
    """Give the texts that say *value* or something in it: JSON, and texts themselves."""
    yield canonical(value)
    if isinstance(value, str):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for each in inner if depth else ():
        yield from _held(each, depth - 1)


def _form(text: str) -> set[str]:
    """Return the forms in which a value may hold what a text says."""
    read = _read(text, None)
    if read is text:
        return {text}
    try:
        return {text, canonical(freeze(read))}
    except DataError:
        return {text}


def _is_content(value: object, content: Sequence[Mapping[str, object]]) -> bool:
    """Return whether *value* is the list of what the result shows anyway; servers write out what is not there as null."""
    return (
        isinstance(value, list | tuple)
        and bool(content)
        and all(isinstance(each, Mapping) for each in value)
        and [{k: v for k, v in each.items() if v is not None} for each in value] == [dict(each) for each in content]
    )


def _data_of(block: Mapping[str, object]) -> str:
    """Return what a block of content holds in base64."""
    resource = block.get("resource")
    found = resource.get("blob") if isinstance(resource, Mapping) else block.get("data")
    return found if isinstance(found, str) else ""


def _without_media(value: object, shown: Collection[str]) -> object:
    """Return *value* with a word in the place of media that the result shows."""
    if isinstance(value, str):
        return SHOWN if value in shown else value
    if isinstance(value, Mapping):
        return {name: _without_media(each, shown) for name, each in value.items()}
    return [_without_media(each, shown) for each in value] if isinstance(value, list | tuple) else value


def _says(texts: Sequence[str], value: object) -> bool:
    return len(texts) == 1 and _says_each(texts, [value])


def _says_each(texts: Sequence[str], values: Sequence[object]) -> bool:
    return len(texts) == len(values) and all(_read(t, v) == v for t, v in zip(texts, values, strict=True))


def _read(text: str, value: object) -> Any:
    """Return a text as JSON, if it is some, unless *value* is a text itself."""
    if isinstance(value, str) or len(text) > RESULT_CHARS:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def content_parts(content: Sequence[Mapping[str, object]]) -> list[ResultPart]:
    """Return the parts of a result, of a prompt or of a resource; what no model can be shown is said in words."""
    parts = [_part(block) for block in content[:PARTS]]
    if len(content) > PARTS:
        parts.append(TextPart(f"[{len(content) - PARTS:,} more parts were left out]"))
    return parts


def _part(block: Mapping[str, Any]) -> ResultPart:
    kind = block.get("type")
    if kind == "text":
        return TextPart(str(block.get("text", "")))
    if kind == "image":
        return _media(block.get("data"), str(block.get("mimeType", "")), "image")
    if kind == "resource_link":
        about = f" ({block['mimeType']})" if block.get("mimeType") else ""
        return TextPart(f"[a link, which was not followed: {block.get('uri')}{about}]")
    if kind == "resource":
        return resource_part(block.get("resource") or {})
    return TextPart(f"[{kind or 'something'} of the type {block.get('mimeType', 'unknown')} was left out]")


def resource_part(resource: Mapping[str, Any]) -> ResultPart:
    """Return what a resource holds."""
    if isinstance(resource.get("text"), str):
        return TextPart(resource["text"])
    return _media(resource.get("blob"), str(resource.get("mimeType") or ""), f"the resource {resource.get('uri')}")


def _media(encoded: object, mime: str, what: str) -> ResultPart:
    cap = IMAGE_BYTES if mime in IMAGES else DOCUMENT_BYTES
    if mime not in (*IMAGES, PDF):
        return TextPart(f"[{what} of the type {mime or 'unknown'} was left out]")
    if not isinstance(encoded, str) or len(encoded) * 3 // 4 > cap:
        return TextPart(f"[{what} was left out: it has more than {cap:,} bytes]")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return TextPart(f"[{what} was left out: it is no base64]")
    made = DocumentPart(data=data, mime_type=mime) if mime == PDF else ImagePart(data=data, mime_type=mime)
    result = as_result(made)
    return TextPart(f"[{what} was left out: {result.text}]") if result.is_error else result.content[0]


def misfit(name: str, schema: Mapping[str, object], raw: Mapping[str, object]) -> str:
    """
    Return why what a call gave is not what its tool had promised; ``""`` when it is.

    A promise that cannot be checked without risk, such as an expression that has to be tried out, is taken as kept.
    """
    if raw.get("isError"):
        return ""
    try:
        check = JsonSchema(f"the output schema of {name!r}", schema)
    except (DefinitionError, DataError):
        return ""
    if "structuredContent" not in raw:
        return "it promises structured content, and gave none"
    try:
        issues = check.issues(freeze(raw["structuredContent"]))
    except DataError as error:
        return error.message
    return "; ".join(issues[:PARTS])
