"""``@tool``: a typed function becomes a ``Tool``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from typing_extensions import Unpack

from stepengine.data.json import freeze
from stepengine.errors import DefinitionError
from stepengine.tools.arguments import FunctionInputs
from stepengine.tools.context import ToolContext
from stepengine.tools.definition import Tool, ToolOptions, check_tool_name
from stepengine.tools.places import caller_locals, source_location
from stepengine.tools.schemas import check_schema_for_providers
from stepengine.tools.signatures import parse_docstring, read_signature

P = ParamSpec("P")
R = TypeVar("R")


class ToolDecorator(Protocol):
    """Converts a function to a ``Tool``; its ``ToolContext`` is not a parameter of the tool."""

    @overload
    def __call__(self, fn: Callable[Concatenate[ToolContext, P], Coroutine[Any, Any, R]], /) -> Tool[P, R]: ...
    @overload
    def __call__(self, fn: Callable[Concatenate[ToolContext, P], R], /) -> Tool[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> Tool[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Tool[P, R]: ...


@overload
def tool(fn: Callable[Concatenate[ToolContext, P], Coroutine[Any, Any, R]], /) -> Tool[P, R]: ...
@overload
def tool(fn: Callable[Concatenate[ToolContext, P], R], /) -> Tool[P, R]: ...
@overload
def tool(fn: Callable[P, Coroutine[Any, Any, R]], /) -> Tool[P, R]: ...
@overload
def tool(fn: Callable[P, R], /) -> Tool[P, R]: ...
@overload
def tool(
    *, name: str | None = None, description: str | None = None, **options: Unpack[ToolOptions]
) -> ToolDecorator: ...
def tool(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    **options: Unpack[ToolOptions],
) -> Any:
    """
    Make a tool of a typed function: ``@tool`` or ``@tool(category="read", ...)``.

    The schema comes from the signature, the description and those of the parameters from the docstring (Google, NumPy or
    reST). A first parameter of type ``ToolContext`` and dependencies (``Depends``) are filled in per call and are no part
    of the schema. Input is validated by pydantic: ``"5"`` is accepted for an ``int``, a text for a date, unknown
    parameters are refused. ``async def`` bodies run on the event loop, others in a thread unless ``in_thread=False``.

    Args:
        fn: The function.
        name: The tool's name; the function's by default.
        description: For the model; the docstring by default.
        **options: See ``ToolOptions``.

    Raises:
        DefinitionError: naming file and line, for ``*args``, ``**kwargs``, a parameter without a type or with one that
            has no JSON Schema, a name that providers refuse, and options that do not go together.
    """
    names = caller_locals("stepengine.tools")
    if fn is None:
        return lambda function: _tool_from_function(function, name, description, options, names)
    return _tool_from_function(fn, name, description, options, names)


def _tool_from_function(fn: Any, name: str | None, description: str | None, options: ToolOptions, names: Any) -> Tool:
    """Return the tool for a function; raise ``DefinitionError`` if name, signature or schema cannot be used."""
    if isinstance(fn, Tool):
        msg = f"{fn!r} is already a tool; put @tool above a function only once"
        raise DefinitionError(msg)
    signature = read_signature(fn, names)
    name = getattr(fn, "__name__", "") if name is None else name
    check_tool_name(name, f"{source_location(fn)}: ")
    text, parameters = parse_docstring(fn.__doc__)
    inputs = FunctionInputs(name, signature, parameters)
    check_schema_for_providers(name, inputs.schema)
    return Tool.from_function(name, freeze(text if description is None else description), inputs, signature, options)
