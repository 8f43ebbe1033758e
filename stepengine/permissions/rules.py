"""
``Rule``: allows, denies or asks about calls, within a scope.

A rule is data. Its matcher is one of a closed set of immutable classes, each with a JSON form. The exception is ``CallsWhere``,
which holds a function. No expression of a rule can backtrack: regular expressions run on pydantic's engine, globs on our own
matcher.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

import attrs
from attrs import frozen
from pydantic_core import PydanticCustomError, SchemaError, SchemaValidator, ValidationError, core_schema

from stepengine.data.call_text import find_shell_command
from stepengine.data.definition import HookContext
from stepengine.data.json import JsonDict, JsonValue, canonical, freeze_object
from stepengine.data.messages import to_string_tuple
from stepengine.data.provenance import Provenance, find_addresses
from stepengine.data.schemas import list_member_names
from stepengine.data.tools import ANYWHERE, ToolSpec, find_values_at_path
from stepengine.errors import DefinitionError, ToolError
from stepengine.permissions.commands import (
    READ_ONLY,
    WIDENABLE,
    CommandForm,
    find_broader_form,
    matches_allow_rule,
    matches_deny_rule,
)
from stepengine.workspace.argv import Argv, Script, parse_command
from stepengine.workspace.contained_paths import (
    DELIMITERS,
    MAX_PARTS,
    MAX_PATH_CHARS,
    find_paths_in_text,
    has_wildcards,
    is_path_like,
    is_resolved,
    iterate_spellings,
    remove_emphasis,
)
from stepengine.workspace.path_rules import (
    BLANKS,
    INSTRUCTING,
    PathRules,
    is_file_url,
    normalize_path,
    possible_paths,
)
from stepengine.workspace.patterns import GlobPattern, escape_brackets_and_braces, find_pattern_problem
from stepengine.workspace.urls import parse_url

Effect: TypeAlias = Literal["allow", "deny", "ask"]
COMMANDS = ("command", "argv")
PATHS = ("path", "paths", "file", "files", "file_path", "folder", "directory", "directories", "cwd")
URLS = ("url", "urls")
PLACES = (
    "destination", "target", "endpoint", "to", "from", "dest", "dst", "src", "out", "output", "outfile", "output_file",
    "output_path", "filename", "old_path", "new_path", "root", "uri", "href", "link", "base_url", "host", "hostname", "server",
    "recipient", "recipients",
)  # fmt: skip
"""
Members that may hold a path, a web address, or something else; each tool decides.

Next to members that certainly hold a file or an address, they are other files in other roles. Alone, they say less about a call
than the rest of its input.
"""
NAMES_OF_PLACES = frozenset((*PATHS, *URLS, *PLACES))
PLURAL_PATHS = ("paths", "files", "directories")
METHODS = ("method", "http_method", "verb")
DECLARED = frozenset({"read", "write", "network"})
"""Categories whose tools work on the files and addresses that they name; for other tools the subject of a call is unknown."""
WITHOUT_FILES = frozenset({"agent", "ask", "control", "memory"})
"""Categories whose tools name no files: their prompts, questions and results may look like paths."""
WITHOUT_DESTINATIONS = frozenset({"agent", "ask", "control"})
"""Categories of the engine's own tools, which do not reach anyone outside the run."""
NAME_DELIMITERS = frozenset(DELIMITERS) - frozenset("[]{},")
"""Characters that split texts, but are allowed in the names of a glob."""
UNUSED = "\uffff"
"""A character that no name contains; a placeholder for any name includes it."""
INSTRUCTS = PathRules(INSTRUCTING, ())
"""Approval of edits does not include files that instruct later runs (requirements:X60)."""
MAX_DECODINGS = 3
"""How often a longer text is decoded before the check whether it is a path."""
DURATIONS = frozenset({"timeout", "timeout_seconds"})
"""Members that do not change the effect of a command."""
USUAL_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443, "ftp": 21}
TOOL_CHARS = re.compile(r"[A-Za-z0-9_-]*")
MAX_TOOL_NAME_CHARS = 64
"""OpenAI and Anthropic document 64 characters for the name of a tool."""
TOOL_SEPARATORS = re.compile(r"[/.:]+")
ADDRESS = re.compile(r"(?i:https?|wss?|ftp)://")
PLAIN_URL = re.compile(r"([a-z][a-z0-9+.-]*)://([A-Za-z0-9.-]*[A-Za-z0-9])\.?(?::([0-9]{1,5}))?(?:[/?#][!-\[\]-~]*)?")


@frozen(kw_only=True)
class Request:
    """
    A call, as matchers receive it.

    Attributes:
        tool: The spec of the tool.
        input: The final input, after validation and hooks.
        agent_id: The agent that makes the call.
        session_id: The conversation's id, if there is one.
        user_id: The user's id, if the caller passed one.
        context: The context that hooks receive, for ``CallsWhere``; ``None`` outside of a run.
        source: The origin of the call: ``"model"``, ``"handler"``, or ``"tool"`` for the body of a tool that yields. With ``""``,
            the origin is unknown; deny and ask rules for any origin then apply, allow rules do not.
        is_call: Whether a person can be asked about it. It is false for files that the engine reads for a prompt.
    """

    tool: ToolSpec
    input: JsonDict
    agent_id: str = ""
    session_id: str | None = None
    user_id: str | None = None
    context: HookContext | None = None
    source: str = ""
    is_call: bool = True
    _contained: dict[tuple[bool, str], tuple[str, ...] | None] = attrs.field(
        factory=dict, init=False, eq=False, repr=False
    )

    @property
    def provenance(self) -> Provenance | None:
        """The data that the run has received, with their origins; ``None`` outside of a run."""
        return None if self.context is None else self.context.provenance

    @property
    def commands(self) -> tuple[Argv | Script, ...]:
        """The commands in the input, parsed as by the shell tool; one that the shell tool rejects is a script."""
        if self.tool.category != "execute":
            return ()
        return tuple(
            [
                _parse_command_or_script(given)
                for name in COMMANDS
                for given in (self.input.get(name),)
                if given is not None
            ]
        )

    def iterate_texts_in_members(self, names: Sequence[str]) -> Iterator[str]:
        """Yield the texts and numbers, as text, in members of the input with one of *names*, at any depth."""
        yield from [text for _, text in find_texts_by_member_name(self.input, frozenset(names))]

    @property
    def paths(self) -> list[str]:
        """
        The files in the call: those that its tool declares, else the texts in members such as ``path``.

        A declared text is not a file only if it starts like a web address; ``a://b`` is a path. For tools without a declaration,
        a ``file:`` address is a path in any member.
        """
        if self.tool.about is not None:
            return [place for place in self._declared_subjects if not _is_url_and_not_path(place)]
        return [
            *self.iterate_texts_in_members(PATHS),
            *filter(is_file_url, _find_texts_outside_members(self.input, PATHS)),
        ]

    @property
    def unmarked_texts(self) -> list[str]:
        """
        The texts that no definition marks as paths; they may still name some, as in ``source`` or ``filename``.

        They include member names that the tool's schema does not declare, as in ``{"files": {"a.txt": "text"}}``. They also
        include a single text in a member such as ``paths``, which may hold several paths. The list is empty for tools that declare the
        subjects of their calls, and for confined tools.
        """
        if self.declares_all_paths:
            return []
        judged = (*PATHS, *COMMANDS) if self.tool.category == "execute" else PATHS
        lists = [text for name in PLURAL_PATHS if isinstance(text := self.input.get(name), str)]
        return [*_find_texts_outside_members(self.input, judged), *self._undeclared_member_names, *lists]

    @property
    def declares_all_paths(self) -> bool:
        """Whether all paths of the call are known from the tool's definition, so no other text can name a file."""
        tool = self.tool
        return tool.about is not None or tool.confined or tool.category in WITHOUT_FILES

    def find_contained_paths(self, *, include_marked: bool, non_delimiters: str = "") -> tuple[str, ...] | None:
        """
        Return the paths that the texts of the call may contain, cached; ``None`` if any path is possible.

        Args:
            include_marked: Whether to search the texts that are marked as paths, too.
            non_delimiters: Delimiters at which texts are not split; see ``stepengine.workspace.contained_paths``.
        """
        # Cached, because every rule needs the same paths.
        if (include_marked, non_delimiters) not in self._contained:
            paths = self.paths if include_marked and not self.tool.confined else ()
            self._contained[include_marked, non_delimiters] = _find_contained_paths(
                [*paths, *self.unmarked_texts], non_delimiters
            )
        return self._contained[include_marked, non_delimiters]

    @property
    def _undeclared_member_names(self) -> list[str]:
        """The names of the input's members that the tool's schema does not declare."""
        found = list(_find_member_names(self.input))
        declared = frozenset(list_member_names(self.tool.input_schema)) if found else frozenset()
        return [name for name in found if name not in declared]

    @property
    def urls(self) -> list[str]:
        """The web addresses in the call: the texts in ``url`` and ``urls``; of declared subjects, also those with ``://``."""
        named = list(self.iterate_texts_in_members(URLS))
        if self.tool.about is None:
            return named
        return [place for place in self._declared_subjects_or_texts if _may_be_url(place) or place in named]

    @property
    def possible_hosts(self) -> set[str]:
        """The hosts that a program may read in declared subjects without ``://``, such as ``example.org/a`` or ``https:/example.org``."""
        places = self._declared_subjects_or_texts if self.tool.about is not None else ()
        return {host for place in places if not _may_be_url(place) for host in _find_possible_hosts(place)}

    @property
    def _declared_subjects_or_texts(self) -> Sequence[str]:
        """The declared subjects; all texts of the input if there are too many subjects."""
        subjects = self._declared_subjects
        return list(_find_texts_outside_members(self.input, ())) if subjects == (ANYWHERE,) else subjects

    @property
    def _declared_subjects(self) -> tuple[str, ...]:
        """The texts in the input that the tool's definition declares as paths or addresses."""
        return self.tool.find_subjects(self.input)


