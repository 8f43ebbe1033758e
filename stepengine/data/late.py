"""
Names of a package that are loaded when they are first used.

Most of what an import costs is building classes. A package of which few use all, such as ``stepengine.models``, names its
modules, and each is loaded when one of its names is first used. Type checkers read the same imports below ``TYPE_CHECKING``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module


def make_lazy_exports(
    package: str, names_by_module: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """
    Return the ``__getattr__`` and ``__dir__`` of a package whose names are imported on first use.

    Args:
        package: Its ``__name__``.
        names_by_module: Modules by their whole name, each with the names that the package has of it.
    """
    homes = {name: module for module, names in names_by_module.items() for name in names}

    def load_export(name: str) -> object:
        home = homes.get(name)
        if home is None:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg, name=name, obj=sys.modules[package])
        value = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    return load_export, lambda: sorted({*vars(sys.modules[package]), *homes})
