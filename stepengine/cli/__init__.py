"""
The command line: ``stepengine run`` and its companions, and what is done with recorded runs. The only part that prints.

Lives here: reading arguments, showing progress and results, exit codes. Must not be here: anything that a program which
embeds stepengine would need. Typer and rich are loaded when a command starts.
"""

from __future__ import annotations

import sys

__all__ = ("main",)

INTERRUPTED = 130
"""As in the table of exit codes, which is not loaded yet when it counts."""


def main() -> None:
    """Run the command line and leave with its exit code; ``stepengine --help`` lists the codes."""
    try:
        from stepengine.cli.app import app
        from stepengine.cli.ending import finished

        finished(app)
    except KeyboardInterrupt:
        print("stepengine: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
