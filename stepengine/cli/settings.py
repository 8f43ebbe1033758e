"""The settings of a command, and the error for wrong usage."""

from __future__ import annotations

import sys
from pathlib import Path

from stepengine.data.visible import visible
from stepengine.engine.settings import Settings


class UsageProblem(Exception):
    """A command was used wrongly. The message says how to correct it."""


def load_settings(config: Path | None = None) -> Settings:
    """
    Load the settings for the working folder, print notes about ignored ones, and store which agent files are sandboxed.

    Raises:
        DefinitionError: as for ``Settings.load``.
    """
    settings = Settings.load(Path.cwd(), config=config)
    for note in settings.notes:
        print(f"stepengine: {visible(note)}", file=sys.stderr)
    if settings.sandboxed:
        from stepengine.engine.trust import SANDBOXED

        SANDBOXED.set(settings.sandboxed)
    return settings
