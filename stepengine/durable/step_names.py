"""
The names of a run's steps in the database: ``kind:fingerprint``.

The names are short, since each row has one, and they never change: a recorded row is compared by its name. Nothing here knows a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stepengine.data.effects import CallModel

MODEL, TOOL = "model", "tool"
SPAWN, CHILD, ASK, INTENT, LOOKUP, END = "spawn", "child", "ask", "intent", "lookup", "end"
BODY, RESULT = "body", "result"
"""Kinds of steps: the start of a tool body that was called alone; its result, in the error for two that differ."""
START = "start"
WAIT = "wait"
"""A kind of step: the start of a wait, before the step with its outcome."""
KINDS = {"model_call": MODEL, "tool_call": TOOL, "agent_call": CHILD, "wait": "await", "send": "tell"}
"""The kind of the step with the outcome of an effect, where it is not the kind of the effect's record."""
REASON = "reason"
"""An attribute of a child that its parent cancelled, with the reason."""
ENDED_BY_PARENT = "ended_by_parent"
"""An attribute of a child that its parent cancelled. Such a child is never retried."""
NAMES = re.compile(r"recorded|expected|(?P<name>[a-z]{1,16}:[0-9a-f]{32}|DBOS\.[A-Za-z]{1,64})")
"""The names of steps in an error of DBOS."""


def parse_step_kind(name: str) -> str:
    """Return the kind of a step by its name, ``""`` for one of the database's own."""
    kind, _, print_ = name.partition(":")
    return kind if print_ else ""


def parse_step_fingerprint(name: str) -> str:
    """Return the fingerprint in a step's name."""
    return name.partition(":")[2]


def get_effect_step_kind(form: CallModel | Mapping[str, Any]) -> str:
    """Return the kind of the step with the outcome of an effect; *form* is the encoded effect."""
    if isinstance(form, CallModel):
        return MODEL
    return START if form.get("background") else KINDS.get(form["type"], form["type"])
