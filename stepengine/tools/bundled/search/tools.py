"""``glob`` and ``code_search``, and with ``find_files`` the whole set: finding files and text below a root."""

from __future__ import annotations

import re
from contextlib import closing
from typing import Annotated, Any

from pydantic import Field

from stepengine.errors import ToolError
from stepengine.tools.bundled.bounds import make_excess_notes, make_softly_bounded_field
from stepengine.tools.bundled.files.read_tools import READS
from stepengine.tools.bundled.search.hits import SEARCH_MATCHES, MatchReport, SearchFlags, parse_flags
from stepengine.tools.bundled.search.ignore import walk_visible_entries
from stepengine.tools.bundled.search.overview import make_find_files_tool
from stepengine.tools.bundled.search.ripgrep import Ripgrep, find_ripgrep, search_in_python
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.workspace import calls
from stepengine.workspace.guard import make_withheld_notes
from stepengine.workspace.paths import format_display_path
from stepengine.workspace.patterns import GlobPattern
from stepengine.workspace.root import Root
from stepengine.workspace.walk import WalkBudget

SEARCH_MATCHES_PER_FILE = 15
"""Further ones in the same file are mostly of the same kind."""
SEARCH_SECONDS = 10.0
"""A repository is searched in a second; a model waits no longer for one of its many searches."""
GLOB_RESULTS = 100
"""About 2,000 tokens of paths."""

NEGATED = re.compile(r"\[\^(?!\])")
"""How shells, git and ripgrep also write ``[!``."""
OTHER_SYNTAX = re.compile(r"^!|[?*+@!]\(|\{-?\w+\.\.-?\w+(?:\.\.-?\d+)?\}")
"""What other globs have, and models write: exclusion, alternatives such as ``@(a|b)``, and ranges such as ``{1..3}``."""

FILES_SEEN = 200_000
"""About as many as are listed within the seconds of a search."""
GLOB_MAX_RESULTS = 2_000
"""About 40,000 tokens of paths, for a model that asks for them."""


def make_search_tools(root: Root, *, prefer_python: bool) -> list[Tool]:
    """Return `glob`, `code_search` and `find_files` for *root*; *prefer_python*: never use ripgrep."""
    ripgrep = None if prefer_python else find_ripgrep(root.real, root.system)

    @tool(category="read", annotations=READS, parallel_safe=True, destinations=())
    def glob(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        pattern: Annotated[str, Field(min_length=1)],
        cwd: str | None = None,
        max_results: Annotated[int, make_softly_bounded_field(GLOB_MAX_RESULTS)] = GLOB_RESULTS,
    ) -> dict[str, Any]:
        """
        Find files by a pattern for their path, sorted by path.

        Usage:
            - `*` stands for any part of a name, `**` for any folders, `?` for one character, `{a,b}` for alternatives.
            - None of them matches a dot at the start of a name: use `.*` or `.github/**`.
            - A pattern without `**/` looks only directly in the folder: `*.py` there, `**/*.py` everywhere.

        Examples:
            {"pattern": "**/*.py"}
            {"pattern": "**/*.{ts,tsx}", "cwd": "web", "max_results": 20}

        When not to use:
            - To find text in files, use `code_search`.
            - To see one folder, use `list_directory`.

        Notes:
            - `count` is the number of all matches, `files` holds the first `max_results` of them. Paths start at the root folder.
            - What `.gitignore` files leave out, `.git`, files with secrets and symbolic links are not found.
            - At most 20,000 entries are looked at, for 10 seconds; `message` says when that was not enough.

        Args:
            pattern: The pattern, relative to `cwd`.
            cwd: The folder to look in, relative to the root folder; the root folder by default.
            max_results: How many files to return at most.
        """
        wanted = GlobPattern(NEGATED.sub("[!", pattern), dotfiles=False)
        _check_glob_syntax(pattern)
        return _glob_files(root, wanted, cwd or ".", max_results, WalkBudget(cancelled=ctx.cancelled))

    @tool(category="read", annotations=READS, parallel_safe=True, destinations=())
    def code_search(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        pattern: Annotated[str, Field(min_length=1)],
        flags: str = "",
        cwd: str | None = None,
        max_results: Annotated[int, make_softly_bounded_field(SEARCH_MATCHES)] = SEARCH_MATCHES_PER_FILE,
    ) -> dict[str, Any]:
        """
        Search the text of files with a regular expression.

        Usage:
            - `stdout` shows each file with its matching lines and their numbers, counting from 1: to read on there, pass such a
              number to `read_files` as `offset`. Paths start at the root folder, also with `cwd`.
            - Narrow a search down with `-g` and `-t` in `flags`, or with `cwd`.

        Examples:
            {"pattern": "def main", "flags": "-g *.py"}
            {"pattern": "TimeoutError", "flags": "-w -t py -C 2", "cwd": "src", "max_results": 5}

        When not to use:
            - To find files by name, use `glob`.
            - To read a file that you know, use `read_files`.

        Notes:
            - Flags: -i ignore case, -s respect it, -S respect it for patterns with upper case, -w whole words, -F plain text,
              -x whole lines, -U across lines, -v lines without a match, -c count, -l names only, -t TYPE and -T TYPE file types,
              -g GLOB, -A N, -B N, -C N lines around a match, -m N matches per file, also by their long names in ripgrep, such as
              --type-not. Others are refused.
            - At most 250 matches and 20,000 characters, for 10 seconds; files over 4 MiB and binary files are left out.
            - What `.gitignore` files leave out, hidden files and files with secrets are not searched.

        Args:
            pattern: The regular expression; plain text with the flag -F.
            flags: Flags as in ripgrep, separated by blanks.
            cwd: The folder to search, relative to the root folder; the root folder by default.
            max_results: How many matches to show per file at most.
        """
        wanted = parse_flags(flags)
        if "\n" in pattern and not wanted.multiline:
            msg = "a pattern across lines needs the flag -U"
            raise ToolError(msg)
        budget = WalkBudget(FILES_SEEN, SEARCH_SECONDS, ctx.cancelled)
        return _search_files(root, ripgrep, pattern, wanted, cwd or ".", max_results, budget)

    return [glob, code_search, make_find_files_tool(root)]