def _find_contained_paths(texts: Iterable[str], non_delimiters: str) -> tuple[str, ...] | None:
    """Return the paths that any of *texts* may contain; ``None`` if there may be too many."""
    found = set[str]()
    for text in texts:
        # Wildcards that match files are checked when the call starts.
        paths = find_paths_in_text(remove_emphasis(text), non_delimiters)
        if paths is None or len(found) > MAX_PARTS:
            return None
        # The target of `..` after a link is checked when the call starts; here it is checked as text.
        found.update(filter(is_resolved, paths))
    return tuple(sorted(found))


def _find_texts_outside_members(value: object, names: Sequence[str]) -> Iterator[str]:
    """Yield the texts in a value at any depth, except those in members with one of *names*."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            if name not in names:
                yield from _find_texts_outside_members(member, names)
    elif isinstance(value, list):
        for member in value:
            yield from _find_texts_outside_members(member, names)


def _find_member_names(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
    for member in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _find_member_names(member)


def _shorten_overlong_path(text: str) -> str:
    """Return *text* unchanged if its length fits a path; else decode percent escapes and resolve ``.`` and ``..``."""
    if len(text) <= MAX_PATH_CHARS:
        return text
    for _ in range(MAX_DECODINGS if "%" in text else 0):
        text = unquote(text)
    parts = _resolve_parent_steps(_split_path(text.replace("\\", "/")))
    return text if parts is None else ("/" if text.startswith(("/", "\\")) else "") + "/".join(parts)


def _fits_path_length(text: str) -> bool:
    """Return whether a text is not empty and not longer than a path can be."""
    return 0 < len(text) <= MAX_PATH_CHARS


def _looks_like_path(readings: Sequence[str]) -> bool:
    """Return True if a text may be a path: its *readings* contain ``/`` or ``..`` and no space, or are empty, which means too many."""
    return not readings or (
        not any(char.isspace() for char in readings[0].strip(BLANKS))
        and any(one == ".." or "/" in one for one in readings)
    )


def _may_be_url(text: str) -> bool:
    return "://" in text


def _is_url_and_not_path(text: str) -> bool:
    """Return whether a text is a web address and cannot also be a path: it has a web scheme, no blank and no ``..``."""
    return ADDRESS.match(text) is not None and ".." not in text.split("/") and set(BLANKS).isdisjoint(text)


def is_checkable_by_path_rules(spec: ToolSpec) -> bool:
    """Return whether rules about files can check calls of a tool: it declares their subjects, or has parameters for paths."""
    return spec.about is not None or any(name in PATHS for name in list_member_names(spec.input_schema))


def _parse_command_or_script(command: object) -> Argv | Script:
    """Return a command of an input as an argument list; as a script if it needs a shell or is invalid."""
    words = (
        command
        if isinstance(command, str)
        else [str(word) for word in command]
        if isinstance(command, list)
        else str(command)
    )
    try:
        return parse_command(words)
    except ToolError as error:
        return Script(words if isinstance(words, str) else "\n".join(words), error.message)


def find_texts_by_member_name(
    value: object, names: frozenset[str], nearest_name: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the texts and numbers in members with one of *names*, at any depth; *name* is the nearest of them."""
    if isinstance(value, str):
        if nearest_name is not None:
            yield nearest_name, value
    elif nearest_name is not None and isinstance(value, int | float) and not isinstance(value, bool):
        yield nearest_name, str(value)  # a tool may open a file of that name
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield from find_texts_by_member_name(member, names, name if name in names else nearest_name)
    elif isinstance(value, list):
        for member in value:
            yield from find_texts_by_member_name(member, names, nearest_name)


def _dashes_to_underscores(name: str) -> str:
    return name.replace("-", "_")


def _matches_wildcard(pattern: str, text: str) -> bool:
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == text
    *middle, last = rest
    if not text.startswith(first) or len(text) < len(first) + len(last) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in middle:
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


@frozen
class EveryCall:
    """Matches every call."""

    kind: ClassVar[str] = "all"

    def matches(self, _request: Request, _decision: Effect) -> bool:
        """Return True."""
        return True

    def __str__(self) -> str:
        return "everything"


@frozen
class ToolNamed:
    """Matches calls of a tool by its name. In *name*, ``*`` matches any text, and ``-`` equals ``_``."""

    kind: ClassVar[str] = "tool"
    name: str

    def __attrs_post_init__(self) -> None:
        _check_not_blank(self.name, 'the name of a tool, such as "read_files" or "mcp__github__*"')
        _check_tool_name_pattern(self.name)

    def matches(self, request: Request, _decision: Effect) -> bool:
        """Return whether the name of the tool matches."""
        return _matches_wildcard(_dashes_to_underscores(self.name), _dashes_to_underscores(request.tool.name))

    def __str__(self) -> str:
        return f"tool {self.name}"


