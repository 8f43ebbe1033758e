"""
The simple commands of a shell script, for deny rules: without quotes and backslashes, and nothing expanded.

Commands in substitutions, subshells and here-documents are included. Only the shell knows whether a command runs, and with
which values. If the reader and a shell may disagree about a script, it is not understood: then all its words count. If the
disagreement could hide a command, the script is unclear.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import attrs
from attrs import frozen

from stepengine.workspace.argv import ASSIGNMENT

WORD = re.compile(r"[^\s\0;&|<>()`$\"'{},=!]+")
"""A word in a text that may be the name of a program."""
RESERVED = frozenset(("!", "{", "}", "do", "done", "elif", "else", "esac", "fi", "if", "then", "until", "while"))
HEADS = frozenset(("[[", "case", "for", "function", "select"))
"""Words that start no command: the following words are values, up to a word of ``BODIES``."""
BODIES = frozenset(("do", "then", "{"))
WITHOUT_PROGRAM = RESERVED | HEADS
BRACKETS = frozenset(("[", "[[", "{", "}", "{}"))
"""Words that no shell expands."""
EXPANDED = frozenset("*?[{")
MAX_HEREDOC_DEPTH = 8
"""The most nested here-documents that are read; no person writes more than two."""
EXPANSION = "\0"
"""The last character of a word that a shell expands, whose value is unknown. No command contains this character."""
HEREDOC = re.compile(r"<<(-?)[ \t]*([\\'\"]?)([A-Za-z0-9_.-]+)(['\"]?)(?![^\s;&|<>()])")
REDIRECTION = re.compile(r"<<<|<<-?|<>|<&|>&|>>|>\||<|>")
PARAMETER = re.compile(
    r"\$(?:\w|[#?@*!$-]|\{(?:[#?@*!$-]|[#!]?\w+(?:\[[@*\w]*\])?(?:[:#%/^,+=?-][^\s'\"`$\\{}()@]*)?)\})"
)
"""Expansions of variables that contain no other expansion."""
ARITHMETIC = re.compile(r"\$?\(\((?:[\w\s+*/%<>=&|^~!?:,$-]|\([\w\s+*/%<>=&|^~!?:,$-]*\))*\)\)")
"""Arithmetic without quotes, indexes and substitutions, so without commands."""
ESCAPED_QUOTE = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL)


INDEX = re.compile(r"\w\[[^\]\n]{0,200}(?:\$\(|`)")
"""An index of an array with a substitution; shell builtins such as ``test -v`` run it, even if it is quoted."""


@frozen
class SimpleCommand:
    """
    A command of a script.

    Attributes:
        words: The program and its arguments, as written; the ones that a shell expands end with ``EXPANSION``.
        settings: The assignments before the program.
        is_piped: Whether it may read the output of another command of the script.
        has_heredoc: Whether it reads text of the script.
    """

    words: tuple[str, ...]
    settings: tuple[str, ...] = ()
    is_piped: bool = False
    has_heredoc: bool = False


@frozen
class ParsedScript:
    """
    The commands and output files of a script.

    Attributes:
        commands: In the order in which they end.
        written: The files that redirections write.
        is_understood: Whether these are all commands, apart from those that they start.
        is_unclear: Whether the script may hide a command from the reader.
    """

    commands: tuple[SimpleCommand, ...]
    written: frozenset[str]
    is_understood: bool
    is_unclear: bool


@attrs.define
class _Frame:
    """The state of the command at one depth of substitutions."""

    closer: str = ""
    in_quotes: bool = False
    skips_word: bool = False
    writes: bool = False
    has_heredoc: bool = False
    is_heredoc: bool = False
    is_expanded: bool = False
    has_index: bool = False
    word: list[str] | None = None
    words: list[str] = attrs.field(factory=list)
    written: list[str] = attrs.field(factory=list)

    def append_to_word(self, text: str) -> None:
        """Append *text* to the current word, or start a word with it."""
        if self.word is None:
            self.word = []
        self.word.append(text)

    def finish_word(self) -> None:
        """Add the current word to the command, or after a redirection to its files; a word that a shell expands gets a mark."""
        if self.word is None:
            return
        text, is_expanded = "".join(self.word), self.is_expanded
        self.word, self.is_expanded = None, False
        # A variable may hold an index, too: arithmetic evaluates variables as expressions.
        self.has_index |= INDEX.search(text) is not None
        if is_expanded and text not in BRACKETS:
            text += EXPANSION
        if self.skips_word:
            self.written += [text] if self.writes else []
            self.skips_word = self.writes = False
        else:
            self.words.append(text)


def split_script(text: str) -> ParsedScript:
    """Return the simple commands and output files of a script, and whether all of them were found for certain."""
    reader = _Reader(text)
    commands = reader.read_commands()
    return ParsedScript(tuple(commands), frozenset(reader.written), reader.is_understood, reader.is_unclear)


class _Reader:
    def __init__(self, text: str, depth: int = 0) -> None:
        self._text = text
        self._at = 0
        self._depth = depth
        # The text of a here-document is no command, only the substitutions in it are.
        self._frames = [_Frame(in_quotes=depth > 0, skips_word=depth > 0, is_heredoc=depth > 0)]
        self._heredocs: list[tuple[str, bool, bool]] = []
        self._backticks = 0
        self._is_piped = self._has_arithmetic = False
        self._expands_twice = "@P}" in text
        self._found: list[SimpleCommand] = []
        self.written: list[str] = []
        self.is_understood = True
        self.is_unclear = False

    def read_commands(self) -> list[SimpleCommand]:
        """Read the whole text, return its commands, and set ``written``, ``is_understood`` and ``is_unclear``."""
        while self._at < len(self._text):
            self._read_char(self._text[self._at])
        if len(self._frames) > 1 or self._frames[0].in_quotes != (self._depth > 0) or self._heredocs:
            self.is_understood = False
        while self._frames:
            self._finish_command()
            self._frames.pop()
        return self._found

    def _read_char(self, char: str) -> None:
        """Read the next character or construct of the script into the innermost frame."""
        frame = self._frames[-1]
        if char == "\\":
            self._read_escaped(frame)
        elif char == '"' and not frame.is_heredoc:
            frame.in_quotes = not frame.in_quotes
            frame.append_to_word("")
            self._at += 1
        elif char == "`":
            self._read_backtick(frame)
        elif char == "$":
            self._read_dollar(frame)
        elif frame.in_quotes:
            frame.append_to_word(char)
            self._at += 1
        else:
            self._read_unquoted(frame, char)

    def _read_escaped(self, frame: _Frame) -> None:
        """Read a backslash and the next character; a line continuation adds nothing."""
        self.is_unclear |= self._backticks > 0
        char = self._text[self._at + 1 : self._at + 2]
        if char != "\n":
            frame.append_to_word(f"\\{char}" if frame.in_quotes and char not in '$`"\\' else char)
        self._at += 2

    def _read_backtick(self, frame: _Frame) -> None:
        """Read a backtick, which opens or closes a command substitution."""
        self._at += 1
        if frame.closer == "`":
            self._backticks -= 1
            self._close_frame()
        else:
            frame.append_to_word("`")
            frame.is_expanded = True
            self.is_unclear |= self._backticks > 0
            self._backticks += 1
            self._frames.append(_Frame("`"))

    def _read_dollar(self, frame: _Frame) -> None:
        """Read a dollar: a parameter, an arithmetic expansion, or the start of a command substitution."""
        following = self._text[self._at + 1 : self._at + 3]
        frame.append_to_word("$")
        whole = ARITHMETIC.match(self._text, self._at) or PARAMETER.match(self._text, self._at)
        if not whole and not frame.in_quotes:
            whole = ESCAPED_QUOTE.match(self._text, self._at)
        if whole:
            frame.is_expanded = True
            frame.append_to_word(whole[0][1:])
            self._at = whole.end()
            return
        if following[:1] == "{" or following == "((":
            self.is_understood = False
            self._has_arithmetic = True
            self.is_unclear |= self._expands_twice
        if following[:1] == "(":
            frame.is_expanded = True
            self._frames.append(_Frame(")"))
            self._at += 2
            return
        frame.is_expanded |= bool(following.strip())
        self._at += 1

    def _read_unquoted(self, frame: _Frame, char: str) -> None:
        """Read a character outside of quotes: a quotation, blank, comment, operator or part of a word."""
        self._at += 1
        if char == "'":
            frame.append_to_word(self._read_until("'"))
            self.is_understood &= self._at < len(self._text)
            self._at += 1
        elif char in " \t":
            frame.finish_word()
        elif char == "#" and frame.word is None:
            self._read_until("\n")
        elif char in "<>":
            self._read_redirection(frame, char)
        elif char in ";&|\n\r()":
            self._read_operator(frame, char)
        else:
            frame.append_to_word(char)
            frame.is_expanded |= char in EXPANDED

    def _read_until(self, end: str) -> str:
        """Return the text up to the character *end*, or all the rest, and advance to there."""
        start, stop = self._at, self._text.find(end, self._at)
        self._at = len(self._text) if stop < 0 else stop
        return self._text[start : self._at]

    def _read_operator(self, frame: _Frame, char: str) -> None:
        """Read an operator, which ends the command or is a parenthesis; at a line end, also skip here-documents."""
        if char == ")":
            self._read_closing_parenthesis(frame)
            return
        if char == "(":
            self._read_opening_parenthesis(frame)
            return
        self._finish_command()
        if char == "|":
            is_or = "|" in self._text[self._at : self._at + 1] + self._text[max(self._at - 2, 0) : self._at - 1]
            self._is_piped |= not is_or
        elif char == "\n" and self._heredocs:
            self._read_heredocs()

    def _read_opening_parenthesis(self, frame: _Frame) -> None:
        """Read an opening parenthesis and open a frame; anything but a subshell is marked as not understood."""
        frame.finish_word()
        if any(word not in RESERVED for word in frame.words):  # a function, an array, a pattern
            self.is_understood = False
        self._finish_command()
        if self._text[self._at : self._at + 1] == "(":  # arithmetic for bash, two subshells for dash
            self._has_arithmetic = True
            self.is_understood &= ARITHMETIC.match(self._text, self._at - 1) is not None
        self._frames.append(_Frame(")"))

    def _read_redirection(self, frame: _Frame, char: str) -> None:
        """Read a redirection or process substitution, and record output files and here-documents."""
        if self._text[self._at : self._at + 1] == "(":  # of a process
            self._is_piped = True
            frame.append_to_word(char)
            self._frames.append(_Frame(")"))
            self._at += 1
            return
        operator = REDIRECTION.match(self._text, self._at - 1)
        assert operator is not None  # noqa: S101  (the character is one)
        if operator[0] in {"<<", "<<-"}:
            found = HEREDOC.match(self._text, self._at - 1)
            if not found or self._has_arithmetic or (found[2] in {"'", '"'}) != (found[4] != ""):
                self.is_unclear = True
            if found:
                self._heredocs.append((found[3], bool(found[2]), bool(found[1])))
            frame.has_heredoc = True
        if frame.word is not None and "".join(frame.word).isdecimal():
            frame.word = None  # the number of a file
        frame.finish_word()
        frame.skips_word, frame.writes = True, operator[0] in {">", ">>", ">|", ">&", "<>"}
        frame.has_heredoc |= operator[0] == "<<<"
        self._at = operator.end()

    def _read_heredocs(self) -> None:
        """Skip the lines of here-documents, and add the commands in their substitutions."""
        for end, is_quoted, strips_tabs in self._heredocs:
            start = stop = self._at
            while stop < len(self._text):
                line_end = self._text.find("\n", stop)
                line_end = len(self._text) if line_end < 0 else line_end
                self._at = line_end + 1
                line = self._text[stop:line_end]
                if (line.lstrip("\t") if strips_tabs else line) == end:
                    break
                stop = self._at
            self.is_unclear |= INDEX.search(self._text, start, stop) is not None
            if not is_quoted and self._depth < MAX_HEREDOC_DEPTH:
                inner = _Reader(self._text[start:stop], self._depth + 1)
                self._found += inner.read_commands()
                self.is_understood &= inner.is_understood
                self.is_unclear |= inner.is_unclear
            elif not is_quoted:
                self.is_unclear = True
        self._heredocs = []

    def _read_closing_parenthesis(self, frame: _Frame) -> None:
        """Read a closing parenthesis, which ends a subshell, or else a pattern of ``case``."""
        if frame.closer == ")":
            self._close_frame()
        else:  # of a pattern, in `case`
            frame.finish_word()
            frame.words = []

    def _close_frame(self) -> None:
        """Store the command of the innermost frame, and remove the frame."""
        self._finish_command()
        self._frames.pop()

    def _finish_command(self) -> None:
        """Store the command of the innermost frame, if it has a program or assignments, and start the next one."""
        frame = self._frames[-1]
        frame.finish_word()
        words, has_heredoc = frame.words, frame.has_heredoc
        self.written += frame.written
        frame.words, frame.written, frame.skips_word, frame.has_heredoc = [], [], False, False
        start = _find_program_index(words)
        settings = [word for word in words[:start] if ASSIGNMENT.match(word)]
        first = words[start] if start < len(words) else ""
        heads = set(words[: start + 1])
        if heads & {"alias", "coproc", "function", "select"} or (first.startswith("!") and first != "!"):
            self.is_understood = False
        self.is_unclear |= frame.has_index
        if "case" in heads and len(self._frames) > 1:
            self.is_unclear = True  # the parenthesis behind a pattern ends no substitution
        if first or settings:
            words = words[start:] or [":"]
            self._found.append(SimpleCommand(tuple(words), tuple(settings), self._is_piped, has_heredoc))


def _find_program_index(words: Sequence[str]) -> int:
    """Return the index of the program in a command, after assignments, reserved words and the head of a loop or function."""
    start = 0
    while start < len(words) and (words[start] in WITHOUT_PROGRAM or ASSIGNMENT.match(words[start])):
        if words[start] in HEADS:  # the body may follow in the same row, as in `for x do` and `function f {`
            start = next((at for at in range(start + 1, len(words)) if words[at] in BODIES), len(words) - 1)
        start += 1
    return start
