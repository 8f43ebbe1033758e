"""
The command line: ``stepengine run`` and its companions, and what is done with recorded runs. The only part that prints.

A command reads its arguments, asks the floors below, shows what comes and ends with an exit code (``exits``); it decides nothing that a
program which embeds stepengine could not have asked for. Answers go to stdout and everything else to stderr, so that the output of a
command can be another one's input. Whatever comes from a model, a tool or a file is made visible before it reaches a terminal, where
an escape sequence could do things.

Lives here: reading arguments, showing progress and results, exit codes. Must not be here: anything that a program which embeds
stepengine would need. Typer and rich are loaded when a command starts, and each command loads its own code alone: whoever types
``--help`` should not wait for an engine.

Begin with ``app``, the table of commands; then one of ``commands``, and ``screen`` for what a terminal shows.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepengine.cli.screen.console import ConsoleRenderer, TerminalInteractor
    from stepengine.cli.screen.logger import ConsoleLogger
    from stepengine.cli.screen.render import ColorScheme

__all__ = ("ColorScheme", "ConsoleLogger", "ConsoleRenderer", "TerminalInteractor", "main")

INTERRUPTED = 130
"""As in the table of exit codes, which is not loaded yet when it counts."""


def main() -> None:
    """Run the command line and leave with its exit code; ``stepengine --help`` lists the codes."""
    try:
        with loading():
            from stepengine.cli.app import app
            from stepengine.cli.exits import run_to_exit
        run_to_exit(app)
    except KeyboardInterrupt:
        print("stepengine: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


@contextmanager
def loading() -> Iterator[None]:
    """Let Ctrl-C end the process at once, while the modules of the command line are loaded."""
    _at_interrupt(_leave_at_once, signal.default_int_handler)
    try:
        yield
    finally:
        _at_interrupt(signal.default_int_handler, _leave_at_once)


def _at_interrupt(handler: Callable[..., object], instead_of: Callable[..., object]) -> None:
    """Let Ctrl-C do something else than usual; a process that ignores it, or has its own handler, keeps that."""
    if signal.getsignal(signal.SIGINT) is instead_of:
        with suppress(ValueError):  # another thread than the main one is never interrupted
            signal.signal(signal.SIGINT, handler)


def _leave_at_once(*_: object) -> None:
    """Leave while modules are loaded, when nothing has begun: raised there, an exception may be shown, or lost in a callback."""
    os.write(2, b"stepengine: interrupted\n")
    os._exit(INTERRUPTED)


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
