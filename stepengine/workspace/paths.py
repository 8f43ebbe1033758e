"""Conversion of paths to their components, with an error for paths outside of a root."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from stepengine.data.alike import MAX_COMPARED_NAMES, find_nearest
from stepengine.data.checks import find_iteration_mistake
from stepengine.errors import DefinitionError, PathOutsideRoot, ToolError

PATH_BYTES = 4_096
"""Linux opens no longer path (PATH_MAX)."""


def to_path(value: object, argument_name: str) -> Path:
    """Return a text or path object as a ``Path``; raise ``DefinitionError`` that names *argument_name* for any other value."""
    if not isinstance(value, str | os.PathLike):
        msg = f"{argument_name} must be a path such as 'runs/one', not {value!r}"
        raise DefinitionError(msg)
    return Path(value)


def to_patterns(value: Sequence[str]) -> tuple[str, ...]:
    """Return patterns of files as a tuple; raise ``DefinitionError`` for a single string and other values that are no lists."""
    if problem := find_iteration_mistake(value):
        msg = f"patterns of files must be a list: {problem}"
        raise DefinitionError(msg)
    return tuple(value)


def make_missing_path_hint(path: Path) -> str:
    """Return a hint for a message about a missing file or folder: ``"; did you mean 'agents/ok.py'?"``, its kind, or ``""``."""
    try:
        if path.exists():
            return f"; it is a {'folder' if path.is_dir() else 'file'}"
        names = sorted([one.name for one in islice(path.parent.iterdir(), MAX_COMPARED_NAMES)])
    except OSError:
        return ""
    near = [name for name in find_nearest(path.name, names) if Path(name).suffix == path.suffix]
    return f"; did you mean {printable_name(str(path.with_name(near[0])))!r}?" if near else ""


def make_outside_error(path: str) -> PathOutsideRoot:
    """Return the error for a path outside of the root; it does not reveal whether the path exists."""
    msg = (
        f"{path!r} is outside of the root folder; give a path relative to the root, without '..' and without links out"
    )
    return PathOutsideRoot(msg)


def printable_name(name: str) -> str:
    """Return a file name as text; bytes that are not UTF-8 become hexadecimal escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def format_display_path(parts: Sequence[str]) -> str:
    """Return a path inside the root as text; the root itself is ``.``."""
    return printable_name("/".join(parts)) or "."


def split_path(path: str, root: Sequence[str]) -> tuple[str, ...]:
    """
    Return the components of a path inside the root, ``()`` for the root; raise ``PathOutsideRoot`` or ``ToolError`` for others.

    Args:
        path: Relative to the root, or absolute and textually below it. One leading ``./`` and trailing ``/`` are fine.
        root: The components of the root's real path.

    Raises:
        PathOutsideRoot: for ``..`` anywhere, and for an absolute path that is not below the root.
        ToolError: for an empty path or component, control characters, and a path of more than 4,096 bytes.
    """
    if not path:
        msg = "the path is empty; '.' is the root folder"
        raise ToolError(msg)
    if any(unicodedata.category(c) in {"Cc", "Cs"} for c in path):
        msg = f"{path!r} holds a control character"
        raise ToolError(msg)
    if len(os.fsencode(path)) > PATH_BYTES:
        msg = f"the path has more than {PATH_BYTES:,} bytes"
        raise ToolError(msg)
    if path.startswith("/"):
        return _strip_root(path, root)
    return _split_components(path, path)


def _strip_root(path: str, root: Sequence[str]) -> tuple[str, ...]:
    """Return the components of an absolute path below the root; raise ``PathOutsideRoot`` for any other path."""
    parts = path[1:].rstrip("/").split("/")
    if tuple(parts[: len(root)]) != tuple(root):
        raise make_outside_error(path)
    rest = "/".join(parts[len(root) :])
    return _split_components(rest, path) if rest else ()


def _split_components(text: str, path: str) -> tuple[str, ...]:
    """Return the components of *text*; raise an error for ``..``, ``.`` or an empty one. Messages name *path*."""
    parts = text.removeprefix("./").rstrip("/").split("/")
    if parts in ([""], ["."]):
        return ()
    if ".." in parts:
        raise make_outside_error(path)
    if "" in parts or "." in parts:
        msg = f"{path!r} has an empty or '.' component; write it like 'src/app.py'"
        raise ToolError(msg)
    return tuple(parts)


def resolve_link_target(folder: Sequence[str], target: str, root: Sequence[str], path: str) -> list[str]:
    """
    Return the components of a link's target relative to the root; raise ``PathOutsideRoot`` if it is not below the root.

    The folder of the link is a real folder, so ``..`` in the target is resolved as text. The walk from the root checks every component
    of the result again.

    Args:
        folder: The components of the link's folder, relative to the root.
        target: The text of the link.
        root: The components of the root's absolute path.
        path: The path for the error message.

    Raises:
        PathOutsideRoot: when the target is not below the root.
    """
    if target.startswith("/"):
        absolute = target.split("/")[1:]
        if absolute[: len(root)] != list(root):
            raise make_outside_error(path)
        done, rest = [], absolute[len(root) :]
    else:
        done, rest = list(folder), target.split("/")
    for part in rest:
        if part == "..":
            if not done:
                raise make_outside_error(path)
            done.pop()
        elif part not in {"", "."}:
            done.append(part)
    return done
