"""
``CallGuard``: the decisions of a run's rules about the files of the current call.

A rule checks the words of a call before it runs. The files behind those words are known only when they are opened, and a search
names none at all. So the performer of a call sets the guard, and every ``Root`` applies it to each file: a new tool is bound
without code of its own. The guard is a context variable, because the bodies of tools are called with their own arguments. Threads
inherit the context variables of their caller.

Files that the engine reads for a prompt are bound in the same way, although no call requests them: see ``make_project_guard``.
"""

from __future__ import annotations

import contextvars
import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

import attrs
from attrs import frozen

from stepengine.workspace.contained_paths import MAX_PATH_CHARS, find_paths_in_text, has_wildcards
from stepengine.workspace.path_rules import possible_paths

MAX_COMPARED = 50_000
"""The most names and folders that are compared with the wildcards of a call, about a second of work."""

FileGuard: TypeAlias = Callable[[Sequence[str], Sequence[str]], str]
"""
Receives the real path of a tool's root, and a file's resolved path below it. Returns why the file is withheld, as the end of a
sentence that starts with its path; ``""`` if it is not.
"""


@frozen(kw_only=True)
class CallGuard:
    """
    The file rules for one call.

    Attributes:
        file: Returns why a single file is withheld; ``None`` if no rule is about files.
        named: The paths of the call that its tool does not open through a ``Root``.
        others: Other texts of the call, which may name files.
        was_asked: Whether a person was asked about the call, and has seen these texts.
    """

    file: FileGuard | None = None
    named: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    was_asked: bool = False

    def find_refusal(self, folder: Path | None, *, is_here: bool) -> str:
        """
        Return why the call must not start, judged by the paths of the call; ``""`` if it may start.

        Args:
            folder: The start of relative paths, by default the working directory. Rules are compared with paths below it. A file
                outside of it is judged by every end of its path.
            is_here: Whether *folder* is on this machine. If not, paths are judged as they are written, and the remote tools check
                the targets of links.
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
                if why := _find_withheld_reason(self.file, top, real):
                    return f"{path!r} {why}"
        return "" if self.was_asked or not is_here else self._find_refusal_by_parts(folder, top)

    def _find_refusal_by_parts(self, folder: Path, top: tuple[str, ...]) -> str:
        """Return why the call must not start, judged by the existing files that the texts of the call name, or ``""``."""
        assert self.file is not None  # noqa: S101
        # As written these texts are allowed. Which files there are and where links lead is known only here.
        patterns = _PatternExpander(folder)
        for texts, is_path in ((self.named, True), (self.others, False)):
            for path in _find_named_files(folder, texts, patterns, is_path=is_path):
                if why := _find_withheld_reason(self.file, top, _split_path(os.path.realpath(folder / path))):
                    return f"{path!r} {why}"
        return "its wildcards stand for more files than can be judged" if patterns.is_exhausted else ""


@attrs.define
class _PatternExpander:
    """Expands patterns with wildcards to the files of a folder, for at most about a second."""

    _folder: Path
    _names: dict[str, list[str]] = attrs.field(factory=dict, init=False)
    _left: int = attrs.field(default=MAX_COMPARED, init=False)

    @property
    def is_exhausted(self) -> bool:
        """Whether the limit of expanded paths is reached."""
        return self._left <= 0

    def expand(self, pattern: str) -> Iterator[str]:
        """Yield the paths that match a pattern: existing ones, and new names in existing folders."""
        given = [name for name in pattern.split("/") if name]
        names = [name for at, name in enumerate(given) if (name, given[at - 1 : at]) != ("**", ["**"])]
        start = "/" if pattern.startswith("/") else ""
        pending, seen = [(start, 0)], set[tuple[str, int]]()
        while pending and self._left > 0:
            path, at = pending.pop()
            self._left -= 1
            plain = list(takewhile(lambda name: not has_wildcards(name), names[at:]))
            path, at = path + "/".join(plain), at + len(plain)
            if at == len(names):
                yield path
                continue
            real = os.path.realpath(self._folder / path)
            if (real, at) in seen:
                continue  # a link that leads back
            seen.add((real, at))
            path, name = f"{path}/" if plain else path, names[at]
            fits = re.compile(fnmatch.translate(re.sub(r"\*{2,}", "*", name)), re.IGNORECASE).match
            if name == "**" and at + 1 < len(names):
                pending.append((path, at + 1))
            for found in self._list_names(real):
                self._left -= 1
                if fits(found):
                    is_last = at + 1 == len(names)
                    pending.append((f"{path}{found}" if is_last else f"{path}{found}/", at + 1))
                    if name == "**":
                        pending.append((f"{path}{found}/", at))

    def _list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, read only once; an empty list if it cannot be read."""
        if folder not in self._names:
            try:
                self._names[folder] = os.listdir(folder)  # noqa: PTH208 - names, and not paths
            except OSError:
                self._names[folder] = []
        return self._names[folder]


