"""
The options of bubblewrap, a sandbox of Linux desktops, for commands and for whole workspaces.

The options list the visible parts of the system: its programs and libraries, read-only, and named folders. There is no network, not
even the loopback of this machine, and no other process is visible.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

PROGRAM = "bwrap"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store", "/gnu/store")
"""Folders that programs need to start, read-only."""
HIDDEN = (
    "/etc/shadow",
    "/etc/shadow-",
    "/etc/gshadow",
    "/etc/gshadow-",
    "/etc/ssh",
    "/etc/ssl/private",
    "/etc/sudoers",
)
"""Files in them without use for programs and with secrets: the superuser could read them in a sandbox, too."""

SETTINGS = ("pyvenv.cfg", "version", "release")
"""Files that the programs of an installation require; ``version`` is that of pyenv and similar tools."""
KEPT = ("share", "state")
"""Folders in ``~/.local`` with a person's data of programs: keyrings, sessions, histories."""
INSTALLED_AMONG_KEPT = ("share/uv/python", "share/uv/tools", "share/pipx/venvs", "share/mise/installs")
"""Folders with whole installations; in other folders, only the file behind a program's link is visible."""


def sandbox_options(search_path: str, *, network: bool = False) -> Iterator[str]:
    """Yield the options of bubblewrap for a sandbox that contains only the programs of this system."""
    yield from ("--unshare-all", *(("--share-net",) if network else ()), "--die-with-parent", "--new-session")
    yield from ("--cap-drop", "ALL", "--hostname", "sandbox")
    yield from _system_options()
    yield from ("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp")  # noqa: S108  (inside of the sandbox)
    for folder in _installed_paths(search_path):
        yield from ("--ro-bind-try", folder, folder)


def sandbox_search_path(search_path: str) -> str:
    """
    Return the search path with which the sandbox finds the same programs.

    Folders outside of the system's own have their real paths, since the sandbox has no links to them. Missing folders are omitted, since a
    program in the sandbox could create them.
    """
    return os.pathsep.join(dict.fromkeys([shown for _, shown in _iterate_search_folders(search_path)]))


def sandbox_python() -> str:
    """Return the path of this Python in the sandbox."""
    folder, name = os.path.split(sys.executable)
    return f"{folder if _is_system_path(folder) else os.path.realpath(folder)}/{name}"


def _iterate_search_folders(search_path: str) -> Iterator[tuple[str, str]]:
    """Yield the real path of each folder of a search path, and the one that it has in the sandbox."""
    for folder in search_path.split(os.pathsep):
        if folder.startswith("/") and os.path.isdir(folder):  # noqa: PTH112  (never raises)
            real = os.path.realpath(folder)
            yield real, folder if _is_system_path(os.path.normpath(folder)) else real


def _is_system_path(path: str) -> bool:
    """Return whether a path is in a system folder, which the sandbox contains."""
    return any(Path(path).is_relative_to(folder) for folder in SYSTEM)


def _system_options() -> Iterator[str]:
    """Yield the options that mount the system's programs and libraries, and hide its secrets."""
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


def _installed_paths(search_path: str) -> Iterator[str]:
    """Yield the paths outside of the system folders that belong to programs on the search path or to this Python."""
    home = Path(os.path.realpath(os.path.expanduser("~")))  # noqa: PTH111  (never raises)
    own = os.pathsep.join([f"{sys.prefix}/bin", f"{sys.base_prefix}/bin"])
    seen: dict[str, None] = {}
    for real, _ in _iterate_search_folders(f"{search_path}{os.pathsep}{own}"):
        above = Path(real).parent if Path(real).name in {"bin", "sbin", "shims"} else Path(real)
        # ~/bin is shown, and not the home folder around it.
        shown = Path(real) if home.is_relative_to(above) else above
        if not home.is_relative_to(shown) and not _is_system_path(str(shown)):
            seen |= dict.fromkeys(
                _visible_paths_of_installation(shown) if shown.parent == home and shown != Path(real) else [str(shown)]
            )
    yield from seen


def _visible_paths_of_installation(installed: Path) -> Iterator[str]:
    """
    Yield the folders of an installation such as ``~/.cargo``, and its settings; other files are hidden, since some contain keys.

    Of ``~/.local``, the data of programs is hidden, except whole installations in it.
    """
    is_local = installed.name == ".local"
    for path in _list_entries(installed):
        inside = Path(os.path.realpath(path)).is_relative_to(installed)
        if inside and (path.is_dir() or path.name in SETTINGS) and not (is_local and path.name in KEPT):
            yield str(path)
    if is_local:
        yield from [f"{installed}/{name}" for name in INSTALLED_AMONG_KEPT]
        for program in _list_entries(installed / "bin"):
            real = Path(os.path.realpath(program))
            if program.is_symlink() and real.is_relative_to(installed / "share"):
                yield str(real)


def _list_entries(folder: Path) -> list[Path]:
    """Return the sorted entries of a folder; an empty list if it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