@frozen
class Category:
    """Matches calls of tools of a category, such as ``read``, ``write``, ``execute`` or ``network``."""

    kind: ClassVar[str] = "category"
    name: str

    def __attrs_post_init__(self) -> None:
        _check_not_blank(self.name, 'a category, such as "write"')
        if self.name != self.name.strip():
            msg = f"the category {self.name!r} starts or ends with blanks; write {self.name.strip()!r}"
            raise DefinitionError(msg)

    def matches(self, request: Request, _decision: Effect) -> bool:
        """Return whether the tool has this category."""
        return request.tool.category == self.name

    def __str__(self) -> str:
        return f"category {self.name}"


@frozen
class Command:
    """Matches commands of tools that run programs; see ``CommandForm``."""

    kind: ClassVar[str] = "command"
    form: CommandForm

    def matches(self, request: Request, decision: Effect) -> bool:
        """Return whether the commands of a call match: for an allow all of them, else any, including wrapped commands."""
        commands = request.commands
        if decision == "allow":
            return bool(commands) and all(matches_allow_rule(self.form, command) for command in commands)
        return any(matches_deny_rule(self.form, command) for command in commands)

    def __str__(self) -> str:
        return f"command {' '.join(self.form.prefix)}"


@frozen
class Path:
    """
    Matches calls about files below a root, by a glob for relative paths. ``*`` stays within a name, ``**`` does not.

    A deny or ask matches if one of the paths in the input matches, in any letter case, and also as an absolute path. An allow
    matches if there is a path and all paths match as written. A deny or ask for a folder includes everything below it:
    ``secrets`` equals ``secrets/**``, but ``src/*`` matches no folder within a folder. The paths are those that the tool declares
    (``@tool(about=...)``). For other tools they are the texts in the members ``path``, ``paths``, ``file``, ``files``,
    ``file_path``, ``folder``, ``directory``, ``directories`` and ``cwd``. With *tool* only calls of that tool match.

    An allow never matches a tool of category ``execute``: the files that a call names do not tell what its program does.

    A path is checked in every reading that a program may give it; see ``possible_paths``. A deny or ask matches if one reading
    matches, an allow if all do. In tools without a declaration, other texts may name paths, too; see ``contained_paths``. If a
    deny matches one of those, a person is asked. An allow does not match if one of them may be outside of it. ``[*]``, ``[[]`` and
    ``[{]`` match the character itself. A glob with brackets or braces also matches names that are spelled exactly so.

    The bundled tools also check the files that they would open or show, with links and other names of a file resolved. Files
    that a deny matches raise an error, or are omitted from listings and searches, with a notice. The same holds for files about
    which a person would be asked, unless a person was asked about the call. For a tool with a declaration, the paths are resolved
    when the call starts. See ``Policy.make_guard``.
    """

    kind: ClassVar[str] = "path"
    glob: str
    tool: str | None = None
    _exact: tuple[GlobPattern, ...] = attrs.field(init=False, eq=False, repr=False)
    _folded: tuple[GlobPattern, ...] = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if why := find_pattern_problem(self.glob):
            msg = f"the pattern {self.glob!r} matches no path: {why}"
            raise DefinitionError(msg)
        if self.tool is not None:
            _check_tool_name_pattern(self.tool)
        try:
            object.__setattr__(
                self, "_exact", tuple([GlobPattern(glob) for glob in _add_literal_bracket_glob(self.glob)])
            )
            object.__setattr__(
                self, "_folded", tuple([GlobPattern(normalize_path([glob])) for glob in self.denied_globs])
            )
        except ToolError as error:
            raise DefinitionError(error.message) from None

    def matches(self, request: Request, decision: Effect) -> bool:
        """Return whether the paths in the input of a call match."""
        # Files do not tell what a program does: the working folder of a command is a path, too.
        if not self.covers_tool(request) or (decision == "allow" and request.tool.category == "execute"):
            return False
        paths = request.paths
        readings = [possible_paths(path) for path in paths]
        if decision == "allow":
            is_within = (
                bool(paths) and all(readings) and all(self._matches_as_written(p) for found in readings for p in found)
            )
            return is_within and not self._may_name_path_outside(request, readings)
        # A text with too many readings may be any path.
        if not all(readings) or any(self._may_match_path(path) for found in readings for path in found):
            return True
        return decision == "ask" and self.find_possible_path(request) is not None

    def find_possible_path(self, request: Request) -> str | None:
        """
        Return a path of the rule that a call may name in another text or notation; ``None`` if there is none.

        The result is ``"..."`` if a text may name any path. For a glob without names, such as ``**``, it is ``None``.
        """
        # A glob without names cannot tell which texts are paths.
        if not self.covers_tool(request) or not self.glob.strip("*/"):
            return None
        keeps = {"", "".join(sorted(set(self.glob) & NAME_DELIMITERS))}
        for keep in keeps:
            found = request.find_contained_paths(include_marked=True, non_delimiters=keep)
            if found is None:
                return "..."
            if path := next(filter(self._may_match_contained_path, found), None):
                return path
        shortened = [text for text in map(_shorten_overlong_path, request.unmarked_texts) if _fits_path_length(text)]
        texts = [(text, possible_paths(text)) for text in shortened if not _is_url_and_not_path(text)]
        return next((text for text, found in texts if not found or any(map(self._may_match_path, found))), None)

    def _may_name_path_outside(self, request: Request, readings: Sequence[Sequence[str]]) -> bool:
        """Return whether a call may name a path outside the glob, in another text or by braces or quotes in a path."""
        try:
            whole = {spelled for found in readings for path in found for spelled in iterate_spellings(path)}
        except ToolError:
            return True
        # A marked text is one path, and a guard checks the files that parts of it name. It does not expand wildcards.
        parts = request.find_contained_paths(include_marked=True)
        if parts is None or any(".." in path.split("/") for path in whole):
            return True
        if not all(map(self._matches_all_expansions, filter(has_wildcards, set(parts) - whole))):
            return True
        texts = [text for text in map(_shorten_overlong_path, request.unmarked_texts) if _fits_path_length(text)]
        found = request.find_contained_paths(include_marked=False)
        others = [
            one
            for text in texts
            if not _is_url_and_not_path(text)
            for one in [possible_paths(text)]
            if _looks_like_path(one)
        ]
        return (
            found is None
            or not all(map(self._matches_all_expansions, filter(is_path_like, found)))
            or not all(others)
            or not all(self._matches_as_written(path) for one in others for path in one)
        )

    def _matches_all_expansions(self, path: str) -> bool:
        """Return whether the glob matches a path and every path that the wildcards in it can match."""
        if not self._matches_as_written(path):
            return False
        far = path.replace("**", f"{UNUSED}/{UNUSED}").replace("*", UNUSED * 2).replace("?", UNUSED)
        return far == path or self._matches_as_written(far)

    def _may_match_contained_path(self, path: str) -> bool:
        """
        Return whether a path that a text contains may name a file of the rule, ignoring case.

        An absolute path, or one with ``..``, is compared from any of its folders on. A path with wildcards matches if it and the
        glob can match the same name.
        """
        names = _split_path(normalize_path([path.removeprefix("../")]))
        starts = range(len(names)) if path.startswith(("/", "..")) else (0,)
        if has_wildcards(path):
            return any(glob.overlaps(names[start:]) for start in starts for glob in self._folded)
        return any(glob.match(names[start:]) for start in starts for glob in self._folded)

    @property
    def denied_globs(self) -> tuple[str, ...]:
        """The globs for a deny or ask: they also match everything below a folder that the glob names."""
        names = _split_path(self.glob)
        return _add_literal_bracket_glob("/".join(names if names and not names[-1].strip("*") else (*names, "**")))

    def covers_tool(self, request: Request) -> bool:
        """Return whether the matcher applies to the tool of a call: to any tool, or to the one in ``tool``."""
        return _matches_tool(self.tool, request)

    def matches_file(self, parts: Sequence[str], folded_parts: Sequence[str], decision: Effect) -> bool:
        """Return whether a file matches; *parts* is its path below the root, *folded_parts* that of ``normalize_path_for_deny``."""
        if decision == "allow":
            return any(glob.match(parts) for glob in self._exact)
        return any(glob.match(folded_parts) for glob in self._folded)

    def _matches_as_written(self, path: str) -> bool:
        """Return whether the glob matches a relative path literally, without ``..``."""
        if is_file_url(path) or not _stays_below_root(path):
            return False
        # The text after `file:` is another reading, which is checked separately.
        parts = _split_path(path.removeprefix("file:"))
        return any(glob.match(parts) for glob in self._exact)

    def _may_match_path(self, path: str) -> bool:
        """Return whether a path may name a file of the rule, ignoring case; an absolute path is compared from any folder on."""
        parts = _resolve_parent_steps(_split_path(normalize_path([path])))
        if parts is None:
            return True  # it leads above its start, so its target is unknown
        starts = range(len(parts)) if path.startswith("/") else (0,)
        return any(glob.match(parts[start:]) for start in starts for glob in self._folded)

    def __str__(self) -> str:
        return f"path {self.glob}" + (f" of {self.tool}" if self.tool else "")


