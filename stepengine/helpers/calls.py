"""``call`` and ``retry``: one tool call with a typed result, and anything that may be tried again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from stepengine.data.names import ToolName
from stepengine.data.tools import ToolLike
from stepengine.data.yields import StepResult, ToolCall, Yieldable
from stepengine.errors import ChildError, ModelError, OutputMissing, PerformError, StepEngineError, ToolError

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

WORTH_ANOTHER_TRY: tuple[type[StepEngineError], ...] = (ToolError, PerformError, ChildError, ModelError, OutputMissing)


@overload
def call(tool: ToolLike[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Generator[Yieldable, StepResult, R]: ...
@overload
def call(tool: ToolName[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Generator[Yieldable, StepResult, R]: ...
@overload
def call(tool: str, as_: type[R], /, **kwargs: Any) -> Generator[Yieldable, StepResult, R]: ...
def call(tool: Any, /, *args: Any, **kwargs: Any) -> Generator[Yieldable, StepResult, Any]:
    """
    Run a tool and return its typed result.

    ``todos = yield from call(find_todos, "src")`` gives what ``find_todos`` is annotated to return.

    ``call(tool, *args, **kwargs)`` takes a decorated tool and the arguments of its function; the result has the type of
    the function's return annotation, read back from JSON, live and on replay alike. ``call(read_files, ["a.py"])`` does the
    same with the names of bundled tools, which ``stepengine.tools.bundled`` has; the agent's tool of that name is run.
    ``call("name", type, **input)`` takes any tool by name and checks that the result is of *type*.

    Raises:
        ToolError: when the tool failed, or its result is of another type.
        ToolNotAvailable: when the agent has no such tool.
        ToolInputError: when the input does not fit.
    """
    if isinstance(tool, str) and not isinstance(tool, ToolName):
        return (yield from _call_by_name(tool, args[0] if args else object, kwargs))
    result = yield from ToolCall(tool, tool.arguments(*args, **kwargs))
    return tool.decode(result)


def _call_by_name(tool: str, as_: type[R], value: dict[str, object]) -> Generator[Yieldable, StepResult, R]:
    result = yield from ToolCall(tool, value)
    given = result.text if as_ is str else result.data
    if given is None:
        given = result.text
    if isinstance(given, as_):
        return given
    msg = f"tool {tool!r} gave a {type(given).__name__}, not a {as_.__name__}"
    raise ToolError(msg, tool_name=tool, result=result)


class YieldedFrom(Protocol[R_co]):
    """An operand of ``yield from``: a yieldable, or a generator of yieldables."""

    def __iter__(self) -> Generator[Yieldable, StepResult, R_co]:
        """Yield the action and return its result."""


def retry(
    make: Callable[[], YieldedFrom[R]],
    *,
    times: int = 3,
    on: tuple[type[StepEngineError], ...] = WORTH_ANOTHER_TRY,
) -> Generator[Yieldable, StepResult, R]:
    """
    Run the action that *make* returns until it succeeds, at most *times* times; then raise its last error.

    ``page = yield from retry(lambda: call(fetch, url), times=3)``

    Args:
        make: Returns what is to be done, anything that ``yield from`` takes; called anew for every try.
        times: How many tries there are, at least 1.
        on: The errors that are worth another try; by default those of tools, ``Perform``, children, models, and replies
            that do not fit a schema.

    Raises:
        StepEngineError: what the last try raised.
    """
    tries = max(times, 1)
    while True:
        tries -= 1
        try:
            return (yield from make())
        except on:
            if not tries:
                raise
