"""
Faults that nobody chose: made from the syntax tree, so that what the tests miss is not what their authors forgot to plant.

``python -m tests.mutants --random 100 --seed 7 --floor machine`` draws them. The same seed gives the same faults for the same
code. A mutant goes first before the tests that name its module, then before those of its floor and of the floors above that
use it; one that passes all of them has survived.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "stepengine"
FLOORS = ("machine", "runtime", "engine", "journal", "permissions", "models", "sessions", "durable")
"""The floors that are drawn from when none is named."""
WIDER: Mapping[str, tuple[str, ...]] = {
    "context": ("tests/context",),
    "data": ("tests/data", "tests/machine"),
    "durable": ("tests/durable",),
    "engine": ("tests/engine", "tests/runtime", "tests/sessions"),
    "journal": ("tests/journal", "tests/testing", "tests/judging"),
    "machine": ("tests/machine", "tests/engine", "tests/testing"),
    "models": ("tests/models",),
    "permissions": ("tests/permissions", "tests/engine"),
    "runtime": ("tests/runtime", "tests/engine", "tests/machine"),
    "sessions": ("tests/sessions", "tests/engine"),
    "tools": ("tests/tools", "tests/permissions"),
}
"""The tests that a mutant of a floor must pass to have survived."""
OPPOSITE: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Is: "is not", ast.IsNot: "is",
    ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)
NEAR_FILES = 12

EQUIVALENT: Mapping[str, str] = {}
"""Mutants that change nothing that anybody can see, by ``file:function: kind: text``, each with the reason."""


@attrs.frozen
class Fault:
    """
    One place and what stands there instead.

    Attributes:
        file: The file, from the top of the checkout.
        function: The function that it is in.
        line: Where, from 1.
        kind: What kind of fault it is.
        text: What stands there, on one line.
        source: The whole file with the fault.
    """

    file: str
    function: str
    line: int
    kind: str
    text: str
    source: str

    @property
    def name(self) -> str:
        """What it is, so that a list of equivalent ones finds it again when lines have moved."""
        return f"{self.file}:{self.function}: {self.kind}: {self.text}"


class _Source:
    """The text of a file, addressed as syntax trees do: lines from 1, columns in bytes."""

    def __init__(self, path: Path) -> None:
        self.file = path.relative_to(ROOT).as_posix()
        self.data = path.read_bytes()
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]  # type: ignore[attr-defined]
        return first + node.col_offset, last + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        first, last = self.span(node)
        return self.data[first:last].decode()

    def between(self, left: ast.AST, right: ast.AST) -> tuple[int, int]:
        return self.span(left)[1], self.span(right)[0]

    def fault(self, function: str, node: ast.AST, kind: str, *changes: tuple[tuple[int, int], str]) -> Fault | None:
        """Return the fault that puts other text into places; ``None`` when that is no program any more."""
        data = self.data
        for (first, last), new in sorted(changes, reverse=True):
            data = data[:first] + new.encode() + data[last:]
        try:
            tree = ast.parse(data)
        except SyntaxError:
            return None
        if ast.dump(tree) == ast.dump(ast.parse(self.data)):
            return None
        shown = " ".join(self.text(node).split())[:100]
        return Fault(self.file, function, node.lineno, kind, shown, data.decode())  # type: ignore[attr-defined]


def faults_of(path: Path) -> Iterator[Fault]:
    """Yield every fault that can be planted in the functions of a file."""
    source = _Source(path)
    tree = ast.parse(source.data)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_stub(function):
            inner = {
                id(n)
                for f in ast.walk(function)
                if f is not function and isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
                for n in ast.walk(f)
            }
            for statement in function.body:
                for node in ast.walk(statement):
                    if id(node) not in inner:
                        yield from filter(None, _at(source, function.name, node))


def _is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function says nothing but its text, as those of protocols do."""
    return all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in function.body)


def _at(source: _Source, function: str, node: ast.AST) -> Iterator[Fault | None]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPPOSITE:
            yield source.fault(function, node, "comparison", (source.between(left, right), f" {OPPOSITE[type(op)]} "))
        case ast.BoolOp(op=op, values=[first, second, *_]):
            word = " or " if isinstance(op, ast.And) else " and "
            yield source.fault(function, node, "boolean", (source.between(first, second), word))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield source.fault(function, node, "boolean", (source.span(node), f"({source.text(operand)})"))
        case ast.Constant(value=bool() as value):
            yield source.fault(function, node, "boolean", (source.span(node), str(not value)))
        case ast.Constant(value=int() as value):
            yield source.fault(function, node, "off by one", (source.span(node), str(value + 1)))
        case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred) and not isinstance(
            second, ast.Starred
        ):
            swapped = ((source.span(first), source.text(second)), (source.span(second), source.text(first)))
            yield source.fault(function, node, "swapped arguments", *swapped)
        case ast.If(test=test):
            yield source.fault(function, test, "guard", (source.span(test), "False"))
            yield source.fault(function, test, "guard", (source.span(test), "True"))
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield source.fault(function, node, "returned nothing", (source.span(value), "None"))
        case _ if isinstance(node, DROPPED) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            yield source.fault(function, node, "dropped statement", (source.span(node), "pass"))


def drawn(count: int, seed: int, floors: tuple[str, ...]) -> list[Fault]:
    """Return *count* faults, as many of each floor as of another, equivalent ones left out."""
    chance = random.Random(seed)
    found: list[Fault] = []
    for number, floor in enumerate(floors):
        files = sorted((PACKAGE / floor).rglob("*.py")) if (PACKAGE / floor).is_dir() else [PACKAGE / f"{floor}.py"]
        known = [fault for path in files for fault in faults_of(path) if fault.name not in EQUIVALENT]
        wanted = count // len(floors) + (number < count % len(floors))
        found += chance.sample(known, min(wanted, len(known)))
    return found


@cache
def _tests() -> dict[str, str]:
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in sorted((ROOT / "tests").rglob("test_*.py"))}


def near(fault: Fault) -> tuple[str, ...]:
    """Return the tests that name the module of a fault, or what it is called by."""
    module = fault.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    name = module.rpartition(".")[2].strip("_")
    imports = re.compile(rf"\b{re.escape(module)}\b")
    mirrored = f"tests/{fault.file.split('/')[1].removesuffix('.py')}/"
    scored = [
        (0 if f"test_{name}." in path else 1 if imports.search(text) else 2, path)
        for path, text in _tests().items()
        if f"test_{name}" in path
        or imports.search(text)
        or (path.startswith(mirrored) and fault.function.strip("_") in text)
    ]
    return tuple([path for _, path in sorted(scored)[:NEAR_FILES]])


def wider(fault: Fault) -> tuple[str, ...]:
    """Return the folders of tests that a mutant must pass to have survived."""
    floor = fault.file.split("/")[1].removesuffix(".py")
    return WIDER.get(floor) or ((f"tests/{floor}",) if (ROOT / "tests" / floor).is_dir() else ("tests",))
