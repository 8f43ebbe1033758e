"""
The script that records runs of the bundled agents, as a module: plays, the sample shop, and tools for it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def recorder() -> ModuleType:
    """
    Return ``cassettes/record_agents.py``, loaded once.
    """
    name = "stepengine_record_agents"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "cassettes" / "record_agents.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
