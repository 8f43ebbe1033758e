"""``@tool``, the decorator that makes a ``Tool`` from a typed function."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from typing_extensions import Unpack

from stepengine.data.json import freeze
from stepengine.errors import DefinitionError
from stepengine.tools.arguments import FunctionInputs
from stepengine.tools.context import ToolContext
from stepengine.tools.definition import Tool, ToolOptions, check_tool_name
from stepengine.tools.places import get_caller_locals, source_location
from stepengine.tools.schemas import check_schema_for_providers
from stepengine.tools.signatures import parse_docstring, read_signature

P = ParamSpec("P")
R = TypeVar("R")


class ToolDecorator(Protocol):
    """Converts a function to a ``Tool``, whose input does not include the ``ToolContext``."""

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

    The schema is made from the signature. The descriptions of the tool and its parameters are read from the docstring (Google,
    NumPy or reST). The engine passes a first parameter of type ``ToolContext`` and dependencies (``Depends``); the schema does
    not contain them. Pydantic validates the input: it accepts ``"5"`` for an ``int`` and a text for a date, and rejects unknown
    parameters. ``async def`` bodies run on the event loop, others in a thread unless ``in_thread=False``.

    Args:
        fn: The function.
        name: The tool's name; by default that of the function.
        description: The description for the model; by default the docstring.
        **options: See ``ToolOptions``.

    Raises:
        DefinitionError: With file and line, for ``*args``, ``**kwargs``, a parameter without a type or whose type has no
            JSON Schema, a name that providers reject, and contradicting options.
    """
    names = get_caller_locals("stepengine.tools")
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
