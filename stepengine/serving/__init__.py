"""
Runs over HTTP: an ASGI application for an engine (extra ``serve``).

What lives here: routes, who may use them, and what they say when they refuse. Starlette is imported only here.

What must not: agents' rules, and anything that a terminal shows.
"""

from __future__ import annotations

from stepengine.serving.access import Caller, Caps, Guard, Logins, Tokens, check_folder
from stepengine.serving.application import Application, app
from stepengine.serving.problems import Problem, problem_of
from stepengine.serving.showing import sse_line
from stepengine.serving.webhooks import Webhooks, sign, verify

__all__ = (
    "Application",
    "Caller",
    "Caps",
    "Guard",
    "Logins",
    "Problem",
    "Tokens",
    "Webhooks",
    "app",
    "check_folder",
    "problem_of",
    "sign",
    "sse_line",
    "verify",
)
