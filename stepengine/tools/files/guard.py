"""
``PathGuard``: what the rules of a run say about single files, for the call that runs now (requirements X70).

A rule judges the words of a call before it runs. Which files those words lead to is known only when they are opened, and a
search names none at all. So whoever carries a call out says here what the rules make of each file, and every ``Root`` asks:
a tool that is added later is bound without knowing of it. It is ambient because the bodies of tools are called with their
own arguments, some of them in threads, which take the context variables of their caller along.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import TypeAlias

__all__ = ("GUARD", "PathGuard", "left_out")

PathGuard: TypeAlias = Callable[[Sequence[str], Sequence[str]], str]
"""
Takes the real place of a tool's root, and a file's place below it, links resolved. Returns why the file is withheld, as the
end of a sentence that begins with its path; ``""`` when it is not.
"""

GUARD: contextvars.ContextVar[PathGuard | None] = contextvars.ContextVar("stepengine_path_guard", default=None)
"""What binds the call that runs now; ``None`` when no rule is about files."""


def left_out() -> tuple[str, ...]:
    """
    Return what a listing or search says under rules about files: one sentence; none without such rules.

    It is said whether or not there was something, else a model could ask for a pattern and read from the sentence alone
    whether a withheld file has it.
    """
    return () if GUARD.get() is None else ("files that rules keep from tools are left out",)
