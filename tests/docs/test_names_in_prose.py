"""
What pages name outside of their blocks, which other tests run, is there: attributes, options of calls, commands and their options.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import typer.main

from stepengine import Engine, HookContext, RunHandle, RunResult, StepContext, StepResult, ToolContext
from stepengine.cli.app import app

from .pages import ROOT, public_modules

MADE = "command-line*.md"
PAGES = [ROOT / "README.md", *[p for p in sorted((ROOT / "docs").rglob("*.md")) if not p.match(MADE)]]
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
ELSEWHERE = re.compile(r"^\| (?!there).*? \|", re.MULTILINE)
"""The first column of the pages for who comes from elsewhere."""


def members(*classes: type) -> set[str]:
    fields = {field.name for each in classes if attrs.has(each) for field in attrs.fields(each)}
    return fields.union(*[dir(each) for each in classes], *[inspect.get_annotations(each) for each in classes])


def engines() -> tuple[type, ...]:
    durable = pytest.importorskip("stepengine.durable")
    return (Engine, durable.DurableEngine)


def spans(page: Path) -> list[str]:
    """
    Return what stands as code in the prose of a page.
    """
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    text = ELSEWHERE.sub("|", text) if page.parent.name == "coming-from" else text
    return [" ".join(span.split()) for span in SPAN.findall(text)]


def test_attributes_that_are_named_exist() -> None:
    known = {
        "engine": members(*engines()),
        "handle": members(RunHandle),
        "result": members(RunResult),
        "turn": members(StepResult),
        "ctx": members(StepContext, HookContext, ToolContext),
    }
    named = [
        (page.name, who, name)
        for page in PAGES
        for span in spans(page)
        for who, name in re.findall(r"(?<![\w.`/-])([a-z]+)\.([a-z]\w*)", span)
        if who in known
    ]

    assert len(named) > 50
    assert [] == [each for each in named if each[2] not in known[each[1]]]


def test_options_of_calls_that_are_named_exist() -> None:
    public: dict[str, Any] = {}
    for module in public_modules():
        found = importlib.import_module(module)
        public = {**{name: getattr(found, name) for name in found.__all__}, **public}
    checked, missing = 0, []
    for page in PAGES:
        for name, given in re.findall(r"\b([A-Z]\w+)\(((?:[^()]|\([^()]*\))*)\)", " ".join(spans(page))):
            try:
                taken = inspect.signature(public[name]).parameters
            except (KeyError, TypeError, ValueError):
                continue
            if not any(each.kind is each.VAR_KEYWORD and each.name != "unknown" for each in taken.values()):
                options = re.findall(r"(?:^|[,(\s])([a-z_]+)=(?!=)", re.sub(r"\([^()]*\)", "", given))
                checked += len(options)
                missing += [(page.name, f"{name}({each}=)") for each in options if each not in taken]

    assert checked > 50
    assert [] == missing


def test_commands_that_are_named_exist_with_their_options() -> None:
    root: Any = typer.main.get_command(app)
    checked, missing = 0, []
    for page in PAGES:
        for span in spans(page):
            first, *rest = span.split()
            if first != "stepengine" or not rest:
                continue
            command = root
            while rest and hasattr(command, "commands") and re.fullmatch(r"[a-z]+", rest[0]):
                command = command.commands.get(rest.pop(0))
            options = {"-"}.union(*[each.opts for each in getattr(command, "params", ())])
            checked += 1
            missing += [(page.name, span)] if command is None else []
            missing += [(page.name, span) for word in rest if word[0] == "-" and word not in options]

    assert checked > 50
    assert [] == missing