def _add_literal_bracket_glob(glob: str) -> tuple[str, ...]:
    """Return (*glob*,), or with brackets or braces in it (*glob*, the glob in which these are plain characters)."""
    plain = escape_brackets_and_braces(glob)
    return (glob,) if plain == glob else (glob, plain)


def normalize_path_for_deny(parts: Sequence[str]) -> tuple[str, ...]:
    """Return a path in the form that denies and asks compare, which ignores letter case."""
    return _split_path(normalize_path(parts))


def _stays_below_root(path: str) -> bool:
    """Return whether a path is relative and has no ``..``."""
    return not path.startswith("/") and ".." not in path.split("/")


def _resolve_parent_steps(parts: Sequence[str]) -> tuple[str, ...] | None:
    """Return a path with its ``..`` resolved; ``None`` if it leads above its start."""
    made: list[str] = []
    for part in parts:
        if part != "..":
            made.append(part)
        elif made:
            made.pop()
        else:
            return None
    return tuple(made)


def _split_path(path: str) -> tuple[str, ...]:
    """Return the components of a path, without empty ones and ``.``."""
    return tuple([part for part in path.split("/") if part not in {"", "."}])


@frozen
class Domain:
    """
    Matches calls that name a web address, by host: ``docs.example.org`` is that host, ``*.example.org`` every host below it.

    The addresses are the texts in ``url`` and ``urls``. If a tool declares its subjects (``@tool(about=...)``), they are the
    subjects in these members and those with ``://``. A deny or ask matches if one of them matches, or if another declared subject
    can be read as an address of the host, such as ``example.org/a``. An allow matches if all addresses match. With *tool* only calls of that tool match.
    An allow never matches a tool of category ``execute``.
    """

    kind: ClassVar[str] = "domain"
    host: str
    tool: str | None = None

    def __attrs_post_init__(self) -> None:
        _check_not_blank(self.host, 'a host, such as "docs.example.org" or "*.example.org"')
        if self.tool is not None:
            _check_tool_name_pattern(self.tool)
        wild, name = ("*.", self.host[2:]) if self.host.startswith("*.") else ("", self.host)
        is_address = name.count(":") > 1 and not name.startswith("[")  # of IPv6
        origin = (
            None
            if set("/@?#* ") & set(name)
            else _parse_origin(f"http://[{name}]/" if is_address else f"http://{name}/")
        )
        if origin is None:
            msg = f"{self.host!r} is not a host; write it like 'docs.example.org' or '*.example.org'"
            raise DefinitionError(msg)
        if origin.port not in (None, USUAL_PORTS["http"]) or name.endswith(f":{origin.port}"):
            msg = f"{self.host!r} has a port, and rules match only hosts; write {wild + origin.host!r}"
            raise DefinitionError(msg)
        # In the form in which hosts are compared: lower case and ASCII.
        object.__setattr__(self, "host", wild + origin.host)

    def matches(self, request: Request, decision: Effect) -> bool:
        """Return whether the hosts of the addresses in a call match."""
        if not _matches_tool(self.tool, request) or (decision == "allow" and request.tool.category == "execute"):
            return False
        hosts = [_parse_host(url) for url in request.urls]
        if decision == "allow":
            return bool(hosts) and all(host is not None and self._matches_host(host) for host in hosts)
        # Different programs may read different hosts in an address that is not plain.
        return None in hosts or any(map(self._matches_host, [*filter(None, hosts), *request.possible_hosts]))

    def _matches_host(self, host: str) -> bool:
        """Return whether a host is the one of the rule, or below it with ``*.``."""
        return host.endswith(self.host[1:]) if self.host.startswith("*.") else host == self.host

    def __str__(self) -> str:
        return f"domain {self.host}" + (f" for {self.tool}" if self.tool else "")


class _UrlOrigin(NamedTuple):
    """The scheme, host and port of an address."""

    scheme: str
    host: str
    port: int | None


def _parse_origin(url: str) -> _UrlOrigin | None:
    """Return the origin of an address; ``None`` if programs may read it in different ways."""
    try:
        found = parse_url(url)
        return _UrlOrigin(found.scheme, found.host.lower(), found.port)
    except ToolError:
        # The web tools also reject clear addresses, such as this machine and other schemes.
        plain = PLAIN_URL.fullmatch(url)
        return None if plain is None else _UrlOrigin(plain[1], plain[2].lower(), int(plain[3]) if plain[3] else None)


def _parse_host(url: str) -> str | None:
    """Return the host of an address; ``None`` if programs may read it in different ways."""
    origin = _parse_origin(url)
    return None if origin is None else origin.host


def _find_possible_hosts(text: str) -> set[str]:
    """Return the hosts that a program may find in an address without ``://``: at its start, or after a word such as ``https:``."""
    for _ in range(MAX_DECODINGS):
        text = unquote(text)
    text = "".join([char for char in text if char.isprintable()]).strip().replace("\\", "/")
    starts = [re.split(r"[/?#]", one.lstrip("/ "), maxsplit=1)[0] for one in (text, text.partition(":")[2])]
    return set(filter(None, [_parse_host(f"http://{start.rpartition('@')[2]}/") for start in starts]))


@frozen
class Regex:
    """
    Matches calls whose input, as canonical JSON, contains a match of an expression (RE2's and Rust's syntax, no look-around).

    An allow never matches a tool of category ``execute``: an expression for a command line is too easy to bypass.
    """

    kind: ClassVar[str] = "regex"
    pattern: str
    tool: str | None = None
    _search: SchemaValidator = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        _check_not_blank(self.pattern, "an expression")
        try:
            search = SchemaValidator(core_schema.str_schema(pattern=self.pattern, regex_engine="rust-regex"))
        except SchemaError as error:
            problem = " ".join(str(error).split())[:300]
            msg = f"the expression {self.pattern!r} of a rule cannot be used: {problem}"
            raise DefinitionError(msg) from None
        object.__setattr__(self, "_search", search)

    def matches(self, request: Request, decision: Effect) -> bool:
        """Return whether the input of a call contains a match; never for an allow and a tool that runs programs."""
        if not _matches_tool(self.tool, request) or (decision == "allow" and request.tool.category == "execute"):
            return False
        try:
            self._search.validate_python(canonical(request.input))
        except (ValidationError, PydanticCustomError):
            return False
        return True

    def __str__(self) -> str:
        return f"regex {self.pattern}" + (f" for {self.tool}" if self.tool else "")


