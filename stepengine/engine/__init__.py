"""
The engine: definitions, tools, models and policies wired into runs. The only place that knows all floors below.

Lives here: ``Engine``, what runs are started with, compiled schemas, the loader of agent files. Must not be here: what
decides the next effect (machine), what performs it (runtime), printing.
"""

from stepengine.engine.engine import Engine
from stepengine.engine.loading import load_agent, load_agents

__all__ = ("Engine", "load_agent", "load_agents")
