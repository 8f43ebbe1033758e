"""
Tools that give an overview of a folder: ``find_files`` and ``read_subtree``.

``find_files`` ranks the files that a description may refer to, without a model or a stored index. It searches the words of the
description in the names of files, folders and top-level definitions; a word that matches few files counts more than one that
matches many. A word without a match is treated as a misspelling of the most similar word. ``read_subtree`` shows a folder as a tree
within a number of tokens.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from difflib import get_close_matches
from itertools import takewhile
from typing import Annotated, Any

from attrs import frozen
from pydantic import Field

from stepengine.data.estimate import CHARS_PER_TOKEN, estimate_tokens
from stepengine.data.tools import ToolAnnotations
from stepengine.errors import ToolError
from stepengine.tools.bundled.bounds import make_excess_notes, make_softly_bounded_field
from stepengine.tools.bundled.files.read_tools import READ_PATHS, TOO_MANY
from stepengine.tools.bundled.search.ignore import walk_visible_entries
from stepengine.tools.bundled.search.symbols import SHORTEST_STEM_CHARS, has_symbols, read_symbols, split_singular_words
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.workspace import calls
from stepengine.workspace.guard import make_withheld_notes
from stepengine.workspace.paths import format_display_path, printable_name
from stepengine.workspace.root import OpenedEntry, Root
from stepengine.workspace.walk import WalkBudget

FIND_RESULTS = 12
"""About as many files as a model opens next."""
FIND_RESULTS_MAX = 30
"""Further ones fit the words by chance."""
FIND_PROMPT_CHARS = 2_000
"""A task in some paragraphs; its words are looked for in every file."""
FIND_SOURCES = 3_000
"""Reading the symbols of so many files takes a second or two."""

Parts = tuple[str, ...]
PROMPT_WORDS = 40
"""The first words of a task name its subject; each is looked for in every file."""
SHOWN_SYMBOLS = 8
"""A line or two for each file."""
NEAR_RATIO = 0.78
"""Above difflib's 0.6, where different words of four letters are near: inflections of a word stay above it."""
SPELLED_CHARS, NEAR = 40, 1_000
"""How long a word may be that is taken for a misspelling, and of how many it may be one: comparing takes long."""
IN_NAME, IN_FOLDER, IN_SYMBOL, WHOLE_SYMBOL, NAMED = 10.0, 4.0, 6.0, 14.0, 60.0
"""Weights of a word by where it is found, by trial: a file that the task names comes before all others."""
BEGINNING = 0.6
"""What a word counts that only begins like one of the description, or the other way round."""
TESTS = frozenset({"test", "tests", "spec", "specs"})
# fmt: off
COMMON = frozenset((
    "a", "about", "all", "an", "and", "any", "are", "as", "at", "be", "by", "can", "code", "do", "does", "file",
    "files", "find", "for", "from", "get", "handle", "handles", "has", "have", "how", "i", "in", "is", "it", "its",
    "like", "me", "need", "of", "on", "or", "please", "project", "related", "relevant", "show", "source", "that",
    "the", "their", "them", "these", "this", "to", "use", "used", "uses", "want", "what", "where", "which", "who",
    "with", "you",
))
"""Words that say nothing about which file is meant."""
# fmt: on


def make_find_files_tool(root: Root) -> Tool:
    """Return the tool that finds files below *root* by a description."""

    @tool(
        category="read",
        annotations=ToolAnnotations(read_only=True, idempotent=True),
        parallel_safe=True,
        destinations=(),
    )
    def find_files(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        prompt: Annotated[str, Field(min_length=1, max_length=FIND_PROMPT_CHARS)],
        max_results: Annotated[int, make_softly_bounded_field(FIND_RESULTS_MAX)] = FIND_RESULTS,
    ) -> dict[str, Any]:
        """
        Find the files that fit a description, best match first.

        Usage:
            - Describe what you look for with the words that probably stand in file names, folders, classes and functions.
            - Read the first results with `read_files` to see whether they are the right ones.

        Examples:
            {"prompt": "session store for sqlite"}
            {"prompt": "class RetryPolicy, back-off of HTTP requests", "max_results": 5}

        When not to use:
            - To find files by a pattern for their path, use `glob`.
            - To find text inside of files, use `code_search`.

        Notes:
            - `symbols` shows which top-level names of a file fitted. Spelling mistakes are forgiven.
            - What `.gitignore` files leave out, `.git`, files with secrets and symbolic links are not found.
            - At most 20,000 entries are looked at, for 10 seconds; `message` says when that was not enough.

        Args:
            prompt: What to look for.
            max_results: How many files to return at most.
        """
        budget = WalkBudget(cancelled=ctx.cancelled)
        files = _list_files_with_symbols(root, budget)
        best = rank_files(prompt, files, budget.has_time_left)[: min(max_results, FIND_RESULTS_MAX)]
        notes = [f"{len(best)} of {len(files):,} files fit best" if best else "no file fits the description"]
        notes += make_excess_notes("max_results", max_results, FIND_RESULTS_MAX)
        if budget.cut:
            notes.append(f"incomplete: {budget.cut}")
        notes += make_withheld_notes()
        symbols = {format_display_path(hit.place): list(hit.symbols) for hit in best if hit.symbols}
        return {
            "files": [format_display_path(hit.place) for hit in best],
            "symbols": symbols,
            "message": "; ".join(notes),
        }

    return find_files


