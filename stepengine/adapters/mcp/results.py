"""What a server gave for a call, as the result of a tool; everything here is JSON as it came over the wire."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.adapters.mcp._caps import BLOCK_CHARS, ERROR_CHARS, MEDIA_BYTES, PAGE_SCHEME, PARTS, RESULT_DEPTH
from stepengine.data.json import MAX_DIGITS, MAX_NUMBER, MIN_NUMBER, JsonValue, canonical, compact, freeze
from stepengine.data.media_types import IMAGES, resolve_media_type
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
from stepengine.data.result_cuts import RESULT_CHARS
from stepengine.data.visible import cut_middle, visible
from stepengine.errors import DataError, DefinitionError, ToolError, ToolServerError
from stepengine.tools.conversion import DOCUMENT_BYTES, IMAGE_BYTES, make_tool_result
from stepengine.tools.schemas import JsonSchema

Channel: TypeAlias = Literal["once", "text", "structured"]
"""What a model is shown of a result that says something in texts and as a value."""
PAGE = "mcp_page"
"""The kind of the side effect that names a page for the result, or stores one."""
BLOB = "mcp_blob"
"""The kind of the side effect that keeps bytes which no model can be shown."""

BEGIN_CHARS = 64
"""Base64 of 48 bytes, more than a file needs to tell its type."""
PDF = "application/pdf"
SHOWN = "[shown beside this]"
HELD_DEPTH = 3
"""The depth to which a value is searched for the texts next to it."""
UNREAD = "stepengine/unread"
"""The type that a block gets which cannot be read; its text says why."""
REQUIRED = {"text": ("text",), "image": ("data", "mimeType"), "audio": ("data", "mimeType"), "resource_link": ("uri",)}
"""The required members of a block of content, by its type; each is a text."""
OF_RESULT = frozenset({"content", "structuredContent", "isError", "_meta", "resultType", "ttlMs", "cacheScope"})
NO = ("", "false", "0", "no", "off")


def make_error_result(text: str) -> ToolResult:
    """Return an error result with *text*, which may be a server's: cut, and with hidden characters made visible."""
    return ToolResult.error(cut_middle(visible(text), ERROR_CHARS))


def make_failed_call_result(server: str, error: ToolError) -> ToolResult:
    """Return the result of a call that failed with *error*. A lost server is distinguished from a refusal."""
    if isinstance(error, ToolServerError):
        return make_lost_server_result(server, error.message)
    return make_error_result(error.message)


def make_lost_server_result(server: str, text: str) -> ToolResult:
    """Return the error result of a call that was open when *server* ended."""
    return attrs.evolve(make_error_result(text), side_effects=(SideEffect(CUT_OFF, server),))


@frozen
class BinaryContent:
    """
    Bytes of a result that no model can be shown, such as sound or an archive.

    Attributes:
        data: The bytes.
        mime_type: What the server says that they are; ``""`` when it does not.
        uri: The address of the resource that they are; ``""`` for none.
    """

    data: bytes = attrs.field(repr=lambda data: f"<{len(data):,} bytes>")
    mime_type: str = ""
    uri: str = ""


def get_non_media_content(result: ToolResult) -> tuple[BinaryContent, ...]:
    """
    Return the binary content that models cannot read, in order; images and PDF files are in ``ToolResult.media``.

    Pictures that models know and PDF files are no blobs: they are in ``ToolResult.media``.
    """
    found: list[BinaryContent] = []
    for effect in result.side_effects:
        if effect.kind == BLOB and isinstance(effect.details, Mapping):
            said = effect.details
            found.append(BinaryContent(base64.b64decode(str(said["data"])), str(said["mime_type"]), effect.target))
    return tuple(found)