def _find_named_files(
    folder: Path, texts: Sequence[str], patterns: _PatternExpander, *, is_path: bool
) -> Iterator[str]:
    """
    Yield the paths in *texts* that lead to existing files or through links.

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
        written = dict.fromkeys([*whole, *sorted(find_paths_in_text(text) or ())])
        wild = [path for path in written if has_wildcards(path) and "\0" not in path]
        expanded = [found for path in wild for found in patterns.expand(path)]
        for path in filter(None, dict.fromkeys([*written, *expanded])):
            first = path.removeprefix("./").partition("/")[0].casefold()
            if (first in names or first in {"", "..", "."}) and "\0" not in path:
                real = os.path.realpath(folder / path)
                is_link = real != os.path.normpath(os.path.join(top, path))  # noqa: PTH118 - as text
                # A file may be created behind a link.
                if is_link or (os.path.lexists(real) and (is_path or path in whole or os.path.isfile(real))):  # noqa: PTH113 - a text
                    yield path


GUARD: contextvars.ContextVar[CallGuard | None] = contextvars.ContextVar("stepengine_guard", default=None)
"""The guard of the current call."""


PROJECT_RULES: contextvars.ContextVar[Callable[[], CallGuard | None]] = contextvars.ContextVar(
    "stepengine_project_rules", default=lambda: None
)
"""Returns the guard of a function that reads the project for a prompt."""


def make_project_guard(folder: Path, top: Path, workspace: Path | None) -> CallGuard | None:
    """
    Return the guard for reading the project of *folder*; ``None`` without rules about files.

    Args:
        folder: The folder that agents work in; rules are about paths below it.
        top: The top of its repository. A file outside of *folder* is judged by every end of its path, one outside of *top* by none:
            it is the user's own.
        workspace: The folder to which tools are confined. If it contains *folder*, rules are also about paths below it.
    """
    guard = PROJECT_RULES.get()()
    if guard is None or guard.file is None:
        return None
    file, base, project = guard.file, _split_path(os.path.realpath(folder)), _split_path(os.path.realpath(top))
    around = base if workspace is None else _split_path(os.path.realpath(workspace))
    bases = {base, around} if base[: len(around)] == around else {base}

    def find_withheld_reason(root: Sequence[str], parts: Sequence[str]) -> str:
        """Return why a file of the project is withheld; ``""`` for a file outside of the project."""
        real = (*root, *parts)
        if real[: len(project)] != project:
            return ""
        return next(filter(None, [_find_withheld_reason(file, one, real) for one in bases]), "")

    return CallGuard(file=find_withheld_reason)


def _find_withheld_reason(file: FileGuard, base: tuple[str, ...], real: tuple[str, ...]) -> str:
    """Return why a file is withheld, judged by its path below *base*, else by every end of its path, or ``""``."""
    starts = [len(base)] if real[: len(base)] == base else range(len(real))
    return next(filter(None, [file(real[:at], real[at:]) for at in starts]), "")


def _split_path(path: str) -> tuple[str, ...]:
    """Return the components of a path, without empty ones."""
    return tuple(filter(None, path.split("/")))


def get_current_file_guard() -> FileGuard | None:
    """Return the file guard of the current call; ``None`` without rules about files."""
    guard = GUARD.get()
    return None if guard is None else guard.file


def make_withheld_notes() -> tuple[str, ...]:
    """
    Return the note that a listing or search omits withheld files; empty without rules about files.

    The note is independent of the result. Otherwise a model could search for a pattern and learn from the note alone whether a
    withheld file contains it.
    """
    return () if get_current_file_guard() is None else ("files that rules keep from tools are left out",)
