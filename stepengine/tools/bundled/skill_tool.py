"""``skill``: the tool that reads an agent skill."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from stepengine.data.tools import ToolAnnotations
from stepengine.data.visible import visible
from stepengine.errors import ToolError
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.workspace.skills import FILE_BYTES, NAME_CHARS, get_skill, read_file_start, read_skill_instructions


def get_working_folder(root: str | os.PathLike[str] | None, ctx: ToolContext | None) -> Path:
    """
    Return the resolved *root*, else the call's workspace, else the working directory; raise ``ToolError`` for a remote workspace.

    Raises:
        ToolError: If the workspace is not a folder of this machine.
    """
    if root is not None:
        return Path(root).resolve()
    if ctx is None or ctx.workspace is None:
        return Path.cwd()
    if ctx.workspace.local_folder is None:
        msg = f"the workspace {ctx.workspace.name} is not on this machine, where skills and notes are kept; they need a root= of their own"
        raise ToolError(msg)
    return ctx.workspace.local_folder.resolve()


def make_skill_tool(root: str | os.PathLike[str] | None, *, user: bool) -> Tool:
    """
    Return ``skill``, the tool by which a model reads one of the skills that ``project_context`` lists.

    Args:
        root: A folder of the project; by default the engine's workspace, else the working directory.
        user: Whether the user's own skills are included.
    """

    @tool(
        category="read",
        annotations=ToolAnnotations(read_only=True, idempotent=True),
        requires_permission=False,
        parallel_safe=True,
        destinations=(),
    )
    def skill(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext, name: Annotated[str, Field(min_length=1, max_length=NAME_CHARS)], file: str | None = None
    ) -> str:
        """
        Read the instructions of a skill, or one of its files.

        Usage:
            - When the description of a skill fits the task, read it before you begin, and follow it.
            - What it refers to is read with `file`.

        Examples:
            {"name": "release-notes"}
            {"name": "release-notes", "file": "references/template.md"}

        When not to use:
            - To read files of the project, use `read_files`.

        Notes:
            - At most 32,768 bytes. Scripts of a skill are only run as any other command is.

        Args:
            name: The name of the skill.
            file: A file in its folder, relative to it; its instructions by default.
        """
        found = get_skill(get_working_folder(root, ctx), name, user=user)
        if file is not None:
            data, _ = read_file_start(found.root, f"{found.folder}/{file}")
            cut = f"\n[cut after {FILE_BYTES:,} bytes]" if len(data) > FILE_BYTES else ""
            return visible(data[:FILE_BYTES].decode("utf-8", "replace")) + cut
        return read_skill_instructions(found)

    skill.mark_confined()
    return skill
