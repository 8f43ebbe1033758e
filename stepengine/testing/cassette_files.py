"""
Recorded requests with their responses, and the files that hold them: vcrpy's YAML version 1, readable in a diff.

Bodies are bytes as they are handed over, and values of a header that came several times are several pairs. Reading constructs
strings, bytes, numbers, lists and mappings, and nothing else: every other tag is refused. Size, aliases and depth are bounded before
a tree is built, since a nested file would overflow the C stack and an aliased one the memory. Text stands in literal blocks, which
plain vcrpy reads, JSON with one member per line.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias
from urllib.parse import urlsplit

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.json import JsonDict, freeze, thaw
from stepengine.data.visible import cut_after
from stepengine.errors import DataError
from stepengine.testing.cassette_bodies import (
    STYLES,
    decode_body,
    format_indented_json,
    indent_json,
    restore_json_style,
)
from stepengine.testing.recorded_errors import error_from_json
from stepengine.workspace.file_formats import NOT_REGULAR, FileFormat, read_regular_file

__tracebackhide__ = True  # a failed test ends at its author's line

Headers: TypeAlias = tuple[tuple[str, str], ...]


def _to_header_pairs(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> Headers:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple([(name, content) for name, content in pairs])


def _to_lower_case_header_pairs(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> Headers:
    return tuple([(name.lower(), content) for name, content in _to_header_pairs(value)])


def _to_upper_case(method: str) -> str:
    return method.upper()


@frozen
class RecordedRequest:
    """
    A request as it is matched and stored.

    Attributes:
        method: Such as ``"POST"``.
        url: The whole URL.
        headers: Pairs of lower-case name and value.
        body: The body; ``b""`` for none.
    """

    method: str = attrs.field(converter=_to_upper_case)
    url: str
    headers: Headers = attrs.field(default=(), converter=_to_lower_case_header_pairs)
    body: bytes = b""

    def get_header(self, name: str) -> str:
        """Return the values of header *name* joined by commas; ``""`` when there is none."""
        return ", ".join([v for n, v in self.headers if n == name])


@frozen
class RecordedResponse:
    """
    A response as it is stored and replayed.

    Attributes:
        status: The status code.
        reason: The reason phrase; ``""`` when unknown.
        headers: Pairs of name and value, in their order and spelled as they came.
        body: The body; compressed if ``content-encoding`` says so.
    """

    status: int
    reason: str = ""
    headers: Headers = attrs.field(default=(), converter=_to_header_pairs)
    body: bytes = b""

    def get_header(self, name: str) -> str:
        """Return the values of header *name* in lower case, joined by commas; ``""`` when there is none."""
        return ", ".join([v for n, v in self.headers if n.lower() == name])


@frozen
class Interaction:
    """
    A request and its response.

    Attributes:
        request: The request.
        response: What came back.
        extras: Further data under ``x_stepengine``: ``chunks`` (sizes of the pieces as they arrived),
            ``complete`` (false when the reply was not read to its end), ``error`` (what the program met in place of a reply, or of its
            rest), ``transport`` (the name of the program's own transport of httpx that gave the reply).
        mark_key: The key of the marks in placeholders. Who recorded with one recorded all headers that count; ``""`` for other
            recordings.
    """

    request: RecordedRequest
    response: RecordedResponse
    extras: JsonDict = attrs.field(factory=JsonDict, converter=freeze)
    mark_key: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the reply was read to its end while recording."""
        return bool(self.extras.get("complete", True))

    @property
    def error(self) -> Exception | None:
        """The recorded error in place of a reply or of its rest, or ``None``; a new object each time."""
        return error_from_json(self.extras["error"]) if "error" in self.extras else None

    @property
    def has_failed_while_sending(self) -> bool:
        """Whether an error occurred while the program sent the request."""
        return bool(self.extras.get("error", {}).get("while_sending"))

    @property
    def is_playable(self) -> bool:
        """Whether it can be replayed. An event stream that was not read to its end cannot, because its events are incomplete."""
        return self.is_complete or "error" in self.extras or not is_event_stream(self.response)


def has_json_content_type(message: RecordedRequest | RecordedResponse) -> bool:
    """Return whether the content type of *message* is a JSON one."""
    kind = message.get_header("content-type").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def may_be_json(request: RecordedRequest) -> bool:
    """Return True if the content type of *request* is JSON, or if it is missing or mentions JSON and the body starts like it."""
    kind = request.get_header("content-type").partition(";")[0].lower()
    return has_json_content_type(request) or ((not kind or "json" in kind) and request.body[:1] in (b"{", b"["))


def is_event_stream(message: Any) -> bool:
    """Return whether *message* is a stream of server-sent events."""
    return bool(message.get_header("content-type").strip().lower().startswith("text/event-stream"))


CASSETTE_FILE = FileFormat(
    "a cassette",
    re.compile(rb'(?:[^\n]*\n)*?interactions:|\{\s*"(?:version|interactions)"\s*:'),
    DataError,
)
MAX_BYTES = 256 * 1024 * 1024
MAX_ALIASES = 1_000
MAX_DEPTH = 100
SHOWN_CHARACTERS = 100

TOP_KEYS = {"version", "interactions", "metadata", "x_stepengine"}
INTERACTION_KEYS = {"request", "response", "x_stepengine", "recorded_at"}
REQUEST_KEYS = {"method", "uri", "headers", "body", "parsed_body"}
IN_FILE = {"json", "text", "headers"}
"""Our additions that describe the form of a reply in the file; they are not part of the reply in memory."""
PAIR = 2
RESPONSE_KEYS = {"status", "headers", "body", "parsed_body", "url", "http_version", "protocol"}


def read_cassette_bytes(path: str | os.PathLike[str]) -> bytes:
    """
    Return the bytes of a cassette's file as stored; raise ``DataError`` for a pipe, a device or a folder.

    Raises:
        DataError: when it is a pipe, a device or a folder.
        OSError: when it cannot be read otherwise.
    """
    try:
        return read_regular_file(path, MAX_BYTES)
    except OSError as error:
        if error.strerror != NOT_REGULAR:
            raise
        msg = f"{os.fspath(path)} is not a cassette: {NOT_REGULAR}"
        raise DataError(msg) from None


def parse_cassette(data: bytes, source: str) -> tuple[Interaction, ...]:
    """
    Return the interactions of the cassette file *data*; *source* is how errors call the file.

    Raises:
        DataError: naming file, interaction index and key, for whatever is not a cassette.
    """
    return parse_cassette_and_extras(data, source)[0]


def parse_cassette_and_extras(data: bytes, source: str) -> tuple[tuple[Interaction, ...], dict[str, Any]]:
    """
    Return (interactions, members of ``x_stepengine`` that belong to none) of the cassette file *data*; raise ``DataError`` if invalid.

    Raises:
        DataError: as ``parse_cassette``.
    """
    if len(data) > MAX_BYTES:
        msg = f"{source} has {len(data)} bytes; a cassette has at most {MAX_BYTES}"
        raise DataError(msg)
    tree = _load_yaml(data, source)
    if not isinstance(tree, dict) or not isinstance(tree.get("interactions"), list):
        msg = f"{source} is not a cassette: it has no list `interactions` at its top level"
        raise DataError(msg)
    if tree.get("version", 1) != 1:
        msg = f"{source} has cassette version {tree['version']!r}; only version 1 is supported"
        raise DataError(msg)
    _refuse_unknown_keys(tree, TOP_KEYS, source, "$")
    extras = tree.get("x_stepengine") or {}
    _check_mapping(extras, source, "x_stepengine")
    key = extras.get("mark_key", "")
    if not isinstance(key, str) or not re.fullmatch(r"(?:[0-9a-f]{2})*", key):
        raise _make_invalid_value_error(key, "hexadecimal digits, in quotes", source, "x_stepengine.mark_key")
    interactions = tuple(
        [_parse_interaction(item, source, index, key) for index, item in enumerate(tree["interactions"])]
    )
    return interactions, {name: value for name, value in extras.items() if name != "mark_key"}


def parse_extras(data: bytes, source: str) -> dict[str, Any]:
    """
    Return the member ``x_stepengine`` of the cassette file *data*: data that belongs to no interaction.

    Raises:
        DataError: as ``parse_cassette``.
    """
    tree = _load_yaml(data, source)
    extras = (tree.get("x_stepengine") if isinstance(tree, dict) else None) or {}
    _check_mapping(extras, source, "x_stepengine")
    return dict(extras)


@functools.cache
def make_yaml_loader() -> Any:
    """Return PyYAML's safe loader, the C one if it is there, that leaves dates as text: JSON has none."""
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar = {
            first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
            for first, rules in base.yaml_implicit_resolvers.items()
        }

    return Loader


def _load_yaml(data: bytes, source: str) -> Any:
    """Return the tree of plain YAML; raise ``DataError`` for any other tag, and for too large or too nested content."""
    import yaml

    try:
        text = data.decode()
        _check_yaml_size(text, source)
        return yaml.load(text, Loader=make_yaml_loader())  # noqa: S506
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        msg = f"{source} cannot be read as plain YAML: {error}"
        raise DataError(msg) from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # What PyYAML's constructors raise for a value that is not of the type that its tag or its form announces.
        msg = (
            f"{source} cannot be read as plain YAML: a value does not match its type ({type(error).__name__}: {error})"
        )
        raise DataError(msg) from None


def _check_yaml_size(text: str, source: str) -> None:
    """
    Raise for too many aliases, too deep nesting, or too much text once aliases are expanded.

    The parser's events tell all of this and need neither stack nor memory.
    """
    import yaml

    aliases = 0
    anchor: Any = None
    open_nodes: list[list[Any]] = [[None, 0]]
    sizes: dict[str, int] = {}
    for event in _parse_yaml_events(text, source):
        size, anchor = 1, getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append([anchor, 1])
            _check_limit(len(open_nodes) - 1, MAX_DEPTH, "levels of nesting", event, source)
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = open_nodes.pop()
        elif isinstance(event, yaml.AliasEvent):
            aliases += 1
            _check_limit(aliases, MAX_ALIASES, "aliases", event, source)
            _check_limit(
                sum(anchor == name for name, _ in open_nodes), 0, "aliases inside their own value", event, source
            )
            anchor, size = None, sizes.get(anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = len(event.value) + 1
        if anchor is not None:
            sizes[anchor] = size
        open_nodes[-1][1] += size
        _check_limit(open_nodes[-1][1], MAX_BYTES, "characters with its aliases expanded", event, source)


def _parse_yaml_events(text: str, source: str) -> Iterator[Any]:
    """
    Yield the YAML events of *text*; raise ``DataError`` for too deep nesting.

    The scanner reads ahead of the parser. From libyaml 0.2.6 on it refuses 1,000 open brackets before the parser reports the first.
    """
    import yaml

    try:
        yield from yaml.parse(text, Loader=make_yaml_loader())
    except yaml.MarkedYAMLError as error:
        if "nesting depth" not in str(error.problem):
            raise
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        msg = f"{source} has too many levels of nesting at line {line}; a cassette has at most {MAX_DEPTH}"
        raise DataError(msg) from None


def _check_limit(count: int, limit: int, counted: str, event: Any, source: str) -> None:
    """Raise ``DataError`` with the line of a YAML *event* if *count* of the things *counted* is above *limit*."""
    if count > limit:
        msg = f"{source} has {count} {counted} at line {event.start_mark.line + 1}; a cassette has at most {limit}"
        raise DataError(msg)


def _parse_interaction(item: Any, source: str, index: int, mark_key: str) -> Interaction:
    """Return the interaction in one item of a cassette; raise ``DataError`` with the key of an invalid value."""
    at = f"interactions[{index}]"
    _check_mapping(item, source, at)
    _refuse_unknown_keys(item, INTERACTION_KEYS, source, at)
    request, response = item.get("request"), item.get("response")
    _check_mapping(request, source, f"{at}.request")
    _refuse_unknown_keys(request, REQUEST_KEYS, source, f"{at}.request")
    _check_mapping(response, source, f"{at}.response")
    _refuse_unknown_keys(response, RESPONSE_KEYS, source, f"{at}.response")
    extras = item.get("x_stepengine") or {}
    _check_mapping(extras, source, f"{at}.x_stepengine")
    status, reason = _parse_status(response.get("status"), source, f"{at}.response.status")
    body, decoded = _parse_message_body(response, source, f"{at}.response", bare=False)
    headers = _parse_header_pairs(response.get("headers"), source, f"{at}.response.headers")
    if decoded:  # the recorder took the compression away and may have left its header
        headers = tuple([(n, v) for n, v in headers if n.lower() != "content-encoding"])
    kept = {name: value for name, value in extras.items() if name not in IN_FILE}
    if "headers" in extras:
        headers = _parse_ordered_headers(extras["headers"], source, f"{at}.x_stepengine.headers")
    if "json" in extras:
        body = _restore_json_body(body, extras["json"], source, at)
    return Interaction(
        RecordedRequest(
            _parse_text(request.get("method"), source, f"{at}.request.method"),
            _parse_url(request.get("uri"), source, f"{at}.request.uri"),
            _parse_header_pairs(request.get("headers"), source, f"{at}.request.headers"),
            _parse_message_body(request, source, f"{at}.request", bare=True)[0],
        ),
        RecordedResponse(status, reason, headers, body),
        JsonDict(_freeze_json(kept, source, f"{at}.x_stepengine")),
        mark_key,
    )


def _parse_ordered_headers(value: Any, source: str, key_path: str) -> Headers:
    """Return the pairs of a list of headers; raise ``DataError`` for another form."""
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == PAIR for pair in value):
        return tuple([(_parse_text(n, source, key_path), _parse_text(v, source, key_path)) for n, v in value])
    raise _make_invalid_value_error(value, "a list of pairs of name and value", source, key_path)


def _restore_json_body(body: bytes, style: Any, source: str, key_path: str) -> bytes:
    """Return a body as it was sent, from its indented JSON in the file and its original *style*; raise ``DataError`` if that is impossible."""
    if not isinstance(style, str) or style not in STYLES:
        raise _make_invalid_value_error(style, f"one of {list_names(STYLES)}", source, f"{key_path}.x_stepengine.json")
    try:
        return restore_json_style(body.decode(), style).encode()
    except ValueError:
        msg = (
            f"{source}: {key_path}.response.body is not JSON, although {key_path}.x_stepengine.json declares it; "
            "correct the body, or remove that line"
        )
        raise DataError(msg, path=f"{key_path}.response.body") from None


def _parse_message_body(message: dict[str, object], source: str, key_path: str, *, bare: bool) -> tuple[bytes, bool]:
    """Return (bytes of a body, whether the file has it as text or a tree); raise ``DataError`` for another form."""
    if "parsed_body" in message:
        return _encode_json_body(message["parsed_body"], source, f"{key_path}.parsed_body"), True
    body = message.get("body")
    key_path = f"{key_path}.body"
    if isinstance(body, dict) and "type" in body:
        return _parse_typed_body(body, source, key_path)
    if isinstance(body, dict) and not bare:
        _refuse_unknown_keys(body, {"string"}, source, key_path)
        body, bare, key_path = body.get("string"), True, f"{key_path}.string"
    if body is None:
        return b"", True
    if bare and isinstance(body, str):
        return _encode_text(body, source, key_path), True
    if bare and isinstance(body, bytes):
        return body, False
    raise _make_invalid_value_error(
        body, "text, binary, or a mapping with type and content" if bare else "a mapping with string", source, key_path
    )


def _parse_typed_body(body: dict[str, object], source: str, key_path: str) -> tuple[bytes, bool]:
    """Return (bytes of a body with ``type`` and ``content``, whether the file has it as text or a tree); raise ``DataError`` for another."""
    _refuse_unknown_keys(body, {"type", "content"}, source, key_path)
    content = body.get("content")
    match body["type"]:
        case "none":
            return b"", True
        case "json":
            return _encode_json_body(content, source, f"{key_path}.content"), True
        case "text" if isinstance(content, str):
            return _encode_text(content, source, f"{key_path}.content"), True
        case "binary" if isinstance(content, bytes):
            return content, False
        case "binary" if isinstance(content, str):
            try:
                return bytes.fromhex(content), False
            except ValueError:
                raise _make_invalid_value_error(content, "hexadecimal digits", source, f"{key_path}.content") from None
    raise _make_invalid_value_error(
        body["type"], "none, json, text or binary with content of that kind", source, f"{key_path}.type"
    )


def _encode_json_body(tree: object, source: str, key_path: str) -> bytes:
    """Return the body for a JSON tree in a file, in our own formatting, because the original bytes are unknown."""
    return format_indented_json(thaw(_freeze_json(tree, source, key_path))).encode()


def _freeze_json(value: object, source: str, key_path: str) -> Any:
    """Return *value* frozen; raise ``DataError`` with its key if it is not JSON."""
    try:
        return freeze(value)
    except DataError as error:
        msg = f"{source}: {key_path} is not JSON: {error.message}"
        raise DataError(msg, path=key_path) from None


def _parse_status(status: object, source: str, key_path: str) -> tuple[int, str]:
    """Return (status code, reason phrase or ``""``); raise ``DataError`` for an invalid status."""
    code, message = (status.get("code"), status.get("message")) if isinstance(status, dict) else (status, "")
    if isinstance(code, int) and not isinstance(code, bool) and isinstance(message or "", str):
        return code, message or ""
    raise _make_invalid_value_error(status, "a mapping with code and message", source, key_path)


def _parse_header_pairs(headers: Any, source: str, key_path: str) -> Headers:
    """Return one pair for each value of each header; a header can have one value or a list."""
    if headers is None:
        return ()
    _check_mapping(headers, source, key_path)
    return tuple(
        [
            (_parse_text(n, source, key_path), v)
            for n, values in headers.items()
            for v in _parse_header_values(values, source, f"{key_path}.{n}")
        ]
    )


def _parse_header_values(values: object, source: str, key_path: str) -> Iterator[str]:
    """Yield the values of one header, a single one or a list; raise ``DataError`` for another type."""
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, bytes):
            yield value.decode("latin-1")
        elif isinstance(value, str):
            yield value
        else:
            raise _make_invalid_value_error(value, "a string, or a list of strings", source, key_path)


