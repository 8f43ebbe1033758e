"""
Faults that nobody chose: made from the syntax tree, so that what the tests miss is not what their authors forgot to plant.

``python -m tests.mutants --random 100 --seed 7 --layer machine`` draws them; ``tests/random_runs.py`` tries them. Each is
known by its text, not by its line, and is drawn by the hash of that: the same seed draws the same faults when code elsewhere
has changed.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "stepengine"
LAYERS = ("machine", "runtime", "engine", "journal", "permissions", "models", "sessions", "durable")
"""The layers that are drawn from when none is named."""
WIDER: Mapping[str, tuple[str, ...]] = {
    "data": ("tests/data", "tests/machine"),
    "engine": ("tests/engine", "tests/sessions"),
    "machine": ("tests/machine", "tests/engine", "tests/testing", "tests/permissions"),
    "models": ("tests/models", "tests/faults"),
    "permissions": ("tests/permissions", "tests/engine/test_permissions.py"),
    "runtime": ("tests/runtime", "tests/engine"),
    "sessions": ("tests/sessions", "tests/engine/test_sessions.py"),
    "tools": ("tests/bundled_tools", "tests/permissions"),
}
"""The tests that know a layer, where those are not only its own."""
OPPOSITE: Mapping[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Is: (r"\bis\b", "is not"), ast.IsNot: (r"\bis\s+not\b", "is"), ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}  # fmt: skip
"""What an operator looks like, and what stands there instead."""
DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
UNREACHABLE = "assert_never("
NEAR_FILES = 6
SHOWN = 240

EQUIVALENT: Mapping[str, str] = tomllib.loads((ROOT / "tests" / "equivalent_mutants.toml").read_text(encoding="utf-8"))
"""Mutants that change nothing that anybody can see, by their names, each with the reason."""

Change = tuple[tuple[int, int], str]
"""Where bytes are replaced, from and to, and the text that stands there instead."""


@attrs.frozen
class Fault:
    """
    One place and what stands there instead.

    Attributes:
        file: The file, from the top of the checkout.
        line: Where, from 1.
        function: The function that it is in, with its class.
        name: File, function, kind of fault, the line before and after: a list of equivalent ones finds it again when lines
            have moved.
        changes: What is replaced.
        sound: The whole file without the fault.
    """

    file: str
    line: int
    function: str
    name: str
    changes: tuple[Change, ...]
    sound: bytes = attrs.field(repr=False)

    @property
    def layer(self) -> str:
        return self.file.split("/")[1].removesuffix(".py")

    @property
    def source(self) -> str:
        """The whole file with the fault."""
        return _changed(self.sound, self.changes).decode()

    @property
    def is_program(self) -> bool:
        """Whether Python can read the file with the fault."""
        try:
            compile(self.source, self.file, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return True


def _changed(data: bytes, changes: tuple[Change, ...]) -> bytes:
    for (first, last), new in sorted(changes, reverse=True):
        data = data[:first] + new.encode() + data[last:]
    return data


class _Source:
    """The text of a file, addressed as syntax trees do: lines from 1, columns in bytes."""

    def __init__(self, path: Path) -> None:
        self.file = path.relative_to(ROOT).as_posix()
        self.data = path.read_bytes()
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._names: Counter[str] = Counter()

    def span(self, node: ast.AST) -> tuple[int, int]:
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]  # type: ignore[attr-defined]
        return first + node.col_offset, last + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        first, last = self.span(node)
        return self.data[first:last].decode()

    def operator(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Change:
        """Return the change of the operator that stands between two operands, brackets left as they are."""
        first, last = self.span(left)[1], self.span(right)[0]
        return (first, last), re.sub(old, new, self.data[first:last].decode(), count=1)

    def fault(self, function: str, kind: str, *changes: Change) -> Fault | None:
        """Return the fault that puts other text into places; ``None`` when that changes nothing."""
        if all(self.data[first:last] == new.encode() for (first, last), new in changes):
            return None
        first, last = min(where[0] for where, _ in changes), max(where[1] for where, _ in changes)
        line = self.data.count(b"\n", 0, first) + 1
        start, end = self._starts[line - 1], self.data.find(b"\n", last)
        moved = tuple(((where[0] - start, where[1] - start), new) for where, new in changes)
        before = self.data[start:end]
        shown = [" ".join(text.decode().split())[:SHOWN] for text in (before, _changed(before, moved))]
        name = f"{self.file}:{function}: {kind}: {shown[0]} -> {shown[1]}"
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name} #{self._names[name]}"
        return Fault(self.file, line, function, name, changes, self.data)


def faults_of(path: Path) -> Iterator[Fault]:
    """Yield every fault that can be planted in the functions of a file; some are no program any more."""
    source = _Source(path)
    for name, function in _functions(ast.parse(source.data), ""):
        if not _is_stub(function):
            for statement in function.body:
                for node in _own(statement):
                    yield from filter(None, _at(source, name, node))


def _functions(node: ast.AST, within: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, (*FUNCTIONS, ast.ClassDef))
        name = f"{within}.{child.name}".lstrip(".") if is_named else within  # type: ignore[attr-defined]
        if isinstance(child, FUNCTIONS):
            yield name, child
        yield from _functions(child, name)


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is in it, functions in it left out: they come by themselves."""
    if isinstance(node, FUNCTIONS):
        return
    yield node
    if isinstance(node, ast.JoinedStr) and sys.version_info < (3, 12):
        return  # Where an expression in a text stands, older Pythons do not know.
    for child in ast.iter_child_nodes(node):
        yield from _own(child)


