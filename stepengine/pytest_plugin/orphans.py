"""
Recordings that no test owns any more: listed when a whole suite was collected.

Only files in the folders of modules count, also in folders of deleted modules. Files next to those folders are not looked at. Neither are
those of a module that exists and was not collected, since it was ignored or skipped, nor cassettes that another recorder wrote.
A test names its shared cassettes only while it runs. So a cassette without the name of a test is an orphan only if every test of its module
that uses cassettes has passed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from stepengine.pytest_plugin.places import (
    SUFFIXES,
    get_extra_cassette_path,
    get_module_recordings_folder,
    get_recordings_folder,
    make_recording_path,
)
from stepengine.pytest_plugin.settings import FIXTURES, read_mark_arguments

FOREIGN = ("recording", "vcr", "pytest_recording")


class OrphanFinder:
    """
    Finds the recordings that no collected test owns.

    Under pytest-xdist every worker collects all tests; the controller merges their states and reports.

    Attributes:
        whole: Whether all tests below the given paths were collected, so that a file without a test has no owner.
        owned: Files that a collected test owns, without suffix; the names of its further files start with these.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        option = config.option
        narrowed = [getattr(option, name, None) for name in ("keyword", "markexpr", "lf", "deselect", "stepwise")]
        self.whole = not any(narrowed) and not any("::" in arg for arg in config.args)
        self.owned: set[str] = set()
        self._collected: set[str] = set()
        self._modules: set[str] = set()
        self._foreign: set[str] = set()
        self._users: dict[str, str] = {}
        self._passed: set[str] = set()

    @property
    def wanted_action(self) -> str:
        """The action: ``report``, ``fail``, ``delete`` or ``off``."""
        return str(self._config.getoption("--stepengine-orphans"))

    def record_owned_files(self, session: pytest.Session) -> None:
        """Record which files the collected tests own; an error of the collection makes it incomplete."""
        self.whole = self.whole and not session.testsfailed
        for item in session.items:
            self._collected.add(str(item.path))
            if item.get_closest_marker("vcr") is not None:
                self._foreign.add(str(item.path))
            if not FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
                self._modules.add(str(item.path))
                self._users[item.nodeid] = str(get_module_recordings_folder(item, "cassette"))
                self.owned |= {str(path.with_suffix("")) for path in _list_recording_files(item)}

    def record_owned_file(self, path: Path) -> None:
        """Record that a test uses the file at *path*, for files that are known only while it runs."""
        self.owned.add(str(path.with_suffix("")))

    def record_passed_test(self, item: pytest.Item) -> None:
        """Record that a test has passed: it has named each shared cassette of its run."""
        self._passed.add(item.nodeid)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON, for the controller of pytest-xdist."""
        return {
            "whole": self.whole,
            "owned": sorted(self.owned),
            "collected": sorted(self._collected),
            "modules": sorted(self._modules),
            "foreign": sorted(self._foreign),
            "users": self._users,
            "passed": sorted(self._passed),
        }

    def merge_worker_state(self, state: dict[str, Any] | None) -> None:
        """Merge the state of a worker. A crashed worker has none, and disables the report."""
        if state is None:
            self.whole = False
            return
        self.whole = self.whole and state["whole"]
        self.owned |= set(state["owned"])
        self._collected |= set(state["collected"])
        self._modules |= set(state["modules"])
        self._foreign |= set(state["foreign"])
        self._users |= state["users"]
        self._passed |= set(state["passed"])

    def find_orphans(self) -> list[Path]:
        """Return the files that no test owns; an empty list if not all tests were collected or the report is off."""
        if not self.whole or not self._modules or self.wanted_action == "off":
            return []
        unfinished = {folder for test, folder in self._users.items() if test not in self._passed}
        files = {
            path
            for kind in SUFFIXES
            for folder in self._iterate_checkable_folders(kind)
            for path in self._iterate_unowned_recordings(folder, kind)
            if str(folder) not in unfinished or self._is_named_after_test(path)
        }
        return sorted(files)

    def _iterate_unowned_recordings(self, folder: Path, kind: str) -> Iterator[Path]:
        """Yield the recordings of this package in a folder that no test owns."""
        for path in folder.glob(f"*{SUFFIXES[kind]}") if folder.is_dir() else ():
            stem = str(path.with_suffix(""))
            if path.name.startswith(".") or stem in self.owned or not _is_own_or_empty_recording(path, kind):
                continue
            if not any(stem.startswith(f"{owner}.") for owner in self.owned):
                yield path

    def _is_named_after_test(self, path: Path) -> bool:
        """Return whether the name of a file is that of a test function or method; a shared cassette has any other name."""
        names = path.stem.partition("[")[0].split(".")
        patterns = ("test", *self._config.getini("python_functions"))
        return any(fnmatch(name, f"{pattern}*") for name in names for pattern in patterns)

    def _iterate_checkable_folders(self, kind: str) -> Iterator[Path]:
        """Yield the recording folders to check: those of collected and of deleted modules, unless another plugin uses them."""
        foreign = kind == "cassette" and any(map(self._config.pluginmanager.hasplugin, FOREIGN))
        for module in map(Path, sorted(self._modules - self._foreign)):
            yield get_recordings_folder(self._config, kind, module.parent) / module.stem
        if not foreign:
            for here in self._iterate_test_folders():
                base = get_recordings_folder(self._config, kind, here)
                kept = [f for f in base.iterdir() if f.is_dir()] if base.is_dir() else []
                # With one folder for the whole project, folders of tests and of modules are next to each other.
                yield from (
                    f for f in kept if not (here / f.name).is_dir() and self._is_collected_or_gone(here, f.name)
                )

    def _is_collected_or_gone(self, folder: Path, name: str) -> bool:
        """Return whether a module was collected or does not exist: a module that was ignored or skipped still owns its recordings."""
        module = folder / f"{name}.py"
        return str(module) in self._collected or not module.exists()

    def _iterate_test_folders(self) -> Iterator[Path]:
        """Yield the collected folders and their subfolders."""
        never = self._config.getini("norecursedirs")
        for arg in self._config.args or [str(self._config.rootpath)]:
            root = Path(self._config.invocation_params.dir, arg)
            for folder, names, _ in os.walk(root) if root.is_dir() else ():
                names[:] = [n for n in names if not any(fnmatch(n, pattern) for pattern in never)]
                yield Path(folder)


def _is_own_or_empty_recording(path: Path, kind: str) -> bool:
    """
    Return whether a file is a recording of this package, or an empty cassette.

    Cassettes of plain vcrpy start the same way, but without the mark of this package they return False.
    """
    from stepengine.journal.files import JOURNAL_FILE
    from stepengine.testing.cassette_files import CASSETTE_FILE

    if kind == "journal":
        return JOURNAL_FILE.matches(path)
    if not CASSETTE_FILE.matches(path):
        return False
    data = path.read_bytes()
    return not data or b"x_stepengine" in data


def _list_recording_files(item: pytest.Item) -> Iterable[Path]:
    """Return the paths of the journal and cassette of a test, and of the extra cassettes that its mark names."""
    own = [make_recording_path(item, kind) for kind in SUFFIXES]
    try:
        return [*own, *(get_extra_cassette_path(item, name) for name in read_mark_arguments(item).get("extra", ()))]
    except pytest.UsageError:  # reported when the test runs
        return own
