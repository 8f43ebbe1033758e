"""What tells of the machine that a journal is written on (replay K7)."""

from __future__ import annotations

import getpass
import os
import socket
import tempfile
from pathlib import Path

__all__ = ("machine_data",)

MIN_PATH = 5
MIN_NAME = 3
ORDINARY_NAMES = frozenset({
    "admin", "app", "build", "builder", "container", "default", "docker", "guest", "home", "host", "local", "localhost",
    "name", "node", "none", "nobody", "python", "root", "runner", "server", "test", "tester", "ubuntu", "unknown", "user",
    "worker", "workspace",
})  # fmt: skip
"""Names of users and hosts that are words: replacing them would change texts that do not speak of this machine."""


def machine_data(cwd: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """
    Return the texts that tell of this machine, each with its placeholder (replay K7).

    They are the working folder ``<cwd>``, the folder for temporary files ``<tmp>``, the home folder ``<home>``, and the
    names of host ``<host>`` and user ``<user>``. Short paths and names that are ordinary words are left out.
    """
    found: dict[str, str] = {}
    for path, placeholder in (
        (os.fspath(cwd) if cwd is not None else _cwd(), "<cwd>"),
        (tempfile.gettempdir(), "<tmp>"),
        (str(Path("~").expanduser()), "<home>"),
    ):
        if len(path) >= MIN_PATH or (placeholder == "<tmp>" and len(path) > 1):
            found.setdefault(str(Path(path)), placeholder)
    for name, placeholder in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if len(name) >= MIN_NAME and name.lower() not in ORDINARY_NAMES:
            found.setdefault(name, placeholder)
    return found


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # removed meanwhile
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""
