"""
The command line: ``stepengine run`` and its companions, and what is done with recorded runs. The only part that prints.

A command reads its arguments, calls the layers below, shows what comes and ends with an exit code (``exits``); it decides nothing that a
program which embeds stepengine could not have asked for. Answers go to stdout and everything else to stderr, so that the output of a
command can be another one's input. Whatever comes from a model, a tool or a file is made visible before it reaches a terminal, where
an escape sequence could do things.

Lives here: reading arguments, showing progress and results, exit codes. Must not be here: anything that a program which embeds
stepengine would need. Typer and rich are loaded when a command starts, and each command loads its own code alone: whoever types
``--help`` should not wait for an engine.

Begin with ``app``, the table of commands; then one of ``commands``, and ``screen`` for what a terminal shows.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepengine.cli.interrupts import INTERRUPTED, exit_on_interrupt

if TYPE_CHECKING:
    from stepengine.cli.screen.console import ConsoleRenderer, TerminalInteractor
    from stepengine.cli.screen.logger import ConsoleLogger
    from stepengine.cli.screen.render import ColorScheme

__all__ = ("ColorScheme", "ConsoleLogger", "ConsoleRenderer", "TerminalInteractor", "main")


def main() -> None:
    """Run the command line and leave with its exit code; ``stepengine --help`` lists the codes."""
    try:
        with exit_on_interrupt():
            from stepengine.cli.app import app
            from stepengine.cli.exits import run_to_exit
        run_to_exit(app)
    except KeyboardInterrupt:
        print("stepengine: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


_HOME = {
    "ColorScheme": "render",
    "ConsoleLogger": "logger",
    "ConsoleRenderer": "console",
    "TerminalInteractor": "console",
}
"""Where the names for programs come from; the command line itself loads them when it needs them."""


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.screen.{home}"), name)
