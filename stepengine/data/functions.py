"""Checks of the functions that an author hands over: handlers and hooks. Their errors name file and line."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

__all__ = ("is_async", "is_generator_function", "location_of", "takes_one_argument", "unwrapped")


def unwrapped(fn: Any) -> Any:
    """Return what runs when *fn* is called: the function behind a partial, the ``__call__`` of an object."""
    while isinstance(fn, partial):
        fn = fn.func
    if inspect.isroutine(fn) or isinstance(fn, type) or not callable(fn):
        return fn
    return fn.__call__


def location_of(fn: Any) -> str:
    """Return ``file:line`` of a function, class, generator or coroutine, or its repr when it has no code."""
    if isinstance(fn, type):
        return _location_of_class(fn)
    fn = getattr(fn, "__func__", fn)
    for name in ("__code__", "gi_code", "ag_code", "cr_code"):
        code = getattr(fn, name, None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return repr(fn)


def _location_of_class(cls: type) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return f"{cls.__module__}.{cls.__qualname__}"


def is_async(fn: Any) -> bool:
    """Return whether calling the unwrapped *fn* gives a coroutine or an async generator."""
    return inspect.isasyncgenfunction(fn) or inspect.iscoroutinefunction(fn)


def is_generator_function(fn: Any) -> bool:
    """Return whether calling the unwrapped *fn* gives a generator."""
    return inspect.isgeneratorfunction(fn)


def takes_one_argument(fn: Any) -> bool:
    """Return whether *fn* can be called with one positional argument; yes when its signature is unknown."""
    try:
        inspect.signature(fn).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
