"""
Find private names of dependencies, SQL on their tables, and generated code in the package.

Run ``python .ci/private_names.py [FOLDER] [ALLOWED]``. Each finding needs an entry in ``private_names.toml``, next to this file. An
entry names the promise in ``docs/spec`` that would be lost and a test that fails without the exception. An entry that matches
nothing, a promise without a row and a test without a function are errors, too.

A private name starts with one underscore. It belongs to a dependency when it is imported from one, when it is read from a name that
was imported from one, or when nothing in the package defines it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OWN = frozenset({"stepengine", "agents"})
SANDBOX = "sandbox"
"""The package that runs untrusted code: generated code is its subject."""
GENERATING = frozenset({"exec", "eval", "compile"})
LOOKUPS = frozenset({"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"})
DOCUMENTED = frozenset(
    {"_asdict", "_fields", "_replace", "_make", "_field_defaults", "_fields_", "_missing_", "_value_"}
)
"""Names of named tuples, enumerations and ctypes that the standard library documents."""
TABLES = (
    "workflow_status|workflow_input|workflow_output|operation_outputs|workflow_events|workflow_events_history|notifications|streams"
    "|queues|workflow_schedules|application_versions|dbos_migrations|event_dispatch_kv"
)
SQL = re.compile(
    rf"\b(?:from|join|into|update|table|on|exists)\s+(dbos\.\w*|(?:{TABLES})\b(?=\s*(?:$|[a-z(;,)])))", re.IGNORECASE
)
CODE_IN_TEXT = re.compile(r"\b(exec|eval)\(")
PRIVATE = re.compile(r"_(?!_)\w+")


class Finding(NamedTuple):
    """Something that needs an entry in the allow list."""

    file: str
    line: int
    kind: str
    name: str


def is_private(name: str) -> bool:
    """Return True for a name with one leading underscore that no documentation of the standard library knows."""
    return PRIVATE.fullmatch(name) is not None and name not in DOCUMENTED


def imported_roots(tree: ast.AST) -> dict[str, str]:
    """Return the names that a module imports, mapped to the package that each comes from."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: node.module.partition(".")[0] for alias in node.names}
    return found


