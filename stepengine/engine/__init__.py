"""
The engine: definitions, tools, models and policies wired into runs. The only package that knows all packages below.

The ``Catalog`` compiles agents when the engine is created: schemas, tools, and the agents that each may spawn. So an invalid agent
is refused before any model is paid for. ``Launcher.plan_root_run`` turns a ``RunRequest`` into a ``PlannedRun``; its ``Planner`` makes the
plan and the first state of the root and of each child, with the models that ``EngineModels`` chooses. ``Launcher`` then creates an
``EngineRun``: recorded or not, in a session (``Turn``) or alone, resumed or forked. The ``EngineRun`` runs to its end; ``EngineRuns``
lists the running ones.

A recorded run starts in ``journal.runs``, which opens the journal and calls ``Launcher.create_run_from_record``. In a session, ``Turn``
loads the state when the run has access, and fills the ``EngineRun`` that the caller already has.
``Stepper`` drives the machines of a recorded run by its ``Tape``, without the runtime.

Objects that all runs share are in ``Services``; the data of one run is in its plan. Nothing here watches a running run: a rule that
needs to is the machine's, and one about the outside world a performer's.

This package also loads agent files and packages, has the threads and loops of ``run_sync``, and starts schedules.

Not here: the choice of the next effect (machine), performing it (runtime), printing. Journals, sessions and adapters are imported
inside functions, so that an engine without them does not load their code.

Read ``engine`` first for the public interface, then ``launcher``, ``run_plans`` and ``catalog``.
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
