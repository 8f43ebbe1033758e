"""
The public surface: the names that documentation, examples and outside code rely on, documented and typed.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

import stepengine

FRONT_DOOR = [
    "AgentDefinition",
    "AgentState",
    "UserMessage",
    "AssistantMessage",
    "ToolMessage",
    "StepContext",
    "StepResult",
    "Steps",
    "ToolCall",
    "AgentCall",
    "STEP",
    "STEP_ALL",
    "StepWith",
    "StepText",
    "GenerateN",
    "Complete",
    "Parallel",
    "Perform",
    "Ask",
    "call",
    "retry",
    "best_of",
    "map_agents",
    "Engine",
    "RunResult",
    "ChildResult",
    "RunStatus",
    "StopReason",
    "RunHandle",
    "Limits",
    "Usage",
    "ModelSettings",
    "tool",
    "Tool",
    "ToolContext",
    "ToolResult",
    "Depends",
    "Hooks",
    "HookContext",
    "Change",
    "Decision",
    "Question",
    "Answer",
    "load_agent",
    "load_agents",
]

MODULES = {
    "stepengine": FRONT_DOOR,
    "stepengine.testing": [
        "ScriptedModel",
        "text",
        "tool_call",
        "tool_calls",
        "failure",
        "Walk",
        "run_with",
        "simulate",
    ],
    "stepengine.journal": ["MemoryJournal", "FileJournal", "SqliteJournal", "diff"],
    "stepengine.tools": ["file_tools", "search_tools", "shell_tools", "control_tools", "spawn_tools", "ask_user_tool"],
    "stepengine.context": [
        "truncate",
        "summarize",
        "raise_on_overflow",
        "mask_tool_results",
        "prune_to_summary",
        "inject_context",
        "usage_logger",
        "SystemPrompt",
    ],
    "stepengine.models": ["Models", "Provider", "ModelRequest", "ModelReply", "ModelDelta", "fallback"],
    "stepengine.events": ["TextDelta", "ToolStarted", "ToolFinished", "AgentFinished", "RunFinished"],
    "stepengine.errors": ["StepEngineError", "ToolError", "ModelError", "LimitExceeded", "LimitReached"],
}
NAMES = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]


@pytest.mark.spec("requirements:P12")
@pytest.mark.parametrize("module", MODULES)
def test_a_public_module_exports_what_the_design_promises(module: str) -> None:
    exported = importlib.import_module(module).__all__

    assert isinstance(exported, tuple)
    assert len(exported) == len(set(exported))
    assert set(MODULES[module]) - set(exported) == set()


@pytest.mark.spec("requirements:P12")
@pytest.mark.parametrize(("module", "name"), NAMES, ids=[f"{m}.{n}" for m, n in NAMES])
def test_every_public_class_and_function_has_a_docstring(module: str, name: str) -> None:
    member = getattr(importlib.import_module(module), name)

    if inspect.isclass(member) or inspect.isfunction(member):
        assert inspect.getdoc(member)


@pytest.mark.spec("requirements:P12", "requirements:P14")
def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(stepengine.__file__).parent / "py.typed").is_file()
