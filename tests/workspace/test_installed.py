"""Which version of a distribution is installed."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from stepengine.workspace.installed import get_installed_version


def test_the_first_entry_of_the_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, version in (("one", "1.5"), ("two", "2.5")):
        folder = tmp_path / place / f"acme-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme\nVersion: {version}\n")
    for place in ("two", "one", "absent"):
        monkeypatch.syspath_prepend(str(tmp_path / place))

    assert "1.5" == metadata.version("acme") == get_installed_version("acme")
    assert get_installed_version("acm") is None


@pytest.mark.leaks_allowed("the standard library keeps the archive open")
def test_a_zipped_distribution_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr("acme-3.5.dist-info/METADATA", "Metadata-Version: 2.1\nName: acme\nVersion: 3.5\n")
    monkeypatch.syspath_prepend(str(tmp_path / "packed.zip"))

    assert "3.5" == get_installed_version("acme")
