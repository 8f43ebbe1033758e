"""
`.ci/deep`: its sections leave no test out, and need nothing that nobody brings.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("deep_sections", str(ROOT / ".ci" / "deep"))
    spec = importlib.util.spec_from_loader("deep_sections", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "deep_sections", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


def is_selected(file: str, arguments: list[str]) -> bool:
    """
    Return True if pytest collects a file with these arguments of a section.
    """
    ignored = [one.removeprefix("--ignore=") for one in arguments if one.startswith("--ignore=")]
    return any(f"{file}/".startswith(f"{path}/") for path in arguments) and not any(
        f"{file}/".startswith(f"{path}/") for path in ignored
    )


@pytest.mark.deep
@pytest.mark.smoke
def test_every_test_file_belongs_to_one_section(deep: ModuleType) -> None:
    # These run one file in two environments: what needs a package that ours has not is skipped in the other.
    own = [one for one in deep.SECTIONS if not one.environment]
    files = [file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py")]
    files = [file for file in files if "pytest.mark.deep" in (ROOT / file).read_text(encoding="utf-8")]
    sections = {
        file: [one.name for one in own if is_selected(file, deep.arguments_of(one))]
        or [one.name for one in deep.SECTIONS if is_selected(file, deep.arguments_of(one))]
        for file in files
    }

    assert len(files) > 100
    assert {} == {file: names for file, names in sections.items() if len(names) != 1}


def test_sections_name_files_that_exist_and_known_tools(deep: ModuleType, request: Any) -> None:
    (conftest,) = [p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "marker_errors")]
    paths = [path for one in deep.SECTIONS for path in one.tests]

    assert [] == [path for path in paths if not (ROOT / path).exists()]
    assert set(conftest.REQUIRED) == set(deep.TOOLS)
    assert set(deep.TOOLS) - {"ripgrep"} == {tool for one in deep.SECTIONS for tool in one.tools}
    assert len({one.name for one in deep.SECTIONS}) == len(deep.SECTIONS)


@pytest.mark.parametrize(
    ("last", "code", "counts"),
    [
        ("==== 2 failed, 8 passed, 1 skipped in 3.20s ====", 1, {"failed": 2, "passed": 8, "skipped": 1}),
        ("==== 3 passed, 1 error in 3.20s ====", 1, {"passed": 3, "error": 1}),
        ("no summary at all", 1, {"failed": 1}),
        ("the wheel holds what it promises", 0, {}),
    ],
)
def test_a_command_that_fails_counts_as_failed(
    deep: ModuleType, tmp_path: Path, last: str, code: int, counts: dict[str, int]
) -> None:
    machine = deep.Machine(tmp_path, sys.executable)

    machine.count(last, code)

    assert counts == machine.counts
