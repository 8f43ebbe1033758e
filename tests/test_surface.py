"""
The public surface: the names that documentation, examples and outside code rely on, documented and typed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from typing_extensions import is_typeddict

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
    "stepengine.drafts": "load_draft_agents",
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


@pytest.mark.deep
@pytest.mark.smoke
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


IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
CODE = re.compile(r"^ *```.*?\n(.*?)^ *```|`([^`]+)`", re.MULTILINE | re.DOTALL)
NAME_LISTS = re.compile(r"^```\{names\}.*?^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = (
    "examples/**/*.py",
    "agents/*.py",
    "tests/examples/test_extending.py",
    "tests/testing/test_conformance_*.py",
)


def mentioned() -> set[str]:
    """
    Return each identifier in code of guides, reference tables, examples, bundled agents and extension tests.

    The specification and the generated lists of public names do not count.
    """
    pages = [ROOT / "README.md", *[page for page in ROOT.glob("docs/**/*.md") if page.parent.name != "spec"]]
    texts = [NAME_LISTS.sub("", page.read_text(encoding="utf-8")) for page in pages]
    code = [block or span for text in texts for block, span in CODE.findall(text)]
    code += [file.read_text(encoding="utf-8") for pattern in EXAMPLES for file in ROOT.glob(pattern)]
    return set(IDENTIFIER.findall("\n".join(code)))


def annotated(value: Any) -> Iterator[object]:
    """
    Give the annotations of a function, the bases and annotations of a class, or the value of an alias.
    """
    if not inspect.isclass(value):
        yield from [type(value).__name__, value, *getattr(inspect.unwrap(value), "__annotations__", {}).values()]
        return
    for base in [one for one in value.__mro__ if one.__module__.startswith("stepengine")]:
        yield from [base.__name__, *getattr(base, "__orig_bases__", ())]
        yield from [text for name, text in getattr(base, "__annotations__", {}).items() if not name.startswith("_")]
        for name, member in vars(base).items():
            if not name.startswith("_") or name in {"__init__", "__call__"}:
                function = getattr(member, "__func__", getattr(member, "fget", member))
                yield from getattr(function, "__annotations__", {}).values()


def named_values() -> Iterator[tuple[str, Any]]:
    """
    Give each public name with its value, and the names of unions and keyword dictionaries, which signatures refer to.
    """
    for module in MODULES:
        found = importlib.import_module(module)
        yield from [(name, getattr(found, name)) for name in found.__all__]
    for module, found in sorted(sys.modules.items()):
        if module.startswith("stepengine."):
            for name, value in vars(found).items():
                if isinstance(value, ALIASES) or is_typeddict(value):
                    yield name, value


ALIASES = (types.UnionType, types.GenericAlias, type(Literal[0]), type(str | None), type(Callable[[], str]))


def test_no_public_name_is_unused() -> None:
    """
    A name that nothing outside of the package needs is private.
    """
    values: dict[str, list[Any]] = {}
    for name, value in named_values():
        values.setdefault(name, []).append(value)
    left = values.keys() & mentioned()
    used = set()
    while left:
        name = left.pop()
        used.add(name)
        texts = [one if isinstance(one, str) else repr(one) for value in values[name] for one in annotated(value)]
        left |= (set(IDENTIFIER.findall("\n".join(texts))) & values.keys()) - used

    assert [] == [
        f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__ if name not in used
    ]