def make_binary_side_effects(blocks: Sequence[Mapping[str, object]]) -> tuple[SideEffect, ...]:
    """Return side effects with the binary content of the blocks that models are not shown."""
    kept: list[SideEffect] = []
    for block in blocks[:PARTS]:
        inner = block.get("resource")
        resource = inner if isinstance(inner, Mapping) else block
        data = resource.get("blob") if "blob" in resource else resource.get("data")
        mime, uri = str(resource.get("mimeType") or ""), str(resource.get("uri") or "")
        if not isinstance(data, str) or not isinstance(_make_media_part(data, mime, ""), TextPart):
            continue
        if len(data) * 3 // 4 <= DOCUMENT_BYTES and _is_base64(data):
            kept.append(SideEffect(BLOB, uri, {"mime_type": mime, "data": data}))
    return tuple(kept)


def make_page_side_effects(content: Sequence[Mapping[str, Any]], page: str) -> tuple[SideEffect, ...]:
    """
    Return side effects with the pages of a result: its texts and links with a ``ui://`` address, and the tool's own *page*.
    """
    found = [SideEffect(PAGE, page)] if page else []
    for one in filter(None, map(_find_block_page, content[:PARTS])):
        text = one.get("text")
        if not isinstance(text, str):
            found.append(SideEffect(PAGE, _clean_page_address(one)))
        elif len(text) <= DOCUMENT_BYTES:
            data = {"mime_type": str(one.get("mimeType") or ""), "text": text}
            found.append(SideEffect(PAGE, _clean_page_address(one), data))
    return tuple(found)


