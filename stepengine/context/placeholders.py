"""The values of codebuff's placeholders about a project: its files, instructions, skills and git state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from stepengine.context.project import format_instructions, format_skills
from stepengine.data.placeholders import TREE_TOKENS
from stepengine.workspace.workspace import WORKSPACE


def read_placeholders(names: Sequence[str]) -> dict[str, Any]:
    """
    Return ``texts`` for the placeholders *names*, read from the workspace folder, and ``warnings``; both are empty without one.

    A workspace on another machine has no folder here.
    """
    from stepengine.workspace.repository import read_project

    workspace = WORKSPACE.get()
    folder = None if workspace is None else workspace.local_folder
    if folder is None:
        return {"texts": {}, "warnings": []}
    folder = folder.resolve()
    found = read_project(
        str(folder),
        instructions="KNOWLEDGE_FILES_CONTENTS" in names,
        skills="SKILLS_PROMPT" in names,
        facts="GIT_CHANGES_PROMPT" in names,
    )
    known: Mapping[str, Callable[[], str]] = {
        **{name: partial(_format_file_tree, folder, tokens) for name, tokens in TREE_TOKENS.items()},
        "GIT_CHANGES_PROMPT": lambda: _format_git_status(found["facts"]),
        "KNOWLEDGE_FILES_CONTENTS": lambda: format_instructions(found),
        "PROJECT_ROOT": lambda: str(folder),
        "SKILLS_PROMPT": lambda: format_skills(found),
        "SYSTEM_INFO_PROMPT": lambda: f"# System Info\n\nOperating System: {sys.platform}",
        "USER_CWD": lambda: str(folder),
    }
    return {"texts": {name: known[name]() for name in names}, "warnings": found["warnings"]}


def _format_file_tree(folder: Path, tokens: int) -> str:
    """Return the file tree of a folder as a prompt section, in at most *tokens* tokens."""
    from stepengine.tools.bundled.search.overview import format_file_tree
    from stepengine.workspace.guard import GUARD, make_project_guard
    from stepengine.workspace.path_policy import PathPolicy
    from stepengine.workspace.root import Root
    from stepengine.workspace.skills import get_project_root

    # No call requests these names, but they reach the model: rules about files apply to them as to a tool.
    token = GUARD.set(make_project_guard(folder, get_project_root(folder), folder))
    try:
        with closing(Root(folder, PathPolicy(allow_wide_root=True))) as root:
            tree = format_file_tree(root, tokens)
    finally:
        GUARD.reset(token)
    return "\n".join(
        [
            "# Project file tree\n",
            f"<project_path>\n{folder}\n</project_path>\n",
            "The files of the project when this run started, without those that .gitignore leaves out:",
            f"<project_file_tree>\n{tree}</project_file_tree>",
        ]
    )


def _format_git_status(facts: Mapping[str, Any]) -> str:
    """Return the git branch and the changed files as a prompt section; ``""`` outside of a repository."""
    if not facts.get("branch"):
        return ""
    more = facts["changed_count"] - len(facts["changed"])
    changed = [*facts["changed"], *([f"and {more} more"] if more else [])]
    return "\n".join(["Git Changes:", f"Branch: {facts['branch']}", "<git_status>", *changed, "</git_status>"])
