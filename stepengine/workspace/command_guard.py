"""``CommandGuard``: confines the call of a command that a rule allows as read-only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from stepengine.workspace.argv import Argv
from stepengine.workspace.guard import CallGuard
from stepengine.workspace.root import Root


@frozen(kw_only=True)
class CommandGuard(CallGuard):
    """
    The guard of a command call, with the function that restricts the command.

    Attributes:
        confine: Receives the root of a tool, the path of the working folder below it, and a command. Returns the command to run
            instead. Raises ``ToolError`` for a command whose words lead to withheld files.
    """

    confine: Callable[[Root, Sequence[str], Argv], Argv]
