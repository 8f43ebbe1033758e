"""
``read_project``: reads the instructions, skills and git state of a repository once.

All of it is untrusted text: it is read below an open root, with size limits, and the engine never follows it. Its form for models is
in ``stepengine.context``.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from stepengine.data.visible import visible
from stepengine.errors import DefinitionError, ToolError
from stepengine.workspace import calls
from stepengine.workspace.argv import Argv
from stepengine.workspace.calls import Fd
from stepengine.workspace.environment import (
    NAMES_BYTES,
    CommandEnvironment,
    PrivateFolders,
    find_program,
    parse_git_query,
)
from stepengine.workspace.guard import GUARD, get_current_file_guard, make_project_guard
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.path_rules import INSTRUCTION_FILES
from stepengine.workspace.root import Missing, Root
from stepengine.workspace.skills import (
    FILE_BYTES,
    get_project_root,
    get_skill_catalog,
    get_user_config_folder,
    read_file_start,
)
from stepengine.workspace.walk import WalkBudget, walk
from stepengine.workspace.workspace import WORKSPACE

ALL_BYTES = 64 * 1024
"""About 16,000 tokens of all files, where one has at most 8,000: each step pays for them."""
CATALOG_BYTES = 16 * 1024
"""About 4,000 tokens, which each step pays for."""
DEEPER_FILES, DEEPER_DEPTH = 50, 6
"""Folders of a repository with their own instructions are few and near its top; deeper ones are not searched."""
ENTRIES, SECONDS = 20_000, 2.0
"""A starting run waits for the search; in a huge repository, files that are not found in time are omitted."""
GIT_SECONDS = 2.0
"""Facts about a repository are optional; in a huge one a run starts without them."""
STATUS_BYTES = 1024 * 1024
"""More than ten thousand changed files need; more are only counted."""
CHANGED_FILES = 50
"""Enough to see a person's current work; more are only counted."""
STATUS = ("git", "status", "--porcelain=v2", "--branch", "-z")
FIELDS = {"1": 8, "2": 9, "u": 10}
"""The number of fields before the path, by the kind of an entry of ``git status``."""
LEFT_OUT = frozenset(("node_modules", "venv", "site-packages", "target", "build", "dist", "vendor"))


def read_project(
    root: str | None, *, instructions: bool = True, skills: bool = True, facts: bool = True, user: bool = True
) -> dict[str, Any]:
    """
    Return the project data of a folder as JSON: instructions, skills, git facts, and warnings.

    Paths are relative to the folder, so that the same repository has the same data on every machine.

    Args:
        root: The folder; by default the engine's workspace, else the working directory.
        instructions: Read ``AGENTS.md``, ``CLAUDE.md`` and ``knowledge.md`` from the top of the repository down to the
            folder: 32 KiB of a file, 64 KiB of all, the nearest first; they come nearest last.
        skills: List the skills.
        facts: Ask for the platform, git's branch and the changed files.
        user: Read also the user's own instructions and skills for all projects.
    """
    workspace = WORKSPACE.get()
    made: dict[str, Any] = {"instructions": [], "deeper": [], "skills": [], "facts": {}, "warnings": []}
    folder = Path(root) if root is not None else workspace.local_folder if workspace is not None else Path.cwd()
    if folder is None:
        made["warnings"].append(
            "the workspace is not on this machine, so its project was not read; pass a root on this machine"
        )
        return made
    folder = folder.resolve()
    # No call asks for these files, and they reach the model all the same: rules about files hold for them as for a tool's.
    token = GUARD.set(
        make_project_guard(folder, get_project_root(folder), None if workspace is None else workspace.local_folder)
    )
    try:
        if instructions:
            _InstructionReader(folder, made).read(user=user)
        if skills:
            _add_skills(folder, made, user=user)
        if facts:
            made["facts"] = {"platform": sys.platform, **_read_git_status(folder)}
    finally:
        GUARD.reset(token)
    made["warnings"] = [visible(text, strict=True) for text in made["warnings"][:CHANGED_FILES]]
    return made


def _add_skills(folder: Path, project: dict[str, Any], *, user: bool) -> None:
    """Add the skills of a project, within the size limit, and their warnings to *project*."""
    catalog = get_skill_catalog(folder, user=user)
    project["warnings"] += catalog.warnings
    left = CATALOG_BYTES
    for skill in catalog.skills.values():
        left -= len(skill.name) + len(skill.description.encode())
        if left < 0:
            project["warnings"].append(
                f"the skill {skill.name!r} and those after it are not listed: all names and descriptions of skills together may have "
                f"at most {CATALOG_BYTES:,} bytes. Shorten descriptions, or remove skills"
            )
            break
        project["skills"].append({"name": skill.name, "description": skill.description, "scope": skill.scope})