def _encode_text(text: str, source: str, key_path: str) -> bytes:
    """Return *text* in UTF-8; raise ``DataError`` for lone surrogates."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _make_invalid_value_error(text, "text that UTF-8 can encode", source, key_path) from None


def _parse_text(value: object, source: str, key_path: str) -> str:
    """Return a string, or bytes decoded as Latin-1; raise ``DataError`` for anything else."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, str):
        return value
    raise _make_invalid_value_error(value, "a string", source, key_path)


def _parse_url(value: object, source: str, key_path: str) -> str:
    """Return the text of a URL that can be parsed; raise ``DataError`` for another."""
    text = _parse_text(value, source, key_path)
    try:
        _ = urlsplit(text).port
    except ValueError:
        raise _make_invalid_value_error(text, "an address such as 'https://host/path'", source, key_path) from None
    return text


def _check_mapping(value: Any, source: str, key_path: str) -> None:
    """Raise ``DataError`` unless *value* is a mapping."""
    if not isinstance(value, Mapping):
        raise _make_invalid_value_error(value, "a mapping", source, key_path)


def _refuse_unknown_keys(value: dict[str, object], known: set[str], source: str, key_path: str) -> None:
    """Raise ``DataError`` if a mapping has a key that is not *known*."""
    for key in value:
        if key not in known:
            msg = f"{source}: {key_path} has the unknown key {key!r}; known keys: {list_names(sorted(known), key, quoted=True)}"
            raise DataError(msg, path=f"{key_path}.{key}")