def _find_block_page(block: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the page that a block has as text or links to; ``None`` for another block."""
    kind = block.get("type")
    found = block.get("resource") if kind == "resource" else block if kind == "resource_link" else None
    is_page = isinstance(found, Mapping) and "blob" not in found and str(found.get("uri")).startswith(PAGE_SCHEME)
    return found if is_page else None


def _clean_page_address(page: Mapping[str, Any]) -> str:
    """Return the address of a page without hidden characters."""
    return visible(str(page["uri"]), strict=True)


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def make_result(raw: Mapping[str, Any], channel: Channel = "once", *, page: str = "") -> ToolResult:
    """
    Return the result of an MCP call. Images and documents are limited in size; links remain text.

    Args:
        raw: What came over the wire.
        channel: What is shown of texts and a structured value.
        page: The ``ui://`` address of the page of its tool; ``""`` for none.
    """
    raw = make_recordable(raw)
    given = make_readable_blocks(raw.get("content"))
    content = replace_excess_media(given)
    parts = make_content_parts(content)
    structured = raw.get("structuredContent")
    unknown = {name: value for name, value in raw.items() if name not in OF_RESULT}
    if structured is None and raw.get("content") is None and unknown:
        structured = unknown  # of a protocol that nobody knows, but it is what the call gave
    data: JsonValue = None
    if structured is not None:
        if channel == "text" and any(isinstance(part, TextPart) for part in parts):
            data = freeze(_replace_media(structured, _list_media_data(given)))
        elif channel == "structured":
            others = [part for part in parts if not isinstance(part, TextPart)]
            parts = [JsonPart(freeze(_replace_media(structured, _list_media_data(given)))), *others]
        else:
            parts = _merge_structured_value(parts, structured, given)
    is_unread = bool(given) and structured is None and all(block["type"] == UNREAD for block in given)
    if is_unread or is_error_result(raw):
        return _make_error_result(raw, parts)
    effects = (*make_binary_side_effects(content), *make_page_side_effects(content, page))
    return make_tool_result(ToolResult(tuple(parts), side_effects=effects, structured=data))


def _make_error_result(raw: Mapping[str, Any], parts: Sequence[ResultPart]) -> ToolResult:
    """Return the error result of a failed call, or of one without a readable result."""
    texts = [
        p.text if isinstance(p, TextPart) else compact(p.value) for p in parts if isinstance(p, TextPart | JsonPart)
    ]
    if not is_error_result(raw):
        texts.insert(0, "the call was carried out, but nothing of its result can be read:")
    elif not isinstance(raw["isError"], bool):
        texts.append(f"[isError is {_format_short_json(raw['isError'])}, which is taken for an error]")
    return make_error_result("\n".join(texts) or "the server says that the call failed, and not why")


def is_error_result(raw: Mapping[str, Any]) -> bool:
    """Return whether a result reports a failed call. Another value than a boolean counts as most clients read it."""
    said = raw.get("isError")
    return bool(said) and str(said).strip().lower() not in NO


def make_readable_blocks(content: object) -> list[dict[str, Any]]:
    """Return the content of a result as readable blocks; an unreadable one has the type ``UNREAD`` and the reason."""
    return [_make_readable_block(block) for block in wrap_in_list(content)]


def wrap_in_list(value: object, *, default: Sequence[Any] = ()) -> list[Any]:
    """Return the items of a list; another value as a list with one item, and *default* for ``None``."""
    return list(value if isinstance(value, list | tuple) else default if value is None else [value])


def _make_readable_block(block: object) -> dict[str, Any]:
    """Return a block of content; a text for a string, and the reason for an unreadable one."""
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if not isinstance(block, Mapping):
        return _make_left_out_block(f"{_format_short_json(block)} is no block of content")
    kind = block.get("type")
    if not isinstance(kind, str):
        text = block.get("text")
        return (
            {"type": "text", "text": text}
            if isinstance(text, str)
            else _make_left_out_block("a block of content has no type")
        )
    missing = [member for member in REQUIRED.get(kind, ()) if not isinstance(block.get(member), str)]
    if missing:
        return _make_left_out_block(f"a block of the type {kind!r} has no text as its {missing[0]!r}")
    if kind == "resource" and not _has_text_or_blob(block.get("resource")):
        return _make_left_out_block("a resource has neither a text nor a blob")
    return dict(block)


def _has_text_or_blob(resource: object) -> bool:
    """Return whether a resource has its content as text or base64."""
    return isinstance(resource, Mapping) and any(isinstance(resource.get(member), str) for member in ("text", "blob"))


def _make_left_out_block(why: str) -> dict[str, Any]:
    """Return a block with the reason why another one is left out."""
    return {"type": UNREAD, "text": f"[{why}, so it was left out]"}


def _format_short_json(value: object) -> str:
    """Return a value of a server as JSON for a message, cut and without hidden characters."""
    return cut_middle(visible(json.dumps(value, ensure_ascii=False), strict=True), BLOCK_CHARS)


def make_recordable(value: Any, max_depth: int = RESULT_DEPTH) -> Any:
    """Return JSON of a server in a form that a record can hold: too large numbers and too deep values become words, NaN ``None``."""
    if isinstance(value, Mapping | list | tuple) and not max_depth:
        return "[nested too deep]"
    if isinstance(value, Mapping):
        return {name: make_recordable(each, max_depth - 1) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [make_recordable(each, max_depth - 1) for each in value]
    if isinstance(value, int) and not MIN_NUMBER <= value <= MAX_NUMBER:
        return f"[a number of more than {MAX_DIGITS:,} digits]"
    return None if isinstance(value, float) and not math.isfinite(value) else value


def replace_excess_media(content: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return *content* with placeholders for media and pages that would make its record too large."""
    kept, left = list[Mapping[str, Any]](), MEDIA_BYTES
    for block in content:
        page = _find_block_page(block)
        text = None if page is None else page.get("text")
        size = len(_get_base64_data(block)) + (len(text.encode(errors="replace")) if isinstance(text, str) else 0)
        if size > left:
            kind = "page" if page else block.get("type")
            words = f"[{kind} was left out: the media of a result have at most {MEDIA_BYTES:,} bytes in base64]"
            kept.append({"type": "text", "text": words})
            continue
        left -= size
        kept.append(block)
    return kept


def _list_media_data(content: Sequence[Mapping[str, object]]) -> set[str]:
    """Return the base64 data of all content blocks that have some."""
    return {data for block in content if (data := _get_base64_data(block))}


def _merge_structured_value(
    parts: Sequence[ResultPart], structured: object, content: Sequence[Mapping[str, object]]
) -> list[ResultPart]:
    """
    Merge the structured value of a result into *parts*, so that nothing is there twice.

    Texts that the value contains are left out. A value that only repeats the text or the content is left out itself, so that a
    model reads the text of a file. If the value is an object with the single member ``result`` and the text is its value, only
    that value is used. Media remain parts, and their data in the value is replaced by placeholders.
    """
    others = [part for part in parts if not isinstance(part, TextPart)]
    texts = [part.text for part in parts if isinstance(part, TextPart)]
    if isinstance(structured, Mapping) and len(structured) == 1:
        (plain,) = structured.values()
        if (isinstance(plain, str) and texts == [plain]) or _is_same_content(plain, content):
            return list(parts)
        if "result" in structured and (
            _does_only_text_encode(texts, plain) or (isinstance(plain, list | tuple) and _do_texts_encode(texts, plain))
        ):
            return [JsonPart(freeze(plain)), *others]
    value = freeze(_replace_media(structured, _list_media_data(content)))
    if _does_only_text_encode(texts, structured):
        return [JsonPart(value), *others]
    held = set(_iterate_text_forms(value, HELD_DEPTH))
    return [JsonPart(value), *[p for p in parts if not (isinstance(p, TextPart) and _get_text_forms(p.text) & held)]]


def _iterate_text_forms(value: object, depth: int) -> Iterator[str]:
    """Yield the JSON of *value* and of its parts to *depth*, and each string also without quotes."""
    yield canonical(value)
    if isinstance(value, str):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for each in inner if depth else ():
        yield from _iterate_text_forms(each, depth - 1)


def _get_text_forms(text: str) -> set[str]:
    """Return a text and, if it is JSON, its canonical form."""
    read = _parse_json_unless_text(text, None)
    if read is text:
        return {text}
    try:
        return {text, canonical(freeze(read))}
    except DataError:
        return {text}


def _is_same_content(value: object, content: Sequence[Mapping[str, object]]) -> bool:
    """Return whether *value* only repeats the content of the result; absent members may be null."""
    return (
        isinstance(value, list | tuple)
        and bool(content)
        and all(isinstance(each, Mapping) for each in value)
        and [{k: v for k, v in each.items() if v is not None} for each in value] == [dict(each) for each in content]
    )


def _get_base64_data(block: Mapping[str, object]) -> str:
    """Return the base64 data of a content block; ``""`` if it has none."""
    resource = block.get("resource")
    found = resource.get("blob") if isinstance(resource, Mapping) else block.get("data")
    return found if isinstance(found, str) else ""


def _replace_media(value: object, shown_data: Collection[str]) -> object:
    """
    Return *value* with placeholders for media.

    These are those that the result shows, and whatever has the form of a block of content or of a resource of bytes.
    """
    if isinstance(value, str):
        return SHOWN if value in shown_data else value
    if isinstance(value, Mapping):
        kept = {name: _replace_media(each, shown_data) for name, each in value.items()}
        return {**kept, **_make_placeholder_member(value, shown_data)}
    if isinstance(value, list | tuple):
        return [_replace_media(each, shown_data) for each in value]
    return value


def _make_placeholder_member(value: Mapping[str, object], shown_data: Collection[str]) -> dict[str, str]:
    """Return the data member of a content block with a placeholder; ``{}`` if there is no such member or *shown_data* has its data."""
    is_block = value.get("type") in ("image", "audio") and isinstance(value.get("mimeType"), str)
    member = "data" if is_block else "blob" if isinstance(value.get("uri"), str) else ""
    data = value.get(member) if member else None
    if not isinstance(data, str) or data in shown_data:
        return {}
    return {member: f"[{len(data.rstrip('=')) * 3 // 4:,} bytes were left out]"}


def _does_only_text_encode(texts: Sequence[str], value: object) -> bool:
    """Return whether there is exactly one text, and it is *value* or its JSON."""
    return len(texts) == 1 and _do_texts_encode(texts, [value])


def _do_texts_encode(texts: Sequence[str], values: Sequence[object]) -> bool:
    """Return whether each text equals the value at its index, or is the JSON of the value."""
    return len(texts) == len(values) and all(
        _parse_json_unless_text(t, v) == v for t, v in zip(texts, values, strict=True)
    )


def _parse_json_unless_text(text: str, value: object) -> Any:
    """Return the JSON value in a text; the text itself if it is not JSON, is too long, or *value* is a text."""
    if isinstance(value, str) or len(text) > RESULT_CHARS:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def make_content_parts(content: Sequence[Mapping[str, object]]) -> list[ResultPart]:
    """Return the parts of a result, prompt or resource. Unsupported content is described in words."""
    parts = [_make_part(block) for block in content[:PARTS]]
    if len(content) > PARTS:
        parts.append(TextPart(f"[{len(content) - PARTS:,} more parts were left out]"))
    return parts


def _make_part(block: Mapping[str, Any]) -> ResultPart:
    """Return a block of content as a text, image or document; links, pages and unsupported content as words in brackets."""
    kind = str(block.get("type") or "")
    if page := _find_block_page(block):
        return TextPart(f"[the page {_clean_page_address(page)} is for people, and is left out]")
    if kind in ("text", UNREAD):
        return TextPart(str(block.get("text", "")))
    if kind == "image":
        return _make_media_part(block.get("data"), str(block.get("mimeType", "")), "image")
    if kind == "resource_link":
        about = f" ({block['mimeType']})" if block.get("mimeType") else ""
        return TextPart(f"[a link, which was not followed: {block.get('uri')}{about}]")
    if kind == "resource":
        return make_resource_part(block.get("resource") or {})
    if kind != "audio" and isinstance(block.get("text"), str):
        return TextPart(f"[{_format_short_json(kind)}, shown as text] {block['text']}")
    return TextPart(
        f"[{kind[:BLOCK_CHARS] or 'something'} of the type {block.get('mimeType', 'unknown')} was left out]"
    )


def make_resource_part(resource: Mapping[str, Any]) -> ResultPart:
    """Return the content of a resource as a text, image or PDF part; else a text with the reason why it is left out."""
    if isinstance(resource.get("text"), str):
        return TextPart(resource["text"])
    return _make_media_part(
        resource.get("blob"), str(resource.get("mimeType") or ""), f"the resource {resource.get('uri')}"
    )


def _make_media_part(encoded: object, mime: str, label: str) -> ResultPart:
    """Return an image or a PDF file as a part; else a text with the reason why it is left out."""
    mime = resolve_media_type(mime, _decode_start(encoded))
    cap = IMAGE_BYTES if mime in IMAGES else DOCUMENT_BYTES
    if mime not in (*IMAGES, PDF):
        return TextPart(f"[{label} of the type {mime or 'unknown'} was left out]")
    if not isinstance(encoded, str) or len(encoded) * 3 // 4 > cap:
        return TextPart(f"[{label} was left out: it has more than {cap:,} bytes]")
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return TextPart(f"[{label} was left out: it is no base64]")
    made = DocumentPart(data=data, mime_type=mime) if mime == PDF else ImagePart(data=data, mime_type=mime)
    result = make_tool_result(made)
    return TextPart(f"[{label} was left out: {result.text}]") if result.is_error else result.content[0]


def _decode_start(encoded: object) -> bytes:
    """Return the first bytes of base64 text, of which the whole may be too large; none if it cannot be decoded."""
    try:
        return base64.b64decode(encoded[:BEGIN_CHARS]) if isinstance(encoded, str) else b""
    except (binascii.Error, ValueError):
        return b""


def find_schema_mismatch(name: str, schema: Mapping[str, object], raw: Mapping[str, object]) -> str:
    """
    Return why a result does not match the output schema of its tool; ``""`` if it matches.

    A promise that cannot be checked without risk, such as an expression that has to be tried out, is taken as kept.
    """
    if is_error_result(raw):
        return ""
    try:
        check = JsonSchema(f"the output schema of {name!r}", schema)
    except (DefinitionError, DataError):
        return ""
    if raw.get("structuredContent") is None:
        return "it promises structured content, and gave none"
    try:
        issues = check.issues(freeze(raw["structuredContent"]))
    except DataError as error:
        return error.message
    return "; ".join([issue.removeprefix(": ") for issue in issues[:PARTS]])
