"""
The only floor that loops with I/O: the driver, the performers, retries, limits, events and handles.

Lives here: everything between an effect and its outcome. Must not be here: what decides the next effect (machine), what an
agent is built from (engine), records of what happened (journal), printing.
"""

from stepengine.runtime.clock import Clock, SystemClock
from stepengine.runtime.driver import drive
from stepengine.runtime.handle import ChildRun, RunHandle
from stepengine.runtime.hub import Hub, Observer
from stepengine.runtime.logs import EventFile, LogObserver
from stepengine.runtime.performer import IO, Item, Middleware, Performer
from stepengine.runtime.rates import RateLimit, RateLimits
from stepengine.runtime.retry import RetryPolicy
from stepengine.runtime.tree import RunTree, Services

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
