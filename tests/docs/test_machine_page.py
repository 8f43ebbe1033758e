"""
The pages about the machine and the engine name modules and classes that exist, and have a row for each of their modules.
"""

from __future__ import annotations

import ast
import builtins
import re

from .pages import KERNEL, ROOT

PAGES = "".join((ROOT / "docs" / name).read_text() for name in ("the-machine.md", "the-engine.md"))
PACKAGE = ROOT / "stepengine"


def defined(names: set[str]) -> set[str]:
    """
    Return what the modules that may define one of *names* define at their top level, and their methods as ``Class.method``.
    """
    found = set(dir(builtins))
    tops = "|".join({name.partition(".")[0] for name in names})
    likely = re.compile(
        rf"^(?:class |(?:async )?def )?(?:{tops})\b", re.MULTILINE
    )  # parsing all modules takes a second
    texts = [file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")]
    for text in filter(likely.search, texts):
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                found |= {node.name} | {
                    f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)
                }
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {each.id for each in targets if isinstance(each, ast.Name)}
    return found


def test_every_module_of_the_pages_exists() -> None:
    modules = re.findall(r"`([a-z_]+/[a-z_]+\.py)`", PAGES)

    assert len(set(modules)) > 25
    assert [] == [module for module in modules if not ((PACKAGE / module).exists() or (ROOT / module).exists())]


def test_every_module_of_these_packages_has_one_row() -> None:
    rows = re.findall(r"^(`[^|\n]+)\|[^|\n]+$", PAGES.partition("\n## Which file decides it\n")[2], re.MULTILINE)
    files = sorted(
        f"{package}/{file.name}"
        for package in KERNEL
        for file in (PACKAGE / package).glob("*.py")
        if file.name != "__init__.py"
    )

    assert files == sorted(module for row in rows for module in re.findall(r"`([^`]+)`", row))


def test_every_class_function_and_table_of_the_pages_exists() -> None:
    names = set(re.findall(r"`([A-Z]\w*(?:\.\w+)?)`", PAGES))

    assert len(names) > 50
    assert set() == names - defined(names) - {"CONTRIBUTING.md"}
