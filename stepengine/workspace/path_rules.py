"""
The files that the bundled tools never show, and those that they never write.

A pattern without ``/`` matches the name of a file or folder at any depth, and everything below it. With ``/`` inside it
matches those names in a row, at any depth. ``*`` and ``?`` stay within a name, ``**`` does not; ``[*]`` is a plain ``*``. Names
are compared case-folded in Unicode's composed form, as some disks do.

``possible_paths`` lists the paths that a program may read in an argument. A rule checks all of them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from urllib.parse import unquote

# fmt: off
SECRETS = (
    ".env", ".env.*", "*.pem", "id_*", ".netrc", ".npmrc", ".pypirc", ".aws/", ".ssh/", ".git/config", ".git/credentials",
    ".git-credentials", ".gnupg/", ".docker/config.json", ".kube/config",
)
"""Not read, not listed, not searched, not written; ``allow_secrets`` opens paths."""

PROTECTED = (
    ".git/", ".gitmodules", ".gitattributes", ".stepengine/", "journals/*.jsonl", "cassettes/", "*.pth", "sitecustomize.py",
    "usercustomize.py", "conftest.py",
    ".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile",
    ".zlogin", ".zlogout", ".kshrc", ".cshrc", ".tcshrc", ".login", "config.fish", ".envrc", ".inputrc",
    ".github/workflows/", ".github/actions/", ".gitlab-ci.yml", ".circleci/", ".travis.yml", ".drone.yml", "Jenkinsfile",
    "azure-pipelines.yml", "bitbucket-pipelines.yml", ".buildkite/", ".woodpecker.yml", ".pre-commit-config.yaml", ".husky/",
    ".vscode/", ".idea/", ".zed/", ".devcontainer/", "*.code-workspace", ".vim/", ".nvim.lua", ".exrc",
    ".mcp.json", ".cursor/", ".claude/settings*.json", ".claude/hooks/",
)
"""Not written, because something runs them without being asked; ``allow_protected`` opens paths."""

INSTRUCTION_FILES = ("AGENTS.md", "CLAUDE.md", "knowledge.md")
"""The instructions of a project for agents, in the order of reading within a folder."""

INSTRUCTING = (
    *INSTRUCTION_FILES, *PROTECTED, "GEMINI.md", "SKILL.md", ".agents/", ".claude/", ".cursorrules", ".windsurfrules",
    ".github/copilot-instructions.md", "agents/*.py", "stepengine.toml", "pyproject.toml", "policy.json", "*.policy.json",
)
"""Files that instruct later runs, other agents and other programs: asked about where edits are accepted."""

UNPROTECTED = ("tests/**/conftest.py", "test/**/conftest.py")
# fmt: on


def normalize_path(parts: Sequence[str]) -> str:
    """Return a path in the normalized form that rules compare."""
    return unicodedata.normalize("NFC", "/".join(parts)).casefold()


FILE_ADDRESS = re.compile(r"[\s\0-\x20]*file:(?=([/\\])?)", re.IGNORECASE)
"""Parsers of addresses leave out control characters and spaces at the beginning."""
OTHER_ADDRESS = re.compile(r"(?!(?:https?|wss?|ftp)://)[A-Za-z][\w+.:-]{0,80}://", re.IGNORECASE)
"""An address that is not of the web, such as ``git+file:///srv/a`` or ``resource://a``: it may name a file."""
BLANKS = "".join([char for char in map(chr, range(0x3001)) if char <= " " or char.isspace()])
"""Control characters and spaces; U+3000 is the last of them."""
ELSEWHERE = re.compile(r"~|\$|[A-Za-z]:/")
DRIVE = re.compile(r"[A-Za-z]:[^/]")
"""``C:secrets`` starts at the current folder of the drive."""
SPELLINGS = 32
"""No honest path has more readings than a few; one with more is not judged but refused."""


def is_file_url(text: str) -> bool:
    """Return whether a text starts with ``file:`` and a slash, such as ``file:///srv/a.txt``; blanks before and line breaks are ignored."""
    found = FILE_ADDRESS.match(_remove_line_breaks_and_tabs(text))
    return found is not None and found[1] is not None