def _list_files_with_symbols(root: Root, budget: WalkBudget) -> dict[Parts, list[str]]:
    """Return the files below the root with the top-level names in each; the names are missing if the time was not sufficient."""
    opened = root.open_folder(".")
    try:
        with closing(walk_visible_entries(root, opened, budget)) as entries:
            places = [place for place, _, is_folder in entries if not is_folder]
    finally:
        calls.close(opened.fd)
    files: dict[Parts, list[str]] = {place: [] for place in places}
    for place in sorted(places, key=lambda p: (len(p), p))[:FIND_SOURCES]:
        if not budget.has_time_left():
            break
        files[place] = read_symbols(root, place)
    return files


@frozen
class Hit:
    """A matching file: its path, its score, and the matching names in it."""

    place: Parts
    score: float
    symbols: tuple[str, ...]


def rank_files(prompt: str, files: Mapping[Parts, list[str]], has_time: Callable[[], bool] = lambda: True) -> list[Hit]:
    """
    Return the files that match the description *prompt*, best first; ties by depth and name.

    Args:
        prompt: The description.
        files: The top-level names in each file, by its path.
        has_time: Called repeatedly; after it returns False, only the matches found so far are ranked.
    """
    index = _Index(files, has_time)
    wanted = list(dict.fromkeys(w for w in split_singular_words(prompt) if w not in COMMON))[:PROMPT_WORDS]
    scores: defaultdict[Parts, float] = defaultdict(float)
    for word in takewhile(lambda _: has_time(), wanted):
        fitting = index.score_files_with_word(word)
        weight = math.log(1 + len(files) / (1 + len(fitting)))
        for place, score in fitting.items():
            scores[place] += score * weight
    named = set(re.findall(r"[\w$./-]+", prompt))
    about_tests = bool(TESTS.intersection(wanted))
    hits = [
        Hit(
            place,
            index.adjust_score(place, scores[place], named, about_tests=about_tests),
            index.list_matching_symbols(place, wanted, named),
        )
        for place in takewhile(lambda _: has_time(), files)
        if scores[place] or index.is_named_in_description(place, named)
    ]
    return sorted(hits, key=lambda h: (-h.score, len(h.place), h.place))


class _Index:
    """An index from words to the files that have them in their path or top-level names."""

    def __init__(self, files: Mapping[Parts, list[str]], has_time: Callable[[], bool]) -> None:
        self._files = files
        self._by_word: defaultdict[str, dict[Parts, float]] = defaultdict(dict)
        for place, symbols in takewhile(lambda _: has_time(), files.items()):
            self._index_words(split_singular_words(place[-1]), place, IN_NAME)
            self._index_words((w for folder in place[:-1] for w in split_singular_words(folder)), place, IN_FOLDER)
            self._index_words((w for symbol in symbols for w in split_singular_words(symbol)), place, IN_SYMBOL)

    def _index_words(self, words: Iterable[str], path: Parts, score: float) -> None:
        """Record that a file has *words*; of two scores for the same word, the higher one is kept."""
        for word in words:
            known = self._by_word[word]
            known[path] = max(known.get(path, 0.0), score)

    def score_files_with_word(self, word: str) -> dict[Parts, float]:
        """Return the score of each file with *word*, or a word with the same beginning; if there is none, with the most similar word."""
        found = dict(self._by_word.get(word, {}))
        if len(word) >= SHORTEST_STEM_CHARS:
            for known, places in self._by_word.items():
                if (
                    known != word
                    and len(known) >= SHORTEST_STEM_CHARS
                    and (known.startswith(word) or word.startswith(known))
                ):
                    for place, score in places.items():
                        found[place] = max(found.get(place, 0.0), score * BEGINNING)
        if not found and SHORTEST_STEM_CHARS < len(word) <= SPELLED_CHARS:
            near = [known for known in self._by_word if known[:1] == word[:1] and abs(len(known) - len(word)) <= 2]  # noqa: PLR2004
            for known in get_close_matches(word, near[:NEAR], n=1, cutoff=NEAR_RATIO):
                found = {place: score * BEGINNING for place, score in self._by_word[known].items()}
        return found

    def is_named_in_description(self, path: Parts, description_words: set[str]) -> bool:
        """Return True if *description_words* contain the file's name, its path, or a name that it defines."""
        return not description_words.isdisjoint([path[-1], "/".join(path), *self._files[path]])

    def adjust_score(self, path: Parts, score: float, description_words: set[str], *, about_tests: bool) -> float:
        """Return *score*, raised if *description_words* name the file or its symbols, halved for a test file unless *about_tests*."""
        if not description_words.isdisjoint([path[-1], "/".join(path)]):
            score += NAMED
        elif not description_words.isdisjoint(
            [s for s in self._files[path] if len(s) > SHORTEST_STEM_CHARS and s not in COMMON]
        ):
            score += WHOLE_SYMBOL
        is_test = any(TESTS & set(re.split(r"[._-]", part.lower())) for part in path)
        return score / 2 if is_test and not about_tests else score

    def list_matching_symbols(
        self, path: Parts, search_words: list[str], description_words: set[str]
    ) -> tuple[str, ...]:
        """Return up to eight top-level names of a file that are among *description_words* or contain one of *search_words*."""
        fitting = [
            s
            for s in self._files[path]
            if s in description_words or not set(search_words).isdisjoint(split_singular_words(s))
        ]
        return tuple(fitting[:SHOWN_SYMBOLS])


