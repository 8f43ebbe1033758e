"""
stepengine: programmatic LLM agents. An agent is a Python generator function; a run records what it yields and receives.

This module exports the names for authors of agents. Further names are in ``stepengine.errors``,
``stepengine.events``, ``stepengine.models``, ``stepengine.testing``, ``stepengine.tools.bundled`` and the other submodules.
Names are loaded when they are first used, so that ``import stepengine`` stays light.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepengine.data.definition import AgentDefinition, HookContext, InputSchema
    from stepengine.data.hooks import Change, Hooks, StepContext
    from stepengine.data.inputs import AnswerInput, Interrupt, RunInput, Shutdown, ToolResultInput, UserInput
    from stepengine.data.limits import Limits
    from stepengine.data.messages import (
        AssistantMessage,
        DocumentPart,
        ImagePart,
        Message,
        TextPart,
        ThinkingPart,
        ToolCallPart,
        ToolMessage,
        ToolResult,
        UserMessage,
    )
    from stepengine.data.models import ModelSettings, StopReason, Thinking
    from stepengine.data.questions import Answer, AnswerLike, Decision, Interactor, Question
    from stepengine.data.state import AgentState, ChildResult, RunResult, RunStatus, Waited
    from stepengine.data.tools import ToolAnnotations
    from stepengine.data.transcript import Transcript
    from stepengine.data.usage import Usage
    from stepengine.data.waits import ChildRef, Waits
    from stepengine.data.yields import (
        STEP,
        STEP_ALL,
        AgentCall,
        Ask,
        Cancel,
        Complete,
        GenerateN,
        Parallel,
        Perform,
        Race,
        Receive,
        Send,
        Sleep,
        Start,
        StepResult,
        Steps,
        StepText,
        StepWith,
        ToolCall,
        Wait,
    )
    from stepengine.engine import Engine, Schedule, load_agent, load_agents, load_schedules
    from stepengine.engine.scheduler import Scheduler
    from stepengine.engine.waker import Waker, WakeResult
    from stepengine.helpers import best_of, call, map_agents, retry
    from stepengine.runtime import ChildRun, EventFile, LogObserver, RateLimit, RetryPolicy, RunHandle
    from stepengine.tools.context import ToolContext
    from stepengine.tools.decorator import tool
    from stepengine.tools.definition import Tool
    from stepengine.tools.depends import Depends
    from stepengine.workspace.workspace import Workspace

__all__ = (
    "STEP",
    "STEP_ALL",
    "AgentCall",
    "AgentDefinition",
    "AgentState",
    "Answer",
    "AnswerInput",
    "AnswerLike",
    "Ask",
    "AssistantMessage",
    "Cancel",
    "Change",
    "ChildRef",
    "ChildResult",
    "ChildRun",
    "Complete",
    "Decision",
    "Depends",
    "DocumentPart",
    "Engine",
    "EventFile",
    "GenerateN",
    "HookContext",
    "Hooks",
    "ImagePart",
    "InputSchema",
    "Interactor",
    "Interrupt",
    "Limits",
    "LogObserver",
    "Message",
    "ModelSettings",
    "Parallel",
    "Perform",
    "Question",
    "Race",
    "RateLimit",
    "Receive",
    "RetryPolicy",
    "RunHandle",
    "RunInput",
    "RunResult",
    "RunStatus",
    "Schedule",
    "Scheduler",
    "Send",
    "Shutdown",
    "Sleep",
    "Start",
    "StepContext",
    "StepResult",
    "StepText",
    "StepWith",
    "Steps",
    "StopReason",
    "TextPart",
    "Thinking",
    "ThinkingPart",
    "Tool",
    "ToolAnnotations",
    "ToolCall",
    "ToolCallPart",
    "ToolContext",
    "ToolMessage",
    "ToolResult",
    "ToolResultInput",
    "Transcript",
    "Usage",
    "UserInput",
    "UserMessage",
    "Wait",
    "Waited",
    "Waits",
    "WakeResult",
    "Waker",
    "Workspace",
    "best_of",
    "call",
    "load_agent",
    "load_agents",
    "load_schedules",
    "map_agents",
    "retry",
    "tool",
)

_PLACES = {
    "definition": ("AgentDefinition", "HookContext", "InputSchema"),
    "hooks": ("Change", "Hooks", "StepContext"),
    "inputs": ("AnswerInput", "Interrupt", "RunInput", "Shutdown", "ToolResultInput", "UserInput"),
    "limits": ("Limits",),
    "messages": (
        "AssistantMessage",
        "DocumentPart",
        "ImagePart",
        "Message",
        "TextPart",
        "ThinkingPart",
        "ToolCallPart",
        "ToolMessage",
        "ToolResult",
        "UserMessage",
    ),
    "models": ("ModelSettings", "StopReason", "Thinking"),
    "questions": ("Answer", "AnswerLike", "Decision", "Interactor", "Question"),
    "state": ("AgentState", "ChildResult", "RunResult", "RunStatus", "Waited"),
    "tools": ("ToolAnnotations",),
    "transcript": ("Transcript",),
    "usage": ("Usage",),
    "yields": (
        "STEP",
        "STEP_ALL",
        "AgentCall",
        "Ask",
        "Cancel",
        "Complete",
        "GenerateN",
        "Parallel",
        "Perform",
        "Race",
        "Receive",
        "Sleep",
        "Start",
        "StepResult",
        "StepText",
        "StepWith",
        "Steps",
        "Send",
        "ToolCall",
        "Wait",
    ),
    "waits": ("ChildRef", "Waits"),
}
_HOME = {
    **{name: f"stepengine.data.{module}" for module, names in _PLACES.items() for name in names},
    **dict.fromkeys(("Engine", "Schedule", "load_agent", "load_agents", "load_schedules"), "stepengine.engine"),
    **dict.fromkeys(("Waker", "WakeResult"), "stepengine.engine.waker"),
    **dict.fromkeys(("best_of", "call", "map_agents", "retry"), "stepengine.helpers"),
    **dict.fromkeys(
        ("ChildRun", "EventFile", "LogObserver", "RateLimit", "RetryPolicy", "RunHandle"), "stepengine.runtime"
    ),
    "Depends": "stepengine.tools.depends",
    "Scheduler": "stepengine.engine.scheduler",
    "Tool": "stepengine.tools.definition",
    "ToolContext": "stepengine.tools.context",
    "Workspace": "stepengine.workspace.workspace",
    "tool": "stepengine.tools.decorator",
}
"""Where each public name comes from."""


_ELSEWHERE = {
    "Agent": "AgentDefinition",
    "LlmAgent": "AgentDefinition",
    "Runner": "Engine",
    "RunContext": "StepContext",
    "function_tool": "tool",
    "step": "STEP",
    "Step": "STEP",
}
"""Names in other libraries, each with its counterpart here."""


def _make_unknown_name_error(name: str) -> Exception:
    """Return the error for an unknown name: ``ImportError`` for an import, whose message would be lost in an ``AttributeError``."""
    from opcode import opmap

    from stepengine.data.alike import did_you_mean

    # A private name such as __wrapped__ is only tested for existence.
    hint = "" if name.startswith("_") else did_you_mean(_ELSEWHERE.get(name, name), __all__)
    caller = sys._getframe(2)  # noqa: SLF001 - nothing else says whether a name is imported or looked up
    if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
        return ImportError(f"cannot import name {name!r} from 'stepengine'{hint}", name=name)
    return AttributeError(f"module 'stepengine' has no attribute {name!r}{hint}")


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise _make_unknown_name_error(name)
    if sys.platform == "win32":
        # Files are opened, locked and walked in ways that only POSIX has, so most modules would break at their import.
        msg = "stepengine needs a POSIX system and is tested on Linux; on Windows, run it in WSL"
        raise ImportError(msg)
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
