"""
The engine: definitions, tools, models and policies wired into runs. The only place that knows all floors below.

Lives here: ``Engine``, what runs are started with, compiled schemas, the loader of agent files, schedules. Must not be here: what
decides the next effect (machine), what performs it (runtime), printing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import late

if TYPE_CHECKING:
    from stepengine.engine.engine import Engine
    from stepengine.engine.loading import load_agent, load_agents, load_schedules
    from stepengine.engine.schedules import Schedule
else:
    __getattr__, __dir__ = late(
        __name__,
        {
            "stepengine.engine.engine": ("Engine",),
            "stepengine.engine.loading": (
                "load_agent",
                "load_agents",
                "load_schedules",
            ),
            "stepengine.engine.schedules": ("Schedule",),
        },
    )

# ``scheduler`` stands apart: it loads the journals, which an engine without them does without.
__all__ = ("Engine", "Schedule", "load_agent", "load_agents", "load_schedules")
