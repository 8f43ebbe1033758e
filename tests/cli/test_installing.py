"""
How stepengine is installed again: never by a bare name where it is not there yet, since anybody may register that on an index.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from stepengine.workspace.installation import get_install_source


class Installed:
    """
    What an installer leaves of a distribution.
    """

    version = "0.1.0"

    def __init__(self, direct_url: str | None) -> None:
        self._told = direct_url

    def read_text(self, name: str) -> str | None:
        assert "direct_url.json" == name
        return self._told


@pytest.mark.parametrize(
    ("told", "install", "wheel"),
    [
        ({"url": "file:///my%20clone", "dir_info": {"editable": True}}, ["-e", "/my clone[web]"], "/my clone"),
        ({"url": "file:///my%20clone", "dir_info": {}}, ["/my clone[web]"], "/my clone"),
        ({"url": "file:///w/stepengine-0.1.0-py3-none-any.whl", "archive_info": {}},
         ["/w/stepengine-0.1.0-py3-none-any.whl[web]"], "/w/stepengine-0.1.0-py3-none-any.whl"),
        ({"url": "https://h/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
         ["stepengine[web] @ git+https://h/x.git@abc"], "git+https://h/x.git@abc"),
        ({"url": "https://h/x.whl", "archive_info": {}}, ["stepengine[web] @ https://h/x.whl"], "https://h/x.whl"),
        (None, ["stepengine[web]==0.1.0"], "stepengine==0.1.0"),
    ],
)  # fmt: skip
def test_extras_install_from_the_original_source(
    told: Any, install: list[str], wheel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if told is None else json.dumps(told)
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed(text))

    assert ["python", "-m", "pip", "install", *install] == shlex.split(get_install_source().pip_install_command("web"))
    assert ["--no-deps", "-w", "vendor", wheel] == shlex.split(get_install_source().pip_wheel_command("vendor"))[4:]


def test_uninstalled_package_installs_from_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "distribution", missing)

    assert "python -m pip install -e '.[test]'" == get_install_source().pip_install_command("test")


@pytest.mark.deep
def test_extra_is_not_taken_from_a_foreign_package(tmp_path: Path) -> None:
    """
    A stranger's newer package of the name lies where pip looks, and is not taken.
    """
    info = "stepengine-99.0.dist-info"
    with zipfile.ZipFile(tmp_path / "stepengine-99.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: stepengine\nVersion: 99.0\nProvides-Extra: test\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    pip = [sys.executable, "-m", "pip", "install", "--dry-run"]
    places = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}

    def said(*words: str) -> str:
        done = subprocess.run(
            [*pip, *words, "stepengine[test]"],
            check=True, cwd=tmp_path, env=places, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        return done.stdout

    assert "99.0" not in said()
    assert "Would install stepengine-99.0" in said("--upgrade")
