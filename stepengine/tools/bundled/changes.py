"""``FileChangeHook``: a check that a caller configures for files that change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from attrs import frozen

from stepengine.errors import DefinitionError

COMMAND_MAX_SECONDS = 600.0
"""A build or a test suite of ten minutes is the longest that somebody waits for; a longer one is a background job."""


def _to_argv(value: Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@frozen
class FileChangeHook:
    """
    A check for files that were changed.

    Attributes:
        name: What it is called in results.
        command: The program and its arguments, as a list.
        pattern: Which files it is for, such as ``"**/*.py"``; every file by default.
        cwd: The folder to work in, relative to the root.
        timeout: Seconds that it may take; 600 by default and at most.

    Raises:
        DefinitionError: when the command names no program, or the timeout is not more than 0 and at most 600.
    """

    name: str
    command: tuple[str, ...] = attrs.field(converter=_to_argv)
    pattern: str = "**"
    cwd: str = "."
    timeout: float = attrs.field(default=COMMAND_MAX_SECONDS)

    @command.validator
    def _check_command(self, _: Any, value: tuple[str, ...]) -> None:
        if not value or not value[0]:
            msg = f"the hook {self.name!r} has no command; write a list such as ['mypy', 'src']"
            raise DefinitionError(msg)

    @timeout.validator
    def _check_timeout(self, _: Any, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= COMMAND_MAX_SECONDS:
            msg = f"the hook {self.name!r} has timeout={value!r}; use more than 0 and at most {COMMAND_MAX_SECONDS:g} seconds"
            raise DefinitionError(msg)
