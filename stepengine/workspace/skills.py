"""
Agent Skills: folders with a ``SKILL.md`` that a model reads when it needs them.

Only names and descriptions are shown beforehand. A skill is untrusted text: it is read below an open root, with size limits. Its list
of allowed tools is shown and never followed.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.alike import find_nearest, list_names
from stepengine.data.visible import truncate_text, visible
from stepengine.errors import DefinitionError, ToolError
from stepengine.workspace import calls
from stepengine.workspace.guard import GUARD, get_current_file_guard
from stepengine.workspace.path_policy import PathPolicy
from stepengine.workspace.root import Root
from stepengine.workspace.walk import WalkBudget, walk

PLACES = (".stepengine/skills", ".agents/skills", ".claude/skills")
"""Folders of skills below the top of a project; all but the first also exist below the home folder."""
MAX_DEPTH_LEVELS = 3
"""Skills are grouped in a folder or two."""
MAX_FOLDERS = 2_000
"""Ten times the limit of listed skills; the folders are searched before each run."""
SCAN_SECONDS = 2.0
"""A starting run waits for the search; skills that are not found in time are omitted with a warning."""
MAX_SKILLS = 200
"""Each is a line of the prompt at every step; a model chooses worse among more."""
KEPT_SCANS = 16
"""A process works with a few folders; an old scan is checked against the disk before it is used."""
FRESH_NS = 50_000_000
"""How coarse the times of a file system may be: a file that changed this recently may change again without a new time."""
SHOWN_FILES = 100
"""About two screens; a skill with more files names the important ones in its text."""
FILE_BYTES = 32 * 1024
"""About 8,000 tokens of instructions for one task; longer material belongs into separate files of the skill."""
HEAD_BYTES = 16 * 1024
"""A name and a description with some fields have about a kilobyte."""
MAX_BRACKETS = 64
"""The most brackets of a head: the time of YAML grows with the square of their nesting."""
NAME_CHARS, DESCRIPTION_CHARS = 64, 1_024
"""The Agent Skills format documents 64 characters for a name and 1,024 for a description."""
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
MAX_PARENT_FOLDERS = 8
"""A working folder is rarely deeper in its repository, and each folder costs a look."""


@frozen(kw_only=True)
class Skill:
    """
    A skill of a project or the user.

    Attributes:
        name: Its name.
        description: Its purpose and when to use it; at most 1,024 characters.
        scope: ``"project"`` or ``"user"``.
        path: Its folder, for messages.
        root: The root below which it is read.
        folder: Its folder below that root.
    """

    name: str
    description: str
    scope: str
    path: str
    root: Root
    folder: str


@frozen
class SkillCatalog:
    """
    The skills of a project.

    Attributes:
        skills: By name, in the order in which they were found.
        warnings: Why skills were omitted, also as duplicates; one sentence each.
    """

    skills: dict[str, Skill] = attrs.field(factory=dict)
    warnings: list[str] = attrs.field(factory=list)


def get_project_root(folder: Path) -> Path:
    """Return the nearest folder with ``.git`` from *folder* upwards, at most 8 levels and below the home folder; else *folder*."""
    home, here = Path(os.path.expanduser("~")), folder  # noqa: PTH111  (never raises)
    for _ in range(MAX_PARENT_FOLDERS + 1):
        if here in (home, here.parent):
            break
        if os.path.lexists(here / ".git"):
            return here
        here = here.parent
    return folder


def get_user_config_folder() -> Path | None:
    """Return the user's configuration folder; ``None`` if the home folder is unknown."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    if base.startswith("/"):
        return Path(base, "stepengine")
    home = os.environ.get("HOME", "")
    return Path(home, ".config", "stepengine") if home.startswith("/") else None


def read_file_start(root: Root, path: str) -> tuple[bytes, os.stat_result]:
    """
    Return the first ``FILE_BYTES`` + 1 bytes of a file below *root*, and the status of the file.

    Raises:
        ToolError: when ``Root.open_file`` raises it.
    """
    opened = root.open_file(path)
    try:
        data = bytearray()
        while len(data) <= FILE_BYTES and (chunk := calls.read(opened.fd, FILE_BYTES + 1 - len(data))):
            data += chunk
        return bytes(data), opened.info
    finally:
        calls.close(opened.fd)


