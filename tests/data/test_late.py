"""Packages whose names are loaded at their first use."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

PACKAGES = (
    "stepengine.engine",
    "stepengine.models",
    "stepengine.permissions",
    "stepengine.runtime",
    "stepengine.sessions",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_exists_and_is_listed(package: str) -> None:
    module = importlib.import_module(package)

    assert [] == [name for name in module.__all__ if getattr(module, name, None) is None]
    assert {*module.__all__} <= {*dir(module)}


def test_a_package_alone_loads_none_of_its_modules() -> None:
    code = (
        "import sys\n"
        f"for package in {PACKAGES!r}:\n"
        "    __import__(package)\n"
        "    print([name for name in sys.modules if name.startswith(f'{package}.')])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ["[]"] * len(PACKAGES) == done.stdout.split("\n")[:-1]


def test_missing_name_error_names_its_package() -> None:
    from stepengine import models

    with pytest.raises(AttributeError, match=r"module 'stepengine\.models' has no attribute 'Nothing'"):
        models.Nothing


@pytest.mark.parametrize("package", [*PACKAGES, "stepengine.context", "stepengine.journal", "stepengine.tools.bundled"])
def test_no_module_shadows_a_name_its_package_exports(package: str) -> None:
    """
    Importing such a module would put it in the place of the function: which of them a user gets would be a matter of order.
    """
    found = importlib.import_module(package)
    modules = {module.name for module in pkgutil.iter_modules(found.__path__)}

    assert set() == modules & set(found.__all__)
