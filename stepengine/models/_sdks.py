"""Check and import the official SDKs. Errors name missing packages as pip knows them."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

from stepengine.errors import ModelError


class Sdk(NamedTuple):
    """
    An official SDK.

    Attributes:
        module: The module to import.
        package: The package for pip.
        extra: The extra of stepengine that installs it.
    """

    module: str
    package: str
    extra: str

    def require_installed(self) -> None:
        """
        Raise ``ModelError`` if the SDK is missing or broken, without loading it.

        Raises:
            ModelError: when it is not installed, only its folder is left, or one of its requirements is missing.
        """
        if sys.modules.get(self.module) is not None:
            return
        try:
            spec = find_spec(self.module)
        except (ImportError, ValueError):  # its parent is missing, or its import is blocked
            spec = None
        if spec is None:
            msg = f"the package {self.package!r} is not installed: pip install 'stepengine[{self.extra}]'"
            raise ModelError(msg, kind="missing_sdk")
        if spec.origin is None:
            why = "only its folder is left"
            raise self._make_broken_error(why)
        if lacking := _find_missing_requirements(self.package):
            why = f"it needs {', '.join(map(repr, lacking))}, which is not installed"
            raise self._make_broken_error(why, *lacking)

    def load(self) -> Any:
        """
        Import the SDK and return its module; raise ``ModelError`` if that fails.

        Raises:
            ModelError: when the SDK is not installed, or cannot be imported.
        """
        self.require_installed()
        try:
            return import_module(self.module)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise self._make_broken_error(why) from error

    def _make_broken_error(self, reason: str, *missing_packages: str) -> ModelError:
        """Return the error for an installed SDK that cannot be loaded; the message names *missing_packages* to install."""
        remedy = " ".join([repr(name) for name in missing_packages]) or f"--force-reinstall '{self.package}'"
        msg = f"the package {self.package!r} is installed but cannot be loaded ({reason}): pip install {remedy}"
        return ModelError(msg, kind="broken_sdk")


@cache
def _find_missing_requirements(package: str) -> tuple[str, ...]:
    """Return the requirements of *package* for which neither metadata nor a module is installed, cached."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in metadata.requires(package) or ()]
    except metadata.PackageNotFoundError:  # packed without metadata
        return ()
    own = [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return tuple([name for name in own if not _is_installed(name)])


def _is_installed(package: str) -> bool:
    """Return whether a package is installed, by its metadata or as a module of the same name."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return find_spec(package.replace("-", "_")) is not None
    return True


ANTHROPIC = Sdk("anthropic", "anthropic", "anthropic")
GOOGLE = Sdk("google.genai", "google-genai", "google")
OPENAI = Sdk("openai", "openai", "openai")
