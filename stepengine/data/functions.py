"""Checks of the author's functions, such as handlers and hooks, and the search for the author's own code in a stack."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from opcode import opmap
from types import FrameType
from typing import Any

import stepengine.errors

PACKAGE = stepengine.errors.__file__.removesuffix("errors.py")
AGENTS = f"{PACKAGE}_agents"
LIBRARY = inspect.__file__.removesuffix("inspect.py")
INSTALLED = ("/site-packages/", "/dist-packages/")
PYTHON = "python"
OWN = ""
POP_TOP = opmap["POP_TOP"]
BETWEEN = frozenset(
    {0, opmap["RESUME"], opmap["YIELD_VALUE"], opmap["JUMP_BACKWARD_NO_INTERRUPT"], opmap.get("END_SEND", 0)}
)
"""
CPython's instructions between a call, ``yield`` or ``yield from`` and the use of its result; 0 is room for caches. Python 3.11 has no
``END_SEND``.
"""


def unwrap_function(fn: object) -> object:
    """Return the function that a call of *fn* runs: the one in a partial, or the ``__call__`` of an object."""
    while isinstance(fn, partial):
        fn = fn.func
    if inspect.isroutine(fn) or isinstance(fn, type) or not callable(fn):
        return fn
    return fn.__call__


def format_location(fn: object) -> str:
    """Return ``file:line`` of a function, class, generator or coroutine, or its repr when it has no code."""
    if isinstance(fn, type):
        return _format_class_location(fn)
    fn = getattr(fn, "__func__", fn)
    for name in ("__code__", "gi_code", "ag_code", "cr_code"):
        code = getattr(fn, name, None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return repr(fn)


def _format_class_location(cls: type) -> str:
    """Return ``file:line`` of a class, or its qualified name if its source is unknown."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return f"{cls.__module__}.{cls.__qualname__}"


def find_author_line(lines: Iterable[tuple[str, int]]) -> str:
    """
    Return ``file:line`` of the innermost line in the author's own code, else in the outermost installed package; else ``""``.

    Other code belongs to this package, to Python's library, to generated code of attrs and the like, or to an installed
    package. The installed package of the author's code itself is an exception.

    Args:
        lines: Files and lines of a stack, outermost first; the first one outside this package is the author's.
    """
    own = at_home = home = ""
    for file, line in lines:
        owner = _find_file_owner(file)
        if owner == OWN:
            own = f"{file}:{line}"
        elif owner != PYTHON:
            home = home or owner
            at_home = f"{file}:{line}" if owner == home else at_home
    return own or at_home


def is_installed_file(file: str) -> bool:
    """Return whether a file belongs to an installed package."""
    path = file.replace("\\", "/")
    return any(folder in path for folder in INSTALLED)


def _find_file_owner(file: str) -> str:
    """Return the owner of the code in *file*: ``OWN``, ``PYTHON``, the folder of an installed package, or *file* if it is no file."""
    if file.startswith((PACKAGE, "<frozen ")) and not file.startswith(AGENTS):
        return PYTHON
    if file.startswith("<") or file.endswith((".pyx", ".pxd", ".pxi")):
        return file
    path = file.replace("\\", "/")
    for folder in INSTALLED:
        before, found, inside = path.rpartition(folder)
        if found:
            return before + found + inside.partition("/")[0]
    return PYTHON if file.startswith(LIBRARY) else OWN


def discards_result(caller: FrameType) -> bool:
    """
    Return whether a frame discards the result of its current call or ``yield``.

    Only the next instruction is examined: a result that is assigned and never used counts as used.
    """
    code = caller.f_code.co_code
    follows = caller.f_lasti + 2
    while follows < len(code) and code[follows] in BETWEEN:
        follows += 2
    return follows < len(code) and code[follows] == POP_TOP


def is_async(fn: object) -> bool:
    """Return whether calling the unwrapped *fn* returns a coroutine or an async generator."""
    return inspect.isasyncgenfunction(fn) or inspect.iscoroutinefunction(fn)


def accepts_one_argument(fn: Any) -> bool:
    """Return whether *fn* accepts one positional argument; True if its signature is unknown."""
    try:
        inspect.signature(fn).bind(None)
    except TypeError:
        return False
    except ValueError:
        return True
    return True
