"""Functions whose source is made of the names of a class's own fields: run as attrs does it, and shown by debuggers."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

__all__ = ("generated",)


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
