"""
The top-level names of source files, and the words that names and texts are compared by.

Names are found by a pattern per language that looks at the beginning of lines, so it needs no parser, no grammar and no
working code; what it finds is good enough to choose a file by. Every repetition in a pattern is bounded or cannot
overlap with its neighbour.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from stepengine.errors import ToolError
from stepengine.workspace import calls
from stepengine.workspace.text import FileText, decode_text, read_if_small

if TYPE_CHECKING:
    from stepengine.workspace.root import Root

FILE_BYTES = 512 * 1024
"""Larger files are generated."""
LINE_CHARS = 300
"""A definition names its symbol at the beginning of its line."""
MAX_NAMES = 200
"""A file with more is generated, or a table."""

PYTHON = r"(?:async +)?def +(\w+)|class +(\w+)|([A-Za-z]\w*) *(?::[^=]*)?=(?!=)"
SCRIPT = (
    r"(?:export +)?(?:default +)?(?:declare +)?(?:abstract +)?(?:async +)?"
    r"(?:function\b *\*?|class|interface|type|enum|const|let|var|namespace) *\b([A-Za-z_$][\w$]*)"
)
GO = r"func +(?:\([^)]*\) *)?(\w+)|(?:type|var|const) +(\w+)"
RUST = (
    r"(?:pub(?:\([^)]*\))? +)?(?:(?:async|unsafe|const|extern) +)*"
    r"(?:fn|struct|enum|trait|mod|type|static|const|union) +(\w+)|macro_rules! *(\w+)"
)
CLASSES = (
    r"(?:(?:public|private|protected|internal|abstract|final|sealed|static|open|data|partial|export|case|override) +)*"
    r"(?:class|interface|enum|record|object|struct|protocol|trait|extension|namespace|fun|func|function|def|module) +"
    r"(\w+)"
)
C = r"(?:typedef +)?(?:struct|class|enum|union|namespace) +(\w+)|# *define +(\w+)|[A-Za-z_][\w \t*&:<>,]{0,120}\b(\w+)\("
SHELL = r"(?:function +)?([\w-]+) *\(\)"

# fmt: off
LANGUAGES: Mapping[str, str] = {
    **dict.fromkeys(("py", "pyi"), PYTHON),
    **dict.fromkeys(("js", "jsx", "mjs", "cjs", "ts", "tsx", "mts", "cts", "vue", "svelte"), SCRIPT),
    "go": GO, "rs": RUST,
    **dict.fromkeys(("java", "kt", "kts", "scala", "cs", "swift", "php", "rb", "groovy", "dart"), CLASSES),
    **dict.fromkeys(("c", "h", "cc", "hh", "cpp", "hpp", "cxx", "m", "mm"), C),
    **dict.fromkeys(("sh", "bash", "zsh"), SHELL),
}
# fmt: on


def _get_suffix(name: str) -> str:
    """Return the suffix of a file name in lower case, without its dot; ``""`` without one."""
    return name.rpartition(".")[2].lower() if "." in name else ""


def has_symbols(name: str) -> bool:
    """Return True if top-level names can be read from a file of this name."""
    return _get_suffix(name) in LANGUAGES


def find_top_level_names(text: str, file_name: str) -> list[str]:
    """Return the names at the top level of a source file, in order, each once, at most 200."""
    pattern = LANGUAGES.get(_get_suffix(file_name))
    if pattern is None:
        return []
    match = re.compile(rf"(?:{pattern})").match  # compiled once for each language, by `re`
    found: dict[str, None] = {}
    for line in text.split("\n"):
        made = match(line[:LINE_CHARS]) if line and not line[0].isspace() else None
        if made is not None:
            found.setdefault(made[made.lastindex or 0])
            if len(found) == MAX_NAMES:
                break
    return list(found)


def read_symbols(root: Root, parts: tuple[str, ...]) -> list[str]:
    """Return the top-level names of a file below the root; an empty list if it cannot be read or is very large."""
    text = read_text_file(root, parts, FILE_BYTES) if has_symbols(parts[-1]) else None
    return [] if text is None else find_top_level_names(text.displayable_text, parts[-1])


def read_text_file(root: Root, parts: tuple[str, ...], max_bytes: int) -> FileText | None:
    """Return the text of a file below the root; ``None`` if it is a link, binary, larger than *max_bytes* or unreadable."""
    try:
        opened = root.open_file("/".join(parts))
    except (ToolError, UnicodeError):
        return None
    try:
        data = read_if_small(opened.fd, max_bytes) if opened.parts == parts else None
    except OSError:
        return None
    finally:
        calls.close(opened.fd)
    return None if data is None else decode_text(data)


SHORTEST_STEM_CHARS = 3
"""Shorter words, such as "is" and "as", are no plurals."""
CACHED_CHARS = 100
"""How long the texts are whose words are kept: names come again and again, descriptions and links do not."""


def split_singular_words(text: str) -> tuple[str, ...]:
    """Return the words of a name or text in lower case and singular, split at ``camelCase``, digits and non-letters."""
    return _known_words(text) if len(text) <= CACHED_CHARS else _split_singular_words_uncached(text)


def _split_singular_words_uncached(text: str) -> tuple[str, ...]:
    """Return the words of a text in lower case and singular, without a cache."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+", text)
    return tuple([_strip_plural(part.lower()) for part in parts])


_known_words = lru_cache(maxsize=50_000)(_split_singular_words_uncached)


def _strip_plural(word: str) -> str:
    is_plural = len(word) > SHORTEST_STEM_CHARS and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return word[:-1] if is_plural else word
