"""
Commands that install this package again: with an extra, or as a wheel in another folder.

stepengine is on no package index, and anybody may register its name there. So commands for a new environment name the source of this
installation. Where it is installed, pip uses the installed package and searches only for extras.
"""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from typing import Any
from urllib.parse import unquote, urlsplit

from attrs import frozen


@frozen
class InstallSource:
    """
    The source of this stepengine installation.

    Attributes:
        place: The argument for pip: a folder or a wheel, an address, or the name with its version for an index.
        is_editable: Whether a clone is used in its folder.
    """

    place: str
    is_editable: bool = False

    def pip_install_command(self, extra: str = "") -> str:
        """Return the pip command that installs this stepengine, with an extra."""
        with_extra = f"[{extra}]" if extra else ""
        if "://" in self.place:
            named = f"stepengine{with_extra} @ {self.place}"
        else:
            name, separator, version = self.place.partition("==")
            named = f"{name}{with_extra}{separator}{version}"
        return f"python -m pip install {'-e ' * self.is_editable}{shlex.quote(named)}"

    def pip_wheel_command(self, folder: str) -> str:
        """Return the pip command that builds its wheel in *folder*."""
        return f"python -m pip wheel --no-deps -w {folder} {shlex.quote(self.place)}"


def get_install_source() -> InstallSource:
    """Return the source that this stepengine was installed from; the working folder if it is not installed."""
    try:
        own = metadata.distribution("stepengine")
    except metadata.PackageNotFoundError:
        return InstallSource(".", is_editable=True)
    try:
        told: Any = json.loads(own.read_text("direct_url.json") or "{}")
    except ValueError:
        told = {}
    url = str(told.get("url") or "")
    if not url:
        return InstallSource(f"stepengine=={own.version}")
    if (split := urlsplit(url)).scheme == "file":
        return InstallSource(unquote(split.path), is_editable=bool((told.get("dir_info") or {}).get("editable")))
    version_control = told.get("vcs_info") or {}
    if version_control:
        return InstallSource(
            f"{version_control.get('vcs', 'git')}+{url}@{version_control.get('commit_id', '')}".rstrip("@")
        )
    return InstallSource(url)
