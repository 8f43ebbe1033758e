"""
The script that records runs of the bundled agents, as a module: plays, the sample shop, and tools for it.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from cassettes import record_agents

ROOT = Path(__file__).resolve().parents[2]


def recorder() -> ModuleType:
    """
    Return ``cassettes/record_agents.py``.
    """
    return record_agents
