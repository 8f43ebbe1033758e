"""
Read JSON from providers, with one strict reader for bodies, events and tool arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from stepengine.data.json import MAX_ARGUMENTS_CHARS, MAX_DECODINGS, JsonDict, compact, freeze
from stepengine.data.messages import ToolCallPart
from stepengine.data.usage import Usage
from stepengine.errors import DataError

MAX_COUNT_TOKENS = 10**12
"""No request has as many tokens; a larger number is an error, and would break sums and limits."""
ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
    rb"|\\.",
    re.DOTALL,
)


def encode_utf8(text: str) -> bytes:
    """Return *text* as UTF-8, lone surrogates replaced by U+FFFD."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()


def parse_json(data: bytes) -> Any:
    """
    Return the JSON value in *data*. Lone surrogates and invalid UTF-8 become U+FFFD; of duplicate keys the last wins.

    Raises:
        ValueError: when it is not JSON, contains NaN or an infinity by name, or is nested deeper than 200.
    """
    import jiter  # imported late, because most functions of this module need no parser

    try:
        return jiter.from_json(data, allow_inf_nan=False)
    except ValueError:
        mended = _repair_encoding(data)
        if mended == data:
            raise
    return jiter.from_json(mended, allow_inf_nan=False)


def _repair_encoding(data: bytes) -> bytes:
    """Return *data* with invalid UTF-8 and escaped lone surrogates replaced by U+FFFD."""
    text = data.decode("utf-8", "replace").encode()
    return ESCAPE.sub(lambda match: b"\\ufffd" if match.group(1) else match.group(0), text)


# The following functions read a member of a required type. A value of another type raises an error.


def get_optional_object(source: Mapping[str, object], name: str) -> Mapping[str, Any]:
    """Return the object under *name*, an empty one if it is missing or ``null``; raise ``TypeError`` for anything else."""
    value = source.get(name)
    if value is None:
        return {}
    return value if isinstance(value, Mapping) else _raise_wrong_type(name, "an object", value)


def get_optional_list(source: Mapping[str, object], name: str) -> list[Any]:
    """Return the array under *name*, an empty one if it is missing or ``null``; raise ``TypeError`` for anything else."""
    value = source.get(name)
    if value is None:
        return []
    return value if isinstance(value, list) else _raise_wrong_type(name, "an array", value)


def get_optional_objects(source: Mapping[str, object], name: str) -> list[Mapping[str, Any]]:
    """Return the array of objects under *name*, an empty one if it is missing or ``null``; raise ``TypeError`` for anything else."""
    values = get_optional_list(source, name)
    for value in values:
        if not isinstance(value, Mapping):
            _raise_wrong_type(name, "an array of objects", value)
    return values


def get_optional_text(source: Mapping[str, object], name: str) -> str:
    """Return the text under *name*, an empty one if it is missing or ``null``; raise ``TypeError`` for anything else."""
    value = source.get(name)
    if value is None:
        return ""
    return value if isinstance(value, str) else _raise_wrong_type(name, "a text", value)


def require_index(source: Mapping[str, object], name: str) -> int:
    """Return the index under *name*, an integer of at least 0; raise ``TypeError`` if it is missing or anything else."""
    value = source.get(name)
    return value if type(value) is int and value >= 0 else _raise_wrong_type(name, "an index", value)


def find_unknown_members(source: Mapping[str, object], known_names: frozenset[str]) -> dict[str, Any]:
    """Return the members of *source* that are neither *known_names* nor ``null``, such as those of a newer API."""
    if known_names.issuperset(source):
        return {}
    return {name: value for name, value in source.items() if name not in known_names and value is not None}


def wrap_unknown_members(part: Mapping[str, object], known_names: frozenset[str]) -> dict[str, Any]:
    """Return ``{"more": ...}`` with the unknown members of *part*, for the encoder to send back; ``{}`` if there are none."""
    newer = find_unknown_members(part, known_names)
    return {"more": newer} if newer else {}


