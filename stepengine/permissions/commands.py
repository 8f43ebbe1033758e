"""
What a rule about commands compares: argument lists word by word, never the text of a shell (``stepengine.tools.argv``).

Allowing errs on the narrow side and denying on the wide one. An allow needs the program by the very name that the rule
gives, so a ``./git`` of the working folder is not ``git``. A deny also finds the program under a path, in another case,
behind programs that start others (``env``, ``xargs``, ``sh -c``), behind options before a sub-command, and anywhere in a
shell script. That is help against accidents, no boundary: a program that may run can start any other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

from stepengine.data.messages import strings
from stepengine.errors import DefinitionError
from stepengine.tools.argv import Argv, Script
from stepengine.tools.files.rules import SECRETS, PathRules

__all__ = ("READ_ONLY", "CommandForm", "denies", "permits")

Operands = Literal["any", "none", "paths", "pattern"]
LAUNCHERS = frozenset((
    "bash", "busybox", "chroot", "command", "dash", "doas", "env", "exec", "fish", "ionice", "ksh", "nice", "nohup", "script",
    "setsid", "sh", "stdbuf", "strace", "sudo", "taskset", "time", "timeout", "unshare", "watch", "xargs", "zsh",
))  # fmt: skip
"""Programs that start the program which their arguments name."""
WORD = re.compile(r"[^\s;&|<>()`$\"']+")
SECRET = PathRules(SECRETS, ())


def _flags(value: Iterable[str] | None) -> frozenset[str] | None:
    return None if value is None else frozenset(strings(value))


@attrs.frozen
class CommandForm:
    """
    Which commands a rule is about: those that begin with the words of *prefix*.

    Attributes:
        prefix: Whole words, the program first, such as ``("git", "status")``.
        exact: Nothing may follow the prefix.
        flags: The only options that may follow, each as ``-x``, ``--word``, or ``--word=`` for one with a value in the same
            word; ``None`` lets any follow. Single-letter options may stand together.
        operands: What may follow beside options: ``"any"`` words, ``"none"``, ``"paths"`` below the working folder that
            name no secret file, or ``"pattern"``, one word of any kind and then such paths.
    """

    prefix: tuple[str, ...] = attrs.field(converter=strings)
    exact: bool = False
    flags: frozenset[str] | None = attrs.field(default=None, converter=_flags)
    operands: Operands = "any"

    def __attrs_post_init__(self) -> None:
        if not self.prefix or not all(self.prefix):
            msg = 'a rule about commands names a program and the words after it, such as ["git", "status"]'
            raise DefinitionError(msg)
        if len(self.prefix) == 1 and any(c.isspace() for c in self.prefix[0]):
            msg = f"{self.prefix[0]!r} is one word with blanks in it; write its words one by one, such as {self.prefix[0].split()!r}"
            raise DefinitionError(msg)


def permits(form: CommandForm, command: Argv | Script) -> bool:
    """Return whether *command* is one that an allow rule or a question about *form* means."""
    if isinstance(command, Script) or command[: len(form.prefix)] != form.prefix:
        return False
    rest = command[len(form.prefix) :]
    if form.exact:
        return not rest
    return (form.flags is None and form.operands == "any") or _fits(form, rest)


def _fits(form: CommandForm, rest: Sequence[str]) -> bool:
    operands: list[str] = []
    options = True
    for word in rest:
        if options and word == "--":
            options = False
        elif options and len(word) > 1 and word.startswith("-"):
            if form.flags is not None and not _is_listed(word, form.flags):
                return False
        else:
            operands.append(word)
    if form.operands == "none":
        return not operands
    if form.operands == "any":
        return True
    return all(_is_harmless_path(word) for word in operands[form.operands == "pattern" :])


def _is_listed(word: str, flags: frozenset[str]) -> bool:
    """Return whether an option is one of the list, spelled out: what a program takes for an abbreviation is not."""
    if word in flags:
        return True
    name, equals, _ = word.partition("=")
    if equals and name.startswith("--"):
        return f"{name}=" in flags
    if word.startswith("--"):
        return False
    letters = word[1:]
    return letters.isascii() and letters.isalpha() and all(f"-{letter}" in flags for letter in letters)


def _is_harmless_path(word: str) -> bool:
    """Return whether a word cannot name a file outside of the working folder or a secret one, ``git``'s ``HEAD:file`` included."""
    return not any(
        part.startswith(("/", "~")) or ".." in part.split("/") or SECRET.match([p for p in part.split("/") if p])
        for part in re.split(r"[:=]", word)
    )


