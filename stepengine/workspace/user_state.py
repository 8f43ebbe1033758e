"""
The state folder of the user: its path, and whether other users may write to it.

Must not be here: the content of the folder. Each package reads and writes its own files in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from stepengine.workspace.calls import OTHERS_WRITE_BITS

RUNS = "runs"
"""The subfolder of recorded runs."""


def get_user_state_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the user's state folder, even if it does not exist; ``None`` without a home folder."""
    if given := environ.get("STEPENGINE_STATE_DIR", "").strip():
        return Path(given).absolute()
    state, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if state.startswith("/"):
        return Path(state, "stepengine")
    return Path(home, ".local", "state", "stepengine") if home.startswith("/") else None


def is_writable_only_by_user(folder: Path) -> bool:
    """
    Return whether this user owns the folder and no other user can write to it.

    Raises:
        OSError: when it cannot be read.
    """
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE_BITS
