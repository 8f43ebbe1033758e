"""``PathPolicy``: the permissions of a set of tools below its root; light, since sets are described before they are built."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
from attrs import frozen

from stepengine.errors import DefinitionError
from stepengine.workspace.paths import to_patterns
from stepengine.workspace.patterns import find_pattern_problem


def is_home_or_above(folder: os.stat_result) -> bool:
    """Return whether a folder is ``/``, the home folder, or one that contains it."""
    try:
        home = Path.home()
    except RuntimeError:
        home = Path("/")
    # By inode and not by name: `/home/../home/me` and a link to it are the home folder, too. A model with write access to it
    # could change the commands that the shell runs at its next start.
    for wide in (home, *home.parents, Path("/")):
        try:
            if os.path.samestat(folder, os.stat(wide)):  # noqa: PTH116  (samestat takes this)
                return True
        except OSError:
            continue
    return False


def _check_patterns(_: object, field: attrs.Attribute[tuple[str, ...]], patterns: tuple[str, ...]) -> None:
    """Raise ``DefinitionError`` for a pattern that can match no path."""
    for pattern in patterns:
        if why := find_pattern_problem(pattern):
            msg = f"{field.name}: the pattern {pattern!r} cannot match any path: {why}"
            raise DefinitionError(msg)


@frozen(kw_only=True)
class PathPolicy:
    """
    The permissions of a set of tools below its root.

    Attributes:
        withhold: Patterns of files that are also withheld, such as the journal of the run.
        allow_secrets: Patterns of files that are withheld by default and may be used, such as ``".env.example"``.
        allow_protected: Patterns of files that are write-protected and may be written, such as ``".github/workflows/"``.
        trusted: Patterns of files without text of third parties: their content is trusted. Tools do not write them.
        refuse_hardlinks: Whether reading a file with more than one name raises an error.
        cross_mounts: Whether folders on other file systems than the root's may be entered.
        allow_wide_root: Whether ``/``, the home folder, and folders that contain it are accepted as the root.
    """

    withhold: tuple[str, ...] = attrs.field(default=(), converter=to_patterns, validator=_check_patterns)
    allow_secrets: tuple[str, ...] = attrs.field(default=(), converter=to_patterns, validator=_check_patterns)
    allow_protected: tuple[str, ...] = attrs.field(default=(), converter=to_patterns, validator=_check_patterns)
    trusted: tuple[str, ...] = attrs.field(default=(), converter=to_patterns, validator=_check_patterns)
    refuse_hardlinks: bool = False
    cross_mounts: bool = False
    allow_wide_root: bool = False
