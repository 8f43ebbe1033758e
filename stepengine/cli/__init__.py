"""
The command line: ``stepengine run`` and its companions, and what is done with recorded runs. The only part that prints.

Lives here: reading arguments, showing progress and results, exit codes. Must not be here: anything that a program which
embeds stepengine would need. Typer and rich are loaded when a command starts.
"""

from __future__ import annotations

from stepengine.cli.console import ConsoleRenderer, TerminalInteractor
from stepengine.cli.logger import ConsoleLogger
from stepengine.cli.screen import ColorScheme

__all__ = ("ColorScheme", "ConsoleLogger", "ConsoleRenderer", "TerminalInteractor", "main")


def main() -> None:
    """Run the command line and leave with its exit code; ``stepengine --help`` lists the codes."""
    from stepengine.cli.app import app
    from stepengine.cli.ending import finished

    finished(app)
