"""
The only floor that loops with I/O: the driver, the performers, retries, limits, events and handles.

Lives here: everything between an effect and its outcome. Must not be here: what decides the next effect (machine), what an
agent is built from (engine), records of what happened (journal), printing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import late

if TYPE_CHECKING:
    from stepengine.runtime.clock import Clock, SystemClock
    from stepengine.runtime.driver import drive
    from stepengine.runtime.handle import ChildRun, RunHandle
    from stepengine.runtime.hub import Hub, Observer
    from stepengine.runtime.logs import EventFile, LogObserver
    from stepengine.runtime.performer import IO, Item, Middleware, Performer
    from stepengine.runtime.rates import RateLimit, RateLimits
    from stepengine.runtime.retry import RetryPolicy
    from stepengine.runtime.tree import RunTree, Services
else:
    __getattr__, __dir__ = late(
        __name__,
        {
            "stepengine.runtime.clock": (
                "Clock",
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
            "stepengine.runtime.tree": (
                "RunTree",
                "Services",
            ),
        },
    )

__all__ = (
    "IO",
    "ChildRun",
    "Clock",
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
    "drive",
)
