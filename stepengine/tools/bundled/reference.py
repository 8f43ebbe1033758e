"""
The documentation of the bundled tools: parameters from schemas, keys of results from shapes, an example from the description.

The documentation page and ``stepengine agents tools`` show it.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints

from attrs import frozen
from typing_extensions import Doc, is_typeddict

from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.tools import ToolSpec
from stepengine.tools.bundled.names import BUNDLED, BundledTool
from stepengine.tools.bundled.shapes import StartedJob

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    "add_message": {"role": "user", "content": "There are TODOs left."},
    "set_messages": {"messages": [{"role": "user", "content": "Begin anew."}]},
}
"""Example inputs of tools that no model receives, so that their descriptions have none."""
WORDS = {"array": "list", "null": "null"}
BOUNDS = (
    ("minimum", "maximum", "", ""),
    ("minItems", "maxItems", " entry", " entries"),
    ("maxLength", "maxLength", "", " characters"),
)


@frozen
class Parameter:
    """
    A parameter of a tool.

    Attributes:
        name: Its name.
        type: Its type, in words.
        is_required: Whether it must be passed.
        default: Its default in the schema; ``None`` without one.
        text: Its description.
    """

    name: str
    type: str
    is_required: bool
    default: Any
    text: str


@frozen
class ResultKey:
    """
    A key of a result.

    Attributes:
        name: Its name.
        type: Its type, in words.
        is_always: Whether it is always present.
        text: Its description.
        form: The form of the objects in it, if it contains any.
    """

    name: str
    type: str
    is_always: bool
    text: str
    form: Form | None = None


@frozen
class Form:
    """
    The form of a result.

    Attributes:
        type: Its type, in words.
        shape: The name of its class in ``stepengine.tools.bundled.shapes``; ``""`` for a text.
        keys: The keys of the object, or of each object of the list.
    """

    type: str
    shape: str = ""
    keys: tuple[ResultKey, ...] = ()


@frozen
class ToolPage:
    """
    The documentation of one tool.

    Attributes:
        name: Its name.
        text: Its purpose.
        maker: The call that creates it; ``""`` for the tools of every run.
        spec: Its specification.
        parameters: Its parameters.
        forms: The forms of its results: one, or one for each way to call it.
        errors: When a call fails.
        limits: The limits of a call.
        example: An example input.
    """

    name: str
    text: str
    maker: str
    spec: ToolSpec
    parameters: tuple[Parameter, ...]
    forms: tuple[Form, ...]
    errors: str
    limits: str
    example: JsonDict


def document_tools() -> list[ToolPage]:
    """Return the documentation of every bundled tool."""
    specs = _get_bundled_specs()
    return [_document_tool(one, specs[name]) for name, one in BUNDLED.items()]


def _document_tool(tool: BundledTool, spec: ToolSpec) -> ToolPage:
    """Return the documentation of a bundled tool: parameters, result forms, errors, limits and an example."""
    name = str(tool.name)
    forms = [
        _make_result_form(tool.name.returns),
        *([_make_result_form(StartedJob)] if name == "run_terminal_command" else []),
    ]
    return ToolPage(
        name=name,
        text=tool.documentation(""),
        maker="" if tool.maker is None else str(tool.maker),
        spec=spec,
        parameters=tuple(_list_parameters(spec)),
        forms=tuple(forms),
        errors=tool.documentation("Errors"),
        limits=tool.documentation("Limits"),
        example=_find_example(spec),
    )


@cache
def _get_bundled_specs() -> Mapping[str, ToolSpec]:
    """Return the specification of every bundled tool by name, cached."""
    from stepengine.tools.agent_tools import BUILT_IN
    from stepengine.tools.bundled.bundled import (
        change_hook_tools,
        file_tools,
        list_all_workspace_tools,
        memory_tools,
        skill_tools,
    )
    from stepengine.tools.bundled.changes import FileChangeHook

    made = [
        *list_all_workspace_tools(),
        *file_tools(Path("/"), write=True, delete=True, allow_wide_root=True),
        *change_hook_tools(Path("/"), [FileChangeHook("check", ["true"])], allow_wide_root=True),
        *skill_tools(),
        *memory_tools(),
        *BUILT_IN.values(),
    ]
    return {tool.name: tool.spec for tool in made}


def _find_example(spec: ToolSpec) -> JsonDict:
    """Return the tool's example input: a fixed one, else the first non-empty example in its description, else ``{}``."""
    if spec.name in EXAMPLES:
        return freeze_object(EXAMPLES[spec.name])
    behind = spec.description.partition("Examples:")[2]
    found: dict[str, object] = {}
    while not found and behind.lstrip(" \nor").startswith("{"):
        behind = behind.lstrip(" \nor")
        found, end = json.JSONDecoder().raw_decode(behind)
        behind = behind[end:]
    return freeze_object(found)


