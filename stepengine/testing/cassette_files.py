"""
Recorded requests with their responses, and the files that hold them: vcrpy's YAML version 1, readable in a diff.

Bodies are bytes as they are handed over; header names are lower-case, and values that came several times are several pairs.
Reading constructs strings, bytes, numbers, lists and mappings, and nothing else: every other tag is refused. Size, aliases
and depth are bounded before a tree is built, since a nested file would overflow the C stack and an aliased one the memory.
JSON bodies are written as indented text in a literal block, one field per line, so that plain vcrpy reads what we write; a
character that YAML would not print is written as JSON escape, which keeps the block.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias
from urllib.parse import urlsplit

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.json import JsonDict, freeze, thaw
from stepengine.errors import DataError
from stepengine.workspace.file_formats import FileFormat

__tracebackhide__ = True  # a failed test ends at its author's line

Headers: TypeAlias = tuple[tuple[str, str], ...]


def _parse_headers(value: Mapping[str, str] | Iterable[tuple[str, str]]) -> Headers:
    pairs = value.items() if isinstance(value, Mapping) else value
    return tuple([(name.lower(), content) for name, content in pairs])


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
    headers: Headers = attrs.field(default=(), converter=_parse_headers)
    body: bytes = b""

    def header(self, name: str) -> str:
        """Return the values of header *name* joined by commas; ``""`` when there is none."""
        return ", ".join([v for n, v in self.headers if n == name])


@frozen
class RecordedResponse:
    """
    A response as it is stored and replayed.

    Attributes:
        status: The status code.
        reason: The reason phrase; ``""`` when unknown.
        headers: Pairs of lower-case name and value.
        body: The body; compressed only when ``content-encoding`` says so.
    """

    status: int
    reason: str = ""
    headers: Headers = attrs.field(default=(), converter=_parse_headers)
    body: bytes = b""

    def header(self, name: str) -> str:
        """Return the values of header *name* joined by commas; ``""`` when there is none."""
        return ", ".join([v for n, v in self.headers if n == name])


@frozen
class Interaction:
    """
    A request and its response.

    Attributes:
        request: What was asked.
        response: What came back.
        extras: What stands beside them under ``x_stepengine``: ``chunks`` (sizes of the pieces as they arrived),
            ``complete`` (false when the reply was not read to its end).
    """

    request: RecordedRequest
    response: RecordedResponse
    extras: JsonDict = attrs.field(factory=JsonDict, converter=freeze)

    @property
    def complete(self) -> bool:
        """Whether the reply was read to its end while recording."""
        return bool(self.extras.get("complete", True))


def is_json(message: RecordedRequest | RecordedResponse) -> bool:
    """Return whether the content type of *message* is a JSON one."""
    kind = message.header("content-type").partition(";")[0].strip().lower()
    return kind == "application/json" or kind.endswith("+json")


def is_stream(message: Any) -> bool:
    """Return whether *message* is a stream of server-sent events."""
    return bool(message.header("content-type").strip().lower().startswith("text/event-stream"))


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
RESPONSE_KEYS = {"status", "headers", "body", "parsed_body", "url", "http_version", "protocol"}


def parse_cassette(data: bytes, source: str) -> tuple[Interaction, ...]:
    """
    Return the interactions of the cassette file *data*; *source* is how errors call the file.

    Raises:
        DataError: naming file, interaction index and key, for whatever is not a cassette.
    """
    if len(data) > MAX_BYTES:
        msg = f"{source} has {len(data)} bytes; a cassette has at most {MAX_BYTES}"
        raise DataError(msg)
    tree = _load_yaml(data, source)
    if not isinstance(tree, dict) or not isinstance(tree.get("interactions"), list):
        msg = f"{source} is not a cassette: it has no list of interactions at its top"
        raise DataError(msg)
    if tree.get("version", 1) != 1:
        msg = f"{source} has cassette version {tree['version']!r}; this reads version 1"
        raise DataError(msg)
    _refuse_unknown_keys(tree, TOP_KEYS, source, "$")
    return tuple([_read_interaction(item, source, index) for index, item in enumerate(tree["interactions"])])


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
def safe_loader() -> Any:
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
    import yaml

    try:
        text = data.decode()
        _check_yaml_size(text, source)
        return yaml.load(text, Loader=safe_loader())  # noqa: S506
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        msg = f"{source} cannot be read as plain YAML: {error}"
        raise DataError(msg) from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        # What PyYAML's constructors raise for a value that is not of the type that its tag or its form announces.
        msg = f"{source} cannot be read as plain YAML: it holds a value that is not of its type ({type(error).__name__}: {error})"
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
    for event in _parse_events(text, source):
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


def _parse_events(text: str, source: str) -> Iterator[Any]:
    """
    Yield the YAML events of *text*.

    The scanner reads ahead of the parser. From libyaml 0.2.6 on it refuses 1,000 open brackets before the parser reports the first.
    """
    import yaml

    try:
        yield from yaml.parse(text, Loader=safe_loader())
    except yaml.MarkedYAMLError as error:
        if "nesting depth" not in str(error.problem):
            raise
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        msg = f"{source} has too many levels of nesting at line {line}; a cassette has at most {MAX_DEPTH}"
        raise DataError(msg) from None


def _check_limit(count: int, limit: int, what: str, event: Any, source: str) -> None:
    if count > limit:
        msg = f"{source} has {count} {what} at line {event.start_mark.line + 1}; a cassette has at most {limit}"
        raise DataError(msg)


def _read_interaction(item: Any, source: str, index: int) -> Interaction:
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
    body, decoded = _read_body(response, source, f"{at}.response", bare=False)
    headers = _header_pairs(response.get("headers"), source, f"{at}.response.headers")
    if decoded:  # the recorder took the compression away and may have left its header
        headers = tuple([(n, v) for n, v in headers if n != "content-encoding"])
    return Interaction(
        RecordedRequest(
            _parse_text(request.get("method"), source, f"{at}.request.method"),
            _parse_url(request.get("uri"), source, f"{at}.request.uri"),
            _header_pairs(request.get("headers"), source, f"{at}.request.headers"),
            _read_body(request, source, f"{at}.request", bare=True)[0],
        ),
        RecordedResponse(status, reason, headers, body),
        JsonDict(freeze(extras)),
    )


def _read_body(message: dict[str, object], source: str, at: str, *, bare: bool) -> tuple[bytes, bool]:
    """Return the body's bytes and whether the file holds it as text or a tree."""
    if "parsed_body" in message:
        return _encode_json(message["parsed_body"], source, f"{at}.parsed_body"), True
    body = message.get("body")
    at = f"{at}.body"
    if isinstance(body, dict) and "type" in body:
        return _read_typed_body(body, source, at)
    if isinstance(body, dict) and not bare:
        _refuse_unknown_keys(body, {"string"}, source, at)
        body, bare, at = body.get("string"), True, f"{at}.string"
    if body is None:
        return b"", True
    if bare and isinstance(body, str):
        return _encode_text(body, source, at), True
    if bare and isinstance(body, bytes):
        return body, False
    raise _make_misfit_error(
        body, "text, binary, or a mapping with type and content" if bare else "a mapping with string", source, at
    )


