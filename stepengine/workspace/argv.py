"""
The two kinds of commands: argument lists and shell scripts.

A string is an argument list only if every POSIX shell would split it into the same words and do nothing else with it;
``parse_command`` checks that. Everything else is a ``Script``, a different kind of call, which matches no rule for argument
lists. The parsed words are executed exactly, without a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from attrs import frozen

from stepengine.errors import ToolError

COMMAND_WORDS = 1_000
"""More arguments than a model writes; a list of files belongs into a file."""
COMMAND_BYTES = 128 * 1024
"""Linux refuses a single argument of more than 128 KiB, which a command for a shell is."""

Argv: TypeAlias = tuple[str, ...]

SHELL_CHARACTERS = frozenset(";&|<>$`(){}*?[]!")
IN_DOUBLE_QUOTES = frozenset("$`!")
ESCAPABLE = frozenset('$`"\\')
ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
PLAIN = re.compile(r"[\x20-\x7e]+")


@frozen
class Script:
    """
    A command that needs a shell.

    Attributes:
        text: The script.
        reason: Why it needs a shell, such as ``"';' outside of quotes"``.
    """

    text: str
    reason: str


class _NotArgv(Exception):
    """The text is not an argument list."""


def parse_command(command: str | Sequence[str]) -> Argv | Script:
    """
    Return *command* as an argument list, or as a script if it needs a shell; raise ``ToolError`` if it is empty or too large.

    Args:
        command: A list of words, or text.

    Raises:
        ToolError: when *command* is empty, has a NUL or half a surrogate pair, or has more than 1,000 words or 128 KiB.
    """
    if not isinstance(command, str):
        return require_argv(command)
    _check_command_text(command)
    if not command.strip(" \t"):
        msg = 'the command is empty; give a program and its arguments, such as ["git", "status"]'
        raise ToolError(msg)
    try:
        words = split_argv(command)
    except ValueError as error:
        return Script(command, str(error))
    return require_argv(words)


def require_argv(words: Sequence[str]) -> Argv:
    """
    Return *words* as an argument list after validation.

    Raises:
        ToolError: when there is no program, or it is too large to be executed.
    """
    argv = tuple(words)
    if not argv or not argv[0]:
        msg = "the command names no program; its first element is the program, the others are the arguments"
        raise ToolError(msg)
    if len(argv) > COMMAND_WORDS:
        msg = f"the command has {len(argv):,} elements; at most {COMMAND_WORDS:,} are allowed"
        raise ToolError(msg)
    for word in argv:
        _check_command_text(word)
    size = sum([len(w.encode()) + 1 for w in argv])
    if size > COMMAND_BYTES:
        _raise_too_large(size)
    return argv


def _check_command_text(text: str) -> None:
    """Raise an error for text that no program accepts: with a NUL or half a surrogate pair, or of more than 128 KiB."""
    if len(text) > COMMAND_BYTES:
        _raise_too_large(len(text))
    if "\0" in text:
        msg = "the command holds a NUL character, which no program can be given"
        raise ToolError(msg)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        msg = "the command holds half of a surrogate pair, which is not text"
        raise ToolError(msg) from None
    if size > COMMAND_BYTES:
        _raise_too_large(size)


def _raise_too_large(size: int) -> NoReturn:
    """Raise ``ToolError`` for a command of *size* bytes."""
    msg = f"the command has {size:,} bytes; at most {COMMAND_BYTES:,} are allowed; put long text into a file"
    raise ToolError(msg)


def split_argv(text: str) -> Argv:
    """
    Return the words of *text* as a POSIX shell splits it; raise ``ValueError`` if a shell would do more than split it.

    Words are separated by spaces and tabs. Single quotes, double quotes and backslashes mean what they mean in a shell.

    Raises:
        ValueError: when a shell would do more than split it; the message names what it would act on.
    """
    try:
        words = _Splitter(text).split_words()
    except _NotArgv as problem:
        raise ValueError(*problem.args) from None
    if words and ASSIGNMENT.match(words[0]):
        msg = f"the variable assignment {words[0].partition('=')[0] + '='!r} in front"
        raise ValueError(msg)
    return tuple(words)


class _Splitter:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._word: list[str] | None = None

    def split_words(self) -> list[str]:
        """Return all words of the text; raise ``_NotArgv`` for a text that only a shell can interpret."""
        found: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in " \t":
                found += self._pop_word()
            else:
                self._read_char_or_quotation(char)
            self._at += 1
        return found + self._pop_word()

    def _pop_word(self) -> list[str]:
        """Return the finished word in a list, which is empty without a word, and start the next word."""
        made, self._word = self._word, None
        return [] if made is None else ["".join(made)]

    def _read_char_or_quotation(self, char: str) -> None:
        """Append a character, an escaped one or a whole quotation to the word; refuse characters that a shell interprets."""
        if char in SHELL_CHARACTERS or not char.isprintable():
            _raise_not_argv(f"{char!r} outside of quotes")
        if char == "'":
            self._append_text(self._read_single_quoted())
        elif char == '"':
            self._append_text(self._read_double_quoted())
        elif char == "\\":
            self._append_text(self._read_escaped())
        else:
            self._check_position(char)
            self._append_text(char)

    def _check_position(self, char: str) -> None:
        """Raise an error for a character that is special at its position."""
        if char not in "#~":
            return
        word = "".join(self._word or ())
        if char == "#" and not word:
            _raise_not_argv("'#' at the start of a word")
        if char == "~" and (not word or word[-1] in "=:"):
            _raise_not_argv(f"'~' {'after ' + repr(word[-1]) if word else 'at the start of a word'}")

    def _append_text(self, text: str) -> None:
        """Append *text* to the current word, or start a word with it."""
        if self._word is None:
            self._word = []
        self._word.append(text)

    def _read_single_quoted(self) -> str:
        """Return the text of a single-quoted part, and move to its end."""
        end = self._text.find("'", self._at + 1)
        if end < 0:
            _raise_not_argv("a single quote that is not closed")
        start, self._at = self._at + 1, end
        return self._text[start:end]

    def _read_escaped(self) -> str:
        """Return the character after a backslash; refuse a line end or other unprintable one."""
        self._at += 1
        char = self._text[self._at : self._at + 1]
        if not char.isprintable() or not char:
            _raise_not_argv(f"{char!r} after a backslash" if char else "a backslash at the end")
        return char

    def _read_double_quoted(self) -> str:
        """Return the text of a double-quoted part, and move to its end; refuse characters that a shell expands in it."""
        made: list[str] = []
        while True:
            self._at += 1
            char = self._text[self._at : self._at + 1]
            if char == '"':
                return "".join(made)
            if not char:
                _raise_not_argv("a double quote that is not closed")
            if char in IN_DOUBLE_QUOTES:
                _raise_not_argv(f"{char!r} in double quotes")
            if char == "\\":
                char = self._unescape_in_double(self._text[self._at + 1 : self._at + 2])
            made.append(char)

    def _unescape_in_double(self, char: str) -> str:
        """Return the value of a backslash and the next character in double quotes."""
        if char == "\n":
            _raise_not_argv("a backslash before the end of a line")
        if char not in ESCAPABLE:
            return "\\"
        self._at += 1
        return char


def _raise_not_argv(problem: str) -> NoReturn:
    """Raise the internal error for a text that only a shell can interpret."""
    raise _NotArgv(problem)


def command_text(command: Argv | Script) -> str:
    """
    Return a command as text for the person who approves it.

    An argument list of printable ASCII characters is one quoted line, and such a script is unchanged. Otherwise each element of
    the list, or line of the script, is a separate line with all other characters escaped. The hidden characters are counted,
    and nothing is omitted.
    """
    words = command.text.split("\n") if isinstance(command, Script) else command
    if all(word == "" or PLAIN.fullmatch(word) for word in words):
        return command.text if isinstance(command, Script) else shlex.join(words)
    hidden = sum([1 for word in words for char in word if not char.isprintable()])
    lines = [ascii(word) for word in words]
    if hidden:
        lines.append(f"({hidden:,} hidden characters, shown as escapes)")
    return "\n".join(lines)