def _make_invalid_value_error(value: object, expected: str, source: str, key_path: str) -> DataError:
    shown = repr(value)
    shown = cut_after(shown, SHOWN_CHARACTERS)
    return DataError(f"{source}: {key_path} is {shown}; use {expected}", path=key_path)


ENDLESS = 1 << 30


def dump_cassette(interactions: Iterable[Interaction], extras: Mapping[str, object] | None = None) -> bytes:
    """Return the bytes of a cassette file with *interactions*, and with *extras* that belong to none of them."""
    import yaml

    held = [*interactions]
    keys = {interaction.mark_key for interaction in held}
    beside = dict(extras or {})
    if len(keys) == 1 and (key := keys.pop()):
        beside["mark_key"] = key
    tree: dict[str, Any] = {"interactions": [_interaction_to_yaml(i) for i in held], "version": 1}
    if beside:
        tree["x_stepengine"] = beside
    text = yaml.dump(
        tree, Dumper=_make_yaml_dumper(), allow_unicode=True, width=ENDLESS, sort_keys=False, default_flow_style=False
    )
    return str(text).encode()


@functools.cache
def _make_yaml_dumper() -> object:
    """Return a PyYAML dumper, the C one if it is there, that writes no aliases, and texts of several lines as literal blocks."""
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(base):  # type: ignore[misc]
        def ignore_aliases(self, data: object) -> bool:
            """Return True, so that equal objects are written in full."""
            return True

    def represent_text(dumper: Any, value: str) -> Any:
        """Return a text as YAML, one of several lines as a literal block."""
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, represent_text)
    return Dumper