def parse_token_count(value: object) -> int | None:
    """Return a number of tokens; ``None`` for other types and for negative, fractional or impossibly large numbers."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and 0 <= value <= MAX_COUNT_TOKENS else None


def parse_token_counts(raw: Mapping[str, object], *names: str) -> tuple[list[int], bool]:
    """Return the numbers of tokens under *names*, 0 for missing and invalid ones, and whether one of them is invalid."""
    counts = [parse_token_count(raw.get(name)) for name in names]
    is_unsure = any(raw.get(name) is not None and count is None for name, count in zip(names, counts, strict=True))
    return [count or 0 for count in counts], is_unsure


def _raise_wrong_type(name: str, expected: str, value: object) -> NoReturn:
    msg = f"{name!r} is {_describe_type(value)}, {expected} was expected"
    raise TypeError(msg)


def make_call_part(name: str, raw_arguments: object, provider_data: Mapping[str, object]) -> ToolCallPart:
    """
    Return the call of the tool *name* with the parsed *raw_arguments* of the model, without a call id.

    Unreadable arguments are stored as ``raw_input``, with the reason as ``input_error``. ``None``, ``null`` and an empty text
    are an empty object. An object that is encoded twice is decoded twice.
    """
    data = JsonDict(freeze(provider_data))
    text = (
        raw_arguments
        if isinstance(raw_arguments, str)
        else ""
        if raw_arguments is None
        else _value_to_json_or_repr(raw_arguments)
    )
    if len(text) > MAX_ARGUMENTS_CHARS:
        import hashlib

        digest = hashlib.sha256(encode_utf8(text)).hexdigest()
        error = f"the arguments are too large: {len(text)} characters, at most {MAX_ARGUMENTS_CHARS} are read"
        return ToolCallPart("", name, raw_input=f"sha256:{digest}", input_error=error, provider_data=data)
    try:
        return ToolCallPart("", name, _parse_arguments(text), provider_data=data)
    except (ValueError, DataError) as error:
        reason = str(error)
    raw_input = encode_utf8(text).decode()
    return ToolCallPart("", name, raw_input=raw_input, input_error=reason, provider_data=data)


def _value_to_json_or_repr(value: object) -> str:
    """Return a value as compact JSON, or its ``repr`` if it has no JSON form."""
    try:
        return compact(value)
    except ValueError:
        return repr(value)


def _parse_arguments(text: str) -> JsonDict:
    """Return the object in *text*, which may be encoded several times; raise ``ValueError`` or ``DataError`` for anything else."""
    value: object = text
    for _ in range(MAX_DECODINGS):
        if not isinstance(value, str):
            break
        value = parse_json(encode_utf8(value)) if value.strip() else {}
    if value is None:
        return JsonDict()
    if not isinstance(value, dict):
        msg = f"the arguments are {_describe_type(value)}, an object was expected"
        raise DataError(msg)
    frozen = freeze(value)
    return JsonDict(frozen)


def _describe_type(value: object) -> str:
    """Return the JSON type of *value* as a phrase for messages."""
    if isinstance(value, Mapping | list):
        return "an array" if isinstance(value, list) else "an object"
    if value is None:
        return "nothing"
    return "a text" if isinstance(value, str) else "a number or a boolean"


def _find_value(value: Any, keys: tuple[str, ...]) -> Any:
    for name in keys:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def find_object(value: object, *keys: str) -> Mapping[str, Any]:
    """Return the object under the nested *keys* of *value*; ``{}`` for a missing value or another type."""
    found = _find_value(value, keys)
    return found if isinstance(found, Mapping) else {}


def find_text(value: object, *keys: str) -> str:
    """Return the text under the nested *keys* of *value*; ``""`` for a missing value or another type."""
    found = _find_value(value, keys)
    return found if isinstance(found, str) else ""


def find_objects(value: Any, *keys: str) -> list[Mapping[str, Any]]:
    """Return the objects in the list under the nested *keys* of *value*; ``[]`` for a missing value or another type."""
    found = _find_value(value, keys)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list | tuple) else []


def usage_from_totals(
    raw: object, prompt_member: str, completion_member: str, *, cached_members: tuple[str, ...] = ()
) -> Usage | None:
    """
    Return the usage of an API whose totals include cached and reasoning tokens; ``None`` without a total.

    *prompt_member* and *completion_member* are the names of the totals. Their details are in objects with the suffix ``_details``.
    *cached_members* are other names for cached tokens. Without a total the result is ``None``.
    """
    if not isinstance(raw, Mapping) or (raw.get(prompt_member) is None and raw.get(completion_member) is None):
        return None
    inside, outside = raw.get(f"{prompt_member}_details"), raw.get(f"{completion_member}_details")
    whole, output = _get_token_count_or_zero(raw, prompt_member), _get_token_count_or_zero(raw, completion_member)
    cached = _get_token_count_or_zero(inside, "cached_tokens") or max(
        [_get_token_count_or_zero(raw, name) for name in cached_members], default=0
    )
    reasoning, total = _get_token_count_or_zero(outside, "reasoning_tokens"), parse_token_count(raw.get("total_tokens"))
    unsure = any(parse_token_count(raw.get(name)) is None for name in (prompt_member, completion_member))
    if cached > whole:
        # Grok on Azure counts cached tokens separately. If the total does not confirm that, the usage is uncertain.
        beside = total in {whole + cached + output, whole + cached + output + reasoning}
        whole, unsure = whole + cached if beside else whole, unsure or not beside
    read = min(whole, cached)
    written = min(whole - read, _get_token_count_or_zero(inside, "cache_write_tokens"))
    if reasoning and total == whole + output + reasoning:
        output += reasoning  # xAI counts it separately from the completion_member (providers:PV81)
    elif not (reasoning or unsure) and total is not None and total - whole - output != cached:
        reasoning = max(0, total - whole - output)  # Google's OpenAI endpoint counts it only in the total
        output += reasoning
    reasoning = min(output, reasoning)
    return Usage(whole - read - written, output - reasoning, read, written, reasoning, at_least=unsure)


def _get_token_count_or_zero(details: object, name: str) -> int:
    """Return the number of tokens under *name* of an object; 0 if it is missing or invalid."""
    return parse_token_count(details.get(name)) or 0 if isinstance(details, Mapping) else 0
