"""Typed results: what a tool returned goes through JSON and the function's return annotation, live and on replay."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from stepengine.data.json import compact
from stepengine.data.messages import DocumentPart, ImagePart, JsonPart, TextPart, ToolResult
from stepengine.errors import DataError, DefinitionError, ToolError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from stepengine.tools.definition import Tool

__all__ = ("decode", "decode_result")

R = TypeVar("R")
PARTS = (TextPart, JsonPart, ImagePart, DocumentPart)


def decode_result(tool: Tool[..., R], result: ToolResult) -> R:
    """
    Return a tool's result as the type that its function is annotated to return.

    Raises:
        ToolError: when the result is an error.
        DataError: when it does not fit the annotation.
    """
    return tool.decode(result)


def decode(tool: Tool[..., Any], annotation: Any, result: ToolResult) -> Any:
    """Return *result* as *annotation*; see ``Tool.decode``."""
    if result.is_error:
        msg = f"tool {tool.spec.name!r} failed: {result.text}"
        raise ToolError(msg, tool_name=tool.spec.name, result=result)
    if annotation is ToolResult:
        return result
    if annotation in PARTS:
        return _part(tool.spec.name, annotation, result)
    value = _value(result)
    if annotation is Any or (annotation in {str, int, bool} and type(value) is annotation):
        return value
    if annotation is None and value is None:
        return None
    return _validated(tool.spec.name, annotation, value)


def _part(name: str, kind: type[Any], result: ToolResult) -> Any:
    for part in result.content:
        if isinstance(part, kind):
            return part
    msg = f"the result of tool {name!r} holds no {kind.__name__}"
    raise DataError(msg)


def _value(result: ToolResult) -> Any:
    for part in result.content:
        if isinstance(part, JsonPart):
            return part.value
    return result.text


@functools.lru_cache(maxsize=1024)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


def _validated(name: str, annotation: Any, value: Any) -> Any:
    from pydantic import ValidationError
    from pydantic.errors import PydanticUserError

    try:
        try:
            adapter = _adapter(annotation)
        except TypeError:  # an annotation that cannot be hashed
            adapter = _adapter.__wrapped__(annotation)
    except PydanticUserError as error:
        kind = getattr(annotation, "__name__", annotation)
        msg = f"tool {name!r} returns {kind}, which cannot be read back from JSON; return a dataclass or pydantic model"
        raise DefinitionError(msg) from error
    try:
        return adapter.validate_json(compact(value))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'result'}: {e['msg']}" for e in error.errors(include_url=False)
        )
        msg = f"the result of tool {name!r} is not what its return annotation says: {problems}"
        raise DataError(msg) from error
