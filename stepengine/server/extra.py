"""Says which extra is missing where runs are to be served without it."""

from __future__ import annotations

from importlib.util import find_spec

from stepengine.errors import DefinitionError


def check_extra_installed(package: str = "starlette") -> None:
    """
    Raise unless a package of the extra ``serve`` is installed.

    Raises:
        DefinitionError: where *package* is not installed.
    """
    if find_spec(package) is None:
        msg = f"runs over HTTP need the package {package}: pip install 'stepengine[serve]'"
        raise DefinitionError(msg)
