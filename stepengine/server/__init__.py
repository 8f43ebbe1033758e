"""
Runs over HTTP: an ASGI application for an engine (extra ``serve``).

A request becomes a call of what an engine, or a deployment on a database, offers anyway; the answer is JSON, or a stream of the run's
events. The run does not belong to the connection: it goes on when the page is closed, and whoever comes back reads on behind the
last event id that it has. ``runs`` (in process, on a folder of journals) and ``durable_runs`` (on PostgreSQL) offer the same to
``routes``, which know neither. What is asked from outside is bounded before it is read (``bodies``), and ``access`` refuses before any
route sees it; whose run is whose is decided where runs are looked up. What is said to a run is written down before whoever says it is
told that it arrived. Errors are problem documents; no traceback leaves the process.

What lives here: routes, who may use them, and what they say when they refuse. Starlette is imported only here.

Must not be here: agents' rules, and anything that a terminal shows.

Begin with ``application`` and ``routes``; then ``runs``, ``watching`` (streams), ``access`` and ``webhooks``.
"""

from __future__ import annotations

from stepengine.server.access import Caller, Caps, Guard, Logins, Tokens, check_folder
from stepengine.server.application import Application, app
from stepengine.server.problems import Problem, problem_of
from stepengine.server.quotas import Quotas
from stepengine.server.showing import sse_line
from stepengine.server.webhooks import Webhooks, sign, verify

__all__ = (
    "Application",
    "Caller",
    "Caps",
    "Guard",
    "Logins",
    "Problem",
    "Quotas",
    "Tokens",
    "Webhooks",
    "app",
    "check_folder",
    "problem_of",
    "sign",
    "sse_line",
    "verify",
)
