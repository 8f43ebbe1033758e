"""``read_subtree``: a folder as a tree that fits a budget of tokens (requirements F14, generator-contract T14)."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import closing
from typing import Annotated, Any

import attrs
from pydantic import Field

from stepengine.data.estimate import estimate_tokens
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import ToolError
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.tools.files.paths import display, shown
from stepengine.tools.files.reading import READ_PATHS
from stepengine.tools.files.root import Opened, Root
from stepengine.tools.files.walk import Budget
from stepengine.tools.search.ignore import visible
from stepengine.tools.search.symbols import has_symbols, symbols_of

__all__ = ("subtree_tool",)

SUBTREE_TOKENS = 4_000
SUBTREE_TOKENS_MAX = 20_000
SUBTREE_SOURCES = 3_000

Parts = tuple[str, ...]
CHARS_PER_TOKEN = 4
MORE = " ..."
# fmt: off
UNIMPORTANT = (
    ".png", ".jpg", ".jpeg", ".gif", ".webp", ".ico", ".svg", ".bmp", ".tiff", ".mp3", ".mp4", ".wav", ".mov", ".webm",
    ".woff", ".woff2", ".ttf", ".otf", ".eot", ".pdf", ".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".tar", ".jar",
    ".pyc", ".o", ".a", ".so", ".dll", ".dylib", ".exe", ".class", ".wasm", ".bin", ".db", ".sqlite", ".parquet",
    ".lock", "-lock.json", "-lock.yaml", ".min.js", ".min.css", ".map", ".snap", ".log", ".csv", ".tsv",
)
"""How the names of files end that say little about a project."""
# fmt: on


@attrs.frozen
class Node:
    """One line of a tree: its place, and whether it is a folder."""

    place: Parts
    is_folder: bool

    def line(self, depth: int, more: str = "") -> str:
        """Return the line that shows it."""
        return f"{' ' * (len(self.place) - depth - 1)}{shown(self.place[-1])}{'/' if self.is_folder else ''}{more}\n"


def subtree_tool(root: Root) -> Tool[..., Any]:
    """Return the tool that shows the tree below *root*."""

    @tool(
        category="read",
        annotations=ToolAnnotations(read_only=True, idempotent=True),
        parallel_safe=True,
        aliases={"paths": ("path",)},
    )
    def read_subtree(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        paths: Annotated[list[Annotated[str, Field(min_length=1)]] | None, Field(max_length=READ_PATHS)] = None,
        max_tokens: Annotated[int, Field(ge=1, le=SUBTREE_TOKENS_MAX)] = SUBTREE_TOKENS,
    ) -> list[dict[str, Any]]:
        """
        Show folders as trees, with the top-level names of source files, within a budget of tokens.

        Usage:
            - Call it without `paths` first, to get an overview of the whole project.
            - Then ask for the folders of interest, where more detail fits into the budget.

        Examples:
            {}
            {"paths": ["src/server", "src/client"], "max_tokens": 8000}

        When not to use:
            - To find files by name, use `glob`, or `find_files` with a description.
            - To read files, use `read_files`.

        Notes:
            - Each path gives an entry: a folder `printed_tree`, a file its top-level names in `variables`, or `error`.
            - In a tree one blank per level; a file's names follow on its line.
            - `truncation_level` and `message` say what was dropped: unimportant files, names (`tokens`), deep entries
              (`depth-based`).
            - What `.gitignore` files leave out, `.git`, files with secrets and symbolic links are not shown.

        Args:
            paths: Folders or files, relative to the root folder; the root folder by default.
            max_tokens: How much to show in all, in tokens of about four characters.
        """
        wanted = list(dict.fromkeys(p.rstrip("/") or p for p in paths or ["."]))
        budget = Budget(cancelled=ctx.cancelled)
        entries, left = [], max_tokens
        for number, path in enumerate(wanted):
            entry = _entry(root, path, left // (len(wanted) - number), budget)
            left -= entry.pop("spent", 0)
            entries.append(entry)
        return entries

    return read_subtree


def _entry(root: Root, path: str, max_tokens: int, budget: Budget) -> dict[str, Any]:
    try:
        opened = root.open_folder(path)
    except ToolError as error:
        return _file_entry(root, path, max_tokens, error)
    try:
        made = _Tree(root, opened, budget).entry(max_tokens)
    finally:
        os.close(opened.fd)
    return {"path": display(opened.parts), **made, "spent": made["token_count"]}


def _file_entry(root: Root, path: str, max_tokens: int, problem: ToolError) -> dict[str, Any]:
    try:
        opened = root.open_file(path)
    except ToolError as error:
        return {"path": path, "error": error.message}
    except OSError:
        return {"path": path, "error": problem.message}
    os.close(opened.fd)
    names, kept, used = symbols_of(root, opened.parts), list[str](), 0
    for name in names:
        used += len(name) + 1
        if used > max_tokens * CHARS_PER_TOKEN:
            break
        kept.append(name)
    entry: dict[str, Any] = {"path": display(opened.parts), "type": "file", "variables": kept}
    if len(kept) < len(names):
        entry["message"] = f"dropped: {len(names) - len(kept)} more names"
    return {**entry, "spent": estimate_tokens(" ".join(kept))}


class _Tree:
    """What is below one folder, and how much of it fits."""

    def __init__(self, root: Root, opened: Opened, budget: Budget) -> None:
        self._root = root
        self._depth = len(opened.parts)
        self._budget = budget
        with closing(visible(root, opened, budget)) as entries:
            self._all = [Node(place, is_folder) for place, _, is_folder in entries]
        self._cut = budget.cut

    def entry(self, max_tokens: int) -> dict[str, Any]:
        """Return the tree: whole, or without unimportant files, or without names, or without deep entries."""
        room = max_tokens * CHARS_PER_TOKEN
        lean = [n for n in self._all if n.is_folder or not n.place[-1].lower().endswith(UNIMPORTANT)]
        dropped: list[str] = []
        nodes, names, level = self._all, dict[Parts, str](), "none"
        if self._size(lean) > room:
            nodes, level, note = self._shallow(lean, room)
            dropped.append(note)
        else:
            names, missing = self._names(lean, room - self._size(lean))
            if missing:
                level = "tokens"
                dropped.append(f"the names of {missing:,} source files")
            if missing or self._size(nodes) + sum(map(len, names.values())) > room:
                nodes, level = lean, level if missing else "unimportant-files"
        if len(lean) < len(self._all) and nodes is not self._all:
            dropped.insert(0, f"{len(self._all) - len(lean):,} unimportant files")
        text = self._text(nodes, names)
        result = {
            "type": "directory",
            "printed_tree": text,
            "token_count": estimate_tokens(text),
            "truncation_level": level,
        }
        notes = [f"dropped: {', '.join(dropped)}"] if dropped else []
        notes += [f"incomplete: {self._cut}"] if self._cut else []
        return {**result, "message": "; ".join(notes)} if notes else result

    def _size(self, nodes: list[Node]) -> int:
        return sum(len(n.line(self._depth)) for n in nodes)

    def _names(self, nodes: list[Node], room: int) -> tuple[dict[Parts, str], int]:
        """Return the names of as many source files as fit, shallow ones first, and how many have to do without."""
        sources = sorted((len(n.place), n.place) for n in nodes if not n.is_folder and has_symbols(n.place[-1]))
        found: dict[Parts, str] = {}
        for number, (_, place) in enumerate(sources):
            if room <= len(MORE) or number >= SUBTREE_SOURCES or not self._budget.check_time():
                return found, len(sources) - len(found)
            text = "".join(f" {name}" for name in symbols_of(self._root, place))
            if len(text) <= room:
                found[place] = text
                room -= len(text)
        return found, len(sources) - len(found)

    def _shallow(self, nodes: list[Node], room: int) -> tuple[list[Node], str, str]:
        """Return what fits when everything below some depth is dropped; in a very wide folder, the first entries."""
        sizes: Counter[int] = Counter()
        for node in nodes:
            sizes[len(node.place)] += len(node.line(self._depth)) + (len(MORE) if node.is_folder else 0)
        deepest, used = self._depth, 0
        while used + sizes[deepest + 1] <= room and deepest < max(sizes, default=deepest):
            deepest += 1
            used += sizes[deepest]
        if deepest > self._depth:
            kept = [n for n in nodes if len(n.place) <= deepest]
            note = f"{len(nodes) - len(kept):,} entries more than {deepest - self._depth} levels down, and all names"
            return kept, "depth-based", note
        kept = []
        for node in (n for n in nodes if len(n.place) == self._depth + 1):
            used += len(node.line(self._depth)) + len(MORE)
            if used > room:
                break
            kept.append(node)
        return kept, "depth-based", f"all but the first {len(kept):,} of {len(nodes):,} entries, and all names"

    def _text(self, nodes: list[Node], names: dict[Parts, str]) -> str:
        """Return the tree; a folder whose content was dropped ends in ``...``."""
        filled = {n.place[:-1] for n in nodes}
        hollow = {n.place[:-1] for n in self._all} - filled
        return "".join(
            n.line(self._depth, names.get(n.place, MORE if n.is_folder and n.place in hollow else "")) for n in nodes
        )