Place: TypeAlias = tuple[Path, str, str]
"""A folder, the path of its skills below it, and their scope."""
Stamp: TypeAlias = tuple[int, ...] | None
"""Numbers that change with a folder or a file; ``None`` if it is missing."""


@frozen
class _Scan:
    """
    The skill folders of a project and a user, and their modification times when they were scanned.

    Attributes:
        found: The members of each skill but its root, and the folder of that: a root that is kept would stay open. Or a warning in place
            of the members. Skills of the same name are kept, since rules may withhold the first one from a call.
        cut: Why the scan ended early; ``""`` if it saw everything.
        is_late: Whether its time ended. The next scan may see more: what was read is in the memory of the system then.
        stamps: The folders and heads that were seen, by path.
    """

    found: tuple[tuple[Path, Mapping[str, Any] | str], ...]
    cut: str
    is_late: bool
    stamps: Mapping[str, Stamp]

    def is_current(self) -> bool:
        """Return True if no folder or head of the scan has changed since."""
        return all(_read_stamp(path) == stamp for path, stamp in self.stamps.items())


_scans: dict[tuple[Place, ...], _Scan] = {}
"""The last scans: a scan of thousands of folders needs seconds, and every call of ``skill`` would need one."""


def get_skill_catalog(folder: Path, *, user: bool) -> SkillCatalog:
    """
    Scan the folders of skills, and return the skills of the project of *folder*, and with *user* then those of the user.

    The folders are scanned once, and again after one of the seen folders or heads has changed, or if the time for the scan was too short.
    """
    places = tuple(_iterate_skill_search_folders(folder, user=user))
    known = _scans.get(places)
    if known is None or not known.is_current():
        known = _scan_skill_folders(places)
        while len(_scans) >= KEPT_SCANS:
            _scans.pop(next(iter(_scans), places), None)
        if not known.is_late and not _has_recent_change(known):
            _scans[places] = known
    return _open_catalog(known)


def _iterate_skill_search_folders(folder: Path, *, user: bool) -> Iterator[Place]:
    """Yield the folders in which skills of the project are searched, with *user* also the user's own."""
    top = get_project_root(folder)
    yield from [(top, place, "project") for place in PLACES]
    if user:
        own, home = get_user_config_folder(), os.environ.get("HOME", "")
        yield from [(own, "skills", "user")] if own is not None else []
        yield from [(Path(home), place, "user") for place in PLACES[1:]] if home.startswith("/") else []


def _scan_skill_folders(places: Iterable[Place]) -> _Scan:
    """Scan the folders for skills within the time limit, and record the stamps of all folders and heads that were seen."""
    left, stamps = WalkBudget(MAX_FOLDERS * 10, SCAN_SECONDS), dict[str, Stamp]()
    found: list[tuple[Path, Mapping[str, Any] | str]] = []
    fields = attrs.filters.exclude("root")
    # Files that rules withhold from one call are removed from its result below; the scan serves all calls.
    token = GUARD.set(None)
    try:
        for base, place, scope in places:
            with closing(_iterate_skill_folders(base, place, left, stamps)) as folders:
                for root, path in folders:
                    added: list[Skill | str] = []
                    _read_and_add_skill(added, root, path, scope)
                    found += [
                        (base, one if isinstance(one, str) else attrs.asdict(one, recurse=False, filter=fields))
                        for one in added
                    ]
                    if not left.has_time_left():  # the walk checks only every 64th entry, and a head may need a second
                        break
    finally:
        GUARD.reset(token)
    return _Scan(tuple(found), left.cut, bool(left.cut) and left.is_late, stamps)


def _open_catalog(scan: _Scan) -> SkillCatalog:
    """Open the roots of a scan's skills again, and return the skills without those that rules withhold from the current call."""
    found, roots = SkillCatalog(), dict[Path, Root | None]()
    for base, one in scan.found:
        if isinstance(one, str):
            found.warnings.append(one)
            continue
        if base not in roots:
            roots[base] = _try_open_root(base)
        root = roots[base]
        if root is not None:
            _add_to_catalog(found, Skill(root=root, **one))
    if scan.cut:
        found.warnings.append(f"some folders of skills were not searched: {scan.cut}")
    return found


