"""
The simple commands of a shell script, for rules that deny: quotes and backslashes removed, nothing expanded.

The grammar is read leniently. Commands in substitutions, subshells and here-documents are found as well. Whether a command runs,
and with which values, only the shell knows.
"""

from __future__ import annotations

import re

import attrs
from attrs import frozen

from stepengine.workspace.argv import ASSIGNMENT

WORD = re.compile(r"[^\s;&|<>()`$\"'{},=!]+")
"""A word that may be the name of a program, wherever it is in a text."""
RESERVED = frozenset(("!", "{", "}", "do", "done", "elif", "else", "esac", "fi", "if", "then", "until", "while"))
HEADS = frozenset(("[[", "case", "for", "function", "select"))
"""Words that start no command: the words behind them are values."""
BRACKETS = frozenset(("[", "[[", "{", "}"))
EXPANDED = frozenset("*?[{")
MAX_HEREDOC_DEPTH = 8
"""How deep here-documents in substitutions of here-documents are read; no person writes more than two."""
HEREDOC = re.compile(r"<<(?!<)-?[ \t]*([\\'\"]?)([A-Za-z0-9_.-]+)")


@frozen
class SimpleCommand:
    """
    A command of a script.

    Attributes:
        words: The program and its arguments; what a shell would expand is as it is written.
        is_literal: Whether the program is written out, and not the value of a variable, pattern or command.
    """

    words: tuple[str, ...]
    is_literal: bool


@attrs.define
class _Frame:
    """The command that is being read, at one depth of substitutions."""

    closer: str = ""
    is_arithmetic: bool = False
    in_quotes: bool = False
    skips_word: bool = False
    is_expanded: bool = False
    word: list[str] | None = None
    words: list[tuple[str, bool]] = attrs.field(factory=list)

    def append(self, text: str) -> None:
        if self.word is None:
            self.word = []
        self.word.append(text)

    def finish_word(self) -> None:
        if self.word is None:
            return
        text, is_expanded = "".join(self.word), self.is_expanded
        self.word, self.is_expanded = None, False
        if self.skips_word:
            self.skips_word = False
        else:
            self.words.append((text, is_expanded and text not in BRACKETS))


def split_script(text: str) -> list[SimpleCommand]:
    """Return the simple commands of a script, in the order in which they end."""
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str, depth: int = 0) -> None:
        self._text = text
        self._at = 0
        self._depth = depth
        # The text of a here-document is no command, only what is substituted in it.
        self._frames = [_Frame(in_quotes=depth > 0, skips_word=depth > 0)]
        self._heredocs: list[tuple[str, bool]] = []
        self._found: list[SimpleCommand] = []

    def read(self) -> list[SimpleCommand]:
        while self._at < len(self._text):
            self._read_char(self._text[self._at])
        while self._frames:
            self._finish_command()
            self._frames.pop()
        return self._found

    def _read_char(self, char: str) -> None:
        frame = self._frames[-1]
        if char == "\\":
            self._read_escaped(frame)
        elif char == '"':
            frame.in_quotes = not frame.in_quotes
            frame.append("")
            self._at += 1
        elif char == "`":
            self._read_backtick(frame)
        elif char == "$":
            self._read_dollar(frame)
        elif frame.in_quotes:
            frame.append(char)
            self._at += 1
        else:
            self._read_unquoted(frame, char)

    def _read_escaped(self, frame: _Frame) -> None:
        char = self._text[self._at + 1 : self._at + 2]
        if char != "\n":
            frame.append(f"\\{char}" if frame.in_quotes and char not in '$`"\\' else char)
        self._at += 2

    def _read_backtick(self, frame: _Frame) -> None:
        self._at += 1
        if frame.closer == "`":
            self._close_frame()
        else:
            frame.append("`")
            frame.is_expanded = True
            self._frames.append(_Frame("`"))

    def _read_dollar(self, frame: _Frame) -> None:
        following = self._text[self._at + 1 : self._at + 3]
        frame.append("$")
        if following[:1] == "(":
            frame.is_expanded = True
            self._frames.append(_Frame(")", is_arithmetic=following == "(("))
            self._at += 2
            return
        frame.is_expanded = frame.is_expanded or bool(following.strip())
        self._at += 1

    def _read_unquoted(self, frame: _Frame, char: str) -> None:
        self._at += 1
        if char == "'":
            frame.append(self._read_until("'"))
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
            frame.append(char)
            frame.is_expanded = frame.is_expanded or char in EXPANDED

    def _read_until(self, end: str) -> str:
        """Return the text up to a character, or to the end, and move there."""
        start, stop = self._at, self._text.find(end, self._at)
        self._at = len(self._text) if stop < 0 else stop
        return self._text[start : self._at]

    def _read_operator(self, frame: _Frame, char: str) -> None:
        if char == ")":
            self._read_closing(frame)
            return
        self._finish_command()
        if char == "(":
            self._frames.append(_Frame(")", is_arithmetic=frame.is_arithmetic))
        elif char == "\n" and self._heredocs:
            self._read_heredocs()

    def _read_redirection(self, frame: _Frame, char: str) -> None:
        if self._text[self._at : self._at + 1] == "(":  # of a process
            frame.append(char)
            self._frames.append(_Frame(")"))
            self._at += 1
            return
        found = HEREDOC.match(self._text, self._at - 1)
        if found and char == "<":
            self._heredocs.append((found[2], bool(found[1])))
        if frame.word is not None and "".join(frame.word).isdecimal():
            frame.word = None  # the number of a file
        frame.finish_word()
        frame.skips_word = True
        while self._text[self._at : self._at + 1] in {"<", ">", "&", "|", "-"}:
            self._at += 1

    def _read_heredocs(self) -> None:
        """Skip the lines of here-documents, but for the commands in them."""
        for end, is_quoted in self._heredocs:
            start = stop = self._at
            while stop < len(self._text):
                line_end = self._text.find("\n", stop)
                line_end = len(self._text) if line_end < 0 else line_end
                self._at = line_end + 1
                if self._text[stop:line_end].lstrip("\t") == end:
                    break
                stop = self._at
            if not is_quoted and self._depth < MAX_HEREDOC_DEPTH:
                self._found += _Reader(self._text[start:stop].replace('"', " "), self._depth + 1).read()
        self._heredocs = []

    def _read_closing(self, frame: _Frame) -> None:
        if frame.closer == ")":
            self._close_frame()
        else:  # of a pattern, in `case`
            frame.finish_word()
            frame.words = []

    def _close_frame(self) -> None:
        self._finish_command()
        self._frames.pop()

    def _finish_command(self) -> None:
        frame = self._frames[-1]
        frame.finish_word()
        words, frame.words, frame.skips_word = frame.words, [], False
        start = 0
        while start < len(words) and (words[start][0] in RESERVED or ASSIGNMENT.match(words[start][0])):
            start += 1
        if start < len(words) and words[start][0] not in HEADS:
            is_literal = frame.is_arithmetic or not words[start][1]
            self._found.append(SimpleCommand(tuple([word for word, _ in words[start:]]), is_literal))
