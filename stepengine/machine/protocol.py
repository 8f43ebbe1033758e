"""
The protocol of a run as tables: how called tools run, the phase of each effect, and the allowed order of effects and events.

``YIELDS`` in ``data/yields.py`` has a row for everything that a handler may yield, ``EFFECTS`` in ``data/effects.py`` one for everything
that the machine hands out. Here, ``CALLS`` has a row for each way in which a called tool runs, ``PHASES`` for each effect the phase that
a run enters with it, and ``ORDER`` says in which state of a run which of these may stand
and which state follows. The handler's loop and the hooks take from them what they accept and what it costs, the run's state
takes the phases. Tests walk all of them and check every run against ``ORDER``. ``docs/make_step_order.py`` makes a page from them.

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
    CallModel,
    CallTool,
    Effect,
    Notify,
    Spawn,
)
from stepengine.data.events import PhaseChanged
from stepengine.data.outcomes import Outcome
from stepengine.data.state import RunPhase
from stepengine.data.tools import How
from stepengine.data.yields import YIELDS, YieldRow

T = TypeVar("T")

Flow: TypeAlias = Generator[Effect, Outcome | None, T]
"""A part of the machine: effects go out, their outcomes come in (``None`` for a ``Notify``), and a ``T`` is returned."""

REFUSALS = ("depth", "children", "questions")
"""Kinds of limits that refuse one effect and leave the run what it has."""


# --- what may be yielded ----------------------------------------------------------------------------------------------


By: TypeAlias = Literal["handler", "hook", "tool"]
"""Whose generator it is."""


def _list_allowed_rows(by: By) -> list[YieldRow]:
    return [row for row in YIELDS if by == "handler" or (row.for_hooks if by == "hook" else row.for_tools)]


def get_yield_rows(by: By) -> Mapping[type, YieldRow]:
    """Return the yieldables allowed for *by*, by class."""
    return {row.kind: row for row in _list_allowed_rows(by)}


def format_yieldable_names(by: By = "handler") -> str:
    """Return the names of the yieldables allowed for *by*, for messages."""
    *names, last = [row.name for row in _list_allowed_rows(by)]
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
            CallRow(how="control", effect="", done_by="the machine"),
            CallRow(how="spawns", effect="Gather", done_by="child runs, one `Spawn` for each"),
            CallRow(how="asks", effect="AskPerson:question", done_by="a person"),
            CallRow(how="yields", effect="CallTool", done_by="a separate run without a model", is_shown=False),
            CallRow(how="drives", effect="", done_by="the calling run, like yields of its handler"),
        )
    }
)


# --- what is handed out -----------------------------------------------------------------------------------------------

Phase: TypeAlias = tuple[RunPhase, str]


def _phase_from_question(effect: AskPerson) -> Phase:
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
        AskPerson: _phase_from_question,
        AwaitTime: lambda _: (RunPhase.AWAITING_TIME, ""),
        AwaitMessage: lambda effect: (RunPhase.AWAITING_MESSAGE, effect.topic),
        AwaitRuns: lambda _: (RunPhase.AWAITING_AGENT, ""),
    }
)
"""The phase that a run enters with an effect, and its detail. Other effects change no phase."""


# --- the order --------------------------------------------------------------------------------------------------------

FIRST, BODY, LAST, STOPPED = "start", "body", "ended", "stopped"
"""In which state a run begins, in which the body of a tool, and in which they end."""

ANYWHERE = ("Compacted", "Compute", "LogLine", "Notification", "PhaseChanged", "TodosChanged", "Warned")
"""What says something on the side, or is worked out there: log lines, warnings, notifications, todos, smaller prompts, and the phase before an effect."""


def _list_allowed_tokens(by: By) -> list[str]:
    """Return the tokens of what *by* may yield, calls of tools and single children left out: those have tokens by their source."""
    rows = [row for row in _list_allowed_rows(by) if row.state == "handler"]
    tokens = {token for row in rows for token in row.effects} - {"CallTool:handler", "CallTool:model", "Spawn"}
    return sorted(tokens)


HOOKS = ("AskPerson:limit", "CallTool:hook", "HookFailed", *_list_allowed_tokens("hook"))
"""What hooks may cause."""
FIRST_HOOKS = tuple([token for token in HOOKS if token not in ("SendToRun", "EndRuns")])
"""What they may cause before the handler began, when there are no children yet."""
BATCH = ("PermissionDecided", "AskPerson:permission", "CallTool:model", "Gather")
"""The tokens that the calls of one reply may cause outside of the spans from ``ToolStarted`` to ``ToolFinished``."""
OWN = ("AskPerson:limit", *_list_allowed_tokens("tool"))
"""The effects within a call that the machine carries out itself, or within the body of a tool: children, a person, I/O, a model, a time."""


def _make_self_loops(state: str, *tokens: str) -> dict[str, str]:
    return dict.fromkeys(tokens, state)


ORDER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "start": {"RunStarted": "pre_run"},
        "pre_run": _make_self_loops("pre_run", *FIRST_HOOKS),
        "handler": {
            **_make_self_loops(
                "handler", *HOOKS, *BATCH, *_list_allowed_tokens("handler"), "CallTool:handler", "Spawn"
            ),
            **_make_self_loops("handler", "TextCompleted", "HandlerNotice"),
            "ToolStarted": "handler_control",
            "StepStarted": "pre_step",
            "CallModel:final_answer": "asking_last",
            "RunFailed": "failed",
            "PhaseChanged:done": "post_run",
        },
        "handler_control": {**_make_self_loops("handler_control", *OWN), "ToolFinished": "handler"},
        # The body of a tool is a run that nobody is told of: its call was.
        BODY: {
            **_make_self_loops(BODY, *HOOKS, "PermissionDecided", "AskPerson:permission", "Gather"),
            **_make_self_loops(BODY, *_list_allowed_tokens("tool"), "CallTool:tool", "Spawn", "HandlerNotice"),
            "ToolStarted": "body_control",
            "Finished": "ended",
        },
        "body_control": {**_make_self_loops("body_control", *OWN), "ToolFinished": BODY},
        "pre_step": {**_make_self_loops("pre_step", *HOOKS), "CallModel:step": "asking", "StepFinished": "handler"},
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
        "tools": {**_make_self_loops("tools", *HOOKS, *BATCH), "ToolStarted": "control"},
        "control": {**_make_self_loops("control", *OWN), "ToolFinished": "tools", "ToolStarted": "children"},
        # Several calls that start children are open at once: all start, and all end, before anything else happens.
        "children": _make_self_loops("children", *HOOKS, "ToolStarted", "ToolFinished"),
        "post_step": _make_self_loops("post_step", *HOOKS),
        "on_stop": {**_make_self_loops("on_stop", *HOOKS), "StepFinished": "handler"},
        "asking_last": {"Value": "answered", "Failure": "handler"},
        "answered": {
            "CallModel:final_answer": "asking_last",
            "ThinkingCompleted": "last_thought",
            "TextCompleted": "handler",
        },
        "last_thought": {"TextCompleted": "handler"},
        "failed": {"PhaseChanged:failed": "post_run"},
        "post_run": {**_make_self_loops("post_run", *HOOKS), "Finished": "ended"},
        "stopped": {
            **_make_self_loops(
                "stopped", "HookFailed", "PermissionDecided", "StepFinished", "HandlerNotice", "RunFailed"
            ),
            **_make_self_loops("stopped", "PhaseChanged:done", "PhaseChanged:failed"),
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


def collect_order_rows(row: YieldRow) -> Mapping[str, Mapping[str, str]]:
    """Return the rows of ``ORDER`` between the yield of *row* and its answer."""
    begins = {token: state for token, state in ORDER["handler"].items() if state == row.state != "handler"}
    way: dict[str, Mapping[str, str]] = {"handler": begins}
    waiting = [*begins.values()]
    while waiting:
        state = waiting.pop(0)
        if state not in way:
            way[state] = ORDER[state]
            waiting += [*ORDER[state].values(), *SILENT.get(state, ())]
    return way


def get_protocol_token(effect: Effect) -> str:
    """Return the token of an emitted effect in the state table ``ORDER``."""
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


def compute_next_states(states: Iterable[str], token: str) -> frozenset[str]:
    """Return the possible states of the machine after *token*; none if *token* is not allowed here."""
    possible = _compute_epsilon_closure(states)
    if token in ANYWHERE:
        return possible
    return frozenset([ORDER[state][token] for state in possible if token in ORDER[state]])


def _compute_epsilon_closure(states: Iterable[str]) -> frozenset[str]:
    """Return *states* and all states that the machine reaches from them without an effect."""
    found = set(states)
    waiting = list(found)
    while waiting:
        fresh = [state for state in SILENT.get(waiting.pop(), ()) if state not in found]
        found.update(fresh)
        waiting.extend(fresh)
    return frozenset(found)
