"""``stepengine undo``: from a recorded run to its folder as it was before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepengine.cli.journals import found, journal_at
from stepengine.cli.options import Options
from stepengine.cli.report import Exit
from stepengine.cli.running import complain, explained
from stepengine.cli.screen import visible
from stepengine.errors import DefinitionError, JournalError, UndoRefused

__all__ = ("undo_command",)


def undo_command(file: str, *, last: bool, cwd: Path | None, **how: Any) -> Exit:
    """Undo what a run wrote, and print what was done; *how* are the options of ``stepengine.journal.undo``."""

    def command() -> Exit:
        from stepengine.journal import undo

        options = found(Options(journal=file, last=last))
        try:
            done = undo(journal_at(options.journal), options.cwd if cwd is None else cwd, **how)
        except UndoRefused as error:
            for path, why in error.files:
                print(visible(f"changed   {path}: {why}"))
            return complain("nothing was undone; --partial leaves these files and brings back the rest", Exit.FAILED)
        except (JournalError, DefinitionError) as error:
            return complain(error.message, Exit.FAILED)
        print(visible(str(done)))
        return Exit.COMPLETED

    return explained(command)
