"""
The engine: definitions, tools, models and policies wired into runs. The only place that knows all floors below.

What a caller asks for goes through here once. The ``Catalog`` compiles agents when the engine is made: schemas, tools, who may spawn
whom, so that what cannot work is refused before anything is paid for. ``Launcher.plan`` turns a request into a ``PlannedRun``; its
``Planner`` makes the plan and the state that a machine is started with, for the root and for each child, with the models that
``EngineModels`` chooses. ``Launcher`` puts a run together: with a journal or without, in a session (``Turn``) or by itself, resumed or
forked. From there on the runtime has it, and ``EngineRuns`` only knows which runs there are. ``Stepper`` drives the machines of a
recorded run by its ``Tape``, without the runtime.

Whatever is the same for all runs is made once and lent to them (``Services``); whatever is one run's own is in its plan. Nothing here
looks into a run while it goes on: a rule that would have to is the machine's, and one about the world a performer's.

Here, too, stand what loads agent files and packages, the threads and loops that ``run_sync`` needs, and schedules.

Must not be here: what decides the next effect (machine), what performs it (runtime), printing. Journals, sessions and adapters are
imported inside functions, since an engine without them does without their code.

Begin with ``engine`` for what callers see, then ``launcher``, ``run_plans`` and ``catalog``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.engine.engine import Engine
    from stepengine.engine.loader import ListedAgent, list_agents, load_agent, load_agents, load_schedules
    from stepengine.engine.packages import approve_package
    from stepengine.engine.projects import make_project
    from stepengine.engine.schedules import Schedule
    from stepengine.engine.settings import Settings
    from stepengine.engine.trust import (
        AccessRequest,
        list_trusted_folders,
        trust_folder,
        untrust_folder,
        withdraw_approval,
    )
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.engine.engine": ("Engine",),
            "stepengine.engine.loader": (
                "ListedAgent",
                "list_agents",
                "load_agent",
                "load_agents",
                "load_schedules",
            ),
            "stepengine.engine.packages": ("approve_package",),
            "stepengine.engine.projects": ("make_project",),
            "stepengine.engine.schedules": ("Schedule",),
            "stepengine.engine.settings": ("Settings",),
            "stepengine.engine.trust": (
                "AccessRequest",
                "list_trusted_folders",
                "trust_folder",
                "untrust_folder",
                "withdraw_approval",
            ),
        },
    )

# ``scheduler`` stands apart: it loads the journals, which an engine without them does without.
__all__ = (
    "AccessRequest",
    "Engine",
    "ListedAgent",
    "Schedule",
    "Settings",
    "approve_package",
    "list_agents",
    "list_trusted_folders",
    "load_agent",
    "load_agents",
    "load_schedules",
    "make_project",
    "trust_folder",
    "untrust_folder",
    "withdraw_approval",
)
