"""Where a function stands in the author's files, and the types of its parameters."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from stepengine.errors import DefinitionError


def source_location(fn: Callable[..., object]) -> str:
    """Return ``file:line`` of a function; the name of its module if it has no Python code."""
    code = getattr(inspect.unwrap(_get_annotated_function(fn)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else str(getattr(fn, "__module__", type(fn).__module__))


def _get_annotated_function(fn: object) -> Any:
    """Return the function that has the annotations: below partials, a class's ``__init__`` or an object's ``__call__``."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    if isinstance(fn, type):
        return cast("Any", fn).__init__
    return fn if inspect.isroutine(fn) else type(fn).__call__


def is_bundled(fn: Callable[..., object]) -> bool:
    """Return True if *fn* is a plain function in a module of the bundled tools."""
    if not inspect.isfunction(fn) or hasattr(fn, "__wrapped__"):
        return False
    # Not `__module__`, which a wrapper may have taken over, and code that was executed without one lacks.
    return str(fn.__globals__.get("__name__")).startswith("stepengine.tools.bundled.")


_BUNDLED: dict[tuple[Any, ...], dict[str, Any]] = {}


def _get_bundled_hints(fn: Callable[..., object]) -> dict[str, Any]:
    """Return the annotations of a bundled function, cached; names in our own modules never change their meaning."""
    written = (fn.__module__, *fn.__annotations__.items())
    found = _BUNDLED.get(written)
    if found is None:
        found = _BUNDLED[written] = inspect.get_annotations(fn, eval_str=True)
    return dict(found)


def evaluate_hints(fn: Callable[..., object], names: Mapping[str, object] | None = None) -> dict[str, Any]:
    """
    Return the annotations of a function with strings evaluated; raise ``DefinitionError`` for a name that does not exist.

    Args:
        fn: A function, method, class, partial or callable object.
        names: More names that its string annotations may use, such as the locals where it was defined.

    Raises:
        DefinitionError: when an annotation names something that does not exist at run time.
    """
    plain = _get_annotated_function(fn)
    try:
        return _get_bundled_hints(plain) if is_bundled(plain) else inspect.get_annotations(plain, eval_str=True)
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


def caller_locals(package: str) -> Mapping[str, object]:
    """Return the local variables of the nearest caller outside of *package*, for annotations that use local classes."""
    frame = sys._getframe(1)  # noqa: SLF001  (the documented way to see a caller's names)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return dict(frame.f_locals)
