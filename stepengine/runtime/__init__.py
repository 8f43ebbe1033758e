"""
The only floor that loops with I/O: the driver, the performers, retries, limits, events and handles.

A machine asks for an effect, the driver hands it to a performer and sends the outcome back. A performer has two methods: ``begin``
says what is about to happen, in the order of the numbers, and ``perform`` gives what came of it. In between they are wrapped around
each other like the skins of an onion: who traces, who counts repeated calls and what the limits allow stand outside, who records
stands in the middle, the gate for refusals, what stops losers, and last what really calls models and tools stand inside. The order
is not free, and ``RunTree`` alone puts it up; a run for which the outer ones have nothing to do goes past them.

One tree of runs shares a ``RunTree``: its clock, ledgers, open questions, messages and event stream. A run is one task, and its
effects are awaited in it; only what is asked for at once, and children, get tasks of their own. A stop cancels what is under way,
comes back to the machine as an outcome, and so reaches each handler as the closing of its generator. Nothing of a run outlives it.

Must not be here: what decides the next effect (machine), what an agent is built from (engine), records of what happened (journal),
printing.

Begin with ``performer`` (the two protocols) and ``services``, then ``driver``, ``tree`` and ``innermost``; ``limits``, ``hub`` and ``standstill`` stand
each by itself.
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