def _interaction_to_yaml(interaction: Interaction) -> dict[str, object]:
    """Return an interaction as the mapping of a cassette file; values that vcrpy has no place for are in ``x_stepengine``."""
    request, response = interaction.request, interaction.response
    extras = thaw(interaction.extras)
    body, style = _body_to_yaml(response)
    headers = _headers_to_yaml(response)
    if style:
        extras["json"] = style
    if response.get_header("content-encoding") and (text := _decompress_body_for_readers(response)):
        extras["text"] = text
    if [(n, v) for n, values in headers.items() for v in values] != [*response.headers]:
        extras["headers"] = [[*pair] for pair in response.headers]
    tree: dict[str, object] = {
        "request": {
            "method": request.method,
            "uri": request.url,
            "headers": _headers_to_yaml(request),
            "body": _body_to_yaml(request)[0],
        },
        "response": {
            "status": {"code": response.status, "message": response.reason},
            "headers": headers,
            "body": {"string": body},
        },
    }
    if extras:
        tree["x_stepengine"] = extras
    return tree


def _headers_to_yaml(message: RecordedRequest | RecordedResponse) -> dict[str, list[str]]:
    headers: dict[str, list[str]] = {}
    for name, value in message.headers:
        headers.setdefault(name, []).append(value)
    return headers


def _body_to_yaml(message: RecordedRequest | RecordedResponse) -> tuple[str | bytes, str]:
    """Return the form of a body in the file, and the style of its JSON."""
    if any(name.lower() == "content-encoding" for name, _ in message.headers):
        return message.body, ""
    try:
        text = message.body.decode()
    except UnicodeDecodeError:
        return message.body, ""
    is_raw = not may_be_json(message) if isinstance(message, RecordedRequest) else is_event_stream(message)
    return (text, "") if is_raw else indent_json(text)


def _decompress_body_for_readers(response: RecordedResponse) -> str:
    """Return the text of a compressed body with JSON indented, for readers of the file; ``""`` if it is no text."""
    try:
        text = decode_body(response.body, response.get_header("content-encoding")).decode()
    except UnicodeDecodeError:
        return ""
    return text if is_event_stream(response) else indent_json(text)[0]
