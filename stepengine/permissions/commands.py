"""
The comparison of rules about commands with argument lists, word by word (``stepengine.workspace.argv``).

Allow rules match narrowly and deny rules widely. An allow needs exactly the program name of the rule, so a ``./git`` in the
working folder is not ``git``. A deny also matches the program under a path, in another case, behind programs that start others
(``wrappers``), with options before a subcommand, and in each command of a shell script. If some commands of a script
are unknown, the whole text is searched.

If a command may start the program without naming it, ``explain_possible_match`` returns the reason, and the policy asks. This
prevents accidents and is not a security boundary: a program that may run can start any other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Literal

import attrs
from attrs import frozen

from stepengine.data.messages import to_string_tuple
from stepengine.errors import DefinitionError, ToolError
from stepengine.permissions.script_commands import EXPANSION, WORD, split_script
from stepengine.permissions.wrappers import (
    ADDED_WORDS,
    GIT_VALUES,
    find_option_ends,
    find_started_commands,
    normalize_program_name,
)
from stepengine.workspace import calls
from stepengine.workspace.argv import Argv, Script
from stepengine.workspace.path_rules import SECRETS, PathRules
from stepengine.workspace.patterns import expand_braces
from stepengine.workspace.root import Missing, OpenedEntry, Root
from stepengine.workspace.withheld_files import find_linked_secrets, has_visible_entry, list_withheld_paths

Operands = Literal["any", "none", "paths", "pattern"]
CONFINED: tuple[Operands, ...] = ("paths", "pattern")
"""Forms that allow commands by the files in their operands; ``confine_command`` restricts these commands."""

SECRET = PathRules(SECRETS, ())
SHOWING = ("diff", "log", "show", "grep", "status")
"""Git commands that show the content of files."""
CACHED_SCRIPTS = 16
"""Every rule about commands needs the words of the same scripts."""
MAX_LEFT_OUT_NAMES = 500
"""The most names that a listing can exclude one by one; the length of a command line is limited."""
NO_RANGE = ("^!", "^@", "^-")
"""Endings of words that git reads as a commit and its parents; only commits may precede them."""


def _convert_to_flag_set(value: Iterable[str] | None) -> frozenset[str] | None:
    """Return flags as a set; ``None`` unchanged, which means any flag."""
    return None if value is None else frozenset(to_string_tuple(value))


@frozen
class CommandForm:
    """
    The commands of a rule: those that start with the words of *prefix*.

    Attributes:
        prefix: Whole words, the program first, such as ``("git", "status")``.
        exact: Nothing may follow the prefix.
        flags: The only options that may follow: ``-x``, ``--word``, ``--word=`` for one with a value in the same word, or
            ``-#`` for a number. ``None`` allows any. Single-letter options may be combined. After ``--``, no word may
            start like an option.
        operands: The operands that may follow: ``"any"`` words, ``"none"``, ``"paths"`` below the working folder except
            secret files, or ``"pattern"``, one word of any kind followed by such paths.
    """

    prefix: tuple[str, ...] = attrs.field(converter=to_string_tuple)
    exact: bool = False
    flags: frozenset[str] | None = attrs.field(default=None, converter=_convert_to_flag_set)
    operands: Operands = "any"

    def __attrs_post_init__(self) -> None:
        if not self.prefix or not all(self.prefix):
            msg = 'a rule about commands must name a program and the words after it, such as ["git", "status"]'
            raise DefinitionError(msg)
        if any(c.isspace() for c in self.prefix[0]):
            msg = f"{self.prefix[0]!r} contains blanks; write its words separately, such as {self.prefix[0].split()!r}"
            raise DefinitionError(msg)
        if "*" in self.prefix[0] or not normalize_program_name(self.prefix[0]):
            msg = (
                f"{self.prefix[0]!r} is not the name of a program, and rules about commands have no wildcards. Name one program, such as "
                '["git"], or write a rule about all commands, such as Rule.deny_category("execute")'
            )
            raise DefinitionError(msg)
        if self.prefix[-1] == "*":
            msg = f"a prefix must not end in '*'; {list(self.prefix[:-1])!r} already covers all commands that start with it"
            raise DefinitionError(msg)


def matches_allow_rule(form: CommandForm, command: Argv | Script) -> bool:
    """Return whether *command* matches an allow rule for *form*: exactly, and never a script."""
    if isinstance(command, Script) or command[: len(form.prefix)] != form.prefix:
        return False
    rest = command[len(form.prefix) :]
    if form.exact:
        return not rest
    return (form.flags is None and form.operands == "any") or _has_allowed_arguments(form, rest)


@frozen
class _CommandTail:
    """
    The words after the prefix of a command, split at ``--``.

    Attributes:
        before: The words before ``--``, options and operands.
        behind: The words after ``--``.
    """

    before: tuple[str, ...]
    behind: tuple[str, ...]

    @classmethod
    def from_argv(cls, rest: Argv) -> _CommandTail:
        """Return the words after a prefix, split at the first ``--``, which is dropped."""
        end = rest.index("--") if "--" in rest else len(rest)
        return cls(rest[:end], rest[end + 1 :])

    @property
    def options(self) -> list[str]:
        """The words before ``--`` that start with a dash, except ``-`` itself."""
        return [word for word in self.before if _is_option(word)]

    @property
    def operands(self) -> list[str]:
        """All words except options; an option's value in a separate word is included, since only the program recognizes it."""
        return [*[word for word in self.before if not _is_option(word)], *self.behind]


