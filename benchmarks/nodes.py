"""
Counts what a reader has to read: ``python -m benchmarks.nodes [FOLDER]``.

For each package of ``stepengine`` it prints the nodes of the syntax trees without docstrings and annotations, the modules, the classes
with more than 25 methods or 15 fields, and the lines of files in other languages. Nothing is gained by moving code or quoting it.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "stepengine"
MOST_METHODS = 25
MOST_FIELDS = 15
OTHER = {".js", ".css", ".html", ".json", ".yaml", ".toml", ".sql", ".sample", ".md", ".txt"}
"""Suffixes of the files whose lines are counted."""

SCOPES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def bare(tree: ast.Module) -> ast.Module:
    """Return a syntax tree without docstrings and annotations; it is changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, SCOPES):
            node.body = [each for each in node.body if not is_text(each)]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return tree


def is_text(statement: ast.stmt) -> bool:
    """Return whether a statement is a docstring, or a text below a constant that describes it."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def large_classes(tree: ast.Module) -> Iterator[str]:
    """Yield the classes with too many methods or fields, with both numbers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) for each in node.body)
            fields = len({*assigned(node)})
            if methods > MOST_METHODS or fields > MOST_FIELDS:
                yield f"{node.name} ({methods} methods, {fields} fields)"


def assigned(node: ast.ClassDef) -> Iterator[str]:
    """Yield the fields of a class: those that it annotates, and those that its methods assign to ``self``."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
    for each in ast.walk(node):
        is_stored = isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if is_stored and isinstance(each.value, ast.Name) and each.value.id == "self":
            yield each.attr


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.nodes", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=PACKAGE, help="a package; default: stepengine")
    folder = parser.parse_args().folder
    nodes, modules, large, lines = Counter[str](), Counter[str](), dict[str, list[str]](), Counter[str]()
    for file in sorted(folder.rglob("*")):
        within = file.relative_to(folder)
        name = within.parts[0] if len(within.parts) > 1 else "."
        if file.suffix == ".py":
            tree = ast.parse(file.read_bytes())
            large.setdefault(name, []).extend(large_classes(tree))
            nodes[name] += sum(1 for _ in ast.walk(bare(tree)))
            modules[name] += 1
        elif file.suffix in OTHER:
            lines[name] += len(file.read_text(encoding="utf-8").splitlines())
    print(f"{'package':<14}{'nodes':>10}{'modules':>9}{'other lines':>13}{'large classes':>15}")
    for name, count in nodes.most_common():
        print(f"{name:<14}{count:>10,}{modules[name]:>9}{lines[name]:>13,}{len(large[name]):>15}")
    counted = sum(map(len, large.values()))
    print(f"{'all':<14}{nodes.total():>10,}{modules.total():>9}{lines.total():>13,}{counted:>15}")
    for name, found in large.items():
        for each in found:
            print(f"  {name}: {each}")


if __name__ == "__main__":
    main()
