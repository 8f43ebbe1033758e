"""
The bundled sets of tools: ``file_tools`` and ``search_tools``.

A set is built with a root folder and a policy, and holds the posture of the reliability page. What it needs is imported
when it is built, not when stepengine is imported.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepengine.tools.definition import Tool

__all__ = ("file_tools", "search_tools")


def file_tools(
    root: str | os.PathLike[str],
    *,
    write: bool = False,
    allow_secrets: Sequence[str] = (),
    allow_protected: Sequence[str] = (),
    refuse_hardlinks: bool = False,
    cross_mounts: bool = False,
    allow_wide_root: bool = False,
) -> list[Tool[..., Any]]:
    """
    Return ``read_files`` and ``list_directory``, and with *write* also ``write_file`` and ``str_replace``.

    The root is opened now and held. No path leads out of it: not ``..``, not an absolute path, not a symbolic link, and
    not a folder that is swapped for a link while a tool runs. Files are written atomically.

    Args:
        root: The folder that the tools are confined to.
        write: Whether files may be written.
        allow_secrets: Patterns of files that are withheld by default, such as ``".env.example"``, and may be used.
        allow_protected: Patterns of files that are protected from being written, such as ``".github/workflows/"``, and
            may be written.
        refuse_hardlinks: Refuse to read a file that has more than one name.
        cross_mounts: Enter folders that are on other file systems than the root.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.

    Raises:
        DefinitionError: when the root is no folder or too wide, or the system cannot confine the tools.
    """
    from stepengine.tools.files.reading import reading_tools
    from stepengine.tools.files.root import Policy, Root
    from stepengine.tools.files.writing import writing_tools

    policy = Policy(
        allow_secrets=tuple(allow_secrets),
        allow_protected=tuple(allow_protected),
        refuse_hardlinks=refuse_hardlinks,
        cross_mounts=cross_mounts,
        allow_wide_root=allow_wide_root,
    )
    held = Root(root, policy)
    return [*reading_tools(held), *(writing_tools(held) if write else ())]


def search_tools(
    root: str | os.PathLike[str],
    *,
    allow_secrets: Sequence[str] = (),
    refuse_hardlinks: bool = False,
    cross_mounts: bool = False,
    allow_wide_root: bool = False,
    prefer_python: bool = False,
) -> list[Tool[..., Any]]:
    """
    Return ``glob`` and ``code_search``, confined to *root* like ``file_tools``.

    Args:
        root: The folder that the tools are confined to.
        allow_secrets: Patterns of files that are withheld by default and may be searched.
        refuse_hardlinks: Do not search files that have more than one name.
        cross_mounts: Enter folders that are on other file systems than the root.
        allow_wide_root: Accept ``/``, the home folder, and folders that contain it.
        prefer_python: Search in Python even where ripgrep is installed.

    Raises:
        DefinitionError: when the root is no folder or too wide, or the system cannot confine the tools.
    """
    from stepengine.tools.files.root import Policy, Root
    from stepengine.tools.search.tools import searching_tools

    policy = Policy(
        allow_secrets=tuple(allow_secrets),
        refuse_hardlinks=refuse_hardlinks,
        cross_mounts=cross_mounts,
        allow_wide_root=allow_wide_root,
    )
    return searching_tools(Root(root, policy), prefer_python=prefer_python)
