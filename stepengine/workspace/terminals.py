"""
``Terminals``: terminals of an editor, in which commands run visibly for a person.

This module must not decide which command may run, and in which folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import frozen


@frozen(kw_only=True)
class TerminalResult:
    """
    The result of a command in a terminal.

    Attributes:
        output: The output of both streams, in order of arrival.
        is_cut: Whether the beginning of the output is missing.
        code: The exit code; ``None`` if a signal ended the command.
        signal: The signal that ended the command; ``""`` for none.
        in_time: Whether the command ended before the time limit.
    """

    output: str
    is_cut: bool = False
    code: int | None = None
    signal: str = ""
    in_time: bool = True


class Terminals(Protocol):
    """The terminals of an editor."""

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        output_bytes: int,
        seconds: float | None,
        path: str,
        call_id: str,
    ) -> TerminalResult | None:
        """
        Run a program to its end or for *seconds*, and release its terminal; ``None`` if the editor offers no terminal.

        Args:
            argv: The program and its arguments.
            cwd: The absolute path of the folder to run it in.
            env: Variables in addition to those of the editor's terminals.
            output_bytes: The most bytes of the output, counted from its end.
            seconds: The time limit; ``None`` for none.
            path: The path of the run with this tool call.
            call_id: The id of the call, next to which the terminal is shown.

        Raises:
            ToolError: when the editor could not start it.
        """
