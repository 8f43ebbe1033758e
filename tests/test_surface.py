"""
The public surface: the names that documentation, examples and outside code rely on, documented and typed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
    "TextPart",
    "ImagePart",
    "DocumentPart",
    "ThinkingPart",
    "ToolCallPart",
    "Thinking",
    "ToolAnnotations",
    "Transcript",
    "InputSchema",
    "Interactor",
    "load_agent",
    "load_agents",
    "Schedule",
    "Scheduler",
    "load_schedules",
    "Waker",
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
        "check_journal",
        "check_provider",
        "check_sandbox",
        "check_sessions",
        "check_tool_source",
        "check_interactor",
        "check_installation",
        "check_package",
        "record_program",
        "replay_program",
    ],
    "stepengine.cli": ["ColorScheme", "ConsoleLogger", "ConsoleRenderer", "TerminalInteractor"],
    "stepengine.journal": [
        "MemoryJournal",
        "FileJournal",
        "SqliteJournal",
        "LineJournal",
        "Writer",
        "Record",
        "diff",
        "list_runs",
        "send_message",
    ],
    "stepengine.engine": [
        "Settings",
        "approve_package",
        "list_agents",
        "list_trusted_folders",
        "make_project",
        "trust_folder",
        "untrust_folder",
        "withdraw_approval",
    ],
    "stepengine.tools": ["ToolName", "ToolPreview", "ToolReferencePart", "ToolRegistry", "ToolSource", "ToolSpec"],
    "stepengine.tools.bundled": [
        "file_tools",
        "search_tools",
        "shell_tools",
        "control_tools",
        "document_tools",
        "spawn_tools",
        "ask_user_tool",
    ],
    "stepengine.tools.bundled.shapes": ["FileEntry", "SearchResult", "CommandResult", "ChildEntry"],
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
    "stepengine.models": [
        "Models",
        "Provider",
        "ModelRequest",
        "ModelReply",
        "ModelDelta",
        "TextChunk",
        "ThinkingChunk",
        "ToolCallStarted",
        "ToolCallChunk",
        "ToolCallEnded",
        "ReplyDone",
        "JsonPart",
        "JsonDict",
        "fallback",
        "find_known_models",
        "list_providers",
    ],
    "stepengine.permissions": ["Policy", "Rule"],
    "stepengine.durable": ["DurableEngine", "DurableHandle", "Operator", "embedded"],
    "stepengine.adapters.mcp": ["mcp_tools", "AgentServer", "Offered"],
    "stepengine.sessions": ["FileSessions", "SqliteSessions", "MemorySessions", "DocumentSessions"],
    "stepengine.adapters.acp": ["EditorAgent", "MakeEngine", "serve", "redirect_stdout"],
    "stepengine.adapters.external": ["RemoteAgent"],
    "stepengine.adapters.ag_ui": [
        "Asked",
        "ag_ui",
        "answers_of",
        "asked_of",
        "connected",
        "page_hooks",
        "prompt_of",
        "run_turns",
    ],
    "stepengine.adapters.otel": ["Tracing"],
    "stepengine.drafts": ["Example", "agent_file_rules", "checked_agents", "permissions_of"],
    "stepengine.sandbox": [
        "CallAnswer",
        "CheckedProgram",
        "MontySandbox",
        "ProgramCall",
        "ProgramEnded",
        "ProgramFunction",
        "ProgramLimits",
        "ProgramProblem",
        "ProgramRaised",
        "ProgramSession",
        "ProgramTurn",
        "ProgramWaiting",
        "Sandbox",
        "StopSignal",
        "Stubs",
        "code_mode",
    ],
    "stepengine.server": ["Caller", "Caps", "Guard", "Logins", "Problem", "Tokens", "check_folder", "problem_of"],
    "stepengine.adapters.vercel": ["HEADERS", "answers_of", "prompt_of", "sse", "vercel"],
    "stepengine.evaluation": [
        "Evaluation",
        "Case",
        "JudgedRun",
        "Verdict",
        "ANY",
        "contains",
        "command",
        "judge",
        "pin",
        "Trials",
    ],
    "stepengine.debugging": ["debug", "describe_run", "render_run", "render_text"],
    "stepengine.events": ["TextDelta", "ToolStarted", "ToolFinished", "AgentFinished", "RunFinished"],
    "stepengine.errors": ["StepEngineError", "ToolError", "ModelError", "LimitExceeded", "LimitReached"],
}
NAMES = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]


@pytest.mark.parametrize("module", MODULES)
def test_a_public_module_exports_the_promised_names(module: str) -> None:
    exported = importlib.import_module(module).__all__

    assert isinstance(exported, tuple)
    assert len(exported) == len(set(exported))
    assert set(MODULES[module]) - set(exported) == set()


def taught() -> Iterator[tuple[str, str]]:
    """
    Give the file and the code of every example, of every Python block of the pages, and of every shipped agent.
    """
    for file in sorted([*ROOT.glob("examples/**/*.py"), *ROOT.glob("agents/*.py")]):
        yield file.name, file.read_text(encoding="utf-8")
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")]):
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            yield page.name, block


def test_imports_of_examples_pages_and_agents_are_public() -> None:
    """
    A name that they need and that no public module exports is missing there.
    """
    imported = [
        (file, node.module, alias.name)
        for file, code in taught()
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom) and not node.level and str(node.module).partition(".")[0] == "stepengine"
        for alias in node.names
    ]

    assert len({file for file, _, _ in imported}) > 30
    assert [] == [
        f"{file}: from {module} import {name}"
        for file, module, name in imported
        if module not in MODULES or name not in importlib.import_module(module).__all__
    ]


@pytest.mark.deep
def test_no_package_name_is_collected_by_pytest() -> None:
    """
    No class or function of the package is named as pytest names tests: imported into a test module, it would be collected.
    """
    files = sorted((ROOT / "stepengine").rglob("*.py"))
    defined = [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file in files
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith(("Test", "test"))
    ]

    assert len(files) > 100
    assert [] == defined


def test_every_public_class_and_function_has_a_docstring() -> None:
    members = {f"{module}.{name}": getattr(importlib.import_module(module), name) for module, name in NAMES}
    told = [name for name, member in members.items() if inspect.isclass(member) or inspect.isfunction(member)]

    assert len(told) > 200
    assert [] == [name for name in told if not inspect.getdoc(members[name])]