def _is_option(word: str) -> bool:
    """Return whether a word starts with a dash and has more characters."""
    return len(word) > 1 and word.startswith("-")


def _has_allowed_arguments(form: CommandForm, rest: Argv) -> bool:
    """Return whether the words after a prefix are only flags and operands that *form* allows."""
    words = _CommandTail.from_argv(rest)
    # An option may take `--` as its value; the program then reads the following words as options.
    if form.flags is not None and not (
        all(_is_allowed_option(word, form.flags) for word in words.options) and not any(map(_is_option, words.behind))
    ):
        return False
    if form.operands == "none":
        return not words.operands
    if form.operands == "any":
        return True
    # Pytest reads further options from `@file`.
    has_options = form.prefix[-1] == "pytest" and any(word.startswith("@") for word in words.operands)
    return not has_options and all(_is_harmless_path(word) for word in words.operands[form.operands == "pattern" :])


def _is_allowed_option(word: str, flags: frozenset[str]) -> bool:
    """Return whether *flags* contain an option; combined single letters are allowed, abbreviated words are not."""
    if word in flags or ("-#" in flags and word.isascii() and word[1:].isdecimal()):
        return True
    name, equals, _ = word.partition("=")
    if equals and name.startswith("--"):
        return f"{name}=" in flags
    if word.startswith("--"):
        return False
    letters = word[1:]
    return letters.isascii() and letters.isalpha() and all(f"-{letter}" in flags for letter in letters)


def _is_harmless_path(word: str) -> bool:
    """Return True if a word names no secret file and no file outside the working folder, also in git's form ``HEAD:file``."""
    return not any(
        part.startswith(("/", "~")) or ".." in part.split("/") or SECRET.match([p for p in part.split("/") if p])
        for part in re.split(r"[:=]", word)
    )


# --- confining read-only commands -----------------------------------------------------------------------------------


def confine_command(form: CommandForm, denied: Sequence[str], root: Root, cwd: Sequence[str], command: Argv) -> Argv:
    """
    Return a read-only command that a rule allows, with options that exclude secret and denied files from its output.

    The files of the command are known only here: a path may be a link to anywhere, and ``git`` and ``rg`` show files that no
    word names. So paths are opened as by file tools, and searches exclude secret and denied files.

    Args:
        form: The form that allowed the command.
        denied: Globs of the files that rules withhold, relative to the root.
        root: The root for all paths.
        cwd: The working folder, as the parts of its path below the root.
        command: The command of the model.

    Raises:
        ToolError: If it names a withheld file, or names files in a notation that only the program understands.
    """
    if command[0] == "git":
        return _confine_git(form, denied, root, cwd, command)
    searched = _CommandTail.from_argv(command[len(form.prefix) :]).operands[form.operands == "pattern" :]
    for path in searched:
        if _path_exists_or_raise_if_withheld(root, cwd, path) and command[0] == "rg":
            _require_normal_search_path(path)
    if command[0] == "ls":
        return _confine_ls(root, cwd, command, searched or ["."])
    if command[0] == "find":
        return _confine_find(root, cwd, command)
    if command[0] != "rg":
        return command
    secret = [
        f"--iglob=!{glob}"
        for glob in (*_list_secret_and_denied_globs(root, denied), *_find_linked_secret_globs(root, cwd))
    ]
    # Its globs start in the working folder and bind paths as the command names them, those of rules start at the root and bind
    # paths without links. Only rg knows which words are values.
    places = [".", *searched] if cwd else [path for path in searched if _leads_through_link(root, path)]
    hidden = dict.fromkeys([path.removeprefix("./") for path in _list_withheld_paths(root, cwd, places)])
    secret += [f"--glob=!/{_escape_glob(path)}" for path in hidden]
    at = command.index("--") if "--" in command else len(command)
    return (*command[:at], *secret, *command[at:])


