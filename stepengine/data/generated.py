"""Functions whose source is made of the names of a class's own fields: run as attrs does it, and shown by debuggers."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from types import FunctionType
from typing import Any

__all__ = ("generated", "generated_later")


def generated(what: str, source: str, known: dict[str, Any]) -> Callable[..., object]:
    """
    Return the one function that *source* defines.

    Its lines can be read wherever a file's can: in a traceback, in pdb, by ``inspect.getsource``.

    Args:
        what: What it is, as the place in a traceback: ``"maker of AgentState"``.
        source: One ``def``; it may name what *known* holds, and nothing that somebody else chose.
        known: The globals of the function; it is added.
    """
    file, count = f"<stepengine generated {what}>", 1
    lines = source.splitlines(keepends=True)
    # Without a time of change `checkcache` keeps the entry; two classes may have one name.
    while linecache.cache.setdefault(file, (len(source), None, lines, file)) != (len(source), None, lines, file):
        count += 1
        file = f"<stepengine generated {what} {count}>"
    before = set(known)
    exec(compile(source, file, "exec"), known)  # noqa: S102 - see *source*
    (name,) = known.keys() - before - {"__builtins__"}
    function: Callable[..., object] = known[name]
    return function


def generated_later(make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """
    Return the function that *make* gives, of ``generated``, which is called for it when somebody calls the function.

    It is that function itself then, with its code, and not one around it: there is no call more.
    """
    known: dict[str, Any] = {}
    function = FunctionType(_first.__code__, known)

    def become() -> Callable[..., Any]:
        made: Any = make()
        known.update(made.__globals__)
        # In this order: another thread may be calling it, and each line leaves something that can be called.
        function.__defaults__ = made.__defaults__
        function.__code__ = made.__code__
        function.__kwdefaults__ = made.__kwdefaults__
        return function

    function.__kwdefaults__ = {"_become": become}
    return function


def _first(*given: Any, _become: Callable[[], Callable[..., Any]], **named: Any) -> Any:
    return _become()(*given, **named)