def _is_stub(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function says nothing but its text, as those of protocols do."""
    return all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in function.body)


def _at(source: _Source, function: str, node: ast.AST) -> Iterator[Fault | None]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in OPPOSITE:
            yield source.fault(function, "comparison", source.operator(left, right, *OPPOSITE[type(op)]))
        case ast.BoolOp(op=op, values=[first, second, *_]):
            old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            yield source.fault(function, "boolean", source.operator(first, second, rf"\b{old}\b", new))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield source.fault(function, "boolean", (source.span(node), f"({source.text(operand)})"))
        case ast.Constant(value=bool() as value):
            yield source.fault(function, "boolean", (source.span(node), str(not value)))
        case ast.Constant(value=int() as value):
            yield source.fault(function, "off by one", (source.span(node), str(value + 1)))
        case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred) and not isinstance(
            second, ast.Starred
        ):
            swapped = ((source.span(first), source.text(second)), (source.span(second), source.text(first)))
            yield source.fault(function, "swapped arguments", *swapped)
        case ast.If(test=test):
            yield source.fault(function, "guard", (source.span(test), "False"))
            yield source.fault(function, "guard", (source.span(test), "True"))
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield source.fault(function, "returned nothing", (source.span(value), "None"))
        case _ if isinstance(node, DROPPED) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            if not source.text(node).startswith(UNREACHABLE):
                yield source.fault(function, "dropped statement", (source.span(node), "pass"))


def files_of(layer: str) -> list[Path]:
    return sorted((PACKAGE / layer).rglob("*.py")) if (PACKAGE / layer).is_dir() else [PACKAGE / f"{layer}.py"]


def drawn(count: int, seed: int, layers: tuple[str, ...]) -> list[Fault]:
    """Return *count* faults, as many of each layer as of another, equivalent ones among them."""
    found: list[Fault] = []
    for number, layer in enumerate(layers):
        known = [fault for path in files_of(layer) for fault in faults_of(path)]
        known.sort(key=lambda fault: hashlib.sha256(f"{seed}:{fault.name}".encode()).digest())
        wanted = count // len(layers) + (number < count % len(layers))
        for fault in known:
            if not wanted:
                break
            if fault.is_program:
                wanted -= 1
                found.append(fault)
    return found


@cache
def _tests() -> dict[str, str]:
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in sorted((ROOT / "tests").rglob("test_*.py"))}


@cache
def nearness(file: str) -> Mapping[str, int]:
    """Return how near the files of tests are to a file of the package, 0 the nearest."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    name = module.rpartition(".")[2].strip("_")
    imports = re.compile(rf"\b{re.escape(module)}\b")
    layer = file.split("/")[1].removesuffix(".py")
    mirrored, of_layer = f"tests/{layer}/", re.compile(rf"\bstepengine\.{layer}\b")
    return {
        path: 0
        if f"test_{name}" in path
        else 1
        if imports.search(text)
        else 2
        if path.startswith(mirrored) or of_layer.search(text)
        else 3
        for path, text in _tests().items()
    }


def near(fault: Fault) -> tuple[str, ...]:
    """Return the tests that name the module of a fault, or what it is called by."""
    function = fault.function.rpartition(".")[2].strip("_")
    scored = [
        (score, path)
        for path, score in nearness(fault.file).items()
        if score < 2 or (score == 2 and function in _tests()[path])
    ]
    return tuple([path for _, path in sorted(scored)[:NEAR_FILES]])


def wider(layer: str) -> tuple[str, ...]:
    """Return the folders of tests that know a layer."""
    return WIDER.get(layer) or ((f"tests/{layer}",) if (ROOT / "tests" / layer).is_dir() else ("tests",))