def _confine_ls(root: Root, cwd: Sequence[str], command: Argv, paths: Sequence[str]) -> Argv:
    """
    Return an ``ls`` command with options that exclude withheld files; raise ``ToolError`` if these would exclude visible files, too.

    Raises:
        ToolError: If the options would also exclude visible files, since ``ls`` excludes names in all folders.
    """
    options = [word for word in command[1:] if _is_option(word)]
    deep = any("R" in word if word[1] != "-" else "--recursive".startswith(word) for word in options)
    names = dict.fromkeys(
        [place[-1] for path in paths for place, _ in _list_withheld_and_real_paths(root, cwd, path, deep=deep)]
    )
    _check_excluded_name_count(names)
    if (
        names
        and (deep or len(paths) > 1)
        and any(_folder_has_visible_entry(root, cwd, path, names, deep=deep) for path in paths)
    ):
        msg = "ls would also hide files with the same name as a withheld file; list one folder at a time without -R, or use find"
        raise ToolError(msg)
    return (command[0], *[f"--ignore={_escape_glob(name)}" for name in names], *command[1:])


def _confine_find(root: Root, cwd: Sequence[str], command: Argv) -> Argv:
    """
    Return a ``find`` command with tests that exclude withheld files; raise ``ToolError`` for ``,`` and ``--``, which would escape them.

    Raises:
        ToolError: For ``,``, which joins two expressions, because the tests apply only to the first; and for ``--``.
    """
    words = command[1:]
    if odd := next((word for word in words if word in {",", "--"}), None):
        msg = f"{odd!r} is not supported for find; pass folders first, then options"
        raise ToolError(msg)
    end = next((at for at, word in enumerate(words) if _is_option(word) or word in {"(", "!"}), len(words))
    starts, rest = [_normalize_search_path(word) for word in words[:end] or (".",)], words[end:]
    depths = [at for at, word in enumerate(rest[:-1]) if word in {"-maxdepth", "-mindepth"}]
    limits = {rest[at + 1] for at in depths if rest[at] == "-maxdepth"}
    hidden = _list_withheld_paths(root, cwd, starts, deep=not limits or not limits <= {"0", "1"})
    leaves_out = [
        word for path in map(_escape_glob, hidden) for word in ("-not", "-path", path, "-not", "-path", f"{path}/*")
    ]
    moved = [word for at in depths for word in rest[at : at + 2]]
    tests = [word for at, word in enumerate(rest) if at not in depths and at - 1 not in depths]
    return (command[0], *starts, *moved, *leaves_out, *tests)


def _normalize_search_path(path: str) -> str:
    """Return a search path as programs print it: without ``//`` and ``/./``; a final ``/`` or ``/.``, which follows a link, is ``/``."""
    parts = [part for part in path.split("/") if part not in {"", "."}]
    head = "./" if parts and path.startswith("./") else ""
    return head + ("/".join(parts) or ".") + ("/" if path.endswith(("/", "/.")) else "")


def _require_normal_search_path(path: str) -> None:
    """Raise ``ToolError`` for a path with ``//`` or ``/./``, since exclusion globs do not match the printed form of its files."""
    if path.removesuffix("/") != _normalize_search_path(path).removesuffix("/"):
        msg = f"{path!r} is not in its normal form, so withheld files below it cannot be excluded; write {_normalize_search_path(path)!r}"
        raise ToolError(msg)


def _list_withheld_paths(root: Root, cwd: Sequence[str], folders: Iterable[str], *, deep: bool = True) -> list[str]:
    """Return the withheld paths below folders, with the folders as the command names them; raise ``ToolError`` for too many."""
    found, files = dict[str, None](), set[tuple[str, ...]]()
    for folder in dict.fromkeys([folder.rstrip("/") for folder in folders]):
        for place, real in _list_withheld_and_real_paths(root, cwd, folder, deep=deep):
            found[f"{folder}/{'/'.join(place)}"] = None
            files.add(real)
    _check_excluded_name_count(files)
    return list(found)


