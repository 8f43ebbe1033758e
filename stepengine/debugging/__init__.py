"""
Debugging: walks a recorded run in both directions, and shows runs.

The debugger goes to any step of a run by sending a new machine the recorded outcomes. ``edits`` walks the same run over edited code,
in a process of its own; ``desk`` and ``jobs`` are what the studio asks. ``viewing`` renders a run as a page. Nothing here performs
an effect.

Begin with ``debugger`` or ``viewing``.
"""

from stepengine.debugging.debugger import debug
from stepengine.debugging.viewing.rendering import render_run

__all__ = ("debug", "render_run")