def _add_to_catalog(catalog: SkillCatalog, skill: Skill) -> None:
    """Add a skill that the current call may read; add a warning instead if its name is taken or the catalog is full."""
    try:
        if get_current_file_guard() is not None:
            calls.close(skill.root.open_file(f"{skill.folder}/SKILL.md").fd)
    except (ToolError, OSError) as error:
        catalog.warnings.append(f"the skill in {skill.path!r} was skipped: {error}")
        return
    where = f"the skill {skill.name!r} in {skill.path!r} was skipped"
    if skill.name in catalog.skills:
        catalog.warnings.append(
            f"{where}: the skill of that name in {catalog.skills[skill.name].path!r} takes precedence"
        )
    elif len(catalog.skills) >= MAX_SKILLS:
        catalog.warnings.append(f"{where}: at most {MAX_SKILLS} skills are allowed")
    else:
        catalog.skills[skill.name] = skill


def _try_open_root(base: Path) -> Root | None:
    """Return a folder as a root; ``None`` if it cannot be opened."""
    try:
        return Root(base, PathPolicy(allow_wide_root=True))
    except DefinitionError:
        return None


def _read_stamp(path: str) -> Stamp:
    """Return the stamp of a file or folder, links followed; ``None`` if its status cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116  (thousands of them: creating a Path for each would double the time)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev


def _has_recent_change(scan: _Scan) -> bool:
    """Return True if a change is so recent that the next one could have the same stamp."""
    now = time.time_ns()
    return any(stamp is not None and now - stamp[1] < FRESH_NS for stamp in scan.stamps.values())


def _iterate_skill_folders(
    base: Path, path: str, budget: WalkBudget, stamps: dict[str, Stamp]
) -> Generator[tuple[Root, str], None, None]:
    """
    Yield the folders with a ``SKILL.md``, at most three below *path*, and the root that they are read below.

    The stamps of all visited folders are added to *stamps*.
    """
    top = f"{base}/{path}"
    stamps[top] = _read_stamp(top)
    root = _try_open_root(base)
    if root is None:
        return
    try:
        opened = root.open_folder(path)
    except ToolError:
        return
    try:
        start = len(opened.parts)
        with closing(
            walk(
                root.may_enter, opened.fd, opened.parts, budget, lambda parts, _: len(parts) <= start + MAX_DEPTH_LEVELS
            )
        ) as entries:
            for parts, entry in entries:
                is_head = entry.name == "SKILL.md"
                if is_head or entry.is_dir(follow_symlinks=False):
                    seen = "/".join([top, *parts[start:]])
                    stamps[seen] = _read_stamp(seen)
                if is_head and len(parts) > start + 1:
                    yield root, "/".join(parts[:-1])
    except OSError:
        return
    finally:
        calls.close(opened.fd)


def _read_and_add_skill(skills_and_warnings: list[Skill | str], root: Root, path: str, scope: str) -> None:
    """Add the skill in a folder to *skills_and_warnings*, or a warning that it was omitted."""
    shown = visible(path if scope == "project" else f"~/{path}", strict=True)
    try:
        head, _ = _read_skill_file(root, path)
    except (ToolError, OSError) as error:
        skills_and_warnings.append(f"the skill in {shown!r} was skipped: {error}")
        return
    folder = path.rpartition("/")[2]
    name = visible(str(head.get("name") or folder), strict=True)
    description = head.get("description")
    if not isinstance(description, str) or not description.strip():
        skills_and_warnings.append(f"the skill in {shown!r} was skipped: its SKILL.md has no description")
        return
    if not NAME.fullmatch(name) or len(name) > NAME_CHARS:
        skills_and_warnings.append(
            f"the skill in {shown!r} was skipped: its name {name[:NAME_CHARS]!r} must consist of a-z, 0-9 and single -, "
            f"at most {NAME_CHARS} characters"
        )
        return
    if name != folder:
        skills_and_warnings.append(f"the skill {name!r} in {shown!r}: its name should be the same as its folder's name")
    said = truncate_text(" ".join(visible(description).split()), DESCRIPTION_CHARS)
    skills_and_warnings.append(Skill(name=name, description=said, scope=scope, path=shown, root=root, folder=path))


def _read_skill_file(root: Root, folder: str) -> tuple[Mapping[str, Any], str]:
    """
    Return the head and the body of a ``SKILL.md``; raise ``ToolError`` for an unreadable file or an invalid head.

    Raises:
        ToolError: when the file cannot be read, or its head is missing, too large, or not a mapping.
    """
    data, _ = read_file_start(root, f"{folder}/SKILL.md")
    text = data.decode("utf-8-sig", "replace").replace("\r\n", "\n")
    if not text.startswith("---\n"):
        msg = "SKILL.md does not begin with a head between two lines of ---"
        raise ToolError(msg)
    head, line, body = text[4:].partition("\n---")
    if not line or len(head.encode()) > HEAD_BYTES:
        msg = f"the head of SKILL.md does not end within {HEAD_BYTES:,} bytes; a line of --- ends it"
        raise ToolError(msg)
    cut = f"\n[cut after {FILE_BYTES:,} bytes]" if len(data) > FILE_BYTES else ""
    return _parse_skill_head(head), body.partition("\n")[2].strip() + cut


def _parse_skill_head(head: str) -> Mapping[str, object]:
    """Return the YAML mapping in the head of a skill; raise ``ToolError`` for aliases, many brackets or other content."""
    import yaml

    if sum([head.count(bracket) for bracket in "[{"]) > MAX_BRACKETS:
        msg = f"the head of SKILL.md has more than {MAX_BRACKETS} brackets"
        raise ToolError(msg)
    for text in (head, _quote_description(head)):
        try:
            # Aliases can multiply: a few hundred bytes become gigabytes.
            if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.BaseLoader)):
                msg = "the head of SKILL.md has an alias (*name), which is not read"
                raise ToolError(msg)
            value = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  (makes strings, lists and mappings alone)
        except (yaml.YAMLError, RecursionError, ValueError):
            continue
        if isinstance(value, dict):
            return value
    msg = "the head of SKILL.md is not a YAML mapping"
    raise ToolError(msg)


def _quote_description(head: str) -> str:
    """Return a head with its description in quotes, since many descriptions contain a colon."""
    lines = head.split("\n")
    for number, line in enumerate(lines):
        key, colon, value = line.partition(":")
        if key == "description" and colon:
            lines[number] = f"description: {json.dumps(value.strip())}"
    return "\n".join(lines)


def get_skill(folder: Path, name: str, *, user: bool) -> Skill:
    """
    Return the skill *name* of *folder*'s project, or with *user* one of the user's own; raise ``ToolError`` if there is none.

    Raises:
        ToolError: when there is no skill of this name; the message lists similar names.
    """
    known = get_skill_catalog(folder, user=user).skills
    found = known.get(name)
    if found is None:
        near = find_nearest(name[:NAME_CHARS], known) or sorted(known)
        there = f"near to it: {list_names(near)}" if near else "there is none here"
        msg = f"there is no skill {visible(name[:NAME_CHARS], strict=True)!r}; {there}"
        raise ToolError(msg)
    return found


def read_skill_instructions(skill: Skill) -> str:
    """
    Return the instructions and the file list of a skill, as untrusted text.

    Raises:
        ToolError: when the skill can no longer be read.
    """
    head, body = _read_skill_file(skill.root, skill.folder)
    files = _list_skill_files(skill)
    parts = [visible(body)]
    if allowed := head.get("allowed-tools"):
        parts.append(
            f"(It names these tools, which gives no permission: {truncate_text(visible(str(allowed), strict=True), NAME_CHARS * 4)})"
        )
    if files:
        more = f"\n- and {len(files) - SHOWN_FILES} more" if len(files) > SHOWN_FILES else ""
        listed = "\n".join([f"- {visible(name, strict=True)}" for name in files[:SHOWN_FILES]])
        parts.append(f"Files of this skill:\n{listed}{more}")
    return f"# Skill {skill.name} ({skill.path})\n\n" + "\n\n".join(parts)


def _list_skill_files(skill: Skill) -> list[str]:
    """Return the paths of a skill's files that tools may read, without its ``SKILL.md``."""
    opened = skill.root.open_folder(skill.folder)
    try:
        start, budget = len(opened.parts), WalkBudget(MAX_FOLDERS, SCAN_SECONDS)
        with closing(walk(skill.root.may_enter, opened.fd, opened.parts, budget, lambda *_: True)) as entries:
            names = [
                "/".join(parts[start:])
                for parts, entry in entries
                if entry.is_file(follow_symlinks=False) and not skill.root.is_withheld(parts)
            ]
    finally:
        calls.close(opened.fd)
    return [name for name in names if name != "SKILL.md"]
