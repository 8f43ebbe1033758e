"""
``Guard``: what the rules of a run say about the call that runs now (requirements X70).

A rule judges the words of a call before it runs. Which files those words lead to is known only when they are opened, and a
search names none at all. So whoever carries a call out says here what the rules make of each file, and every ``Root`` asks:
a tool that is added later is bound without knowing of it. It is ambient because the bodies of tools are called with their
own arguments, some of them in threads, which take the context variables of their caller along.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs

if TYPE_CHECKING:
    from stepengine.system.argv import Argv
    from stepengine.system.root import Root

__all__ = ("GUARD", "CommandGuard", "FileGuard", "Guard", "file_guard", "left_out")

FileGuard: TypeAlias = Callable[[Sequence[str], Sequence[str]], str]
"""
Takes the real place of a tool's root, and a file's place below it, links resolved. Returns why the file is withheld, as the
end of a sentence that begins with its path; ``""`` when it is not.
"""

CommandGuard: TypeAlias = "Callable[[Root, Sequence[str], Argv], Argv]"
"""
Takes the root of a tool, the place of the working folder below it, and a command. Returns what is run in its place; raises
``ToolError`` for a command whose words lead to what it must not show.
"""


@attrs.frozen(kw_only=True)
class Guard:
    """
    What binds one call.

    Attributes:
        file: Judges single files; ``None`` where no rule is about files.
        command: Confines a command that is allowed because it only looks; ``None`` for other calls.
    """

    file: FileGuard | None = None
    command: CommandGuard | None = None


GUARD: contextvars.ContextVar[Guard | None] = contextvars.ContextVar("stepengine_guard", default=None)
"""What binds the call that runs now."""


def file_guard() -> FileGuard | None:
    """Return what judges the files of the call that runs now; ``None`` where no rule is about files."""
    guard = GUARD.get()
    return None if guard is None else guard.file


def left_out() -> tuple[str, ...]:
    """
    Return what a listing or search says under rules about files: one sentence; none without such rules.

    It is said whether or not there was something, else a model could ask for a pattern and read from the sentence alone
    whether a withheld file has it.
    """
    return () if file_guard() is None else ("files that rules keep from tools are left out",)
