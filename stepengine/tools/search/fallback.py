"""
``code_search`` in Python, for where ripgrep is missing.

A regular expression of Python's ``re`` can take exponential time, and nothing can stop it; ``regex`` refuses those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING

from stepengine.errors import ToolError
from stepengine.tools.files.walk import Budget, walk
from stepengine.tools.search.flags import Flags
from stepengine.tools.search.hits import SEARCH_FILE_BYTES, FileHits, Sources
from stepengine.tools.search.ignore import Ignore
from stepengine.tools.search.patterns import IgnorePattern
from stepengine.tools.search.regex import SEARCH_COLUMNS, safe_columns

if TYPE_CHECKING:
    from stepengine.tools.files.root import Opened, Root

__all__ = ("HIDDEN_SEARCHED", "python_hits")

SEARCH_PATTERN_CHARS = 512

SHORT_LINE = 32
"""No pattern that is let through takes noticeable time for such a line; for a longer one the time is checked each time."""
HIDDEN_SEARCHED = (".agents", ".claude", ".github", ".gitlab", ".circleci", ".husky")
"""Hidden folders that are searched when they are directly in the folder of the search."""

# fmt: off
TYPES: dict[str, tuple[str, ...]] = {
    "c": ("*.c", "*.h"), "cpp": ("*.cpp", "*.cc", "*.cxx", "*.hpp", "*.hh", "*.hxx", "*.h"), "cs": ("*.cs",),
    "css": ("*.css", "*.scss"), "go": ("*.go",), "html": ("*.html", "*.htm"), "java": ("*.java",),
    "js": ("*.js", "*.jsx", "*.mjs", "*.cjs", "*.vue"), "json": ("*.json",), "kotlin": ("*.kt", "*.kts"), "lua": ("*.lua",),
    "markdown": ("*.md", "*.markdown"), "md": ("*.md", "*.markdown"), "php": ("*.php",), "py": ("*.py", "*.pyi"),
    "python": ("*.py", "*.pyi"), "ruby": ("*.rb",), "rust": ("*.rs",), "scala": ("*.scala",), "sh": ("*.sh", "*.bash", "*.zsh"),
    "sql": ("*.sql",), "swift": ("*.swift",), "toml": ("*.toml",), "ts": ("*.ts", "*.tsx", "*.mts", "*.cts"),
    "txt": ("*.txt",), "xml": ("*.xml",), "yaml": ("*.yaml", "*.yml"),
}
# fmt: on


def python_hits(
    root: Root, base: Opened, pattern: str, flags: Flags, *, per_file: int, budget: Budget
) -> Generator[FileHits, None, None]:
    """
    Yield the files with matches below a folder.

    Raises:
        ToolError: for a pattern or flag that Python cannot be trusted with.
    """
    test = _line_test(pattern, flags)
    wanted = _file_test(flags)
    ignore = Ignore(root, budget)
    sources = Sources(root, ignore)
    depth = len(base.parts)

    def enter(place: tuple[str, ...], _: int) -> bool:
        hidden = place[-1].startswith(".") and not (len(place) == depth + 1 and place[-1] in HIDDEN_SEARCHED)
        return not hidden and not root.secrets.match(place) and not ignore.is_ignored(place, is_folder=True)

    with closing(walk(root.device, base.fd, base.parts, budget, enter)) as entries:
        for place, entry in entries:
            if entry.is_dir(follow_symlinks=False) or place[-1].startswith(".") or not wanted(place):
                continue
            if entry.stat(follow_symlinks=False).st_size > SEARCH_FILE_BYTES:
                continue
            lines = sources.lines(place)
            if lines is not None:
                found = _search(lines, test, flags, per_file, budget)
                if found[0]:
                    yield FileHits(place, lines, *found)
            if budget.cut:
                return


def _search(
    lines: list[str], test: Callable[[str], bool], flags: Flags, per_file: int, budget: Budget
) -> tuple[list[tuple[int, int]], int]:
    spans: list[tuple[int, int]] = []
    total = 0
    for number in range(len(lines)):
        is_long = len(lines[number]) > SHORT_LINE
        if (is_long or not number % 1000) and not budget.check_time():
            break
        if test(lines[number]) is not flags.invert:
            total += 1
            if len(spans) <= per_file:
                spans.append((number, 1))
            elif not flags.count:
                break
            if flags.names_only or total == flags.max_count:
                break
    return spans, total


def _line_test(pattern: str, flags: Flags) -> Callable[[str], bool]:
    if flags.multiline:
        msg = "-U needs ripgrep, which is not installed here; search for one line of it"
        raise ToolError(msg)
    if len(pattern) > SEARCH_PATTERN_CHARS:
        msg = f"without ripgrep a pattern has at most {SEARCH_PATTERN_CHARS} characters"
        raise ToolError(msg)
    source = re.escape(pattern) if flags.fixed else pattern
    columns = SEARCH_COLUMNS if flags.fixed else safe_columns(source)
    if flags.word:
        source = rf"(?<!\w)(?:{source})(?!\w)"
    ignore_case = flags.case == "i" or (flags.case == "S" and not any(c.isupper() for c in pattern))
    compiled = re.compile(source, re.IGNORECASE if ignore_case else 0)
    search = compiled.fullmatch if flags.whole_line else compiled.search
    return lambda line: search(line[:columns]) is not None


def _file_test(flags: Flags) -> Callable[[tuple[str, ...]], bool]:
    """Return which files the flags ask for."""
    types, not_types = _endings(flags.types), _endings(flags.not_types)
    globs = [(not g.startswith("!"), IgnorePattern(g.removeprefix("!"))) for g in flags.globs]
    only = any(positive for positive, _ in globs)

    def wanted(parts: tuple[str, ...]) -> bool:
        if (flags.types and not parts[-1].endswith(types)) or parts[-1].endswith(not_types):
            return False
        verdicts = [positive for positive, pattern in globs if pattern.covers(parts)]
        return verdicts[-1] if verdicts else not only

    return wanted


def _endings(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return how the names of files of some types end."""
    unknown = [n for n in names if n not in TYPES]
    if unknown:
        msg = f"the file type {unknown[0]!r} is not known; these are: {', '.join(TYPES)}"
        raise ToolError(msg)
    return tuple([glob.removeprefix("*") for n in names for glob in TYPES[n]])
