"""The official SDKs: whether one is there, and its import. What is missing or broken is told by the name that pip knows."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from stepengine.errors import ModelError

__all__ = ("ANTHROPIC", "GOOGLE", "OPENAI", "Sdk")


class Sdk(NamedTuple):
    """
    An official SDK.

    Attributes:
        module: What is imported.
        package: What pip installs.
        extra: The extra of stepengine that brings it.
    """

    module: str
    package: str
    extra: str

    def check(self) -> None:
        """
        Look for it, without loading it.

        Raises:
            ModelError: when it is not installed, or only a folder is left of it.
        """
        if sys.modules.get(self.module) is not None:
            return
        try:
            spec = find_spec(self.module)
        except (ImportError, ValueError):  # its parent is missing; somebody keeps it from being imported
            spec = None
        if spec is None:
            raise self._missing()
        if spec.origin is None:
            why = "only its folder is left"
            raise self._broken(why)

    def load(self) -> Any:
        """
        Import it.

        Raises:
            ModelError: when it is not installed, or cannot be imported.
        """
        self.check()
        try:
            return import_module(self.module)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise self._broken(why) from error

    def _missing(self) -> ModelError:
        msg = f"the package {self.package!r} is not installed: pip install 'stepengine[{self.extra}]'"
        return ModelError(msg, kind="missing_sdk")

    def _broken(self, why: str) -> ModelError:
        msg = (
            f"the package {self.package!r} is installed and cannot be loaded ({why}): pip install --force-reinstall "
            f"'{self.package}'"
        )
        return ModelError(msg, kind="broken_sdk")


ANTHROPIC = Sdk("anthropic", "anthropic", "anthropic")
GOOGLE = Sdk("google.genai", "google-genai", "google")
OPENAI = Sdk("openai", "openai", "openai")