def _read_typed_body(body: dict[str, object], source: str, at: str) -> tuple[bytes, bool]:
    _refuse_unknown_keys(body, {"type", "content"}, source, at)
    content = body.get("content")
    match body["type"]:
        case "none":
            return b"", True
        case "json":
            return _encode_json(content, source, f"{at}.content"), True
        case "text" if isinstance(content, str):
            return _encode_text(content, source, f"{at}.content"), True
        case "binary" if isinstance(content, bytes):
            return content, False
        case "binary" if isinstance(content, str):
            try:
                return bytes.fromhex(content), False
            except ValueError:
                raise _make_misfit_error(content, "hexadecimal digits", source, f"{at}.content") from None
    raise _make_misfit_error(body["type"], "none, json, text or binary with content of that kind", source, f"{at}.type")


def _encode_json(tree: object, source: str, at: str) -> bytes:
    try:
        return json.dumps(thaw(freeze(tree)), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except DataError as error:
        msg = f"{source}: {at} is not JSON: {error.message}"
        raise DataError(msg, path=at) from None


def _parse_status(status: object, source: str, at: str) -> tuple[int, str]:
    code, message = (status.get("code"), status.get("message")) if isinstance(status, dict) else (status, "")
    if isinstance(code, int) and not isinstance(code, bool) and isinstance(message or "", str):
        return code, message or ""
    raise _make_misfit_error(status, "a mapping with code and message", source, at)


def _header_pairs(headers: Any, source: str, at: str) -> Headers:
    if headers is None:
        return ()
    _check_mapping(headers, source, at)
    return tuple(
        [
            (_parse_text(n, source, at), v)
            for n, values in headers.items()
            for v in _parse_header_values(values, source, f"{at}.{n}")
        ]
    )


def _parse_header_values(values: object, source: str, at: str) -> Iterator[str]:
    for value in values if isinstance(values, list) else [values]:
        if isinstance(value, bytes):
            yield value.decode("latin-1")
        elif isinstance(value, str):
            yield value
        else:
            raise _make_misfit_error(value, "a text, or a list of texts", source, at)


def _encode_text(text: str, source: str, at: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise _make_misfit_error(text, "text that UTF-8 can hold", source, at) from None


def _parse_text(value: object, source: str, at: str) -> str:
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, str):
        return value
    raise _make_misfit_error(value, "a text", source, at)


def _parse_url(value: object, source: str, at: str) -> str:
    text = _parse_text(value, source, at)
    try:
        _ = urlsplit(text).port
    except ValueError:
        raise _make_misfit_error(text, "an address such as 'https://host/path'", source, at) from None
    return text


def _check_mapping(value: Any, source: str, at: str) -> None:
    if not isinstance(value, Mapping):
        raise _make_misfit_error(value, "a mapping", source, at)


def _refuse_unknown_keys(value: dict[str, object], known: set[str], source: str, at: str) -> None:
    for key in value:
        if key not in known:
            msg = f"{source}: {at} has the unknown key {key!r}; known are {list_names(sorted(known), key, quoted=True)}"
            raise DataError(msg, path=f"{at}.{key}")


def _make_misfit_error(value: object, fine: str, source: str, at: str) -> DataError:
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}..."
    return DataError(f"{source}: {at} is {shown}; {fine} would be fine", path=at)


