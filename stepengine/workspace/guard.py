"""
``CallGuard``: what the rules of a run say about the call that runs now.

A rule judges the words of a call before it runs. Which files those words lead to is known only when they are opened, and a
search names none at all. So whoever carries a call out says here what the rules make of each file, and every ``Root`` asks:
a tool that is added later is bound without knowing of it. It is ambient because the bodies of tools are called with their
own arguments, some of them in threads, which take the context variables of their caller along.

What the engine reads of a project for a prompt is bound likewise, although no call asks for it: see ``project_guard``.
"""

from __future__ import annotations

import contextvars
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from attrs import frozen

from stepengine.workspace.contained_paths import MAX_PATH_CHARS, contained_paths
from stepengine.workspace.path_rules import possible_paths

FileGuard: TypeAlias = Callable[[Sequence[str], Sequence[str]], str]
"""
Takes the real place of a tool's root, and a file's place below it, links resolved. Returns why the file is withheld, as the
end of a sentence that begins with its path; ``""`` when it is not.
"""


@frozen(kw_only=True)
class CallGuard:
    """
    The file rules for one call.

    Attributes:
        file: Judges single files; ``None`` where no rule is about files.
        named: The paths of the call that its tool does not open through a ``Root``.
        others: Other texts of such a call, which may name files.
        was_asked: Whether a person was asked about the call, and has seen these texts.
    """

    file: FileGuard | None = None
    named: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    was_asked: bool = False

    def refusal(self, folder: Path | None, *, is_here: bool = True) -> str:
        """
        Return why the call must not start, judged by the paths of the call; ``""`` if it may start.

        Args:
            folder: Where relative paths start, by default the working directory. Rules are about places below it, and of what
                is outside of it about every end of its path.
            is_here: Whether that is a folder of this machine. Where it is not, paths are judged as they are written; where links
                lead, the tools that work there judge.
        """
        if self.file is None or not (self.named or self.others):
            return ""
        folder = folder or Path.cwd()
        resolved = os.path.realpath if is_here else os.path.normpath
        top = _split_path(resolved(folder))
        for path in self.named:
            if not (readings := possible_paths(path)):
                return f"{path!r} cannot be resolved: it is encoded too often"
            for reading in readings:
                try:
                    real = _split_path(resolved(folder / reading))
                except (OSError, ValueError) as error:
                    return f"{path!r} cannot be resolved: {error}"
                if why := _judge_place(self.file, top, real):
                    return f"{path!r} {why}"
        return "" if self.was_asked or not is_here else self._find_refused_part(folder, top)

    def _find_refused_part(self, folder: Path, top: tuple[str, ...]) -> str:
        """Return why the call must not start, judged by the existing files that its texts name; ``""`` if it may start."""
        assert self.file is not None  # noqa: S101
        # As written these texts are allowed. Which files there are and where links lead is known only here.
        for path in (*_find_files(folder, self.named, is_path=True), *_find_files(folder, self.others, is_path=False)):
            if why := _judge_place(self.file, top, _split_path(os.path.realpath(folder / path))):
                return f"{path!r} {why}"
        return ""


def _find_files(folder: Path, texts: Sequence[str], *, is_path: bool) -> Iterator[str]:
    """
    Yield the paths to existing files that texts name.

    A text that is marked as a path was judged as one path, and not by its parts. Of another text single words were not judged. As the
    name of a folder only the whole text counts: prose is full of words such as "tests".
    """
    try:
        names = {name.casefold() for name in os.listdir(folder)}  # noqa: PTH208 - names, and not paths
    except OSError:
        names = set()
    top = os.path.realpath(folder)
    for text in texts:
        whole = possible_paths(text) if len(text) <= MAX_PATH_CHARS else ()
        for path in filter(None, dict.fromkeys([*whole, *sorted(contained_paths(text) or ())])):
            first = path.removeprefix("./").partition("/")[0].casefold()
            if (first in names or first in {"", "..", "."}) and "\0" not in path and os.path.lexists(folder / path):
                real = os.path.realpath(folder / path)
                is_link = real != os.path.normpath(os.path.join(top, path))  # noqa: PTH118 - as text
                if is_path or is_link or path in whole or os.path.isfile(real):  # noqa: PTH113 - a text
                    yield path


GUARD: contextvars.ContextVar[CallGuard | None] = contextvars.ContextVar("stepengine_guard", default=None)
"""What binds the call that runs now."""


PROJECT_RULES: contextvars.ContextVar[Callable[[], CallGuard | None]] = contextvars.ContextVar(
    "stepengine_project_rules", default=lambda: None
)
"""Returns what binds a function that reads the project for a prompt."""


def project_guard(folder: Path, top: Path, workspace: Path | None = None) -> CallGuard | None:
    """
    Return the guard for reading the project of *folder*; ``None`` without rules about files.

    Args:
        folder: The folder that agents work in; rules are about paths below it.
        top: The top of its repository. A file outside of *folder* is judged by every end of its path, one outside of *top* by none:
            it is the user's own.
        workspace: The folder that tools are confined to. Rules are about paths below it, too, where it holds *folder*.
    """
    guard = PROJECT_RULES.get()()
    if guard is None or guard.file is None:
        return None
    file, base, project = guard.file, _split_path(os.path.realpath(folder)), _split_path(os.path.realpath(top))
    around = base if workspace is None else _split_path(os.path.realpath(workspace))
    bases = {base, around} if base[: len(around)] == around else {base}

    def judge(root: Sequence[str], parts: Sequence[str]) -> str:
        real = (*root, *parts)
        if real[: len(project)] != project:
            return ""
        return next(filter(None, [_judge_place(file, one, real) for one in bases]), "")

    return CallGuard(file=judge)


def _judge_place(file: FileGuard, base: tuple[str, ...], real: tuple[str, ...]) -> str:
    """Return why a file is withheld: by its path below *base*, or outside of it by any end of its path; ``""`` if it is not."""
    starts = [len(base)] if real[: len(base)] == base else range(len(real))
    return next(filter(None, [file(real[:at], real[at:]) for at in starts]), "")


def _split_path(path: str) -> tuple[str, ...]:
    return tuple(filter(None, path.split("/")))


def file_guard() -> FileGuard | None:
    """Return the file guard of the current call; ``None`` without rules about files."""
    guard = GUARD.get()
    return None if guard is None else guard.file


def withheld_note() -> tuple[str, ...]:
    """
    Return the note that a listing or search omits withheld files; empty without rules about files.

    It is said whether or not there was something, else a model could ask for a pattern and read from the sentence alone
    whether a withheld file has it.
    """
    return () if file_guard() is None else ("files that rules keep from tools are left out",)
