"""The check that the extra ``serve`` is installed."""

from __future__ import annotations

from importlib.util import find_spec

from stepengine.errors import DefinitionError


def require_extra_package(package: str = "starlette") -> None:
    """
    Raise unless a package of the extra ``serve`` is installed.

    Raises:
        DefinitionError: If *package* is not installed.
    """
    if find_spec(package) is None:
        msg = f"runs over HTTP need the package {package}: pip install 'stepengine[serve]'"
        raise DefinitionError(msg)
