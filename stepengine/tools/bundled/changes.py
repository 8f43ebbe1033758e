"""``FileChangeHook``: a check that a caller configures for changed files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from attrs import frozen

from stepengine.errors import DefinitionError

COMMAND_MAX_SECONDS = 600.0
"""Ten minutes, for a long build or test suite; a longer command should be a background job."""


def _to_argv(value: Sequence[str]) -> tuple[str, ...]:
    """Return a command as a tuple of words; a text is one word."""
    return (value,) if isinstance(value, str) else tuple(value)


@frozen
class FileChangeHook:
    """
    A check for files that were changed.

    Attributes:
        name: Its name in results.
        command: The program and its arguments, as a list.
        pattern: The pattern of its files, such as ``"**/*.py"``; every file by default.
        cwd: The working folder, relative to the root.
        timeout: The time limit in seconds; 600 by default, which is also the maximum.

    Raises:
        DefinitionError: If the command names no program, or the timeout is not above 0 and at most 600.
    """

    name: str
    command: tuple[str, ...] = attrs.field(converter=_to_argv)
    pattern: str = "**"
    cwd: str = "."
    timeout: float = attrs.field(default=COMMAND_MAX_SECONDS)

    @command.validator
    def _check_command(self, _: Any, value: tuple[str, ...]) -> None:
        """Raise ``DefinitionError`` for a hook without a command."""
        if not value or not value[0]:
            msg = f"the hook {self.name!r} has no command; write a list such as ['mypy', 'src']"
            raise DefinitionError(msg)

    @timeout.validator
    def _check_timeout(self, _: Any, value: object) -> None:
        """Raise ``DefinitionError`` for a timeout that is not a number in the allowed range."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= COMMAND_MAX_SECONDS:
            msg = f"the hook {self.name!r} has timeout={value!r}; use more than 0 and at most {COMMAND_MAX_SECONDS:g} seconds"
            raise DefinitionError(msg)
