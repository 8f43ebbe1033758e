"""
What bubblewrap, which Linux desktops use for the same, is told to show of this system: for commands, and for whole workspaces.

What may be seen is listed, not what may not: the system's programs and libraries, read-only, and folders that are named. There is
no network, not even the loopback of this machine, and no other process in sight.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ("PROGRAM", "shown_system")

PROGRAM = "bwrap"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store", "/gnu/store")
"""What programs need to start, read-only."""
HIDDEN = (
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/ssh",
    "/etc/ssl/private",
    "/etc/sudoers",
)
"""What of that says nothing to programs and much to others: the superuser can read it in a sandbox, too."""


def shown_system(search_path: str, *, network: bool = False) -> Iterator[str]:
    """Yield the options that make an empty system and show in it the programs of this one, and nothing else."""
    yield from ("--unshare-all", *(("--share-net",) if network else ()), "--die-with-parent", "--new-session")
    yield from ("--cap-drop", "ALL", "--hostname", "sandbox")
    yield from _system()
    yield from ("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")  # noqa: S108  (inside of the sandbox)
    for folder in _installed(search_path):
        yield from ("--ro-bind-try", folder, folder)


def _system() -> Iterator[str]:
    """Yield the options that show the system's programs and libraries, as this system lays them out."""
    for folder in SYSTEM:
        if os.path.islink(folder):  # noqa: PTH114  (the target as written is wanted)
            yield from ("--symlink", os.readlink(folder), folder)  # noqa: PTH115  (as above)
        else:
            yield from ("--ro-bind-try", folder, folder)
    for path in HIDDEN:
        if Path(path).is_dir():
            yield from ("--tmpfs", path)
        elif Path(path).exists():
            yield from ("--ro-bind", "/dev/null", path)


def _installed(search_path: str) -> Iterator[str]:
    """Yield the folders outside of the system's own that programs on the search path, and this Python, are installed in."""
    seen: dict[str, None] = {}
    for folder in (*search_path.split(os.pathsep), f"{sys.prefix}/bin", f"{sys.base_prefix}/bin"):
        real = os.path.realpath(folder)
        above = str(Path(real).parent) if Path(real).name in {"bin", "sbin", "shims"} else real
        home = str(Path("~").expanduser())
        if folder and above not in {"/", home} and not above.startswith(SYSTEM):
            seen.setdefault(above)
    yield from seen
