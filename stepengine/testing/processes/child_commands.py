"""
Recognise commands that start a Python which ignores ``PYTHONPATH``: it cannot be recorded or replayed.

This module imports the standard library alone.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

PYTHON = re.compile(r"(?:python|pypy)[\d.]*[a-z]*(?:\.exe)?")
REASONS = {
    "I": "-I ignores PYTHONPATH",
    "E": "-E ignores PYTHONPATH",
    "S": "-S does not import the site module",
}
WITH_VALUE = "WX"
ENDS = "cm"
SHELLS = frozenset({"sh", "bash", "dash", "zsh"})


def find_uncovered_reason(
    command: Sequence[object], variables: Mapping[object, object] | None, site_folder: str
) -> str | None:
    """
    Return why a command starts a Python that does not record or replay; ``None`` if it does, or starts no Python.

    Args:
        command: The program and its arguments. The words of ``sh -c`` are searched, too.
        variables: The environment of the new process; None if it inherits that of this one.
        site_folder: The entry of ``PYTHONPATH`` that covers a process.
    """
    words = _split_command_words(command)
    starts = [i for i, word in enumerate(words) if PYTHON.fullmatch(os.path.basename(word))]  # noqa: PTH119 - runs at start-up
    for start in starts:
        reason = _find_option_reason(words[start + 1 :])
        if reason:
            return reason
    if starts and variables is not None:
        given = {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()}  # type: ignore[arg-type]
        if site_folder not in given.get("PYTHONPATH", "").split(os.pathsep):
            return "its environment has another PYTHONPATH"
    return None


def _split_command_words(command: Sequence[object]) -> list[str]:
    """Return the words of a command that starts Python, or of the script of a shell; nothing for other programs."""
    words = [os.fsdecode(word) for word in command if isinstance(word, (str, bytes, os.PathLike))]
    if not words or os.path.basename(words[0]) not in SHELLS:  # noqa: PTH119
        # Only the program itself is a Python: its arguments may name another one without starting it.
        return words if words and PYTHON.fullmatch(os.path.basename(words[0])) else []  # noqa: PTH119
    try:
        return [word for text in words[1:] for word in shlex.split(text)]
    except ValueError:
        return []


def _find_option_reason(words: list[str]) -> str | None:
    """Return why an option before the script makes Python ignore the recorder; None if no option does."""
    position = 0
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-", "--"):
        word = words[position]
        position += 1
        if word.startswith("--"):
            continue
        for index, letter in enumerate(word[1:], 1):
            if letter in REASONS:
                return REASONS[letter]
            if letter in WITH_VALUE:
                position += index == len(word) - 1
                break
            if letter in ENDS:
                return None
    return None
