"""
Runs over HTTP: an ASGI application for an engine (extra ``serve``).

A request becomes a call of a part of ``Runs`` (in process, on a folder of journals) or ``DurableRuns`` (on PostgreSQL). Both have the same
parts: a launcher, a reader, a watcher, a messenger and conversations; ``routes`` know neither store. The answer is JSON, or a stream of
the run's events. A run does not belong to a connection: it continues when the page is closed, and a client that reconnects reads
on from the last event id that it has. Requests are bounded before they are read (``bodies``), and ``access`` refuses before any
route sees them. Who owns a run is decided where runs are found. A message to a run is stored before the sender is told that it
arrived. Errors are problem documents; no traceback leaves the process.

Routes, access rules and refusals belong here. Starlette is imported only here. Rules of agents and output for terminals do not.

Begin with ``application`` and ``routes``; then ``runs`` and its parts, ``access`` and ``webhooks``.
"""

from __future__ import annotations

from stepengine.server.access import Caller, Caps, Guard, Logins, Tokens
from stepengine.server.application import Application, app
from stepengine.server.problems import Problem, problem_of
from stepengine.server.quotas import Quotas
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
    "problem_of",
    "sign",
    "verify",
)
