"""
Agent Skills: folders with a ``SKILL.md`` that a model reads when it needs them (requirements X60, interfaces IF91).

Only names and descriptions are shown beforehand. A skill is foreign text: it is read below a held root, within caps, and
what it says of allowed tools is shown and never obeyed.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import attrs
from pydantic import Field

from stepengine.data.tools import ToolAnnotations
from stepengine.data.visible import visible
from stepengine.errors import DefinitionError, ToolError
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.tools.files.policy import Policy
from stepengine.tools.files.root import Root
from stepengine.tools.files.walk import Budget, walk

__all__ = (
    "Catalog",
    "Skill",
    "find_skills",
    "instructions_of",
    "project_top",
    "read_start",
    "skill_named",
    "skill_tool",
    "user_folder",
    "working_folder",
)

PLACES = (".stepengine/skills", ".agents/skills", ".claude/skills")
"""Where skills stand below the top of a project, and all but the first below the home folder."""
DEPTH = 3
FOLDERS = 2_000
SECONDS = 2.0
SKILLS = 200
SHOWN_FILES = 100
FILE_BYTES = 32 * 1024
HEAD_BYTES = 16 * 1024
BRACKETS = 64
"""How many brackets a head may have: the time that YAML takes grows with the square of how deep they stand."""
NAME_CHARS, DESCRIPTION_CHARS = 64, 1_024
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
UP = 8


@attrs.frozen(kw_only=True)
class Skill:
    """
    A skill that was found.

    Attributes:
        name: What it is called by.
        description: What it is for and when to use it; at most 1,024 characters.
        scope: ``"project"`` or ``"user"``.
        path: Its folder, as people are shown it.
        root: What it is read below.
        folder: Its folder below that root.
    """

    name: str
    description: str
    scope: str
    path: str
    root: Root
    folder: str


@attrs.frozen
class Catalog:
    """
    The skills of a project.

    Attributes:
        skills: By name, in the order in which they were found.
        warnings: What is wrong with those that are not there, or that were found twice; one sentence each.
    """

    skills: dict[str, Skill] = attrs.field(factory=dict)
    warnings: list[str] = attrs.field(factory=list)


def working_folder(root: str | os.PathLike[str] | None, ctx: ToolContext | None) -> Path:
    """Return the folder that is meant: the given one, else the workspace of the call, else the working directory."""
    if root is not None:
        return Path(root).resolve()
    return ctx.workspace.root.resolve() if ctx is not None and ctx.workspace is not None else Path.cwd()


def project_top(folder: Path) -> Path:
    """Return the nearest folder with ``.git`` from *folder* up, at most 8 above, below home and ``/``; else *folder* itself."""
    home, here = Path(os.path.expanduser("~")), folder  # noqa: PTH111  (never raises)
    for _ in range(UP + 1):
        if here in (home, here.parent):
            break
        if os.path.lexists(here / ".git"):
            return here
        here = here.parent
    return folder


def user_folder() -> Path | None:
    """Return the folder of the user's own configuration, if there is one to be had."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if base.startswith("/"):
        return Path(base, "stepengine")
    home = os.environ.get("HOME", "")
    return Path(home, ".config", "stepengine") if home.startswith("/") else None


def read_start(root: Root, path: str, limit: int) -> tuple[bytes, os.stat_result]:
    """
    Return the first *limit* + 1 bytes of a file below *root*, and what the system says of it.

    Raises:
        ToolError: as ``Root.open_file`` does.
    """
    opened = root.open_file(path)
    try:
        data = bytearray()
        while len(data) <= limit and (chunk := os.read(opened.fd, limit + 1 - len(data))):
            data += chunk
        return bytes(data), opened.info
    finally:
        os.close(opened.fd)


