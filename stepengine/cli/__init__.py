"""
The command line: commands that start runs, and commands on recorded and durable runs.

A command parses its arguments, calls the layers below, prints the result and returns an exit code (``exits``). Programs that embed
stepengine can do everything that a command does. Results go to stdout and everything else to stderr, so that commands can be piped.
Texts of models, tools and files are made visible before they reach a terminal, because escape sequences could control it.

This package contains arguments, progress, results and exit codes. Features that an embedding program needs belong to other packages.
A command imports its own modules when it starts, so that ``--help`` does not load the engine.

Start with ``command_table``, the table of commands, and ``app``, which parses them. Then read a module of ``commands``: ``options`` holds
its options, ``bench`` makes the engine, ``perform`` and ``journals`` run it, ``state_folder`` records it, and ``screen`` prints it.
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
    """Run the command line and exit with its exit code; ``stepengine --help`` lists the codes."""
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
"""The modules below ``screen`` of the public names, which are imported on first access."""


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.screen.{home}"), name)
