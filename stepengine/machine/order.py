"""
The order of one run as a table: in which state the machine may show or ask for what, and which state comes next.

The machine does not read this table; its own code, top to bottom, is the order. The tests check every run against the
table, and the diagram in ``docs/step-order.md`` is made from it (design 3, reliability I9).

A *token* names what the machine emits: the class of an event, or the kind of an effect with what tells its uses apart,
such as ``"CallTool:hook"``. In the two states in which the model is asked, the token is what came back. Every effect that
is answered with a ``Stop`` leads to ``"stopped"``, whatever the state. ``ANYWHERE`` may stand between any two tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from stepengine.data.effects import Ask, CallModel, CallTool, Effect, Notify
from stepengine.data.events import PhaseChanged
from stepengine.data.run import RunPhase

__all__ = ("ANYWHERE", "FIRST", "LAST", "ORDER", "SILENT", "STOPPED", "advance", "token_of")

FIRST, LAST, STOPPED = "start", "ended", "stopped"

ANYWHERE = ("Compacted", "LogLine", "Notification", "PhaseChanged")
"""What says something on the side: log lines, notifications, smaller prompts, and the phase before an effect."""

HOOKS = ("Perform", "CallModel:complete", "CallTool:hook", "HookFailed")
"""What hooks may cause at their points."""
CALLS = ("PermissionDecided", "Ask:permission", "CallTool:model", "Gather")
"""What the calls of one reply may cause, beside those that stand between a ``ToolStarted`` and its ``ToolFinished``."""
OWN = ("Gather", "Ask:question")
"""What the machine asks for in the middle of a call that it carries out itself: children, a person."""


def _stay(state: str, *tokens: str) -> dict[str, str]:
    return dict.fromkeys(tokens, state)


ORDER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "start": {"RunStarted": "pre_run"},
        "pre_run": _stay("pre_run", *HOOKS),
        "handler": {
            **_stay("handler", *HOOKS, *CALLS, "Ask:question", "CallTool:handler", "Spawn"),
            **_stay("handler", "TextCompleted", "HandlerNotice"),
            "ToolStarted": "handler_control",
            "StepStarted": "pre_step",
            "CallModel:final_answer": "asking_last",
            "RunFailed": "failed",
            "PhaseChanged:done": "post_run",
        },
        "handler_control": {**_stay("handler_control", *OWN), "ToolFinished": "handler"},
        "pre_step": {**_stay("pre_step", *HOOKS), "CallModel:step": "asking"},
        "asking": {"Value": "replied", "Failure": "refused"},
        "refused": {},
        "replied": {
            "CallModel:step": "asking",
            "ThinkingCompleted": "thought",
            "TextCompleted": "tools",
            "Warned": "tools",
        },
        "thought": {"TextCompleted": "tools"},
        "tools": {**_stay("tools", *HOOKS, *CALLS), "ToolStarted": "control"},
        "control": {**_stay("control", *OWN), "ToolFinished": "tools"},
        "post_step": _stay("post_step", *HOOKS),
        "on_stop": {**_stay("on_stop", *HOOKS), "StepFinished": "handler"},
        "asking_last": {"Value": "answered", "Failure": "handler"},
        "answered": {
            "CallModel:final_answer": "asking_last",
            "ThinkingCompleted": "last_thought",
            "TextCompleted": "handler",
            "Warned": "handler",
        },
        "last_thought": {"TextCompleted": "handler"},
        "failed": {"PhaseChanged:failed": "post_run"},
        "post_run": {**_stay("post_run", *HOOKS), "Finished": "ended"},
        "stopped": {
            **_stay("stopped", "HookFailed", "PermissionDecided", "HandlerNotice", "RunFailed"),
            **_stay("stopped", "PhaseChanged:done", "PhaseChanged:failed"),
            "Finished": "ended",
        },
        "ended": {},
    }
)
"""State -> token -> next state."""

SILENT: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # A hook that fails ends the run; otherwise the handler's first advance is not told.
        "pre_run": ("handler",),
        # No model, or a hook that fails: the step ends before it asked.
        "pre_step": ("handler",),
        # A request that was too long is made shorter by the hooks, once; any other failure is the handler's.
        "refused": ("handler", "pre_step"),
        # A reply without thinking or text goes straight to its calls; one that ends with an error counts for nothing.
        "replied": ("tools", "handler"),
        "thought": ("tools",),
        "tools": ("post_step",),
        "post_step": ("on_stop",),
        "answered": ("handler",),
        "last_thought": ("handler",),
    }
)
"""State -> states that may follow without a token."""


def token_of(effect: Effect) -> str:
    """Return the token of what the machine emitted."""
    if isinstance(effect, Notify):
        event = effect.event
        if isinstance(event, PhaseChanged) and event.phase in (RunPhase.DONE, RunPhase.FAILED):
            return f"PhaseChanged:{event.phase.value}"
        return type(event).__name__
    if isinstance(effect, CallModel | Ask):
        return f"{type(effect).__name__}:{effect.purpose}"
    if isinstance(effect, CallTool):
        return f"CallTool:{effect.source}"
    return type(effect).__name__


def advance(states: Iterable[str], token: str) -> frozenset[str]:
    """Return the states in which the machine may be after *token*; none when it must not stand here."""
    possible = _closure(states)
    if token in ANYWHERE:
        return possible
    return frozenset([ORDER[state][token] for state in possible if token in ORDER[state]])


def _closure(states: Iterable[str]) -> frozenset[str]:
    found = set(states)
    waiting = list(found)
    while waiting:
        fresh = [state for state in SILENT.get(waiting.pop(), ()) if state not in found]
        found.update(fresh)
        waiting.extend(fresh)
    return frozenset(found)
