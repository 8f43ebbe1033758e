"""
Performs the effects of runs: the driver, the performers, retries, limits, events and handles.

A machine yields an effect, the driver passes it to a performer and sends the outcome back. A performer has two methods: ``begin``
prepares effects in the order of their numbers, and ``perform`` returns the outcome of one. Performers wrap each other. From the
outside in: tracing, the count of repeated calls, the limits, the recorder, the gate for refusals, the one that stops losers, and the
one that calls models and tools. ``PerformerStack`` alone puts them together; a run for which the outer ones have nothing to do
takes a shorter way.

One tree of runs shares a ``RunTree``: its clock, ledgers, open questions, messages and event stream. A run is one task, and its
effects are awaited in it; only members of a group and children get tasks of their own. A stop cancels the running effects. The
machine receives it as an outcome and closes the handlers. No task of a run outlives it.

Not here: the choice of the next effect (machine), the parts of an agent (engine), records (journal), printing.

Read ``performer`` (the two protocols) and ``services`` first, then ``driver``, ``tree`` and ``core_performer``. ``limits``, ``hub`` and
``suspension`` can be read alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.runtime.clock import SystemClock, TimeSource
    from stepengine.runtime.driver import drive
    from stepengine.runtime.handle import ChildRun, RunHandle
    from stepengine.runtime.hub import Hub, Observer
    from stepengine.runtime.logs import EventFile, LogObserver
    from stepengine.runtime.performer import IO, Item, Middleware, Performer
    from stepengine.runtime.rates import RateLimit, RateLimits
    from stepengine.runtime.retry import RetryPolicy
    from stepengine.runtime.services import Services
    from stepengine.runtime.tree import RunTree
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.runtime.clock": (
                "TimeSource",
                "SystemClock",
            ),
            "stepengine.runtime.driver": ("drive",),
            "stepengine.runtime.handle": (
                "ChildRun",
                "RunHandle",
            ),
            "stepengine.runtime.hub": (
                "Hub",
                "Observer",
            ),
            "stepengine.runtime.logs": (
                "EventFile",
                "LogObserver",
            ),
            "stepengine.runtime.performer": (
                "IO",
                "Item",
                "Middleware",
                "Performer",
            ),
            "stepengine.runtime.rates": (
                "RateLimit",
                "RateLimits",
            ),
            "stepengine.runtime.retry": ("RetryPolicy",),
            "stepengine.runtime.services": ("Services",),
            "stepengine.runtime.tree": ("RunTree",),
        },
    )

__all__ = (
    "IO",
    "ChildRun",
    "EventFile",
    "Hub",
    "Item",
    "LogObserver",
    "Middleware",
    "Observer",
    "Performer",
    "RateLimit",
    "RateLimits",
    "RetryPolicy",
    "RunHandle",
    "RunTree",
    "Services",
    "SystemClock",
    "TimeSource",
    "drive",
)
