"""
The site of the documentation: it is built without a warning, holds every public name, and its made parts are what they are made from.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import inspect
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import typer.main

from stepengine.cli.app import app
from stepengine.engine import options
from stepengine.engine.settings import KEYS, Settings
from tests import spec_rows
from tests.scripts import load_script

from .pages import ROOT, public_modules

DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md"))
NAMES = re.compile(r"^```\{names\} ([\w.]+)$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def script(name: str) -> Any:
    """
    Load a script that makes a part of the documentation.
    """
    return load_script(DOCS / f"{name}.py")


@pytest.mark.deep
def test_the_reference_has_every_public_name_and_run_option(site: Path) -> None:
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    found = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    public = {f"{module}.{name}" for module in public_modules() for name in importlib.import_module(module).__all__}
    typed = {f"{options.__name__}.{name}" for name in options.__all__ if name.endswith("Options")}

    assert len(public) > 350
    assert {"stepengine.engine.options.RunOptions"} <= typed
    assert set() == {*public, *typed} - found


@pytest.mark.deep
def test_pages_of_llms_txt_are_on_the_site_as_text(site: Path) -> None:
    listed = LINK.findall((site / "llms.txt").read_text(encoding="utf-8"))

    assert listed
    for page in listed:
        source, shown = [(folder / page).read_text(encoding="utf-8") for folder in (DOCS, site)]
        modules = [importlib.import_module(name) for name in NAMES.findall(source)]
        assert modules or shown == source, page
        for module in modules:
            assert set(module.__all__) == set(re.findall(r"^## (\w+)$", shown, re.MULTILINE)), page


@pytest.mark.deep
def test_the_site_lists_the_tests_below_each_row(site: Path) -> None:
    for name in spec_rows.PAGES:
        shown = html.unescape((site / "spec" / f"{name}.html").read_text(encoding="utf-8"))
        rows = spec_rows.rows_of((DOCS / "spec" / f"{name}.md").read_text(encoding="utf-8"))
        held = {test for row in rows for test in spec_rows.holders().get(f"{name}:{row}", ())}
        assert rows
        assert all(f'<span id="{row}"></span>' in shown for row in rows), name
        assert all(test.partition("::")[2] in shown for test in held), name


@pytest.mark.deep
def test_the_site_is_complete_without_a_network(site: Path) -> None:
    """
    Pages load nothing from elsewhere; their pictures lie beside them.
    """
    foreign = re.compile(r'(?:src|<link[^>]+href)="https?://')

    assert [] == [str(page) for page in site.rglob("*.html") if foreign.search(page.read_text(encoding="utf-8"))]
    assert {"step.svg", "run.svg", "exchange.svg", "layers.svg"} <= {p.name for p in (site / "_images").iterdir()}


def test_every_page_is_in_one_toctree_and_in_llms_txt() -> None:
    made = script("make_llms")
    listed = [page for _, pages in made.sections() for page in pages]

    assert made.listing() == (DOCS / "llms.txt").read_text(encoding="utf-8")
    specification = [page for page in PAGES if page.startswith("spec/")]  # for maintainers, and in no menu
    assert PAGES == sorted([*listed, *specification, "index"])


def test_pages_that_are_linked_exist() -> None:
    for page in [*(DOCS / f"{name}.md" for name in PAGES), DOCS / "llms.txt"]:
        for target in LINK.findall(
            re.sub(r"`[^`\n]*`|^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        ):
            if not target.startswith(("#", "https://")):
                assert (page.parent / target.partition("#")[0]).exists(), (page.name, target)


def test_command_line_pages_match_the_help_output() -> None:
    made = script("make_command_line").pages()

    assert len(made) > 5
    shown = {page.stem: page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("command-line*.md")}
    assert made == shown, "python docs/make_command_line.py"


def test_every_command_maps_to_a_callable_public_name_or_none() -> None:
    """
    A name is one of ``__all__`` of a public module, or a method of such a class without an underscore, and can be called.
    """
    in_python = script("make_command_line").IN_PYTHON
    root: Any = typer.main.get_command(app)
    groups = {name: getattr(one, "commands", {"": None}) for name, one in root.commands.items()}

    assert {f"{group} {name}".strip() for group, names in groups.items() for name in names} == set(in_python)
    for command, dotted in in_python.items():
        if dotted is not None:
            parent, _, last = dotted.rpartition(".")
            module, _, owner = parent.rpartition(".") if parent not in public_modules() else (parent, "", "")
            public = importlib.import_module(module)

            assert module in public_modules(), command
            assert (owner or last) in public.__all__, command
            assert not last.startswith("_"), command
            assert callable(getattr(getattr(public, owner) if owner else public, last)), command


def test_documented_environment_variables_set_their_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    rows = re.findall(
        r"^\| `([a-z_.<>]+)` \| (`STEPENGINE_[^|]+) \|",
        script("make_command_line").pages()["command-line"],
        re.MULTILINE,
    )
    values = {"a whole number from 1": "7", "a number above 0": "7", "true or false": "true"}
    kinds = {key.name: key for key in KEYS}

    assert {"model", "limits.max_steps", "models.<agent>"} <= {name for name, _ in rows}
    for name, variables in rows:
        for variable in re.findall(r"`(\w+)`", variables):
            key = kinds[name]
            value = values.get(key.kind, str(key.default or "always"))
            with monkeypatch.context() as patch:
                patch.setenv(variable, value)
                found = Settings.load(tmp_path)

            assert name.replace("<", "").replace(">", "") in found.values, variable


def test_the_diagrams_match_their_sources() -> None:
    made = script("make_diagrams").pictures()

    assert made == {file.name: file.read_text(encoding="utf-8") for file in (DOCS / "diagrams").iterdir()}


def test_every_option_of_a_run_is_explained() -> None:
    more_than = {
        "StartOptions": options.RunOptions,
        "StartResumeOptions": options.ResumeOptions,
        "StartForkOptions": options.ForkOptions,
    }
    for name in options.__all__:
        kind = getattr(options, name)
        if name.endswith("Options"):
            inherited = set(more_than[name].__annotations__) if name in more_than else set()
            told = set(re.findall(r"^    (\w+): ", inspect.getdoc(kind) or "", re.MULTILINE))

            assert set(kind.__annotations__) - inherited == told, name


def test_every_public_module_has_its_page() -> None:
    found = [name for page in PAGES for name in NAMES.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))]

    assert sorted(public_modules()) == sorted(found)


MADE_BY_THE_ENGINE = {"Application", "HookContext", "RunHandle", "ToolContext"}


def test_every_option_of_a_public_class_or_function_is_explained() -> None:
    """
    Whatever has a default: its docstring says what it is for. Events, and what only the engine makes, have no options.
    """
    missing, checked = [], 0
    for module in sorted({*public_modules()} - {"stepengine.events", "stepengine.errors"}):
        for name in importlib.import_module(module).__all__:
            member = getattr(importlib.import_module(module), name)
            made = inspect.isclass(member) and not issubclass(member, BaseException | Enum | dict)
            if (
                name in MADE_BY_THE_ENGINE
                or not (made or inspect.isroutine(member))
                or getattr(member, "_is_protocol", False)
            ):
                continue
            told = set(re.findall(r"\w+", inspect.getdoc(member) or ""))
            options = [p.name for p in inspect.signature(member).parameters.values() if p.default is not p.empty]
            checked += len(options)
            missing += [f"{module}.{name}: {option}" for option in options if option not in told]

    assert checked > 500
    assert [] == missing
