"""The source location of a function, and the types of its parameters."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from stepengine.errors import DefinitionError


def source_location(fn: Callable[..., object]) -> str:
    """Return ``file:line`` of a function; the name of its module if it is not written in Python."""
    code = getattr(inspect.unwrap(_get_annotated_function(fn)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else str(getattr(fn, "__module__", type(fn).__module__))


def _get_annotated_function(fn: object) -> Any:
    """Return the function with the annotations: that of a partial, the ``__init__`` of a class, or the ``__call__`` of an object."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, type):
        return cast("Any", fn).__init__
    return fn if inspect.isroutine(fn) else type(fn).__call__


def is_bundled_function(fn: Callable[..., object]) -> bool:
    """Return True if *fn* is an unwrapped function from a module of the bundled tools."""
    if not inspect.isfunction(fn) or hasattr(fn, "__wrapped__"):
        return False
    # Not `__module__`, which a wrapper may have taken over, and code that was executed without one lacks.
    return str(fn.__globals__.get("__name__")).startswith("stepengine.tools.bundled.")


_BUNDLED: dict[tuple[Any, ...], dict[str, Any]] = {}


def _get_bundled_hints(fn: Callable[..., object]) -> dict[str, Any]:
    """Return the annotations of a bundled function, evaluated and cached: names in these modules do not change."""
    written = (fn.__module__, *fn.__annotations__.items())
    found = _BUNDLED.get(written)
    if found is None:
        found = _BUNDLED[written] = inspect.get_annotations(fn, eval_str=True)
    return dict(found)


def evaluate_annotations(fn: Callable[..., object], names: Mapping[str, object] | None = None) -> dict[str, Any]:
    """
    Return the annotations of a function, with strings evaluated; raise ``DefinitionError`` for an unknown name.

    Args:
        fn: A function, method, class, partial or callable object.
        names: Further names for its string annotations, such as the local variables at its definition.

    Raises:
        DefinitionError: If an annotation uses a name that does not exist at run time.
    """
    plain = _get_annotated_function(fn)
    try:
        return (
            _get_bundled_hints(plain) if is_bundled_function(plain) else inspect.get_annotations(plain, eval_str=True)
        )
    except NameError:
        pass
    try:
        return inspect.get_annotations(plain, eval_str=True, locals=names or {})
    except NameError as error:
        msg = (
            f"{source_location(fn)}: an annotation of {getattr(fn, '__name__', fn)!r} names {error.name!r}, which does not exist "
            "at run time; import it outside of `if TYPE_CHECKING`"
        )
        raise DefinitionError(msg) from None


def get_caller_locals(package: str) -> Mapping[str, object]:
    """Return the local variables of the nearest calling frame outside of *package*, for annotations with local classes."""
    frame = sys._getframe(1)  # noqa: SLF001  (the documented way to see a caller's names)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return dict(frame.f_locals)