@contextmanager
def _open_folder(root: Root, cwd: Sequence[str], path: str) -> Iterator[OpenedEntry | None]:
    """Open a folder, yield it and close it; yield ``None`` if the path is not an accessible folder."""
    try:
        opened = root.open_folder(_join_below_root(cwd, path))
    except ToolError:
        yield None
        return
    try:
        yield opened
    finally:
        calls.close(opened.fd)


def _list_withheld_and_real_paths(
    root: Root, cwd: Sequence[str], path: str, *, deep: bool
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return (path relative to the folder, path relative to the root) of each withheld entry; an empty list if it is no folder."""
    with _open_folder(root, cwd, path) as folder:
        if folder is None:
            return []
        return [(place, (*folder.parts, *place)) for place in list_withheld_paths(root, folder, deep=deep)]


def _leads_through_link(root: Root, path: str) -> bool:
    """Return whether a path below the root leads to a folder through a symbolic link."""
    with _open_folder(root, (), path) as folder:
        return folder is not None and list(folder.parts) != [part for part in path.split("/") if part not in {"", "."}]


def _folder_has_visible_entry(root: Root, cwd: Sequence[str], path: str, names: Collection[str], *, deep: bool) -> bool:
    """Return whether the folder at *path* has an entry with one of *names* that is not withheld; False if it is no folder."""
    with _open_folder(root, cwd, path) as folder:
        return folder is not None and has_visible_entry(root, folder, names, deep=deep)


def _check_excluded_name_count(names: Collection[object]) -> None:
    """Raise ``ToolError`` if a command would have to exclude more than 500 names."""
    if len(names) > MAX_LEFT_OUT_NAMES:
        msg = f"the output would have to exclude {len(names):,} withheld files, and the limit is {MAX_LEFT_OUT_NAMES}; name a folder with fewer"
        raise ToolError(msg)


def _escape_glob(name: str) -> str:
    """Return the glob that matches exactly this name."""
    return "".join([f"[{c}]" if c in "*?[{" else "\\\\" if c == "\\" else c for c in name])


def _find_linked_secret_globs(root: Root, cwd: Sequence[str] = ()) -> list[str]:
    """Return globs, for any depth below the folder *cwd*, that match the hard links to withheld files in it."""
    found = [place for place in find_linked_secrets(root) if place[: len(cwd)] == tuple(cwd)]
    return ["**/" + _escape_glob("/".join(place[len(cwd) :])) for place in found]


def _join_below_root(cwd: Sequence[str], path: str) -> str:
    """Return the path relative to the root for a *path* relative to the folder *cwd*."""
    return "/".join([*cwd, *[part for part in path.split("/") if part not in {"", "."}]]) or "."


def _path_exists_or_raise_if_withheld(root: Root, cwd: Sequence[str], path: str) -> bool:
    """Return whether a file or folder exists; raise ``ToolError`` if it is withheld or cannot be opened."""
    place = _join_below_root(cwd, path)
    try:
        calls.close(root.open_folder(place).fd)
    except Missing:
        return False
    except ToolError:
        try:
            calls.close(root.open_file(place).fd)
        except Missing:
            return False
    return True


def _list_secret_and_denied_globs(root: Root, denied: Sequence[str]) -> list[str]:
    """Return globs, for any depth, that match the secret and denied files below a root."""
    secret = [f"{pattern}**" if pattern.endswith("/") else pattern for pattern in root.secrets.patterns]
    found = [glob for pattern in (*secret, *denied) for glob in expand_braces(pattern.removeprefix("./"))]
    # Git and rg read such an ending as the content of a folder, not as a file of that name.
    return [f"**/{glob}" for each in found for glob in dict.fromkeys((each, each.removesuffix("/**")))]


def _confine_git(form: CommandForm, denied: Sequence[str], root: Root, cwd: Sequence[str], command: Argv) -> Argv:
    """
    Return a git command with ``--`` before its paths and without secret files; raise ``ToolError`` for pathspec magic and object paths.

    Raises:
        ToolError: For pathspec magic, for an object named by its path in a tree or index, and for an option before the subcommand.
    """
    deed = command[1] if len(command) > 1 else ""
    if _is_option(deed):
        msg = f"the option {deed!r} before the git command may change which files git reads; remove it"
        raise ToolError(msg)
    head = max(len(form.prefix), 2)
    words = _GitArguments.from_argv(command[head:], has_pattern=form.operands == "pattern")
    for word in (*words.operands, *words.behind):
        if word.startswith(":") or (":" in word and word in words.operands):
            msg = f"{word!r} names files in a way that only git understands; name commits, then '--', then paths"
            raise ToolError(msg)
    paths = [word for word in words.operands if _path_exists_or_raise_if_withheld(root, cwd, word) or deed == "status"]
    for word in words.behind:
        _path_exists_or_raise_if_withheld(root, cwd, word)
    if deed not in SHOWING or (
        deed == "log" and not paths and not words.behind and not _git_log_shows_files(words.options)
    ):
        return command
    commits = [_limit_revision_to_commits(word) for word in words.operands if word not in paths]
    inside = "/".join([".."] * len(cwd)) or "."
    left = [f":(top,exclude,icase,glob){glob}" for glob in _list_secret_and_denied_globs(root, denied)]
    left += [f":(top,exclude,glob){glob}" for glob in _find_linked_secret_globs(root)]
    return (*command[:head], *words.options, *commits, "--", *([*paths, *words.behind] or [inside]), *left)


@frozen
class _GitArguments:
    """
    The words after the prefix of a git command.

    Attributes:
        options: Options with their values, and the pattern of a search.
        operands: Commits, and paths before ``--``.
        behind: The paths after ``--``.
    """

    options: tuple[str, ...]
    operands: tuple[str, ...]
    behind: tuple[str, ...]

    @classmethod
    def from_argv(cls, rest: Argv, *, has_pattern: bool) -> _GitArguments:
        """Return the words split into options and operands; with *has_pattern*, the first operand becomes the option ``-e PATTERN``."""
        words, options, operands = _CommandTail.from_argv(rest), list[str](), list[str]()
        behind = words.behind
        for at, word in enumerate(words.before):
            is_value = at > 0 and words.before[at - 1] == "-n" and word.isdecimal() and not has_pattern
            if _is_option(word) or is_value:
                options.append(word)
            elif has_pattern:
                options += ["-e", word]
                has_pattern = False
            else:
                operands.append(word)
        if has_pattern and behind:
            options += ["-e", behind[0]]
            behind = behind[1:]
        return cls(tuple(options), tuple(operands), behind)


def _git_log_shows_files(words: Sequence[str]) -> bool:
    """Return whether these options make ``git log`` show changed files or their content."""
    return any(word.startswith(("-p", "-U", "--patch", "--stat", "--shortstat", "--name-")) for word in words)


def _limit_revision_to_commits(word: str) -> str:
    """
    Return a word for any git object, or a range of them, restricted to commits.

    A file's content or a folder can be named by its hash. The exclusion of paths would not apply to it.
    """
    if word.endswith(NO_RANGE):
        return word
    return "".join(
        [f"{part}^{{commit}}" if part.strip(".") else part for part in re.split(r"(\.{2,3})", word, maxsplit=1)]
    )


def find_broader_form(command: Argv | Script) -> CommandForm | None:
    """Return a known-harmless form that covers *command* and similar ones; ``None`` if there is none."""
    return next((form for form in WIDENABLE if matches_allow_rule(form, command)), None)


def matches_deny_rule(form: CommandForm, command: Argv | Script) -> bool:
    """Return whether *command*, or any command that it starts, matches a deny rule for *form*."""
    return any(_matches_single_command(form, started) for started in find_started_commands(command).commands)


def explain_possible_match(form: CommandForm, command: Argv | Script) -> str:
    """Return why *command* may run a command of *form* without naming it; ``""`` if it cannot."""
    started = find_started_commands(command)
    if any(_matches_single_command(form, possible) for possible in started.possible):
        return f"it names {normalize_program_name(form.prefix[0])!r} after a program that may start it"
    if any(_may_match_after_expansion(form, one) for one in started.commands):
        return f"the arguments of {form.prefix[0]!r} are known only to the shell"
    return started.unclear


def _matches_single_command(form: CommandForm, command: Argv | Script) -> bool:
    """Return whether a deny for *form* matches one command: an argument list by its prefix, a script if a word names the program."""
    program = normalize_program_name(form.prefix[0])
    if isinstance(command, Script):
        return program in _find_possible_program_names(command.text)
    if normalize_program_name(command[0]) != program:
        return False
    if form.exact and not any(ADDED_WORDS in word for word in command):
        return command[1:] == form.prefix[1:]
    return _matches_prefix_ignoring_options(form.prefix[1:], command)


def _may_match_after_expansion(form: CommandForm, command: Argv | Script) -> bool:
    """Return whether a word that a shell expands may complete the prefix of *form*."""
    if isinstance(command, Script) or normalize_program_name(command[0]) != normalize_program_name(form.prefix[0]):
        return False
    for wanted, word in zip(form.prefix[1:], command[1:], strict=False):
        if word.endswith(EXPANSION):
            return True
        if word != wanted:
            return False
    return False


@lru_cache(CACHED_SCRIPTS)
def _find_possible_program_names(text: str) -> frozenset[str]:
    """Return the normalized words of a script that may name programs, both with and without quotes."""
    words = [word for simple in split_script(text).commands for word in simple.words]
    return frozenset([normalize_program_name(word) for part in (text, *words) for word in (part, *WORD.findall(part))])


def _matches_prefix_ignoring_options(prefix: Sequence[str], words: Sequence[str]) -> bool:
    """Return whether the words *prefix* follow the program in this order, with only options and their values between them."""
    places = {1}
    for wanted in prefix:
        ends = find_option_ends(words, places)
        # Added words may be the rest of the prefix, unless they are the value of an option such as `git -C`.
        if any(ADDED_WORDS in words[at] and words[at - 1] not in GIT_VALUES for at in ends):
            return True
        places = {at + 1 for at in ends if words[at] == wanted}
    return bool(places)


def _make_command_form(prefix: str, flags: str = "", operands: Operands = "none") -> CommandForm:
    """Return a command form; the words of *prefix* and *flags* are separated by blanks."""
    return CommandForm(prefix.split(), flags=flags.split(), operands=operands)


REVISIONS = "--oneline --stat --shortstat --name-only --name-status --no-color --no-ext-diff --no-textconv --no-renames"
LOG = "-# -n -p --patch --graph --decorate --all --reverse --merges --no-merges --date= --format= --pretty= --since= --until= --author= --grep= --max-count="

READ_ONLY: tuple[CommandForm, ...] = (
    _make_command_form("pwd"),
    _make_command_form("echo", "-n", "any"),
    _make_command_form("ls", "-a -A -l -h -1 -r -R -t -S -d -F -i -s -p --all --color=never --human-readable --recursive", "paths"),
    _make_command_form("cat", "-n -b -s -A --number", "paths"),
    _make_command_form("head", "-# -n -c -q -v --lines= --bytes=", "paths"),
    _make_command_form("tail", "-# -n -c -q -v --lines= --bytes=", "paths"),
    _make_command_form("wc", "-l -w -c -m -L --lines --words --bytes --chars", "paths"),
    _make_command_form("sort", "-n -r -u -f -b -h -V -k -t --numeric-sort --reverse --unique --key=", "paths"),
    _make_command_form("find", "-name -iname -path -ipath -type -maxdepth -mindepth -size -mtime -newer -empty -print -not", "paths"),
    _make_command_form("rg", "-n -i -s -S -w -F -x -v -c -l -t -T -g -A -B -C -m -U --line-number --count", "pattern"),
    _make_command_form("git status", "-s -b -u --short --branch --porcelain --ignored --untracked-files=", "paths"),
    _make_command_form("git diff", f"-U -w --cached --staged --unified= --word-diff {REVISIONS}", "paths"),
    _make_command_form("git log", f"{LOG} {REVISIONS}", "paths"),
    _make_command_form("git show", f"-U -p --patch --format= --pretty= {REVISIONS}", "paths"),
    _make_command_form("git grep", "-n -i -w -F -E -l -c --line-number --cached", "pattern"),
    _make_command_form("git branch", "-a -r -v --all --remotes --list --show-current", "none"),
)  # fmt: skip
"""Read-only programs, each with the options and operands with which it writes nothing."""

TESTS = "-q -v -x -s -l -k -m --lf --last-failed --ff --failed-first --sw --stepwise --co --collect-only --maxfail= --tb= --durations= --no-header"

WIDENABLE: tuple[CommandForm, ...] = (
    *READ_ONLY,
    _make_command_form("du", "-a -c -h -s --max-depth=", "paths"),
    _make_command_form("grep", "-# -n -i -l -L -c -w -x -E -F -v -h -H -s -q -A -B -C -m --include= --exclude= --exclude-dir=", "pattern"),
    _make_command_form("stat", "-c -t --format=", "paths"),
    *[_make_command_form(f"{start}pytest", TESTS, "paths") for start in ("", "python -m ", "python3 -m ", "uv run ", "poetry run ")],
)  # fmt: skip
"""
Forms that a person may allow permanently after one command: no option or operand writes a file or starts a program.

The list contains only known options, since no one knows every option of every program: ``git log`` has ``--output``, ``sort``
has ``-o``. ``pytest`` runs the tests of the folder with any of these options, and ``@file`` is not one of its operands.
"""
