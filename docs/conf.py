# ruff: noqa: INP001
"""
How Sphinx makes the site: ``python -m sphinx -W -n --keep-going docs site``. Nothing is fetched.

Pages are MyST Markdown and are read without the site, too. A fenced block ``{names} MODULE`` becomes the reference of every
public name of that module, from docstrings; below each row of the specification stand the tests that hold it.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from contextlib import suppress
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.addnodes import index
from sphinx.pycode import ModuleAnalyzer

from stepengine.data.names import ToolName
from stepengine.tools.bundled.names import BUNDLED

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # for `tests.spec_rows`: the one reader of the specification
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# The text in the block is for readers of a checkout; the site has the names in its place.
NAMES = re.compile(r"^```\{names\} ([\w.]+)\n((?:(?!```).*\n)*)```$", re.MULTILINE)

project = PROJECT["name"]
version = release = PROJECT["version"]
author = copyright = PROJECT["authors"][0]["name"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py", "make_*.py"]
html_theme = "furo"
html_title = f"{project} {version}"
html_extra_path = ["llms.txt"]
html_show_sphinx = False
html_copy_source = False
html_search_scorer = str(HERE / "search_scorer.js")

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]  # their types stand in the signature
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

# Signatures name what no page explains: other packages, type variables, classes of ours that are no public names. What a page
# or a docstring links itself has to be there.
nitpick_ignore_regex = [(r"py:.*", r"(?!stepengine\b).*"), (r"py:.*", r"stepengine(\.\w+){2,}")]


def explained(name: str, value: Any) -> list[str]:
    """Return what stands below an assignment to *name*, in the module of ours that makes *value*; what a tool is for."""
    if isinstance(value, ToolName):
        return [f"The name of the tool, typed. {BUNDLED[value].documentation('')}"]
    ours = [module for key, module in sorted(sys.modules.items()) if key.startswith("stepengine.")]
    for module in ours:
        if vars(module).get(name) is value:
            found = ModuleAnalyzer.for_module(module.__name__)
            found.analyze()
            if ("", name) in found.attr_docs:
                return [line for line in found.attr_docs["", name] if line]
    msg = f"{name!r} is public, and nothing below its assignment says what it is"
    raise LookupError(msg)


def directive(module: ModuleType, name: str, known: dict[int, str]) -> list[str]:
    """Return the directive that documents one public name; *known* holds what stands elsewhere already."""
    value, full = getattr(module, name), f"{module.__name__}.{name}"
    data = [f".. py:data:: {name}", f"   :module: {module.__name__}", ""]
    elsewhere = known.setdefault(id(value), full)
    if elsewhere != full:
        return [*data, f"   The same as :py:obj:`{elsewhere}`.", ""]
    if inspect.isclass(value) and issubclass(value, BaseException):
        return [f".. autoexception:: {full}", "   :show-inheritance:", ""]
    if inspect.isclass(value):
        return [f".. autoclass:: {full}", *(["   :undoc-members:"] if issubclass(value, Enum) else []), ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {full}", ""]
    return [*data, *(f"   {line}" for line in explained(name, value)), ""]


def put_names(_app: Any, _page: str, source: list[str]) -> None:
    """Put the reference of a module in the place of its block."""

    def block(found: re.Match[str]) -> str:
        module = import_module(found[1])
        first = import_module(found[1].partition(".")[0])
        known = {} if module is first else {id(getattr(first, name)): f"stepengine.{name}" for name in first.__all__}
        lines = [f".. automodule:: {found[1]}", "   :no-members:", ""]
        for name in module.__all__:
            lines += directive(module, name, known)
        return "\n".join(["```{eval-rst}", *lines, "```"])

    source[0] = NAMES.sub(block, source[0])


def put_tests(_app: Any, page: str, source: list[str]) -> None:
    """Put below each row of the specification the tests that hold it, as their marks say."""
    spec_rows = import_module("tests.spec_rows")
    folder, _, name = page.rpartition("/")
    if folder == "spec" and name in spec_rows.PAGES:
        source[0] = spec_rows.with_tests(name, source[0])


def put_words(app: Any, doctree: Any) -> None:
    """Add the entries of ``search_words.toml`` for a page to the search index."""
    words = tomllib.loads((HERE / "search_words.toml").read_text(encoding="utf-8")).get(app.env.docname)
    if words:
        doctree[0]["ids"].append("top")
        doctree[0].insert(1, index(entries=[("single", word, "top", "main", None) for word in words]))


def hide_specification(_app: Any, page: str, source: list[str]) -> None:
    """Keep the specification, which is for maintainers, out of search and navigation."""
    if page.startswith("spec/"):
        source[0] = f"---\nnosearch: true\norphan: true\n---\n{source[0]}"


def keep_sentence(_app: Any, what: str, *rest: Any) -> None:
    """Keep the colon in the first line of a property from being read as the end of a type."""
    lines: list[str] = rest[-1]
    if what in ("property", "attribute") and lines and ":" in lines[0]:
        lines.insert(0, "")


def without_noise(_app: Any, what: str, _name: str, value: Any, *_: Any) -> tuple[str, str] | None:
    """Show no signature of what nobody calls: protocols and enumerations."""
    no_call = what == "class" and (getattr(value, "_is_protocol", False) or issubclass(value, Enum))
    return ("", "") if no_call else None


def copy_pages(app: Any, failure: Exception | None) -> None:
    """Put the pages as they were written, and docstrings as text, beside what became of them: ``llms.txt`` links them."""
    if failure is None and app.builder.name == "html":
        for page in sorted(app.env.found_docs):
            source = Path(app.env.doc2path(page)).read_text(encoding="utf-8")
            Path(app.outdir, f"{page}.md").write_text(NAMES.sub(as_text, source), encoding="utf-8")


def as_text(found: re.Match[str]) -> str:
    """Return the reference of a module as Markdown for readers of text."""
    module = import_module(found[1])
    parts = [inspect.getdoc(module) or ""]
    for name in module.__all__:
        value, head = getattr(module, name), name
        if inspect.isclass(value) or inspect.isroutine(value):
            with suppress(ValueError):
                head = f"{name}{inspect.signature(value)}"
            said = inspect.getdoc(value) or ""
        else:
            said = " ".join(explained(name, value))
        parts.append(f"## {name}\n\n    {head}\n\n{said}")
    return "\n\n".join(parts)


def setup(app: Any) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("source-read", put_names)
    app.connect("source-read", put_tests)
    app.connect("source-read", hide_specification)
    app.connect("doctree-read", put_words)
    app.connect("autodoc-process-docstring", keep_sentence, priority=400)
    app.connect("autodoc-process-signature", without_noise)
    app.connect("build-finished", copy_pages)
