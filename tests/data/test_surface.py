"""
What importing the package `data` loads.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import stepengine.data
from stepengine import errors

ROOT = Path(__file__).parents[2]
MODULES = [
    *[importlib.import_module(f"stepengine.data.{m.name}") for m in pkgutil.iter_modules(stepengine.data.__path__)],
    errors,
]


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
