"""
The only floor that loops with I/O: the driver, the performers, retries, limits, events and handles.

Lives here: everything between an effect and its outcome. Must not be here: what decides the next effect (machine), what an
agent is built from (engine), records of what happened (journal), printing.
"""

from stepengine.runtime.clock import Clock, SystemClock
from stepengine.runtime.driver import drive
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.hub import Hub, Observer
from stepengine.runtime.performer import IO, Item, Middleware, Performer
from stepengine.runtime.rates import RateLimit, RateLimits
from stepengine.runtime.retry import RetryPolicy
from stepengine.runtime.tree import Services, Tree

__all__ = (
    "IO",
    "Clock",
    "Hub",
    "Item",
    "Middleware",
    "Observer",
    "Performer",
    "RateLimit",
    "RateLimits",
    "RetryPolicy",
    "RunHandle",
    "Services",
    "SystemClock",
    "Tree",
    "drive",
)
