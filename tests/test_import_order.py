"""The check that modules can be read in an order: which imports it counts, and what it reports."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[1]
LAYERS = [frozenset({"engine"}), frozenset({"data", "machine"})]
BACK = {
    "at the top": "from stepengine.data.lower import f\n",
    "relative": "from . import lower\n",
    "for types alone": "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from stepengine.data.lower import f\n",
    "inside a function": "def g():\n    from stepengine.data.lower import f\n\n    return f()\n",
    "by a loader": "from importlib import import_module\n\n\ndef g():\n    return import_module('stepengine.data.lower')\n",
}


@pytest.fixture
def check() -> ModuleType:
    return load_script(ROOT / ".ci" / "import_order.py")


def problems_of(check: ModuleType, tmp_path: Path, files: dict[str, str]) -> list[str]:
    folder = tmp_path / "stepengine"
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "__init__.py").touch()
        file.write_text(text, encoding="utf-8")
    found: list[str] = check.find_problems(check.read_imports(folder), LAYERS)
    return found


@pytest.mark.parametrize("text", BACK.values(), ids=BACK.keys())
def test_two_modules_that_import_each_other_are_reported(check: ModuleType, tmp_path: Path, text: str) -> None:
    files = {"data/lower.py": "from stepengine.data.upper import g\n", "data/upper.py": text}
    (problem,) = problems_of(check, tmp_path, files)
    assert problem.startswith("2 modules import each other:\n  stepengine.data.lower:1 imports stepengine.data.upper\n")


def test_an_import_cycle_of_several_modules_is_reported_once(check: ModuleType, tmp_path: Path) -> None:
    files = {
        "data/a.py": "import stepengine.data.b\n",
        "data/b.py": "import stepengine.data.c\nimport stepengine.data.d\n",
        "data/c.py": "import stepengine.data.a\n",
        "data/d.py": "",
        "data/e.py": "import stepengine.data.a\n",
    }
    (problem,) = problems_of(check, tmp_path, files)
    assert problem.splitlines() == [
        "3 modules import each other:",
        "  stepengine.data.a:1 imports stepengine.data.b",
        "  stepengine.data.b:1 imports stepengine.data.c",
        "  stepengine.data.c:1 imports stepengine.data.a",
    ]


@pytest.mark.parametrize(
    "text", ["from stepengine.engine.a import f\n", BACK["by a loader"].replace("data.lower", "engine.a")]
)
def test_an_import_of_a_higher_layer_is_reported(check: ModuleType, tmp_path: Path, text: str) -> None:
    (problem,) = problems_of(check, tmp_path, {"data/b.py": text, "engine/a.py": ""})
    assert "imports upwards: stepengine.engine.a" in problem


def test_imports_in_one_direction_are_fine(check: ModuleType, tmp_path: Path) -> None:
    files = {
        "data/a.py": "import re\nfrom stepengine.data.b import f\nfrom stepengine.data import c\n",
        "data/b.py": "from stepengine.data import c\n",
        "data/c.py": '"""Not an import: stepengine.data.a."""\n',
        "engine/a.py": "from stepengine.data.a import f\n",
    }
    assert problems_of(check, tmp_path, files) == []


def test_an_import_cycle_makes_the_script_fail(
    check: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stepengine" / "data"
    folder.mkdir(parents=True)
    (folder / "lower.py").write_text("import stepengine.data.upper\n", encoding="utf-8")
    (folder / "upper.py").write_text("", encoding="utf-8")
    assert check.main(folder.parent, ROOT / "pyproject.toml") == 0
    (folder / "upper.py").write_text(BACK["inside a function"], encoding="utf-8")
    assert check.main(folder.parent, ROOT / "pyproject.toml") == 1
    assert "2 modules import each other" in capsys.readouterr().out