def possible_paths(text: str) -> tuple[str, ...]:
    """
    Return the paths that a program may read in an argument, the text itself first; none if there are too many.

    Programs decode ``%2f``, accept ``file:`` addresses and backslashes, and expand ``~``, variables and drives. The start of
    such a path is unknown, so it is returned as an absolute path.
    """
    found = [text]
    for path in found:  # grows meanwhile: a program may do several of these, in any order
        found += [other for other in _iterate_readings(path) if other not in found]
        if len(found) > SPELLINGS:
            return ()
    return tuple(found)


def _remove_line_breaks_and_tabs(text: str) -> str:
    return re.sub(r"[\t\r\n]", "", text)


def _iterate_readings(path: str) -> Iterator[str]:
    """Yield the paths that a program may read in *path* after one step of decoding or expansion."""
    yield _remove_line_breaks_and_tabs(path)
    yield path.strip(BLANKS)
    if (other := OTHER_ADDRESS.match(path)) is not None:
        yield f"/{path[other.end() :]}"
    if (address := FILE_ADDRESS.match(path)) is not None:
        yield path[address.end() :]
        yield re.split(r"[?#]", path[address.end() :], maxsplit=1)[0]
    yield unquote(path)
    yield path.replace("\\", "/")
    if ELSEWHERE.match(path):
        yield f"/{path}"
    if DRIVE.match(path):
        yield f"/{path[2:]}"


def _pattern_to_regex(pattern: str) -> str:
    """Return the regex that finds a pattern at any depth of a normalized path."""
    text = normalize_path([pattern]).strip("/")
    body = re.sub(
        r"\[.\]|\*\*/|\*\*|\*|\?|[^*?\[]+|\[",
        lambda m: {"**/": "(?:[^/]+/)*", "**": ".*", "*": "[^/]*", "?": "[^/]"}.get(m[0]) or _name_to_regex(m[0]),
        text,
    )
    return f"(?:^|/){body}(?:/|$)"


def _name_to_regex(text: str) -> str:
    """Return the regex for part of a name. A single character in brackets also matches its literal spelling."""
    is_escape = len(text) == len("[x]") and text.startswith("[") and text.endswith("]")
    return f"(?:{re.escape(text[1])}|{re.escape(text)})" if is_escape else re.escape(text)


def _compile_patterns(patterns: Iterable[str]) -> re.Pattern[str] | None:
    """Return one regex that finds any of the patterns; ``None`` without patterns."""
    sources = [_pattern_to_regex(p) for p in patterns]
    return re.compile("|".join(sources)) if sources else None


class PathRules:
    """
    A list of patterns and its exceptions.

    Args:
        patterns: The patterns of the rule.
        allowed: The patterns of its exceptions.
    """

    def __init__(self, patterns: Sequence[str], allowed: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self.has_exceptions = bool(allowed)
        # Compiled when a path is first compared, which is always possible.
        self._said = [pattern for pattern in patterns if pattern.strip("/")]
        self._let_through = [pattern for pattern in allowed if pattern.strip("/")]

    @cached_property
    def _match_regex(self) -> re.Pattern[str] | None:
        """The regex that finds any of the patterns; ``None`` without patterns."""
        return _compile_patterns(self._said)

    @cached_property
    def _exception_regex(self) -> re.Pattern[str] | None:
        """The regex that finds any of the exceptions; ``None`` without exceptions."""
        return _compile_patterns(self._let_through)

    def match(self, parts: Sequence[str]) -> bool:
        """Return whether a path inside the root matches a pattern and no exception."""
        text = normalize_path(parts)
        if self._match_regex is None or not self._match_regex.search(text):
            return False
        return self._exception_regex is None or not self._exception_regex.search(text)

    def find_matching_pattern(self, parts: Sequence[str]) -> str:
        """Return the pattern that a path matches, for a message."""
        text = normalize_path(parts)
        return next((p for p in self.patterns if re.search(_pattern_to_regex(p), text)), "")