# What libyaml does not print inside a literal block, and what YAML 1.1 counts as a line break there.
UNPRINTABLE = re.compile(r"[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd]")
ENDLESS = 1 << 30


def dump_cassette(interactions: Iterable[Interaction], extras: Mapping[str, object] | None = None) -> bytes:
    """Return the file that holds *interactions*, and *extras* that belong to none of them."""
    import yaml

    tree = {"interactions": [_interaction_to_yaml(i) for i in interactions], "version": 1}
    if extras:
        tree["x_stepengine"] = dict(extras)
    text = yaml.dump(
        tree, Dumper=_make_dumper(), allow_unicode=True, width=ENDLESS, sort_keys=False, default_flow_style=False
    )
    return str(text).encode()


@functools.cache
def _make_dumper() -> object:
    import yaml

    base: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)

    class Dumper(base):  # type: ignore[misc]
        def ignore_aliases(self, data: object) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return Dumper


def _interaction_to_yaml(interaction: Interaction) -> dict[str, object]:
    request, response = interaction.request, interaction.response
    tree: dict[str, object] = {
        "request": {
            "method": request.method,
            "uri": request.url,
            "headers": _headers_to_yaml(request),
            "body": _body_to_yaml(request),
        },
        "response": {
            "status": {"code": response.status, "message": response.reason},
            "headers": _headers_to_yaml(response),
            "body": {"string": _body_to_yaml(response)},
        },
    }
    if interaction.extras:
        tree["x_stepengine"] = thaw(interaction.extras)
    return tree


def _headers_to_yaml(message: RecordedRequest | RecordedResponse) -> dict[str, list[str]]:
    headers: dict[str, list[str]] = {}
    for name, value in message.headers:
        headers.setdefault(name, []).append(value)
    return headers


def _body_to_yaml(message: RecordedRequest | RecordedResponse) -> str | bytes:
    if message.header("content-encoding"):
        return message.body
    try:
        text = message.body.decode()
    except UnicodeDecodeError:
        return message.body
    return text if is_stream(message) else _indent_json(text)


def _indent_json(text: str) -> str:
    """Return a JSON object or array with one member per line; any other text as it is."""
    if text[:1] not in ("{", "["):
        return text
    try:
        tree = json.loads(text)
        written = json.dumps(tree, ensure_ascii=False, allow_nan=False, indent=2)
    except (ValueError, RecursionError):
        return text
    return UNPRINTABLE.sub(_escape_char, written)


def _escape_char(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
