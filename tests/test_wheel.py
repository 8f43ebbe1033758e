"""
What users install: the wheel that is built from the sdist.
"""

from __future__ import annotations

import subprocess
import tarfile
import tomllib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

pytestmark = [pytest.mark.deep, pytest.mark.spec("ecosystem:EC122")]


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.Path:
    (file,) = dist.glob("*.whl")
    return zipfile.Path(file)


def names(wheel: zipfile.Path) -> set[str]:
    return {info.filename for info in wheel.root.infolist()}


def metadata(wheel: zipfile.Path, name: str) -> str:
    return (wheel / f"stepengine-{VERSION}.dist-info" / name).read_text(encoding="utf-8")


def test_the_wheel_contains_the_package_and_the_agents_only(wheel: zipfile.Path) -> None:
    """
    Anything else, above all a top-level `agents`, would overwrite other packages.
    """
    files = [file for file in (ROOT / "stepengine").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    package = {file.relative_to(ROOT).as_posix() for file in files}
    agents = {
        f"stepengine/_agents/{file.relative_to(ROOT / 'agents').as_posix()}" for file in (ROOT / "agents").rglob("*.py")
    }
    inside = names(wheel)

    assert {"stepengine", f"stepengine-{VERSION}.dist-info"} == {name.partition("/")[0] for name in inside}
    assert set() == package - inside
    assert "stepengine/py.typed" in inside
    assert agents == {name for name in inside if name.startswith("stepengine/_agents/") and name.endswith(".py")}
    assert [] == [
        name for name in inside if name.endswith(".pyc") or ("/tests/" in name and "/engine/_init/" not in name)
    ]


def test_the_metadata_names_license_command_and_extras(wheel: zipfile.Path) -> None:
    headers = HeaderParser().parsestr(metadata(wheel, "METADATA"))

    assert "MIT" == headers["License-Expression"]
    assert (ROOT / "LICENSE").read_text() == metadata(wheel, "licenses/LICENSE")
    assert "stepengine = stepengine.cli:main" in metadata(wheel, "entry_points.txt")
    assert {"anthropic", "openai", "google", "test"} <= set(headers.get_all("Provides-Extra"))


def test_the_sdist_contains_files_for_tests_and_wheel(dist: Path) -> None:
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}

    assert {"pyproject.toml", "LICENSE", "CHANGELOG.md", "README.md", "constraints.txt", "tests/conftest.py"} <= inside
    assert any(name.startswith("agents/") for name in inside)


def test_the_installed_wheel_runs_its_command(installed: Path, tmp_path: Path) -> None:
    (own,) = installed.glob("lib/python3*/site-packages")

    where = subprocess.run(
        [installed / "bin" / "python", "-c", "import stepengine; print(stepengine.__file__)"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    answer = subprocess.run(
        [installed / "bin" / "stepengine", "--version"], check=True, capture_output=True, text=True, cwd=tmp_path
    )

    assert where.stdout.startswith(str(own))
    assert VERSION in answer.stdout
