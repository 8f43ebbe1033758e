"""
The protocol of a run as tables: what a called tool becomes, which phase an effect enters, and what comes next.

``YIELDS`` in ``data/yields.py`` has a row for everything that a handler may yield, ``EFFECTS`` in ``data/effects.py`` one for everything
that the machine hands out. Here, ``CALLS`` has a row for each way in which a called tool runs, ``PHASES`` for each effect the phase that
a run enters with it, and ``ORDER`` says in which state of a run which of these may stand
and which state follows. The handler's loop and the hooks take from them what they accept and what it costs, the run's state
takes the phases; tests walk all of them and check every run against ``ORDER``; ``docs/step-order.md`` is made from them.

A *token* names what the machine emits: the class of an event, or the kind of an effect with what tells its uses apart,
such as ``"CallTool:hook"``. In the two states in which the model is asked, the token is what came back. Every effect that
is answered with a ``Stop`` leads to ``"stopped"``, whatever the state. ``ANYWHERE`` may stand between any two tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from stepengine.data.effects import (
    AskPerson,
    AwaitMessage,
    AwaitRuns,
    AwaitTime,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    Compute,
    Effect,
    EndRuns,
    Gather,
    Notify,
    SendToRun,
    Spawn,
)
from stepengine.data.events import PhaseChanged
from stepengine.data.outcomes import Outcome
from stepengine.data.state import RunPhase
from stepengine.data.tools import How
from stepengine.data.yields import YIELDS, YieldRow

__all__ = (
    "ANYWHERE",
    "BODY",
    "CALLING",
    "CALLS",
    "EXECUTING",
    "FIRST",
    "LAST",
    "ORDER",
    "PHASES",
    "REFUSALS",
    "SILENT",
    "STOPPED",
    "By",
    "CallRow",
    "Flow",
    "advance",
    "names_of_yieldables",
    "rows_for",
    "token_of",
    "way_of",
)

T = TypeVar("T")

Flow: TypeAlias = Generator[Effect, Outcome | None, T]
"""A part of the machine: effects go out, their outcomes come in (``None`` for a ``Notify``), and a ``T`` is returned."""

REFUSALS = ("depth", "children", "questions")
"""Kinds of limits that refuse one effect and leave the run what it has."""


# --- what may be yielded ----------------------------------------------------------------------------------------------


By: TypeAlias = Literal["handler", "hook", "tool"]
"""Whose generator it is."""


def _may_yield(by: By) -> list[YieldRow]:
    return [row for row in YIELDS if by == "handler" or (row.for_hooks if by == "hook" else row.for_tools)]


def rows_for(by: By) -> Mapping[type, YieldRow]:
    """Return what *by* may yield, by class."""
    return {row.kind: row for row in _may_yield(by)}


def names_of_yieldables(by: By = "handler") -> str:
    """Return the names of what *by* may yield, for messages."""
    *names, last = [row.name for row in _may_yield(by)]
    return f"{', '.join(names)} or {last} (all from stepengine)"


# --- how a called tool runs -------------------------------------------------------------------------------------------


class CallRow(NamedTuple):
    """
    What a call of a tool becomes.

    Attributes:
        how: How the tool runs.
        effect: The token of its effect; ``""`` when it has none.
        done_by: Who does it.
        is_shown: Whether the machine shows its start and end; those of other calls are shown by whoever performs them.
    """

    how: How
    effect: str
    done_by: str
    is_shown: bool = True


CALLS: Mapping[How, CallRow] = MappingProxyType(
    {
        row.how: row
        for row in (
            CallRow(how="ordinary", effect="CallTool", done_by="a performer", is_shown=False),
            CallRow(how="control", effect="", done_by="the machine itself"),
            CallRow(how="spawns", effect="Gather", done_by="child runs, one `Spawn` for each"),
            CallRow(how="asks", effect="AskPerson:question", done_by="a person"),
            CallRow(how="yields", effect="CallTool", done_by="a run of its own, without a model", is_shown=False),
            CallRow(how="drives", effect="", done_by="the run that makes it: what its steps yield is the run's own"),
        )
    }
)


# --- what is handed out -----------------------------------------------------------------------------------------------

Phase: TypeAlias = tuple[RunPhase, str] | None


def _asking(effect: AskPerson) -> Phase:
    phase = RunPhase.AWAITING_PERMISSION if effect.purpose == "permission" else RunPhase.AWAITING_ANSWER
    return phase, effect.questions[0].tool_name or ""


# Looked up once, since they are asked for at each effect of a run that is watched.
CALLING, EXECUTING = (RunPhase.CALLING_MODEL, ""), RunPhase.EXECUTING_TOOL
PHASES: Mapping[type, Callable[[Any], Phase]] = MappingProxyType(
    {
        CallModel: lambda _: CALLING,
        CallTool: lambda effect: (EXECUTING, effect.tool_name),
        CallBody: lambda effect: (EXECUTING, effect.tool_name),
        Spawn: lambda effect: (RunPhase.AWAITING_AGENT, effect.agent_id),
        AskPerson: _asking,
        AwaitTime: lambda _: (RunPhase.AWAITING_TIME, ""),
        AwaitMessage: lambda effect: (RunPhase.AWAITING_MESSAGE, effect.topic),
        AwaitRuns: lambda _: (RunPhase.AWAITING_AGENT, ""),
        **dict.fromkeys((CallFunction, SendToRun, EndRuns, Gather, Compute, Notify), lambda _: None),
    }
)
"""The phase that a run enters with an effect, and its detail; ``None`` for an effect that changes no phase."""


# --- the order --------------------------------------------------------------------------------------------------------

FIRST, BODY, LAST, STOPPED = "start", "body", "ended", "stopped"
"""In which state a run begins, in which the body of a tool, and in which they end."""

ANYWHERE = ("Compacted", "Compute", "LogLine", "Notification", "PhaseChanged", "TodosChanged", "Warned")
"""What says something on the side, or is worked out there: log lines, warnings, notifications, todos, smaller prompts, and the phase before an effect."""

WAITING = ("AwaitTime", "AwaitMessage", "AwaitRuns", "Gather")
"""What only waits, and several things at once."""
FIRST_HOOKS = ("AskPerson:limit", "CallFunction", "CallModel:complete", "CallTool:hook", "HookFailed", *WAITING)
"""What hooks may cause before the handler began, when there are no children yet."""
HOOKS = (*FIRST_HOOKS, "SendToRun", "EndRuns")
"""What hooks may cause at their other points."""
BATCH = ("PermissionDecided", "AskPerson:permission", "CallTool:model", "Gather")
"""What the calls of one reply may cause, beside those that stand between a ``ToolStarted`` and its ``ToolFinished``."""
OWN = ("AskPerson:question", "AskPerson:limit", "CallFunction", "CallModel:complete", *WAITING, "SendToRun", "EndRuns")
"""
What the machine asks for in the middle of a call that it carries out itself, or that goes on after its tool's body: children, a
person, I/O, a model, a time.
"""


def _stay(state: str, *tokens: str) -> dict[str, str]:
    return dict.fromkeys(tokens, state)


ORDER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "start": {"RunStarted": "pre_run"},
        "pre_run": _stay("pre_run", *FIRST_HOOKS),
        "handler": {
            **_stay("handler", *HOOKS, *BATCH, "AskPerson:question", "CallTool:handler", "Spawn"),
            **_stay("handler", "TextCompleted", "HandlerNotice"),
            "ToolStarted": "handler_control",
            "StepStarted": "pre_step",
            "CallModel:final_answer": "asking_last",
            "RunFailed": "failed",
            "PhaseChanged:done": "post_run",
        },
        "handler_control": {**_stay("handler_control", *OWN), "ToolFinished": "handler"},
        # The body of a tool is a run that nobody is told of: its call was.
        BODY: {
            **_stay(BODY, *HOOKS, "PermissionDecided", "AskPerson:permission", "Gather"),
            **_stay(BODY, "AskPerson:question", "CallTool:tool", "Spawn", "HandlerNotice"),
            "ToolStarted": "body_control",
            "Finished": "ended",
        },
        "body_control": {**_stay("body_control", *OWN), "ToolFinished": BODY},
        "pre_step": {**_stay("pre_step", *HOOKS), "CallModel:step": "asking", "StepFinished": "handler"},
        "asking": {"Value": "replied", "Failure": "refused"},
        "refused": {"AskPerson:limit": "granted", "StepFinished": "handler"},
        "granted": {"CallModel:step": "asking", "StepFinished": "handler"},
        "replied": {
            "CallModel:step": "asking",
            "ThinkingCompleted": "thought",
            "TextCompleted": "tools",
            "StepFinished": "handler",
        },
        "thought": {"TextCompleted": "tools"},
        "tools": {**_stay("tools", *HOOKS, *BATCH), "ToolStarted": "control"},
        "control": {**_stay("control", *OWN), "ToolFinished": "tools", "ToolStarted": "children"},
        # Several calls that start children are open at once: all start, and all end, before anything else happens.
        "children": _stay("children", *HOOKS, "ToolStarted", "ToolFinished"),
        "post_step": _stay("post_step", *HOOKS),
        "on_stop": {**_stay("on_stop", *HOOKS), "StepFinished": "handler"},
        "asking_last": {"Value": "answered", "Failure": "handler"},
        "answered": {
            "CallModel:final_answer": "asking_last",
            "ThinkingCompleted": "last_thought",
            "TextCompleted": "handler",
        },
        "last_thought": {"TextCompleted": "handler"},
        "failed": {"PhaseChanged:failed": "post_run"},
        "post_run": {**_stay("post_run", *HOOKS), "Finished": "ended"},
        "stopped": {
            **_stay("stopped", "HookFailed", "PermissionDecided", "StepFinished", "HandlerNotice", "RunFailed"),
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
        # A request that was too long is made shorter by the hooks, once.
        "refused": ("pre_step",),
        # A reply without thinking or text goes straight to its calls.
        "replied": ("tools",),
        "thought": ("tools",),
        "tools": ("post_step",),
        "children": ("post_step",),
        "post_step": ("on_stop",),
        "answered": ("handler",),
        "last_thought": ("handler",),
    }
)
"""State -> states that may follow without a token."""


def way_of(row: YieldRow) -> Mapping[str, Mapping[str, str]]:
    """Return the rows of ``ORDER`` between the yield of *row* and the answer that its handler is sent."""
    begins = {token: state for token, state in ORDER["handler"].items() if state == row.state != "handler"}
    way: dict[str, Mapping[str, str]] = {"handler": begins}
    waiting = [*begins.values()]
    while waiting:
        state = waiting.pop(0)
        if state not in way:
            way[state] = ORDER[state]
            waiting += [*ORDER[state].values(), *SILENT.get(state, ())]
    return way


def token_of(effect: Effect) -> str:
    """Return the token of what the machine emitted."""
    if isinstance(effect, Notify):
        event = effect.event
        if isinstance(event, PhaseChanged) and event.phase in (RunPhase.DONE, RunPhase.FAILED):
            return f"PhaseChanged:{event.phase.value}"
        return type(event).__name__
    if isinstance(effect, CallModel | AskPerson):
        return f"{type(effect).__name__}:{effect.purpose}"
    if isinstance(effect, CallTool):
        return f"CallTool:{effect.source}"
    return type(effect).__name__


def advance(states: Iterable[str], token: str) -> frozenset[str]:
    """Return the states in which the machine may be after *token*; none when *token* is not allowed here."""
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
