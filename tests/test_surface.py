"""
The public surface: the names that documentation, examples and outside code rely on, documented and typed.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "stepengine": "Engine",
    "stepengine.testing": "ScriptedModel",
    "stepengine.cli": "TerminalInteractor",
    "stepengine.journal": "FileJournal",
    "stepengine.engine": "Settings",
    "stepengine.tools": "ToolSpec",
    "stepengine.tools.bundled": "file_tools",
    "stepengine.tools.bundled.shapes": "FileEntry",
    "stepengine.context": "truncate",
    "stepengine.models": "Provider",
    "stepengine.permissions": "Policy",
    "stepengine.durable": "DurableEngine",
    "stepengine.adapters.mcp": "mcp_tools",
    "stepengine.sessions": "FileSessions",
    "stepengine.adapters.acp": "EditorAgent",
    "stepengine.adapters.external": "RemoteAgent",
    "stepengine.adapters.ag_ui": "ag_ui",
    "stepengine.adapters.otel": "Tracing",
    "stepengine.drafts": "checked_agents",
    "stepengine.sandbox": "code_mode",
    "stepengine.server": "Tokens",
    "stepengine.adapters.vercel": "vercel",
    "stepengine.evaluation": "Evaluation",
    "stepengine.debugging": "debug",
    "stepengine.events": "TextDelta",
    "stepengine.errors": "StepEngineError",
    "stepengine.questions": "list_choices",
}
"""The public modules, each with a name that it exports. The pages of the reference list the others."""


@pytest.mark.parametrize("module", MODULES)
def test_a_public_module_exports_unique_names(module: str) -> None:
    exported = importlib.import_module(module).__all__

    assert isinstance(exported, tuple)
    assert len(exported) == len(set(exported))
    assert MODULES[module] in exported


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
