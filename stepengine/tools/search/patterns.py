"""Glob patterns: ``*``, ``?``, ``[...]``, ``**`` and ``{a,b}``, matched component by component in polynomial time."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Sequence

from stepengine.errors import ToolError

__all__ = ("GlobPattern",)

FORMS = 64
PATTERN_CHARS = 512
COMPONENTS = 64


class GlobPattern:
    """
    A glob pattern for paths relative to one folder.

    Raises:
        ToolError: for an empty or absolute pattern, one with ``..``, and one that is too long or branches too often.
    """

    def __init__(self, pattern: str) -> None:
        text = pattern.removeprefix("./")
        problem = ""
        if not text or len(text) > PATTERN_CHARS:
            problem = f"a pattern has 1 to {PATTERN_CHARS} characters"
        elif text.startswith("/") or ".." in text.split("/"):
            problem = "patterns are relative to cwd and stay below it"
        if problem:
            msg = f"the pattern {pattern[:PATTERN_CHARS]!r} cannot be used: {problem}"
            raise ToolError(msg)
        self._forms = [_compiled(form, pattern) for form in _expanded(text, pattern)]

    def match(self, parts: Sequence[str]) -> bool:
        """Return whether a path matches."""
        return any(_matches(form, parts) for form in self._forms)


def _expanded(text: str, pattern: str) -> list[str]:
    """Return the forms that braces stand for."""
    forms, done = [text], list[str]()
    while forms:
        if len(forms) + len(done) > FORMS:
            msg = f"the pattern {pattern!r} cannot be used: its braces stand for more than {FORMS} patterns"
            raise ToolError(msg)
        form = forms.pop()
        inner = re.search(r"\{([^{}]*,[^{}]*)\}", form)
        if inner is None:
            done.append(form)
        else:
            forms += [form[: inner.start()] + choice + form[inner.end() :] for choice in inner[1].split(",")]
    return done


Component = Callable[[str], object] | None
"""Matches one name; ``None`` stands for ``**``, any number of names."""


def _compiled(form: str, pattern: str) -> list[Component]:
    names = [n for n in form.split("/") if n]
    if len(names) > COMPONENTS:
        msg = f"the pattern {pattern!r} cannot be used: it has more than {COMPONENTS} components"
        raise ToolError(msg)
    made: list[Component] = []
    for name in names:
        if name != "**":
            made.append(re.compile(fnmatch.translate(re.sub(r"\*{2,}", "*", name))).match)
        elif not made or made[-1] is not None:
            made.append(None)
    return made


def _matches(form: list[Component], parts: Sequence[str]) -> bool:
    @functools.cache
    def fits(component: int, part: int) -> bool:
        if component == len(form):
            return part == len(parts)
        one = form[component]
        if one is None:
            return fits(component + 1, part) or (part < len(parts) and fits(component, part + 1))
        return part < len(parts) and bool(one(parts[part])) and fits(component + 1, part + 1)

    return fits(0, 0)
