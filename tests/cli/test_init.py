"""
`stepengine init`: what it makes works at once, and it never writes over anything.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from stepengine.cli.app import app
from stepengine.engine import make_project, trust
from stepengine.engine.projects import TEMPLATE
from stepengine.errors import DefinitionError

ROOT = Path(__file__).resolve().parents[2]
JOURNAL = "tests/journals/test_todos/test_a_run.jsonl"
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "syrupy", "-p", "stepengine.pytest_plugin"]


def made(folder: Path) -> Result:
    return CliRunner().invoke(app, ["init", str(folder)])


def ran(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {
        n: os.environ[n]
        for n in ("PATH", "HOME", "TMPDIR", "XDG_STATE_HOME", "STEPENGINE_STATE_DIR")
        if n in os.environ
    }
    # Only the plugins that the project asks for: what else is installed here would be loaded beside them.
    made = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, check=False, cwd=folder, env={**kept, **made}, capture_output=True, text=True, timeout=120
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


@pytest.mark.deep
def test_new_project_passes_its_tests_and_fails_after_an_edit(tmp_path: Path) -> None:
    project = tmp_path / "My Agent!"
    assert made(project).exit_code == 0

    assert "4 passed" in ran(project, *PYTEST).stdout
    assert ran(project, "-m", "stepengine.cli", "test", "tests/journals/").returncode == 0
    assert ran(project, "-m", "stepengine.cli", "journal", "check", ".").returncode == 0

    there = ran(project, "-m", "stepengine.cli", "debug", JOURNAL, "--exec", "next", "--exec", "p len(found)")
    assert "2" in there.stdout.splitlines(), there.stderr
    seen = ran(project, "-m", "stepengine.cli", "show", JOURNAL, "--html", "-o", "run.html")
    assert (0, True) == (seen.returncode, (project / "run.html").stat().st_size > 10_000), seen.stderr

    agent = project / "agents/todos.py"
    agent.write_text(agent.read_text().replace('system_prompt="Sort ', 'system_prompt="Order '))
    broken = ran(project, *PYTEST)
    assert broken.returncode == 1
    assert "/system_prompt" in broken.stdout
    assert "--stepengine-record=rewrite" in broken.stdout

    stopped = ran(project, "-m", "stepengine.cli", "debug", JOURNAL, "--exec", "next")
    assert (5, True) == (stopped.returncode, "/system_prompt" in stopped.stderr)

    (impact,) = re.findall(r"^stepengine (compare impact .+)$", (project / "README.md").read_text(), re.MULTILINE)
    changed = ran(project, "-m", "stepengine.cli", *impact.split())
    assert (0, True) == (changed.returncode, "repeated from step 1" in changed.stdout), changed.stderr

    again = ran(project, *PYTEST, "--stepengine-record=rewrite")
    assert again.returncode == 0, again.stdout
    assert "4 passed" in ran(project, *PYTEST).stdout


@pytest.mark.deep
def test_bundled_journal_equals_a_new_recording(tmp_path: Path) -> None:
    assert made(tmp_path).exit_code == 0
    shipped = (tmp_path / JOURNAL).read_text()

    assert ran(tmp_path, *PYTEST, "--stepengine-record=rewrite").returncode == 0

    assert (tmp_path / JOURNAL).read_text() == shipped


def test_project_is_named_after_its_folder_with_valid_files(tmp_path: Path) -> None:
    project = tmp_path / "My Agent!"
    result = made(project)

    files = files_of(project)
    assert tomllib.loads(files["pyproject.toml"].decode())["project"]["name"] == "my-agent"
    assert files["README.md"].startswith(b"# my-agent\n")
    assert yaml.safe_load(files[".github/workflows/tests.yml"])["permissions"] == {"contents": "read"}
    assert all(json.loads(line) for line in files[JOURNAL].splitlines())
    assert not [path for path, content in files.items() if path.endswith(".sample") or b"{name}" in content]
    told = re.findall(r"^  (\S*\.\S+)$", result.stdout, re.MULTILINE)
    assert told == sorted(files)
    assert len(files) == len(list(TEMPLATE.rglob("*.sample")))


def test_cd_hint_is_quoted_for_any_folder_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()

    assert "\n  cd 'my agent/it'\n" in made(Path("my agent/it")).output
    monkeypatch.chdir(tmp_path / "here")
    said = made(Path()).output
    assert said.startswith("Created a project in this folder:")
    assert "\n  cd " not in said


def test_missing_studio_packages_are_installed_from_the_vendored_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepengine.cli.commands.init.find_spec", lambda name: None if name == "uvicorn" else name)
    said = made(tmp_path).output

    assert '\n  python -m pip install "$(ls vendor/stepengine-*.whl)[serve]"\n      for the studio\n' in said
    assert "[test]" not in said


def test_other_python_on_path_gets_an_activation_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Somebody who typed ``.venv/bin/stepengine init`` has no ``python`` on the path, or one without stepengine.
    """
    scripts = tmp_path / "of me/bin"
    scripts.mkdir(parents=True)
    for name in ("python", "activate"):
        (scripts / name).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    outside = made(tmp_path / "a").output
    monkeypatch.setenv("PATH", str(scripts))
    inside = made(tmp_path / "b").output

    entered = f"\n  . '{scripts}/activate'\n"
    assert entered in outside
    assert outside.index(entered) < outside.index("python -m pip wheel")
    assert "activate" not in inside


@pytest.mark.parametrize("path", ["README.md", JOURNAL])
def test_existing_file_prevents_init_and_is_named(tmp_path: Path, path: str) -> None:
    mine = tmp_path / path
    mine.parent.mkdir(parents=True, exist_ok=True)
    mine.write_text("mine")

    result = made(tmp_path)

    assert result.exit_code == 2
    assert path in result.stderr
    assert files_of(tmp_path) == {path: b"mine"}


def test_a_link_that_leads_nowhere_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/README.md").symlink_to(tmp_path / "elsewhere")

    assert made(tmp_path / "project").exit_code == 2
    assert not (tmp_path / "elsewhere").exists()


def test_file_in_place_of_the_folder_is_one_error_line(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")

    result = made(tmp_path / "taken")

    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "cannot be written" in result.stderr


def test_make_project_writes_the_same_files_and_trusts_nothing(tmp_path: Path) -> None:
    one, two = tmp_path / "a" / "same", tmp_path / "b" / "same"
    written = make_project(one)
    made(two)

    assert files_of(two) == files_of(one)
    assert sorted(written) == written == list(files_of(one))
    assert [two / "agents"] == trust.list_trusted_folders()
    with pytest.raises(DefinitionError, match="existing files are not overwritten"):
        make_project(one, package=True)