# --- parameters ----------------------------------------------------------------------------------------------------


def _list_parameters(spec: ToolSpec) -> Iterator[Parameter]:
    """Yield the top-level parameters of a tool, with type, default and description."""
    schema = spec.input_schema
    required = schema.get("required", ())
    for name, one in schema["properties"].items():
        yield Parameter(
            name, _describe_schema(one, schema), name in required, one.get("default"), one.get("description", "")
        )


def _describe_schema(schema: Mapping[str, Any], top: Mapping[str, Any]) -> str:
    """Return the type of a JSON Schema in words, with its bounds; references are looked up in *top*."""
    if "$ref" in schema:
        return _describe_schema(top["$defs"][schema["$ref"].rpartition("/")[2]], top)
    if "anyOf" in schema:
        words = [_describe_schema(one, top) for one in schema["anyOf"]]
        return (", or " if any("," in word and "{" not in word for word in words) else " or ").join(words)
    if "enum" in schema:
        return " or ".join([json.dumps(one) for one in schema["enum"]])
    kind = schema.get("type", "")
    if kind == "array":
        items = schema.get("items", {})
        what = _describe_schema(items, top)
        what = f"({what})" if " or " in what else _make_plural(what) if what.isalpha() and items else what
        return f"list of {what}{_describe_bounds(schema)}".replace("list of any", "list")
    if kind == "object" and "properties" in schema:
        members = [name if name in schema.get("required", ()) else f"{name}?" for name in schema["properties"]]
        return f"{{{', '.join(members)}}}"
    return f"{WORDS.get(kind, kind) or 'any'}{_describe_bounds(schema)}"


def _describe_bounds(schema: Mapping[str, object]) -> str:
    """Return the limits in a schema in words, such as ``, 1 to 10 entries``; ``""`` if there are none."""
    for low, high, one, several in BOUNDS:
        least, most = schema.get(low) if low != high else None, schema.get(high)
        if least is not None and most is not None:
            return f", {least:,} to {most:,}{several}"
        if most is not None:
            return f", at most {most:,}{several}"
        if least is not None:
            return f", at least {least:,}{one if least == 1 else several}"
    return ""


# --- results --------------------------------------------------------------------------------------------------


def _make_result_form(annotation: object) -> Form:
    """Return the form of a result type, with its keys if it is a typed dict or a list of them."""
    shape = _find_typed_dict(annotation)
    if shape is None:
        return Form(_describe_type(annotation))
    return Form(_describe_type(annotation), shape.__name__, list_result_keys(shape))


def list_result_keys(shape: Any) -> tuple[ResultKey, ...]:
    """Return the keys of a result class of ``stepengine.tools.bundled.shapes``."""
    keys = []
    for name, annotation in get_type_hints(shape, include_extras=True).items():
        docs = [one.documentation for one in _get_annotation_metadata(annotation) if isinstance(one, Doc)]
        inner = _find_typed_dict(annotation)
        form = None if inner is None else _make_result_form(inner)
        keys.append(ResultKey(name, _describe_type(annotation), name in shape.__required_keys__, " ".join(docs), form))
    return tuple(keys)


def _get_annotation_metadata(annotation: object) -> Sequence[object]:
    if get_origin(annotation) is NotRequired:
        return _get_annotation_metadata(get_args(annotation)[0])
    return get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()


def _strip_annotation(annotation: object) -> Any:
    """Return the type of an annotation without ``NotRequired`` and ``Annotated``."""
    while get_origin(annotation) in {NotRequired, Annotated}:
        annotation = get_args(annotation)[0]
    return annotation


def _find_typed_dict(annotation: object) -> Any:
    """Return the typed dict of an annotation, also of a list of them; ``None`` for other types."""
    plain = _strip_annotation(annotation)
    if get_origin(plain) is list:
        plain = _strip_annotation(get_args(plain)[0])
    return plain if is_typeddict(plain) else None


def _describe_type(annotation: object) -> str:
    """Return a Python type in words, by the names of JSON types."""
    plain = _strip_annotation(annotation)
    origin, inner = get_origin(plain), get_args(plain)
    if is_typeddict(plain):
        return "object"
    if origin is list:
        return f"list of {_make_plural(_describe_type(inner[0]))}"
    if origin is dict:
        return "object" if inner[1] is Any else f"object of {_make_plural(_describe_type(inner[1]))}"
    if origin is Literal:
        return " or ".join([json.dumps(one) for one in inner])
    if origin in {Union, types.UnionType}:
        return " or ".join([_describe_type(one) for one in inner])
    return {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}.get(plain, "any")


def _make_plural(word: str) -> str:
    """Return the plural of a type in words, such as ``lists of strings`` or ``strings``."""
    return f"lists{word.removeprefix('list')}" if word.startswith("list") else f"{word}s"