class _InstructionReader:
    """Reads the instruction files of a folder into *made*."""

    def __init__(self, folder: Path, made: dict[str, Any]) -> None:
        self._folder, self._made = folder, made
        self._left = ALL_BYTES
        self._seen: set[Any] = set()

    def read(self, *, user: bool) -> None:
        """
        Read the instruction files within the size limit, the nearest folder first; its text is last in the result.

        With *user*, the user's own file is read last, and its text is first in the result.
        """
        top = get_project_root(self._folder)
        with suppress(DefinitionError), closing(Root(top, PathPolicy(allow_wide_root=True))) as root:
            below = self._folder.relative_to(top).parts
            found = []
            for depth in range(len(below), -1, -1):
                paths = ["/".join((*below[:depth], name)) for name in INSTRUCTION_FILES]
                up = "../" * (len(below) - depth)
                found.append(
                    [one for path in paths if (one := self._read_file(root, path, up + path.rpartition("/")[2]))]
                )
            self._made["instructions"] = [one for folder in reversed(found) for one in folder]
            self._made["deeper"] = list(self._find_deeper_files(root, below))
        own = get_user_config_folder() if user else None
        if own is not None:
            with suppress(DefinitionError), closing(Root(own, PathPolicy(allow_wide_root=True))) as root:
                if one := self._read_file(root, "AGENTS.md", "~/AGENTS.md"):
                    self._made["instructions"].insert(0, one)

    def _read_file(self, root: Root, path: str, display_path: str) -> dict[str, object] | None:
        """Return the content of a file within the size limit; ``None``, often with a warning, if it is missing or was read already."""
        try:
            data, info = read_file_start(root, path)
        except Missing:
            return None
        except (ToolError, OSError) as error:
            self._made["warnings"].append(f"{display_path} was not read: {error}")
            return None
        digest = hashlib.sha256(data).hexdigest()
        same = {(info.st_dev, info.st_ino), digest}
        if same & self._seen or not data.strip():
            return None
        if b"\0" in data:
            self._made["warnings"].append(f"{display_path} was not read: it is not text")
            return None
        self._seen |= same
        room = min(FILE_BYTES, self._left)
        kept = data[:room]
        self._left -= len(kept)
        if not kept:
            self._made["warnings"].append(
                f"{display_path} was not read: nearer files already use the limit of {ALL_BYTES:,} bytes; shorten them"
            )
            return None
        text = kept.decode("utf-8-sig", "ignore" if len(kept) < len(data) else "replace")
        return {"path": display_path, "sha256": digest, "text": text, "cut": len(kept) < len(data)}

    def _find_deeper_files(self, root: Root, below: Sequence[str]) -> Iterator[str]:
        """Yield the paths of instruction files below the folder. Their content is not read."""

        def enter(parts: tuple[str, ...], _: Fd) -> bool:
            """Return whether a folder is searched: not too deep, not hidden and not left out."""
            return (
                len(parts) - len(below) <= DEEPER_DEPTH and not parts[-1].startswith(".") and parts[-1] not in LEFT_OUT
            )

        try:
            opened = root.open_folder("/".join(below) or ".")
        except ToolError:
            return
        try:
            with closing(walk(root.may_enter, opened.fd, opened.parts, WalkBudget(ENTRIES, SECONDS), enter)) as entries:
                count = 0
                for parts, entry in entries:
                    is_deeper = entry.name in INSTRUCTION_FILES and len(parts) > len(opened.parts) + 1
                    if is_deeper and count < DEEPER_FILES and not root.is_withheld(parts):
                        count += 1
                        yield visible("/".join(parts[len(opened.parts) :]), strict=True)
        except OSError:
            return
        finally:
            calls.close(opened.fd)


# --- git --------------------------------------------------------------------------------------------------------------


def _read_git_status(folder: Path) -> dict[str, object]:
    """Return branch and changed files; empty without a repository, git or temporary folder, or if git fails or is slow."""
    if not os.path.lexists(get_project_root(folder) / ".git"):
        return {}
    try:
        private = PrivateFolders()
    except OSError:  # there is no folder for temporary files
        return {}
    try:
        private.create_subfolders()
        place = tuple([part for part in str(folder).split("/") if part])
        env = CommandEnvironment(names=(), real_home=False, root=place).make_variables(private)
        look = parse_git_query(STATUS)
        program = find_program("git", env["PATH"], place)
        if look is None or program is None:
            return {}
        names = _run_git(program, look.question, folder, env, NAMES_BYTES)
        argv, variables = look.make_command(names)
        status = _run_git(program, argv, folder, {**env, **variables}, STATUS_BYTES)
        return _parse_git_status(status, get_project_root(folder))
    except (OSError, ToolError, subprocess.SubprocessError):
        return {}
    finally:
        private.remove()


def _run_git(program: str, argv: Argv, folder: Path, env: Mapping[str, str], max_bytes: int) -> bytes:
    """Return the output of git; raise an error if it fails, takes two seconds or prints more than *max_bytes*."""
    with tempfile.TemporaryFile() as out:
        subprocess.run(  # noqa: S603  (only git, which cannot run programs of the repository)
            [program, *argv[1:]],
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            timeout=GIT_SECONDS,
            check=True,
        )
        out.seek(0)
        said = out.read(max_bytes + 1)
    if len(said) > max_bytes:
        msg = f"git printed more than {max_bytes:,} bytes"
        raise ToolError(msg)
    return said


def _parse_git_status(status: bytes, top: Path) -> dict[str, object]:
    """
    Return branch and changed files from the output of ``git status --porcelain=v2 --branch -z``; paths are relative to *top*.

    Withheld files are omitted. At most 50 files are listed; all are counted.
    """
    guard, real = get_current_file_guard(), tuple([part for part in os.path.realpath(top).split("/") if part])
    made: dict[str, Any] = {"branch": "", "changed": [], "changed_count": 0}
    entries = iter(status.decode("utf-8", "replace").split("\0"))
    for entry in entries:
        kind, _, rest = entry.partition(" ")
        if kind == "#":
            key, _, value = rest.partition(" ")
            if key == "branch.head":
                made["branch"] = visible(value, strict=True)
            continue
        path = rest if kind == "?" else (entry.split(" ", FIELDS[kind])[-1] if kind in FIELDS else "")
        if kind == "2":
            next(entries, "")  # where it was before
        if path and not (guard and guard(real, [part for part in path.split("/") if part])):
            made["changed_count"] += 1
            if made["changed_count"] <= CHANGED_FILES:
                made["changed"].append(visible(path, strict=True))
    return made
