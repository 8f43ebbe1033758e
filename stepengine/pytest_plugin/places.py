"""The paths of the recordings of a test. Their names are valid in every file system, and no two tests share one."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from stepengine.pytest_plugin.settings import choose_record_mode, get_node_id_without_group

ROOT = "{rootdir}"
SUFFIXES = {"journal": ".jsonl", "cassette": ".yaml"}
UNFIT = re.compile(r"[^A-Za-z0-9._\[\]=,-]")
LONGEST = 120


def get_recordings_folder(config: pytest.Config, kind: str, test_folder: Path) -> Path:
    """Return the folder of the recordings of one kind, ``journal`` or ``cassette``, for tests in *test_folder*."""
    setting = str(config.getini(f"stepengine_{kind}_dir"))
    if not setting.startswith(ROOT):
        return test_folder / setting
    folder = config.rootpath / setting.removeprefix(ROOT).lstrip("/")
    return folder / test_folder.relative_to(config.rootpath) if test_folder.is_relative_to(config.rootpath) else folder


def get_module_recordings_folder(item: pytest.Item, kind: str) -> Path:
    """Return the folder of the recordings of a test's module."""
    return get_recordings_folder(item.config, kind, item.path.parent) / item.path.stem


def make_recording_path(item: pytest.Item, kind: str) -> Path:
    """
    Return the path of the recording of a test: ``<folder>/<module>/<Class>.<test>[<param>]`` and the kind's suffix.

    If the name had to be changed, is too long, or may differ from another one only in case, a part of the hash of the test's id is
    appended. The name does not depend on which tests are selected.
    """
    owner = getattr(item, "cls", None)
    name = f"{owner.__name__}.{item.name}" if owner is not None else item.name
    fit = UNFIT.sub("-", name)
    if fit != name or len(fit) > LONGEST or _has_name_differing_in_case(item):
        fit = f"{fit[:LONGEST]}~{hashlib.sha256(get_node_id_without_group(item).encode()).hexdigest()[:6]}"
    return get_module_recordings_folder(item, kind) / f"{fit}{SUFFIXES[kind]}"


def is_replayed_only(item: pytest.Item) -> bool:
    """Return whether a test replays each of its recordings: in the mode `none`, or in the mode `once` if all files exist."""
    mode = choose_record_mode(item)
    if mode not in ("none", "once"):
        return False
    names = getattr(item, "fixturenames", ())
    kinds = [kind for kind in SUFFIXES if f"stepengine_{kind}" in names] or ["cassette"]
    return mode == "none" or all(make_recording_path(item, kind).exists() for kind in kinds)


def _has_name_differing_in_case(item: pytest.Item) -> bool:
    """Return whether another test's name may differ only in case: in the same class or module, or by parameters."""
    _, _, parameters = item.name.partition("[")
    if parameters != parameters.lower():
        return True
    owners = [getattr(node, "obj", None) for node in item.listchain()]
    inner = [getattr(node, "originalname", None) or node.name for node in item.listchain()]
    for owner, name in zip(owners, inner[1:], strict=False):
        names = {*getattr(owner, "__dict__", ()), *dir(owner)} if owner is not None else set()
        if any(n != name and n.lower() == name.lower() and n.startswith(("test", "Test")) for n in names):
            return True
    return False


def get_extra_cassette_path(item: pytest.Item, name: str) -> Path:
    """
    Return the path of an extra cassette: next to the test's own, else above; raise ``pytest.UsageError`` if missing.

    Raises:
        pytest.UsageError: when there is no such file.
    """
    folder = get_module_recordings_folder(item, "cassette")
    for path in (folder / name, folder.parent / name):
        if path.is_file():
            return path
    msg = f"{get_node_id_without_group(item)}: there is no cassette {name!r} in {folder} or {folder.parent}; the mark names it in extra="
    raise pytest.UsageError(msg)
