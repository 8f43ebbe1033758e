"""
The text of a handler that was written for no sandbox: of its file what it needs, each line where it stands.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def text_of(file: Path, *names: str) -> str:
    """
    Return the part of an agent file that functions of it need: what they and what they call are made of.

    A file in the sandbox stands alone, so what comes from the file beside it is appended, as whoever hands the agent on would do.
    Definitions and hooks are left out: these are of the agent that is run.
    """
    source = file.read_text(encoding="utf-8")
    lines, tree = source.split("\n"), ast.parse(source)
    needed, keep, beside = _needed(tree, names), set[int](), dict[str, list[str]]()
    made = dict[int, str]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            kept = [alias for alias in node.names if (alias.asname or alias.name) in needed]
            if isinstance(node, ast.ImportFrom) and node.level:
                beside.setdefault(str(node.module), []).extend([one.name for one in kept if one.name != "agent"])
                kept = [one for one in kept if one.name == "agent"]
            if kept:
                pruned: Any = type(node)(**{**dict(ast.iter_fields(node)), "names": kept})
                made[node.lineno] = ast.unparse(pruned)
        elif needed & set(_bound(node)):
            first = min([node.lineno, *[one.lineno for one in getattr(node, "decorator_list", [])]])
            keep |= set(range(first, (node.end_lineno or first) + 1))
    shown = [line if n in keep else made.get(n, "") for n, line in enumerate(lines, 1)]
    others = [text_of(file.with_name(f"{module}.py"), *found) for module, found in beside.items() if found]
    return "\n".join([*shown, *others])


def _needed(tree: ast.Module, names: tuple[str, ...]) -> set[str]:
    uses: dict[str, set[str]] = {}
    for node in tree.body:
        for name in _bound(node):
            uses.setdefault(name, set()).update(_used(node))
    found, left = set[str](), list(names)
    while left:
        name = left.pop()
        if name not in found and name in uses:
            found.add(name)
            left += uses[name]
    return found


def _bound(node: ast.stmt) -> list[str]:
    match node:
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name for alias in node.names]
        case ast.FunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            return [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        case ast.AnnAssign(target=ast.Name(name)):
            return [name]
    return []


def _used(node: ast.AST) -> set[str]:
    return {one.id for one in _walk(node) if isinstance(one, ast.Name)}


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Give what is run: annotations of functions are not, those of a class make its fields."""
    yield node
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.FunctionDef | ast.arg) and name in {"annotation", "returns"}:
            continue
        if isinstance(node, ast.AnnAssign) and name == "annotation" and value is not None and not _is_field(node):
            continue
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                yield from _walk(one)


def _is_field(node: ast.AnnAssign) -> bool:
    return node.simple == 1 and node.col_offset > 0