def _check_glob_syntax(pattern: str) -> None:
    """Raise ``ToolError`` for a pattern that would silently find nothing: with unsupported syntax, or with ``/`` at its end."""
    found = OTHER_SYNTAX.search(pattern)
    if found:
        msg = (
            f"the pattern {pattern!r} cannot be used: {found[0]!r} has no special meaning here. Write {{a,b}} for alternatives, "
            "and ? for such a character of a name"
        )
        raise ToolError(msg)
    if pattern.endswith("/"):
        msg = f"the pattern {pattern!r} cannot be used: it names folders, and glob finds files. Write {pattern + '*'!r}"
        raise ToolError(msg)


def _glob_files(root: Root, pattern: GlobPattern, cwd: str, max_results: int, budget: WalkBudget) -> dict[str, object]:
    """Return the result of ``glob``: the first matching files, their total number and notes."""
    opened = root.open_folder(cwd)
    depth = len(opened.parts)
    try:
        with closing(walk_visible_entries(root, opened, budget, lambda place: pattern.match(place[depth:]))) as entries:
            found = sorted([place for place, _, is_folder in entries if not is_folder])
    finally:
        calls.close(opened.fd)
    most = min(max_results, GLOB_MAX_RESULTS)
    notes = [f"Found {len(found):,} file{'' if len(found) == 1 else 's'}"]
    notes += make_excess_notes("max_results", max_results, GLOB_MAX_RESULTS)
    if len(found) > most:
        notes.append(f"the first {most} are shown")
    if budget.cut:
        notes.append(f"incomplete: {budget.cut}")
    notes += make_withheld_notes()
    files = [format_display_path(place) for place in found[:most]]
    return {"files": files, "count": len(found), "message": "; ".join(notes)}


def _search_files(  # noqa: PLR0917  (one call, spelled out)
    root: Root, ripgrep: str | None, pattern: str, flags: SearchFlags, cwd: str, max_results: int, budget: WalkBudget
) -> dict[str, object]:
    """Return the result of ``code_search``, found by ripgrep, or in Python if *ripgrep* is ``None``."""
    most = min(max_results, SEARCH_MATCHES)
    report = MatchReport(flags, most, make_excess_notes("max_results", max_results, SEARCH_MATCHES))
    opened = root.open_folder(cwd)
    engine = None if ripgrep is None else Ripgrep(ripgrep, root, opened)
    try:
        hits = (
            search_in_python(
                root,
                opened,
                pattern,
                flags,
                max_per_file=most,
                budget=budget,
                on_skipped_line=report.count_skipped_line,
            )
            if engine is None
            else engine.search(pattern, flags, most, budget)
        )
        with closing(hits):
            for found in hits:
                if not report.add_file(found):
                    break
    finally:
        calls.close(opened.fd)
    report.stopped = report.stopped or budget.cut
    return report.make_result("" if engine is None else engine.problems)
