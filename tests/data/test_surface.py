"""
What the data floor shows: `__all__` of every module is what a reader would expect to be public.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stepengine.data
from stepengine import errors

ROOT = Path(__file__).parents[2]
MODULES = [
    *[importlib.import_module(f"stepengine.data.{m.name}") for m in pkgutil.iter_modules(stepengine.data.__path__)],
    errors,
]


def public_names(module: ModuleType) -> set[str]:
    """
    Return the classes and functions that *module* defines, and the constants that a docstring explains or that it lists.
    """
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    } - {"TypeVar"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_all_lists_the_public_names_of_a_module_sorted_and_once(module: Any) -> None:
    assert isinstance(module.__all__, tuple)
    assert len(set(module.__all__)) == len(module.__all__)
    assert [] == [name for name in module.__all__ if not hasattr(module, name) or name.startswith("_")]
    assert public_names(module) <= set(module.__all__) | INTERNAL.get(module.__name__, set())


INTERNAL: dict[str, set[str]] = {"stepengine.data.definition": {"check_handler"}}
"""Functions that another module of ours calls though they are no part of the surface."""


def test_the_data_floor_is_light() -> None:
    """
    Importing all of it loads neither pydantic, nor an SDK, nor an event loop.
    """
    heavy = ["pydantic", "asyncio", "anthropic", "openai", "google", "httpx2", "yaml", "rich", "typer", "uuid"]
    names = [module.__name__ for module in MODULES]
    code = (
        f"import sys, importlib; [importlib.import_module(n) for n in {names!r}]; print({heavy!r} & sys.modules.keys())"
    )
    code = code.replace(f"{heavy!r} &", f"set({heavy!r}) &")

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)

    assert "set()" == done.stdout.strip()
