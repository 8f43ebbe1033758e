"""
The command line: ``stepengine run`` and its companions, and what is done with recorded runs. The only part that prints.

Lives here: reading arguments, showing progress and results, exit codes. Must not be here: anything that a program which
embeds stepengine would need. Typer and rich are loaded when a command starts.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepengine.cli.console import ConsoleRenderer, TerminalInteractor
    from stepengine.cli.logger import ConsoleLogger
    from stepengine.cli.render import ColorScheme

__all__ = ("ColorScheme", "ConsoleLogger", "ConsoleRenderer", "TerminalInteractor", "main")

INTERRUPTED = 130
"""As in the table of exit codes, which is not loaded yet when it counts."""


def main() -> None:
    """Run the command line and leave with its exit code; ``stepengine --help`` lists the codes."""
    try:
        from stepengine.cli.app import app
        from stepengine.cli.exits import finished

        finished(app)
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
    return getattr(import_module(f"{__name__}.{home}"), name)