def find_skills(folder: Path, *, user: bool) -> Catalog:
    """Return the skills of the project that *folder* belongs to; with *user* also the user's, which stand behind those."""
    found, left = Catalog(), Budget(FOLDERS * 10, SECONDS)
    places = [(project_top(folder), place, "project") for place in PLACES]
    if user:
        own, home = user_folder(), os.environ.get("HOME", "")
        places += [(own, "skills", "user")] if own is not None else []
        places += [(Path(home), place, "user") for place in PLACES[1:]] if home.startswith("/") else []
    for base, place, scope in places:
        with closing(_folders(base, place, left)) as folders:
            for root, path in folders:
                _take(found, root, path, scope)
                if not left.check_time():  # the walk asks only at every 64th entry, and a head can take a second
                    break
    if left.cut:
        found.warnings.append(f"not all folders of skills were looked at: {left.cut}")
    return found


def _folders(base: Path, place: str, left: Budget) -> Generator[tuple[Root, str], None, None]:
    """Yield the folders with a ``SKILL.md``, at most three below *place*, and the root that they are read below."""
    try:
        root = Root(base, Policy(allow_wide_root=True))
        opened = root.open_folder(place)
    except (DefinitionError, ToolError):
        return
    try:
        depth = len(opened.parts) + DEPTH
        with closing(walk(root.holds, opened.fd, opened.parts, left, lambda parts, _: len(parts) <= depth)) as entries:
            for parts, entry in entries:
                if entry.name == "SKILL.md" and len(parts) > len(opened.parts) + 1:
                    yield root, "/".join(parts[:-1])
    except OSError:
        return
    finally:
        os.close(opened.fd)


def _take(found: Catalog, root: Root, path: str, scope: str) -> None:
    shown = visible(path if scope == "project" else f"~/{path}", strict=True)
    try:
        head, _ = _read(root, path)
    except (ToolError, OSError) as error:
        found.warnings.append(f"the skill in {shown!r} was left out: {error}")
        return
    folder = path.rpartition("/")[2]
    name = visible(str(head.get("name") or folder), strict=True)[:NAME_CHARS]
    description = head.get("description")
    if not isinstance(description, str) or not description.strip():
        found.warnings.append(f"the skill in {shown!r} was left out: its SKILL.md has no description")
        return
    if not NAME.fullmatch(name) or name != folder:
        found.warnings.append(
            f"the skill {name!r} in {shown!r}: its name should be that of its folder, of a-z, 0-9 and -"
        )
    if name in found.skills:
        found.warnings.append(
            f"the skill {name!r} in {shown!r} was left out: another one in {found.skills[name].path!r} comes first"
        )
    elif len(found.skills) >= SKILLS:
        found.warnings.append(f"the skill {name!r} in {shown!r} was left out: there are {SKILLS} already")
    else:
        said = " ".join(visible(description).split())[:DESCRIPTION_CHARS]
        found.skills[name] = Skill(name=name, description=said, scope=scope, path=shown, root=root, folder=path)


def _read(root: Root, folder: str) -> tuple[Mapping[str, Any], str]:
    """
    Return the head and the body of a ``SKILL.md``.

    Raises:
        ToolError: when it cannot be read, or its head is missing, too large, or no mapping.
    """
    data, _ = read_start(root, f"{folder}/SKILL.md", FILE_BYTES)
    text = data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    if not text.startswith("---\n"):
        msg = "SKILL.md does not begin with a head between two lines of ---"
        raise ToolError(msg)
    head, line, body = text[4:].partition("\n---")
    if not line or len(head.encode()) > HEAD_BYTES:
        msg = f"the head of SKILL.md does not end within {HEAD_BYTES:,} bytes; a line of --- ends it"
        raise ToolError(msg)
    cut = f"\n[cut after {FILE_BYTES:,} bytes]" if len(data) > FILE_BYTES else ""
    return _mapping(head), body.partition("\n")[2].strip() + cut


