"""``ToolName``: the name of a tool with its parameter and return types."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, get_origin, get_type_hints

from typing_extensions import ParamSpec, TypeVar

from stepengine.data.alike import list_names
from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.messages import ToolResult
from stepengine.errors import ToolError

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

KINDS: dict[Any, type] = {str: str, list: list}


def bind_arguments(name: str, signature: inspect.Signature, /, *args: object, **kwargs: object) -> dict[str, Any]:
    """
    Return Python arguments by parameter name; raise ``TypeError`` with the valid names if they do not fit the signature.

    Raises:
        TypeError: when they do not fit, naming the tool and what it takes.
    """
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        msg = f"{name}: {error}; valid arguments: {list_names(signature.parameters, none='none')}"
        raise TypeError(msg) from None


class ToolName(str, Generic[P, R_co]):  # noqa: SLOT000  (a name with a function as its attribute)
    """
    The name of a tool with its signature, so that ``call`` is typed; anywhere else it is a plain name.

    The engine decides which tool has the name, as for every name.

    Args:
        signature: A function with the parameters of the tool, annotated with its result; never called.
    """

    signature: Callable[P, R_co]

    def __new__(cls, signature: Callable[P, R_co]) -> ToolName[P, R_co]:
        """Return the name of the tool that has the name of the function."""
        made = super().__new__(cls, signature.__name__)
        made.signature = signature
        made.__doc__ = signature.__doc__
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return str, (str(self),)

    def arguments(self, *args: P.args, **kwargs: P.kwargs) -> JsonDict:
        """
        Return Python arguments as the tool's JSON input; omitted ones use the tool's defaults.

        Raises:
            TypeError: if the tool has other parameters.
            DataError: if a value is not JSON.
        """
        return freeze_object(bind_arguments(str(self), inspect.signature(self.signature), *args, **kwargs))

    @cached_property
    def returns(self) -> Any:
        """The return type of the tool."""
        return get_type_hints(self.signature, include_extras=True)["return"]

    def decode(self, result: ToolResult) -> R_co:
        """
        Return the tool's result as its return type; raise ``ToolError`` if the call failed or the type differs.

        Raises:
            ToolError: when the result is an error, or of another kind: another tool has the name, or it was too long and cut.
        """
        name, returns = str(self), get_origin(self.returns) or self.returns
        if result.is_error:
            msg = f"tool {name!r} failed: {result.text}"
            raise ToolError(msg, tool_name=name, result=result)
        wanted = KINDS.get(returns, dict)
        given: object = result.text if wanted is str or result.data is None else result.data
        if isinstance(given, wanted):
            return given  # type: ignore[return-value]  # the keys are the tool's promise
        msg = f"tool {name!r} returned a {type(given).__name__}, not a {wanted.__name__}"
        raise ToolError(msg, tool_name=name, result=result)
