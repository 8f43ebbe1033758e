"""
Recordings that no test owns any more: listed when a whole suite was collected.

Only files in the folder of a module count: shared files beside those folders are the project's own business.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from stepengine.pytest_plugin.places import SUFFIXES, base_of, extra_of, file_of
from stepengine.pytest_plugin.settings import FIXTURES, marked

__all__ = ("Orphans",)

FOREIGN = ("recording", "vcr", "pytest_recording")


class Orphans:
    """
    What was collected, and which recordings it owns.

    Under pytest-xdist every worker collects everything; the controller takes what they found and reports.

    Attributes:
        whole: Whether everything below the given paths was collected, so that a file without a test is one for good.
        owned: Files that a collected test owns, without suffix; its further files begin so, too.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        option = config.option
        narrowed = [getattr(option, name, None) for name in ("keyword", "markexpr", "lf", "deselect", "stepwise")]
        self.whole = not any(narrowed) and not any("::" in arg for arg in config.args)
        self.owned: set[str] = set()
        self._modules: set[str] = set()
        self._foreign: set[str] = set()

    @property
    def wanted(self) -> str:
        """What is to be done: ``report``, ``fail``, ``delete`` or ``off``."""
        return str(self._config.getoption("--stepengine-orphans"))

    def collect(self, session: pytest.Session) -> None:
        """Note which files the collected tests own."""
        self.whole = self.whole and not session.testsfailed
        for item in session.items:
            if item.get_closest_marker("vcr") is not None:
                self._foreign.add(str(item.path))
            if not FIXTURES.isdisjoint(getattr(item, "fixturenames", ())):
                self._modules.add(str(item.path))
                self.owned |= {str(path.with_suffix("")) for path in _files_of(item)}

    def state(self) -> dict[str, Any]:
        """Return everything as JSON, for the controller of pytest-xdist."""
        return {
            "whole": self.whole,
            "owned": sorted(self.owned),
            "modules": sorted(self._modules),
            "foreign": sorted(self._foreign),
        }

    def add(self, state: dict[str, Any] | None) -> None:
        """Take in what a worker found; one that crashed found nothing, and then nothing is said at all."""
        if state is None:
            self.whole = False
            return
        self.whole = self.whole and state["whole"]
        self.owned |= set(state["owned"])
        self._modules |= set(state["modules"])
        self._foreign |= set(state["foreign"])

    def found(self) -> list[Path]:
        """Return the files that no test owns; none when that cannot be known."""
        if not self.whole or not self._modules or self.wanted == "off":
            return []
        files = {path for kind in SUFFIXES for folder in self._folders(kind) for path in self._unowned(folder, kind)}
        return sorted(files)

    def _unowned(self, folder: Path, kind: str) -> Iterator[Path]:
        for path in folder.glob(f"*{SUFFIXES[kind]}") if folder.is_dir() else ():
            stem = str(path.with_suffix(""))
            if path.name.startswith(".") or stem in self.owned:
                continue
            if not any(stem.startswith(f"{owner}.") for owner in self.owned):
                yield path

    def _folders(self, kind: str) -> Iterator[Path]:
        """Give the folders of modules, also of those that are gone, unless another plugin keeps its files there too."""
        foreign = kind == "cassette" and any(map(self._config.pluginmanager.hasplugin, FOREIGN))
        for module in map(Path, sorted(self._modules - self._foreign)):
            yield base_of(self._config, kind, module.parent) / module.stem
        if not foreign:
            for here in self._test_folders():
                base = base_of(self._config, kind, here)
                kept = [f for f in base.iterdir() if f.is_dir()] if base.is_dir() else []
                # With one folder for the whole project, folders of tests and of modules stand side by side.
                yield from (f for f in kept if not (here / f.name).is_dir())

    def _test_folders(self) -> Iterator[Path]:
        """Give the folders that were collected, each with those inside it."""
        never = self._config.getini("norecursedirs")
        for arg in self._config.args or [str(self._config.rootpath)]:
            root = Path(self._config.invocation_params.dir, arg)
            for folder, names, _ in os.walk(root) if root.is_dir() else ():
                names[:] = [n for n in names if not any(fnmatch(n, pattern) for pattern in never)]
                yield Path(folder)


def _files_of(item: pytest.Item) -> Iterable[Path]:
    own = [file_of(item, kind) for kind in SUFFIXES]
    try:
        return [*own, *(extra_of(item, name) for name in marked(item).get("extra", ()))]
    except pytest.UsageError:  # it is told where the test runs
        return own