def _mapping(head: str) -> Mapping[str, Any]:
    import yaml

    if sum([head.count(bracket) for bracket in "[{"]) > BRACKETS:
        msg = f"the head of SKILL.md has more than {BRACKETS} brackets"
        raise ToolError(msg)
    for text in (head, _quoted(head)):
        try:
            # An alias can stand for many: a few hundred bytes become gigabytes.
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.BaseLoader)):
                msg = "the head of SKILL.md has an alias (*name), which is not read"
                raise ToolError(msg)
            value = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  (makes strings, lists and mappings alone)
        except (yaml.YAMLError, RecursionError, ValueError):
            continue
        if isinstance(value, dict):
            return value
    msg = "the head of SKILL.md is no YAML mapping"
    raise ToolError(msg)


def _quoted(head: str) -> str:
    """Return a head with its description in quotes: many have a colon in it."""
    lines = head.split("\n")
    for number, line in enumerate(lines):
        key, colon, value = line.partition(":")
        if key == "description" and colon:
            lines[number] = f"description: {json.dumps(value.strip())}"
    return "\n".join(lines)


def skill_named(folder: Path, name: str, *, user: bool) -> Skill:
    """
    Return the skill *name* of the project that *folder* belongs to, or with *user* one of the user's own.

    Raises:
        ToolError: when there is none of that name; it names those that are near to it.
    """
    known = find_skills(folder, user=user).skills
    found = known.get(name)
    if found is None:
        near = difflib.get_close_matches(name[:NAME_CHARS], known, 3) or sorted(known)[:20]
        there = f"near to it: {', '.join(near)}" if near else "there is none here"
        msg = f"there is no skill {visible(name[:NAME_CHARS], strict=True)!r}; {there}"
        raise ToolError(msg)
    return found


def skill_tool(root: str | os.PathLike[str] | None = None, *, user: bool = True) -> Tool[..., Any]:
    """
    Return ``skill``, by which a model reads one of the skills that ``project_context`` lists.

    Args:
        root: A folder of the project; by default the engine's workspace, else the working directory.
        user: Whether the user's own skills are among them.
    """

    @tool(
        category="read",
        annotations=ToolAnnotations(read_only=True, idempotent=True),
        requires_permission=False,
        parallel_safe=True,
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
        found = skill_named(working_folder(root, ctx), name, user=user)
        if file is not None:
            data, _ = read_start(found.root, f"{found.folder}/{file}", FILE_BYTES)
            cut = f"\n[cut after {FILE_BYTES:,} bytes]" if len(data) > FILE_BYTES else ""
            return visible(data[:FILE_BYTES].decode("utf-8", "replace")) + cut
        return instructions_of(found)

    return skill


def instructions_of(found: Skill) -> str:
    """
    Return what a skill says to do, and which files it has; the text is foreign.

    Raises:
        ToolError: when it cannot be read any more.
    """
    head, body = _read(found.root, found.folder)
    files = _files(found)
    parts = [visible(body)]
    if allowed := head.get("allowed-tools"):
        parts.append(
            f"(It names these tools, which gives no permission: {visible(str(allowed), strict=True)[: NAME_CHARS * 4]})"
        )
    if files:
        parts.append("Files of this skill:\n" + "\n".join([f"- {visible(name, strict=True)}" for name in files]))
    return f"# Skill {found.name} ({found.path})\n\n" + "\n\n".join(parts)


def _files(found: Skill) -> list[str]:
    opened = found.root.open_folder(found.folder)
    try:
        start, budget = len(opened.parts), Budget(FOLDERS, SECONDS)
        with closing(walk(found.root.holds, opened.fd, opened.parts, budget, lambda *_: True)) as entries:
            names = [
                "/".join(parts[start:])
                for parts, entry in entries
                if entry.is_file(follow_symlinks=False) and not found.root.withholds(parts)
            ]
    finally:
        os.close(opened.fd)
    return [name for name in names if name != "SKILL.md"][:SHOWN_FILES]
