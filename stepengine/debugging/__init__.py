"""
Debugging: moves through a recorded run in both directions, and shows runs.

The debugger moves to any step of a run by sending the recorded outcomes to a new machine. ``edits`` replays the same run under
edited code, in a process of its own. ``desk``, ``jobs`` and ``load_check`` are the child processes of the studio. ``viewer``
renders a run as a page, and ``run_description`` as JSON and text.

Moving and showing perform no effect. Only ``Debugger.fork`` and the jobs start runs, which may call models.

Begin with ``debugger`` or ``viewer``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.debugging.debugger import debug
    from stepengine.debugging.run_description import (
        describe_compactions,
        describe_run,
        render_compactions,
        render_text,
    )
    from stepengine.debugging.viewer.rendering import render_run
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.debugging.debugger": ("debug",),
            "stepengine.debugging.run_description": (
                "describe_compactions",
                "describe_run",
                "render_compactions",
                "render_text",
            ),
            "stepengine.debugging.viewer.rendering": ("render_run",),
        },
    )

__all__ = ("debug", "describe_compactions", "describe_run", "render_compactions", "render_run", "render_text")
