"""What cassettes and journals of tests have in common: the modes of recording, and the account of what happened (replay M)."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import attrs

__all__ = ("MODES", "Account", "Mode", "replays", "shown_path")

Mode: TypeAlias = Literal["none", "once", "new", "extend", "rewrite"]
MODES: tuple[Mode, ...] = get_args(Mode)


def replays(mode: Mode, *, existed: bool) -> bool:
    """Return whether a test only plays a file in this *mode*; *existed* says whether there was one when it began."""
    return mode == "none" or (mode == "once" and existed)


@attrs.frozen(kw_only=True)
class Account:
    """
    What a test did with one of its files.

    Attributes:
        path: The file, as it is shown.
        mode: The mode.
        replayed: Entries that were played.
        recorded: Entries that were recorded.
        unused: Entries that nobody asked for.
        cost: US dollars of the model replies: paid when recorded, saved when replayed; ``None`` when unknown.
    """

    path: str
    mode: str
    replayed: int = 0
    recorded: int = 0
    unused: int = 0
    cost: Decimal | None = None

    def __str__(self) -> str:
        counts = f"{self.replayed} replayed, {self.recorded} recorded, {self.unused} unused"
        cost = "" if self.cost is None else f", ${self.cost:f} {'spent' if self.recorded else 'saved'}"
        return f"{self.path}  mode {self.mode}: {counts}{cost}"

    @property
    def written(self) -> str:
        """What is said of a file that was written."""
        cost = "" if self.cost is None else f", ${self.cost:f}"
        noun = "interaction" if self.path.endswith((".yaml", ".yml")) else "effect"
        return f"recorded {self.path}: {self.recorded} {noun}{'' if self.recorded == 1 else 's'}{cost}"


def shown_path(path: Path) -> str:
    """Return *path* as people write it: from the working directory, where that holds it."""
    try:
        return path.relative_to(Path.cwd()).as_posix()
    except (ValueError, OSError):
        return str(path)