def denies(form: CommandForm, command: Argv | Script) -> bool:
    """Return whether *command* may run what a deny rule about *form* means."""
    first = form.prefix[0].casefold()
    if isinstance(command, Script):
        return any(_name(word) == first for word in WORD.findall(command.text))
    launches = _name(command[0]) in LAUNCHERS
    if permits(form, command) or (_stands_in(form.prefix, command, anywhere=launches) and (launches or not form.exact)):
        return True
    return launches and any(_name(w) == first for word in command[1:] for w in WORD.findall(word) if w != word)


def _name(word: str) -> str:
    return word.rpartition("/")[2].casefold()


def _stands_in(prefix: Sequence[str], words: Sequence[str], *, anywhere: bool) -> bool:
    """Return whether the words of a prefix stand in front, or *anywhere*, options and their values between them aside."""
    program = _name(prefix[0])
    places = {at + 1 for at, word in enumerate(words if anywhere else words[:1]) if _name(word) == program}
    for wanted in prefix[1:]:
        places = {at + 1 for at in _after_options(words, places) if words[at] == wanted}
    return bool(places)


def _after_options(words: Sequence[str], starts: set[int]) -> set[int]:
    """Return where options that begin at *starts* may end: nobody knows which of them takes the next word as its value."""
    ends, reached = set[int](), set(starts)
    if starts:
        for at in range(min(starts), len(words)):
            if at in reached:
                ends.add(at)
                if words[at].startswith("-"):
                    reached.update((at + 1, at + 2))
    return ends


def _form(prefix: str, flags: str = "", operands: Operands = "none") -> CommandForm:
    return CommandForm(prefix.split(), flags=flags.split(), operands=operands)


REVISIONS = "--oneline --stat --shortstat --name-only --name-status --no-color --no-ext-diff --no-textconv --no-renames"
LOG = "-n -p --patch --graph --decorate --all --reverse --follow --merges --no-merges --date= --format= --pretty= --since= --until= --author= --grep= --max-count="

READ_ONLY: tuple[CommandForm, ...] = (
    _form("pwd"),
    _form("echo", "-n", "any"),
    _form("ls", "-a -A -l -h -1 -r -R -t -S -d -F -i -s -p --all --color=never --human-readable --recursive", "paths"),
    _form("cat", "-n -b -s -A --number", "paths"),
    _form("head", "-n -c -q -v --lines= --bytes=", "paths"),
    _form("tail", "-n -c -q -v --lines= --bytes=", "paths"),
    _form("wc", "-l -w -c -m -L --lines --words --bytes --chars", "paths"),
    _form("sort", "-n -r -u -f -b -h -V -k -t --numeric-sort --reverse --unique --key=", "paths"),
    _form("find", "-name -iname -path -ipath -type -maxdepth -mindepth -size -mtime -newer -empty -print -not", "paths"),
    _form("rg", "-n -i -s -S -w -F -x -v -c -l -t -T -g -A -B -C -m -U --line-number --count", "pattern"),
    _form("git status", "-s -b -u --short --branch --porcelain --ignored --untracked-files=", "paths"),
    _form("git diff", f"-U -w --cached --staged --unified= --word-diff {REVISIONS}", "paths"),
    _form("git log", f"{LOG} {REVISIONS}", "paths"),
    _form("git show", f"-U -p --patch --format= --pretty= {REVISIONS}", "paths"),
    _form("git grep", "-n -i -w -F -E -l -c --line-number --cached", "pattern"),
    _form("git branch", "-a -r -v --all --remotes --list --show-current", "none"),
)  # fmt: skip
"""Programs that only look, each with the options and operands with which it does."""