@frozen
class CallsWhere:
    """
    Matches calls for which a function of the request returns true; it cannot be stored.

    The function must depend only on the request, else a replay may decide otherwise. If it raises or returns anything but a
    bool, the call is denied, whatever the decision of the rule.
    """

    kind: ClassVar[str] = "when"
    test: Callable[[Request], bool]

    def matches(self, request: Request, _decision: Effect) -> bool:
        """
        Return the result of the function.

        Raises:
            TypeError: if the function returns no bool.
        """
        found = self.test(request)
        if not isinstance(found, bool):
            msg = f"it returned a {type(found).__name__}, not a bool"
            raise TypeError(msg)
        return found

    def __str__(self) -> str:
        return f"calls for which {getattr(self.test, '__qualname__', 'a function')} is true"


def _remove_current_folder_steps(path: str) -> str:
    """Return a path without ``.`` and empty steps; a path with ``..`` is unchanged."""
    return path if not _stays_below_root(path.lstrip("/")) else "/" * path.startswith("/") + "/".join(_split_path(path))


def _to_string_tuple_or_none(value: Iterable[str] | None) -> tuple[str, ...] | None:
    """Return texts as a tuple; ``None`` unchanged."""
    return None if value is None else to_string_tuple(value)


@frozen
class Call:
    """
    Matches calls of exactly this tool, narrowed by the other members.

    It is the rule of a person who answers "always allow this": the call on the screen, and no similar one.

    Attributes:
        tool: The tool's name.
        input: Only calls with an equal input; commands are compared word by word. With *prefix*, the command, its time limit
            and members that are ``None`` are not compared.
        agent: Only calls of this agent.
        paths: Only calls that name files, and only these files. A file in a member such as ``destination`` is written
            ``"destination: a.txt"``. Without *hosts* and *origins*, calls with an address or a ``method`` do not match.
        hosts: Only calls that name web addresses, and only of these hosts. Without *paths*, calls with a file do not match.
        prefix: Only calls of one command of this program or subcommand. Its options and operands must be known to write no
            file and start no program. Shell scripts never match.
        origins: Only calls that name web addresses, and only below these: scheme, host and port. A ``method`` of the call
            precedes them, as in ``"POST https://api.example.org"``. Without *paths*, calls with a file do not match.
        any_input: A person confirmed that any input is allowed. It narrows nothing. A remembered rule with only a tool needs
            it to answer questions.
    """

    kind: ClassVar[str] = "call"
    tool: str
    input: JsonDict | None = attrs.field(default=None, converter=attrs.converters.optional(freeze_object))
    agent: str | None = attrs.field(default=None, kw_only=True)
    paths: tuple[str, ...] | None = attrs.field(default=None, converter=_to_string_tuple_or_none, kw_only=True)
    hosts: tuple[str, ...] | None = attrs.field(default=None, converter=_to_string_tuple_or_none, kw_only=True)
    prefix: tuple[str, ...] | None = attrs.field(default=None, converter=_to_string_tuple_or_none, kw_only=True)
    origins: tuple[str, ...] | None = attrs.field(default=None, converter=_to_string_tuple_or_none, kw_only=True)
    any_input: bool = attrs.field(default=False, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _check_not_blank(self.tool, 'the name of a tool, such as "read_files"')
        if self.prefix is not None and self._form is None:
            known = ", ".join([shlex.join(form.prefix) for form in WIDENABLE])
            msg = (
                f"the command {shlex.join(self.prefix)!r} has no list of harmless options; these commands have one: {known}. To allow "
                "any options, use Rule.allow_command"
            )
            raise DefinitionError(msg)

    @property
    def _form(self) -> CommandForm | None:
        """The known-harmless command form with the prefix of the matcher; ``None`` if there is none."""
        return next((form for form in WIDENABLE if form.prefix == self.prefix), None)

    @classmethod
    def from_request(cls, request: Request) -> Call:
        """
        Return the matcher for a call that a person allows permanently: the agent, the tool, and its subject.

        For tools of the categories ``read``, ``write`` and ``network``, the subject is the files and addresses that the call
        names. They must be plain, no ``method`` may apply to files, and no other text may name a file. For all other calls, the
        subject is the whole input.
        """
        agent = request.agent_id or None
        paths, origins = _list_paths_with_roles(request), _list_methods_and_origins(request)
        is_clear = None not in origins and (bool(origins) or not _list_http_methods(request))
        is_clear = is_clear and not _may_name_other_files(tuple(paths), request)
        if request.tool.category not in DECLARED or not is_clear or not _names_path_or_url(request):
            return cls(request.tool.name, _parse_commands_in_input(request), agent=agent)
        named = sorted([origin for origin in origins if origin is not None])
        return cls(request.tool.name, agent=agent, paths=sorted(paths) or None, origins=named or None)

    @classmethod
    def list_broader_matchers(cls, request: Request) -> tuple[Call, ...]:
        """
        Return the broader matchers that a person may allow permanently, the narrowest first.

        For a command, the first matches the same program with other options and operands that are known to write no file and
        start no program. The last one matches any input of the tool.
        """
        agent, found, words = request.agent_id or None, list[Call](), _find_single_command(request)
        form = find_broader_form(words) if words else None
        if form is not None:
            found.append(cls(request.tool.name, _remove_command_from_input(request), agent=agent, prefix=form.prefix))
        return (*found, cls(request.tool.name, agent=agent, any_input=True))

    def matches(self, request: Request, _decision: Effect) -> bool:
        """Return whether a call is of this tool and matches all members of the matcher."""
        if request.tool.name != self.tool or (
            self.agent is not None and _dashes_to_underscores(self.agent) != _dashes_to_underscores(request.agent_id)
        ):
            return False
        if self.prefix is not None and (
            self._form is None or not matches_allow_rule(self._form, _find_single_command(request))
        ):
            return False
        if self.input is not None:
            found = (_parse_commands_in_input if self.prefix is None else _remove_command_from_input)(request)
            if canonical(self.input) != canonical(found):  # as JSON: 1 is neither true nor 1.0
                return False
        return _names_only_allowed_subjects(self, request)

    def __str__(self) -> str:
        by = "" if self.agent is None else f" by {self.agent}"
        if self.prefix is not None:
            beside = f" beside {canonical(self.input)}" if self.input else ""
            return f"the command {shlex.join(self.prefix)} with harmless options and paths, of {self.tool}{by}{beside}"
        if self.input is not None:
            return f"the call {self.tool} {canonical(self.input)}{by}"
        paths = "" if self.paths is None else f" for {', '.join(self.paths)}"
        where = [*(self.hosts or ()), *(self.origins or ())]
        return f"{'any calls' if self.any_input else 'calls'} of {self.tool}{by}{paths}" + (
            f" to {', '.join(where)}" if where else ""
        )


def _list_paths_with_roles(request: Request) -> set[str]:
    """Return the files that a call names; a file with a role, such as ``destination``, has the role as prefix."""
    named = [
        (role, place) for role, place in _list_paths_and_urls_with_roles(request) if not _is_url_and_not_path(place)
    ]
    return {
        f"{role}: {_remove_current_folder_steps(path)}"
        if role
        else _escape_role_separator(_remove_current_folder_steps(path))
        for role, path in named
    }


def _escape_role_separator(path: str) -> str:
    """Return a path that cannot be mistaken for one with a role as prefix: with ``./`` before it if it contains ``: ``."""
    return f"./{path}" if ": " in path else path


def _list_urls_with_roles(request: Request) -> list[tuple[str, str]]:
    """Return (role, address) of each web address in a call, including members such as ``proxy`` or ``callback``."""
    found = [(role, place) for role, place in _list_paths_and_urls_with_roles(request) if _may_be_url(place)]
    others = _find_texts_outside_place_members(request.input) if request.tool.about is None else ()
    return [*found, *[(name, text) for name, text in others if _is_url_and_not_path(text)]]


def _find_texts_outside_place_members(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for inner, member in value.items():
            if inner not in NAMES_OF_PLACES:
                yield from _find_texts_outside_place_members(member, inner)
    elif isinstance(value, list):
        for member in value:
            yield from _find_texts_outside_place_members(member, name)


def _list_paths_and_urls_with_roles(request: Request) -> list[tuple[str, str]]:
    """
    Return (role, text) of each file or web address that a call names.

    The role is the name of the member. It distinguishes a copy from one file to another from the reverse. Members for plain
    files and addresses have no role. If a tool declares several subjects, each of them is a role.
    """
    about = request.tool.about
    if about is not None:
        return [
            (place if len(about) > 1 else "", text)
            for place in about
            for text in attrs.evolve(request.tool, about=(place,)).find_subjects(request.input)
        ]
    found = find_texts_by_member_name(request.input, NAMES_OF_PLACES)
    return [("" if name in PATHS[:-1] or name in URLS else name, text) for name, text in found]


def _names_path_or_url(request: Request) -> bool:
    """Return whether a call certainly names a file or web address; a member such as ``target`` may also name something else."""
    if request.tool.about is not None:
        return bool(_list_paths_and_urls_with_roles(request))
    found = find_texts_by_member_name(request.input, NAMES_OF_PLACES)
    return any(name not in PLACES or ADDRESS.match(text) for name, text in found)


def _list_http_methods(request: Request) -> list[Any]:
    """Return the HTTP methods in the input of a call."""
    return [request.input[name] for name in METHODS if request.input.get(name) not in {None, ""}]


def _list_hosts(request: Request) -> set[str | None]:
    """Return the hosts of all web addresses in a call; ``None`` for one that programs may read differently."""
    return {_parse_host(url) for _, url in _list_urls_with_roles(request)}


def _list_methods_and_origins(request: Request) -> set[str | None]:
    """Return the method, role and origin of each address in a call as one text; ``None`` if programs may read it differently."""
    how = "".join([f"{str(method).upper()} " for method in _list_http_methods(request)])
    origins = [(f"{role}: " if role else "", _parse_origin(url)) for role, url in _list_urls_with_roles(request)]
    return {None if origin is None else how + role + _format_origin(origin) for role, origin in origins}


def _format_origin(origin: _UrlOrigin) -> str:
    """Return an origin as text, without the default port of its scheme."""
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    is_usual = origin.port is None or origin.port == USUAL_PORTS.get(origin.scheme)
    return f"{origin.scheme}://{host}" + ("" if is_usual else f":{origin.port}")


def _is_allowed_subset(allowed: Sequence[str] | None, found: set[Any]) -> bool:
    """Return True if *found* is not empty and contains only *allowed* entries, or if *allowed* is ``None``."""
    return allowed is None or (bool(found) and found <= set(allowed))


def _names_only_allowed_subjects(call: Call, request: Request) -> bool:
    """Return whether all files and addresses of a call are allowed by the members ``paths``, ``origins`` and ``hosts`` of *call*."""
    if call.paths is None and call.origins is None and call.hosts is None:
        return True
    if not _names_path_or_url(request) or (call.paths is None and _list_paths_with_roles(request)):
        return False
    if call.paths is not None and _may_name_other_files(call.paths, request):
        return False
    if call.origins is None and call.hosts is None and (_list_urls_with_roles(request) or _list_http_methods(request)):
        return False
    is_there = _is_allowed_subset(call.paths, _list_paths_with_roles(request)) and _is_allowed_subset(
        call.origins, _list_methods_and_origins(request)
    )
    return is_there and _is_allowed_subset(call.hosts, _list_hosts(request))


def _may_name_other_files(allowed: Sequence[str], request: Request) -> bool:
    """Return whether an unmarked text may name a file that is not one of the *allowed* paths."""
    named = {text for _, text in _list_paths_and_urls_with_roles(request)}  # these are compared as a whole
    found = _find_contained_paths([text for text in request.unmarked_texts if text not in named], "")
    known = {text for path in allowed for text in (find_paths_in_text(path) or ())}
    return found is None or any(is_path_like(path) and path not in known for path in found)


def _parse_commands_in_input(request: Request) -> JsonDict:
    """Return the input with its commands as lists of words; a script, which only a shell can parse, stays a text."""
    read = {
        name: _parse_command_or_script(request.input[name]) for name in COMMANDS if request.input.get(name) is not None
    }
    return freeze_object({**request.input, **{n: list(c) for n, c in read.items() if not isinstance(c, Script)}})


def _find_single_command(request: Request) -> Argv:
    """Return the words of the only command of a call; an empty tuple for a script and for several commands."""
    commands = request.commands
    return commands[0] if len(commands) == 1 and not isinstance(commands[0], Script) else ()


def _remove_command_from_input(request: Request) -> JsonDict:
    """Return the input of a call without its commands, its time limits and members that are ``None``."""
    left_out = {*COMMANDS, *DURATIONS}
    given = {name: value for name, value in request.input.items() if name not in left_out and value is not None}
    return freeze_object(given)


@frozen
class Untrusted:
    """
    Matches calls with an argument that does not occur in the user's request, or in another trusted source of the run.

    It checks *parameters*, else the destinations of the tool and the addresses in texts that leave with the call. For writing
    tools, it also checks files that instruct later runs.

    Tools without declared destinations are checked only after the run has received untrusted data. Then all their arguments are
    checked, or their commands that are not read-only. Read-only tools and the engine's own tools are not checked.
    """

    kind: ClassVar[str] = "untrusted"
    tool: str
    parameters: tuple[str, ...] = attrs.field(default=(), converter=to_string_tuple)

    def __attrs_post_init__(self) -> None:
        _check_tool_name_pattern(self.tool)
        for parameter in self.parameters:
            _check_not_blank(parameter, 'the name of a parameter, such as "to" or "event.attendees"')

    def matches(self, request: Request, _decision: Effect) -> bool:
        """Return whether one of the checked arguments is not trusted; without provenance, none of them is."""
        known = request.provenance
        is_id = self.treats_numbers_as_ids(request)
        return any(
            known is None or not known.is_trusted(value, is_id=is_id)
            for _, value in self.list_checked_arguments(request)
        )

    def treats_numbers_as_ids(self, request: Request) -> bool:
        """Return whether numbers in the checked arguments are ids: destinations, not amounts."""
        return not self.parameters and request.tool.destinations is not None

    def list_checked_arguments(self, request: Request) -> list[tuple[str, JsonValue]]:
        """Return (path in the input, value) of each argument that is checked, trusted ones included."""
        if not _matches_tool(self.tool, request):
            return []
        paths = self.parameters or request.tool.destinations
        if paths is not None:
            found = [one for path in paths for one in find_values_at_path(request.input, path)]
            return (
                found
                if self.parameters
                else [*found, *_find_addresses_in_texts(request), *_find_arguments_naming_instruction_files(request)]
            )
        if request.provenance is not None and not request.provenance.saw_untrusted:
            return []
        if request.commands:
            return _find_commands_with_effects(request)
        return [] if _is_harmless_tool(request.tool) else list(request.input.items())

    def __str__(self) -> str:
        return f"untrusted {', '.join(self.parameters) or 'destinations'} of {self.tool}"


def _find_addresses_in_texts(request: Request) -> list[tuple[str, JsonValue]]:
    """Return (argument path, address) of each mail address and URL in the texts that leave with a call."""
    texts = [one for path in request.tool.texts for one in find_values_at_path(request.input, path)]
    return [(place, address) for place, value in texts for _, address in find_addresses(value)]


def _is_harmless_tool(tool: ToolSpec) -> bool:
    """Return whether a tool, by its declaration, changes nothing and reaches no one outside the run."""
    notes = tool.annotations
    only_reads = notes.read_only and not notes.open_world and tool.category != "network"
    return only_reads or tool.category in WITHOUT_DESTINATIONS


def _find_commands_with_effects(request: Request) -> list[tuple[str, JsonValue]]:
    """Return (member name, command line) of each command of a call that is not read-only."""
    given = [name for name in COMMANDS if request.input.get(name) is not None]
    return [
        (name, find_shell_command({name: request.input[name]}) or str(request.input[name]))
        for name, command in zip(given, request.commands, strict=True)
        if not any(matches_allow_rule(form, command) for form in READ_ONLY)
    ]


def _find_arguments_naming_instruction_files(request: Request) -> list[tuple[str, JsonValue]]:
    """
    Return (name, value) of the arguments by which a write after untrusted data may name a file that instructs later runs.

    These are all marked paths, and the other arguments that may name such a file.
    """
    known = request.provenance
    if (
        request.tool.category != "write"
        or (known is not None and not known.saw_untrusted)
        or not names_instruction_file(request)
    ):
        return []
    paths: list[JsonValue] = list(request.paths)
    members = [] if request.declares_all_paths else list(request.input.items())
    naming = [
        (name, value)
        for name, value in members
        if value not in paths and names_instruction_file(attrs.evolve(request, input=freeze_object({name: value})))
    ]
    # Where only the arguments together may name one, all are checked.
    return [*[("path", path) for path in paths], *naming] or members


def names_instruction_file(request: Request) -> bool:
    """Return whether a call names, or may name, a file that instructs later runs."""
    readings = [possible_paths(path) for path in request.paths]
    others = request.find_contained_paths(include_marked=True)
    return (
        not all(readings)
        or others is None
        or any(INSTRUCTS.match(path.split("/")) for found in (*readings, others) for path in found)
    )


@frozen
class AfterUntrusted:
    """Matches calls of a tool after the run has received data that may contain text of third parties."""

    kind: ClassVar[str] = "after_untrusted"
    tool: str

    def __attrs_post_init__(self) -> None:
        _check_tool_name_pattern(self.tool)

    def matches(self, request: Request, _decision: Effect) -> bool:
        """Return whether the tool matches and untrusted data were received; unknown provenance counts as untrusted."""
        return _matches_tool(self.tool, request) and (request.provenance is None or request.provenance.saw_untrusted)

    def list_checked_arguments(self, request: Request) -> list[tuple[str, JsonValue]]:
        """Return (name, value) of all arguments, since none of them is checked alone and the person sees all of them."""
        return list(request.input.items())

    def __str__(self) -> str:
        return f"{self.tool} after anything untrusted"


@frozen
class Values:
    """Matches calls of a tool with exactly these arguments; a person allowed them after seeing their origins."""

    kind: ClassVar[str] = "values"
    tool: str
    values: JsonDict = attrs.field(converter=freeze_object)

    def matches(self, request: Request, _decision: Effect) -> bool:
        """Return whether the tool is the same and each listed argument has exactly these values."""
        return request.tool.name == self.tool and all(
            canonical([value for _, value in find_values_at_path(request.input, path)]) == canonical(wanted)
            for path, wanted in self.values.items()
        )

    def __str__(self) -> str:
        return f"{self.tool} with {canonical(self.values)}"


OriginMatcher: TypeAlias = Untrusted | AfterUntrusted
"""Matchers of rules about data origins: they win over rules that allow, and over permanent approvals."""
ORIGIN_MATCHERS = (Untrusted, AfterUntrusted)

Matcher: TypeAlias = (
    Call | EveryCall | ToolNamed | Category | Command | Path | Domain | Regex | CallsWhere | OriginMatcher | Values
)
"""The matchers of a ``Rule``."""


def _matches_tool(name: str | None, request: Request) -> bool:
    """Return whether the tool of a call has the name *name*, which may contain ``*``; True for ``None``."""
    return name is None or _matches_wildcard(_dashes_to_underscores(name), _dashes_to_underscores(request.tool.name))


def _check_tool_name_pattern(pattern: str) -> None:
    """Raise ``DefinitionError`` for a pattern that matches no valid tool name."""
    plain = pattern.replace("*", "")
    if TOOL_CHARS.fullmatch(plain) and len(plain) <= MAX_TOOL_NAME_CHARS:
        return
    near = TOOL_SEPARATORS.sub("__", pattern)
    like = f", as in {near!r}" if near != pattern and TOOL_CHARS.fullmatch(near.replace("*", "")) else ""
    msg = (
        f"{pattern!r} matches no valid tool name: names have up to {MAX_TOOL_NAME_CHARS} letters, digits, _ and -, and only * matches any "
        f"text; tools of a server have names like server__tool{like}"
    )
    raise DefinitionError(msg)


def _check_not_blank(text: object, expected: str) -> None:
    """Raise ``DefinitionError`` unless *text* is a text that is not blank."""
    if not isinstance(text, str) or not text.strip():
        msg = f"a rule needs {expected}, not {text!r}"
        raise DefinitionError(msg)


@frozen
class Scope:
    """
    The part of the runs in which a rule applies.

    Attributes:
        kind: ``global`` for all runs; ``agent`` for the agent *id*, anywhere in a tree; ``session`` for the conversation
            *id*; ``user`` for the decisions of a person. These apply to the user *id* or, without one, to all users.
        id: See *kind*.
    """

    kind: Literal["global", "agent", "session", "user"] = "global"
    id: str | None = None

    def __attrs_post_init__(self) -> None:
        if self.kind not in ORDER:
            msg = f"unknown scope {self.kind!r} of a rule; valid scopes: 'global', 'agent', 'session', 'user'"
            raise DefinitionError(msg)
        if ((self.kind == "global") != (self.id is None) and self.kind != "user") or self.id == "":
            msg = f"the scope {self.kind!r} " + (
                "has no id" if self.kind == "global" else f"needs the id of the {self.kind}"
            )
            raise DefinitionError(msg)

    def applies_to(self, request: Request) -> bool:
        """Return whether rules of this scope apply to a call."""
        if self.kind == "agent":
            return self.id is not None and _dashes_to_underscores(self.id) == _dashes_to_underscores(request.agent_id)
        if self.kind == "session":
            return self.id == request.session_id
        return self.kind == "global" or self.id is None or self.id == request.user_id

    def __str__(self) -> str:
        return self.kind if self.id is None else f"{self.kind}:{self.id}"


SOURCES = ("model", "handler", "tool")
ORDER = {"user": 0, "session": 1, "agent": 2, "global": 3}
"""The order in which scopes are checked."""


def _parse_scope(value: str | Scope) -> Scope:
    """Return the scope for a string such as ``"agent:reviewer"``; a ``Scope`` is returned unchanged."""
    if isinstance(value, Scope):
        return value
    kind, colon, identity = value.partition(":")
    return Scope(kind, identity if colon else None)  # type: ignore[arg-type]  # checked by the class


def _make_rule_id(rule: Rule) -> str:
    """Return the default id of a rule: its decision, matcher, source and scope in words."""
    where = "" if rule.scope.kind == "global" else f" in {rule.scope}"
    asked = "" if rule.source is None else f" asked for by a {rule.source}"
    return f"{rule.decision} {rule.matcher}{asked}{where}"


def _check_call_source(_: Any, __: Any, value: str | None) -> None:
    """Raise ``DefinitionError`` for an unknown source of calls: an attrs validator."""
    if value is not None and value not in SOURCES:
        msg = f"the source of a rule must be one of {', '.join(SOURCES)}, or None for all of them, not {value!r}"
        raise DefinitionError(msg)


@frozen
class Rule:
    """
    One rule of a policy. Class methods make the usual ones, such as ``Rule.allow_tool("read_files")``.

    Attributes:
        decision: ``"allow"``, ``"deny"`` or ``"ask"``. Except for data origins, an ask allows tools with ``requires_permission=False``.
        matcher: The calls that the rule matches.
        scope: The scope, or a string such as ``"agent:reviewer"``.
        priority: Rules with higher priority are checked first, within their scope.
        id: The name in explanations and events; by default made of the decision and the matcher.
        message: For a deny, the text for the model; for an ask, the question.
        description: A text for people.
        source: The origin of the call: ``"model"``, ``"handler"``, or ``"tool"`` for the body of a tool that yields; ``None``
            for any of them.
    """

    decision: Effect = attrs.field(validator=attrs.validators.in_(("allow", "deny", "ask")))
    matcher: Matcher
    scope: Scope = attrs.field(default=Scope(), converter=_parse_scope, kw_only=True)
    priority: int = attrs.field(default=0, kw_only=True)
    source: str | None = attrs.field(default=None, kw_only=True, validator=_check_call_source)
    id: str = attrs.field(default=attrs.Factory(_make_rule_id, takes_self=True), kw_only=True)
    message: str = attrs.field(default="", kw_only=True)
    description: str = attrs.field(default="", kw_only=True)

    def covers_scope_and_source(self, request: Request) -> bool:
        """Return whether the scope and the source of the rule cover a call; its matcher is not checked."""
        if self.source not in (None, request.source) and (request.source or self.decision == "allow"):
            return False  # for an unknown source, deny and ask rules apply, and allow rules do not
        return self.scope.applies_to(request)

    @classmethod
    def allow_tool(cls, name: str, **options: Any) -> Rule:
        """Allow a tool; ``*`` in its name matches any text. *options* are ``scope``, ``priority``, ``id``, ``description``, ``source``."""
        return cls("allow", ToolNamed(name), **options)

    @classmethod
    def deny_tool(cls, name: str, message: str = "", **options: Any) -> Rule:
        """Deny a tool; the model receives *message*."""
        return cls("deny", ToolNamed(name), message=message, **options)

    @classmethod
    def ask_for_tool(cls, name: str, message: str = "", **options: Any) -> Rule:
        """Ask a person before a tool runs, unless it has ``requires_permission=False``."""
        return cls("ask", ToolNamed(name), message=message, **options)

    @classmethod
    def ask_untrusted(cls, tool: str, *parameters: str, message: str = "", **options: Any) -> Rule:
        """
        Ask a person about calls whose arguments are not from the user: the named parameters, else the destinations of the tool.

        The rule wins over allow rules, remembered answers and ``requires_permission=False``. It also asks in the mode
        ``bypass``. A person who allows such a call permanently allows these values.
        """
        return cls("ask", Untrusted(tool, parameters), message=message, **options)

    @classmethod
    def deny_untrusted(cls, tool: str, *parameters: str, message: str = "", **options: Any) -> Rule:
        """Deny calls whose named parameters, else whose destinations, are not from the user; see ``ask_untrusted``."""
        return cls("deny", Untrusted(tool, parameters), message=message, **options)

    @classmethod
    def ask_after_untrusted(cls, tool: str, *, message: str = "", **options: Any) -> Rule:
        """Ask a person about each call of a tool after the run has received untrusted data; see ``ask_untrusted``."""
        return cls("ask", AfterUntrusted(tool), message=message, **options)

    @classmethod
    def allow_category(cls, name: str, **options: Any) -> Rule:
        """Allow the tools of a category, such as ``"read"``."""
        return cls("allow", Category(name), **options)

    @classmethod
    def deny_category(cls, name: str, message: str = "", **options: Any) -> Rule:
        """Deny the tools of a category; the model receives *message*."""
        return cls("deny", Category(name), message=message, **options)

    @classmethod
    def ask_for_category(cls, name: str, message: str = "", **options: Any) -> Rule:
        """Ask a person before a tool of a category runs."""
        return cls("ask", Category(name), message=message, **options)

    @classmethod
    def allow_command(cls, prefix: str | Sequence[str], *, exact: bool = False, **options: Any) -> Rule:
        """
        Allow commands that start with the words of *prefix*, such as ``["git", "status"]``.

        All options after the prefix are allowed, with all their effects. With *exact*, nothing may follow the prefix.
        """
        return cls("allow", Command(CommandForm(to_string_tuple(prefix), exact)), **options)

    @classmethod
    def deny_command(cls, prefix: str | Sequence[str], message: str = "", **options: Any) -> Rule:
        """Deny commands that start with the words of *prefix*, including wrapped ones (``env``). Not a security boundary."""
        return cls("deny", Command(CommandForm(to_string_tuple(prefix))), message=message, **options)

    @classmethod
    def ask_for_command(cls, prefix: str | Sequence[str], message: str = "", **options: Any) -> Rule:
        """Ask a person before running a command that starts with the words of *prefix*."""
        return cls("ask", Command(CommandForm(to_string_tuple(prefix))), message=message, **options)

    @classmethod
    def allow_path(cls, glob: str, *, tool: str | None = None, **options: Any) -> Rule:
        """
        Allow calls if all their paths match a glob, such as ``"docs/**"``; *tool* narrows it to one tool.

        The rule never allows a tool that runs programs (category ``execute``).
        """
        return cls("allow", Path(glob, tool), **options)

    @classmethod
    def deny_path(cls, glob: str, message: str = "", *, tool: str | None = None, **options: Any) -> Rule:
        """Deny calls if one of their paths matches a glob."""
        return cls("deny", Path(glob, tool), message=message, **options)

    @classmethod
    def ask_for_path(cls, glob: str, message: str = "", *, tool: str | None = None, **options: Any) -> Rule:
        """Ask a person before a call if one of its paths matches a glob."""
        return cls("ask", Path(glob, tool), message=message, **options)

    @classmethod
    def allow_domain(cls, host: str, *, tool: str | None = None, **options: Any) -> Rule:
        """
        Allow calls to a host, or with ``*.example.org`` to every host below it.

        The rule never allows a tool that runs programs (category ``execute``).
        """
        return cls("allow", Domain(host, tool), **options)

    @classmethod
    def deny_domain(cls, host: str, message: str = "", *, tool: str | None = None, **options: Any) -> Rule:
        """Deny calls to a host, or with ``*.example.org`` to every host below it."""
        return cls("deny", Domain(host, tool), message=message, **options)