SUBTREE_TOKENS = 4_000
"""An overview that is paid for at each further step."""
SUBTREE_TOKENS_MAX = 20_000
"""A tenth or less of a context window."""
SUBTREE_SOURCES = 3_000
"""Reading the symbols of so many files takes a second or two."""

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


@frozen
class TreeNode:
    """One line of a tree: its place, and whether it is a folder."""

    place: Parts
    is_folder: bool

    def format_line(self, depth: int, more: str = "") -> str:
        """Return the line of the entry in a tree, indented by its level below *depth*, with *more* after its name."""
        return f"{' ' * (len(self.place) - depth - 1)}{printable_name(self.place[-1])}{'/' if self.is_folder else ''}{more}\n"


def make_subtree_tool(root: Root) -> Tool:
    """Return the tool that shows the file tree below *root*."""

    @tool(
        category="read",
        annotations=ToolAnnotations(read_only=True, idempotent=True),
        parallel_safe=True,
        aliases={"paths": ("path",)},
        destinations=(),
    )
    def read_subtree(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        paths: Annotated[list[str] | None, Field(json_schema_extra={"maxItems": READ_PATHS})] = None,
        max_tokens: Annotated[int, make_softly_bounded_field(SUBTREE_TOKENS_MAX)] = SUBTREE_TOKENS,
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
        wanted = list(dict.fromkeys(p.rstrip("/") or p or "." for p in paths or ["."]))
        shown, refused = wanted[:READ_PATHS], wanted[READ_PATHS:]
        budget = WalkBudget(cancelled=ctx.cancelled)
        notes = make_excess_notes("max_tokens", max_tokens, SUBTREE_TOKENS_MAX)
        entries, left = [], min(max_tokens, SUBTREE_TOKENS_MAX)
        for number, path in enumerate(shown):
            entry = _make_path_entry(root, path, left // (len(shown) - number), budget)
            left -= entry.pop("spent", 0)
            if notes and "error" not in entry:
                entry["message"] = "; ".join([*notes, *([entry["message"]] if "message" in entry else [])])
            entries.append(entry)
        return entries + [{"path": path, "error": TOO_MANY.format(READ_PATHS)} for path in refused]

    return read_subtree


def _make_path_entry(root: Root, path: str, max_tokens: int, budget: WalkBudget) -> dict[str, Any]:
    """Return the entry of a folder with its tree, of a file with its names, or with an error; ``spent`` is its size in tokens."""
    try:
        opened = root.open_folder(path)
    except ToolError as error:
        return _make_file_entry(root, path, max_tokens, error)
    try:
        made = _Tree(root, opened, budget).make_tree_entry(max_tokens)
    finally:
        calls.close(opened.fd)
    return {"path": format_display_path(opened.parts), **made, "spent": made["token_count"]}


def _make_file_entry(root: Root, path: str, max_tokens: int, problem: ToolError) -> dict[str, object]:
    """Return the entry of a file with as many of its top-level names as fit, or its error."""
    try:
        opened = root.open_file(path)
    except ToolError as error:
        return {"path": path, "error": error.message}
    except OSError:
        return {"path": path, "error": problem.message}
    calls.close(opened.fd)
    names, kept, used = read_symbols(root, opened.parts), list[str](), 0
    for name in names:
        used += len(name) + 1
        if used > max_tokens * CHARS_PER_TOKEN:
            break
        kept.append(name)
    entry: dict[str, object] = {"path": format_display_path(opened.parts), "type": "file", "variables": kept}
    if len(kept) < len(names):
        entry["message"] = f"dropped: {len(names) - len(kept)} more names"
    return {**entry, "spent": estimate_tokens(" ".join(kept))}


def format_file_tree(root: Root, max_tokens: int) -> str:
    """Return the tree of the files below *root* in at most *max_tokens* tokens."""
    opened = root.open_folder(".")
    try:
        return str(_Tree(root, opened, WalkBudget()).make_tree_entry(max_tokens)["printed_tree"])
    finally:
        calls.close(opened.fd)


class _Tree:
    """The entries below one folder, reduced to a number of tokens."""

    def __init__(self, root: Root, opened: OpenedEntry, budget: WalkBudget) -> None:
        self._root = root
        self._depth = len(opened.parts)
        self._budget = budget
        with closing(walk_visible_entries(root, opened, budget)) as entries:
            self._all = [TreeNode(place, is_folder) for place, _, is_folder in entries]
        self._cut = budget.cut

    def make_tree_entry(self, max_tokens: int) -> dict[str, Any]:
        """Return the entry of the folder: its tree, reduced to *max_tokens*, the number of tokens, and a message about dropped parts."""
        room = max_tokens * CHARS_PER_TOKEN
        lean = [n for n in self._all if n.is_folder or not n.place[-1].lower().endswith(UNIMPORTANT)]
        dropped: list[str] = []
        nodes, symbols, level = self._all, dict[Parts, str](), "none"
        if self._count_line_chars(lean) > room:
            nodes, level, note = self._drop_deep_nodes(lean, room)
            dropped.append(note)
        else:
            symbols, missing = self._read_fitting_symbols(lean, room - self._count_line_chars(lean))
            if missing:
                level = "tokens"
                dropped.append(f"the names of {missing:,} source files")
            if missing or self._count_line_chars(nodes) + sum(map(len, symbols.values())) > room:
                nodes, level = lean, level if missing else "unimportant-files"
        if len(lean) < len(self._all) and nodes is not self._all:
            dropped.insert(0, f"{len(self._all) - len(lean):,} unimportant files")
        text = self._format_tree(nodes, symbols)
        result = {
            "type": "directory",
            "printed_tree": text,
            "token_count": estimate_tokens(text),
            "truncation_level": level,
        }
        notes = [f"dropped: {', '.join(dropped)}"] if dropped else []
        notes += [f"incomplete: {self._cut}"] if self._cut else []
        notes += make_withheld_notes()
        return {**result, "message": "; ".join(notes)} if notes else result

    def _count_line_chars(self, nodes: list[TreeNode]) -> int:
        """Return the number of characters of the lines of *nodes* in the tree."""
        return sum(len(n.format_line(self._depth)) for n in nodes)

    def _read_fitting_symbols(self, nodes: list[TreeNode], room: int) -> tuple[dict[Parts, str], int]:
        """Return (symbols by file, number of omitted files): the symbols that fit in *room* characters, top-level files first."""
        sources = sorted((len(n.place), n.place) for n in nodes if not n.is_folder and has_symbols(n.place[-1]))
        found: dict[Parts, str] = {}
        for number, (_, place) in enumerate(sources):
            if room <= len(MORE) or number >= SUBTREE_SOURCES or not self._budget.has_time_left():
                return found, len(sources) - len(found)
            text = "".join(f" {name}" for name in read_symbols(self._root, place))
            if len(text) <= room:
                found[place] = text
                room -= len(text)
        return found, len(sources) - len(found)

    def _drop_deep_nodes(self, nodes: list[TreeNode], room: int) -> tuple[list[TreeNode], str, str]:
        """Return (nodes of the levels that fit, else the first top-level nodes; truncation level; note about dropped nodes)."""
        sizes: Counter[int] = Counter()
        for node in nodes:
            sizes[len(node.place)] += len(node.format_line(self._depth)) + (len(MORE) if node.is_folder else 0)
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
            used += len(node.format_line(self._depth)) + len(MORE)
            if used > room:
                break
            kept.append(node)
        return kept, "depth-based", f"all but the first {len(kept):,} of {len(nodes):,} entries, and all names"

    def _format_tree(self, nodes: list[TreeNode], symbols: dict[Parts, str]) -> str:
        """Return the tree with the *symbols* of files; a folder whose content was dropped ends in ``...``."""
        filled = {n.place[:-1] for n in nodes}
        hollow = {n.place[:-1] for n in self._all} - filled
        return "".join(
            n.format_line(self._depth, symbols.get(n.place, MORE if n.is_folder and n.place in hollow else ""))
            for n in nodes
        )