def is_dependency(package: str) -> bool:
    """Return True for a package that is neither ours nor part of Python."""
    return package not in OWN and package not in sys.stdlib_module_names


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private names that a module defines: functions, classes, variables, parameters, slots and attributes of ``self``."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(value=ast.Name(id="self" | "cls"), ctx=ast.Store()):
                yield node.attr
            case ast.Assign(targets=[ast.Name(id="__slots__")]):
                yield from [part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
            case _:
                pass


class Search(ast.NodeVisitor):
    """
    Collects the findings of one module.

    Args:
        file: Its path, for the findings.
        tree: The module.
        defined: The private names of our own that it may use.
    """

    def __init__(self, file: str, tree: ast.Module, defined: frozenset[str]) -> None:
        self.found: list[Finding] = []
        self._file = file
        self._defined = defined
        self._roots = imported_roots(tree)
        self._is_sandbox = f"/{SANDBOX}/" in file
        self.visit(tree)

    def _report(self, node: ast.AST, kind: str, name: str) -> None:
        self.found.append(Finding(self._file, getattr(node, "lineno", 0), kind, name))

    def visit_Expr(self, node: ast.Expr) -> None:
        """Skip docstrings."""
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        """Report private modules."""
        for alias in node.names:
            self._check_import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Report private modules and what is private in a module."""
        for alias in node.names if node.module and not node.level else ():
            self._check_import(node, f"{node.module}.{alias.name}")

    def _check_import(self, node: ast.AST, name: str) -> None:
        if is_dependency(name.partition(".")[0]) and any(map(is_private, name.split("."))):
            self._report(node, "private name", name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Report private attributes."""
        self._check_attribute(node, node.attr, node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Report attributes that are looked up by a string, and calls that run generated code."""
        match node:
            case ast.Call(func=ast.Name(id=name), args=[subject, ast.Constant(value=str(attr)), *_]) if name in LOOKUPS:
                self._check_attribute(node, attr, subject)
            case ast.Call(func=ast.Name(id=name)) if name in GENERATING and not self._is_sandbox:
                self._report(node, "generated code", name)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Report tables of a dependency, and code in a string."""
        if isinstance(node.value, str):
            for table in SQL.findall(node.value):
                self._report(node, "foreign table", table)
            for name in () if self._is_sandbox else CODE_IN_TEXT.findall(node.value):
                self._report(node, "generated code", name)

    def _check_attribute(self, node: ast.AST, attr: str, subject: ast.expr) -> None:
        if not is_private(attr):
            return
        package = self._roots.get(_root_of(subject))
        is_foreign = attr not in self._defined if package is None or package in OWN else is_dependency(package)
        if is_foreign:
            self._report(node, "private name", attr)


def _root_of(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript | ast.Await):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def find(folder: Path) -> list[Finding]:
    """Return the findings in all modules below *folder*, a package of ours."""
    trees = {path: ast.parse(path.read_bytes()) for path in sorted(folder.rglob("*.py"))}
    defined = {part: set[str]() for part in sorted({_part_of(folder, path) for path in trees})}
    for path, tree in trees.items():
        defined[_part_of(folder, path)].update(filter(is_private, defined_names(tree)))
    found: list[Finding] = []
    for path, tree in trees.items():
        # A name of a package that the module does not import may be a dependency's that is spelled alike.
        parts = {_part_of(folder, path), *_imported_parts(folder.name, tree)}
        known = frozenset().union(*[defined.get(part, ()) for part in parts])
        found += Search(path.relative_to(folder.parent).as_posix(), tree, known).found
    return found


def _part_of(folder: Path, path: Path) -> str:
    return path.relative_to(folder).parts[0].removesuffix(".py")


def _imported_parts(package: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package:
            names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
            yield from names


def problems_of(findings: list[Finding], allowed: list[dict[str, object]], root: Path) -> list[str]:
    """Return the findings without an entry, the entries without a finding, and entries whose promise or test does not exist."""
    problems, used = [], set[tuple[int, str]]()
    for finding in findings:
        matching = [
            (number, finding.name)
            for number, entry in enumerate(allowed)
            if (entry["file"], entry["kind"]) == (finding.file, finding.kind) and finding.name in _list(entry["names"])
        ]
        used.update(matching)
        if not matching:
            problems.append(f"{finding.file}:{finding.line}: {finding.kind} {finding.name!r} is not in the allow list")
    for number, entry in enumerate(allowed):
        where = f"private_names.toml: {entry['file']}"
        unused = [name for name in _list(entry["names"]) if (number, name) not in used]
        problems += [f"{where}: {name!r} is not used any more; remove the entry" for name in unused]
        if not entry.get("why"):
            problems.append(f"{where}: an entry says why it is needed")
        problems += [f"{where}: {why}" for why in _missing(str(entry.get("promise")), str(entry.get("test")), root)]
    return problems


def _list(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _missing(promise: str, test: str, root: Path) -> Iterator[str]:
    page, _, row = promise.partition(":")
    spec = root / "docs/spec" / f"{page}.md"
    if not spec.is_file() or f"- **{row}**:" not in spec.read_text(encoding="utf-8"):
        yield f"the promise {promise!r} is no row of docs/spec"
    path, _, name = test.partition("::")
    file = root / path
    if not file.is_file() or re.search(rf"\bdef {re.escape(name)}\(", file.read_text(encoding="utf-8")) is None:
        yield f"the test {test!r} does not exist"


def main(folder: Path, allow_list: Path) -> int:
    """Print the problems and return how the process ends."""
    findings = find(folder)
    allowed = tomllib.loads(allow_list.read_text(encoding="utf-8")).get("allowed", [])
    problems = problems_of(findings, allowed, ROOT)
    print(*problems, f"{len(findings)} findings, {len(allowed)} entries, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    defaults = [ROOT / "stepengine", Path(__file__).with_suffix(".toml")]
    sys.exit(main(*given, *defaults[len(given) :]))
