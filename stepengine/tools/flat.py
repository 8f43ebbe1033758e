"""What the tools of the engine itself have in common: flat JSON Schemas, and the check of an input against one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stepengine.data.json import JsonDict, freeze
from stepengine.data.tools import Validated
from stepengine.errors import ToolInputError

__all__ = ("STRING", "described", "issues_of", "object_schema", "validator")

STRING = {"type": "string"}


def object_schema(required: tuple[str, ...] = (), **properties: Any) -> JsonDict:
    """Return the schema of an object that has these members and no others."""
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return JsonDict(freeze(schema))


def described(schema: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return *schema* with a description."""
    return {**schema, "description": text}


def _refused(tool_name: str, issues: Sequence[str]) -> ToolInputError:
    listed = "; ".join(issues)
    msg = f"Invalid parameters for {tool_name}: {listed}"
    return ToolInputError(msg, tool_name=tool_name, issues=issues)


def validator(
    tool_name: str, schema: JsonDict, also: Callable[[JsonDict], Iterator[str]] | None = None
) -> Callable[[JsonDict], Validated]:
    """
    Return a function that checks a tool's inputs against a flat schema: known members, required ones, simple types.

    *also* looks at inputs that fit and gives what else is wrong. The function raises ``ToolInputError``.
    """

    def validate(value: JsonDict) -> Validated:
        issues = list(issues_of(schema, value, ""))
        if also is not None and not issues:
            issues.extend(also(value))
        if issues:
            raise _refused(tool_name, issues)
        return Validated(value, value)

    return validate


_TYPES: Mapping[str, tuple[Any, str]] = {
    "string": (str, "text"),
    "boolean": (bool, "true or false"),
    "array": (list, "a list"),
    "object": (Mapping, "an object"),
}


def _word_of(value: Any) -> str:
    """Return what *value* is, but never the name of a class of ours that stands for a list or an object."""
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list) else type(value).__name__


def issues_of(schema: Mapping[str, Any], value: Any, path: str) -> Iterator[str]:
    """Give what is wrong with *value*, each with its path."""
    kind, word = _TYPES.get(schema.get("type", ""), (object, ""))
    if not isinstance(value, kind):
        yield f"{path or 'input'}: expected {word}, not {_word_of(value)}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{path}: expected one of {list(schema['enum'])}, not {value!r}"
    elif kind is Mapping:
        yield from _member_issues(schema, value, path)
    elif kind is list:
        yield from _item_issues(schema, value, path)


def _item_issues(schema: Mapping[str, Any], value: Sequence[Any], path: str) -> Iterator[str]:
    if len(value) < schema.get("minItems", 0):
        yield f"{path}: at least {schema['minItems']} needed"
    for index, item in enumerate(value):
        yield from issues_of(schema.get("items", {}), item, f"{path}[{index}]")


def _member_issues(schema: Mapping[str, Any], value: Mapping[str, Any], path: str) -> Iterator[str]:
    prefix = f"{path}." if path else ""
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{prefix}{name}: missing"
    for name, member in value.items():
        if name in properties:
            yield from issues_of(properties[name], member, f"{prefix}{name}")
        elif not schema.get("additionalProperties", True):
            yield f"{prefix}{name}: unknown; known are {sorted(properties)}"
