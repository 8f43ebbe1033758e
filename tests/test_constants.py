"""
Every numeric constant of the kernel has its reason beside it.

A limit without a reason cannot be changed: a reader does not know what it protects. So each number that a module or a class names has a sentence:
a docstring under it, a comment above it or on its line. A field with a numeric default may have it under "Attributes" of its class instead;
one that starts with 0, 1 or -1 counts something, and limits nothing.

The name of a constant has its unit or what it counts, as a word in the plural: ``MAX_NAME_CHARS``, ``LOCK_SECONDS``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import stepengine

PACKAGE = Path(stepengine.__file__).parent
COMPLETE = (
    "data",
    "machine",
    "runtime",
    "journal",
    "engine",
    "durable",
    "context",
    "permissions",
    "sessions",
)
NAMED_BY_UNIT = ("data", "machine", "runtime", "journal", "engine")
WITHOUT_UNIT = ("RATIO", "FACTOR", "VERSION", "USD", "YEAR", "EXPONENT", "INT", "NUMBER", "SEQ", "PLACE")
"""Last words of constants that are in no unit: parts of a whole, versions, and values of a type that has one bound."""
STARTS = ("0", "1", "-1", "0.0")
WORDS = 5
"""A comment of fewer words is a heading."""
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow, ast.LShift)


class NumericConstant(NamedTuple):
    """A number that a module or a class names."""

    path: str
    line: int
    name: str
    value: str
    has_reason: bool


def is_numeric(node: ast.expr | None, names: set[str]) -> bool:
    """Return True if an expression is a number: a literal, arithmetic of numbers and constants, or the default of a field."""
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return is_numeric(operand, names)
        case ast.BinOp(left=left, op=op, right=right):
            sides = (left, right)
            if not isinstance(op, OPERATORS) or not all(
                is_numeric(side, names) or isinstance(side, ast.Name) for side in sides
            ):
                return False
            return any(is_numeric(side, names) for side in sides) or all(side.id in names for side in sides)
        case ast.Tuple(elts=elements):
            return bool(elements) and all(is_numeric(element, names) for element in elements)
        case ast.Call(func=ast.Name(id="field") | ast.Attribute(attr="field"), keywords=keywords):
            return any(keyword.arg == "default" and is_numeric(keyword.value, names) for keyword in keywords)
    return False


def starting_value(node: ast.expr | None) -> str:
    """Return the source text of a field's default."""
    if isinstance(node, ast.Call):
        node = next(keyword.value for keyword in node.keywords if keyword.arg == "default")
    return ast.unparse(node) if node is not None else ""


def has_sentence(lines: list[str], statement: ast.stmt, following: ast.stmt | None) -> bool:
    """Return True if a comment or a docstring explains a statement."""
    if (
        isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
        and isinstance(following.value.value, str)
    ):
        return True
    on_line = lines[(statement.end_lineno or statement.lineno) - 1][statement.end_col_offset :].partition("#")[2]
    above, line = "", statement.lineno - 2
    while line >= 0 and lines[line].lstrip().startswith("#"):
        above, line = f"{lines[line]} {above}", line - 1
    return any("noqa" not in comment and len(comment.split()) >= WORDS for comment in (above.replace("#", ""), on_line))


def constants_in(
    lines: list[str], body: list[ast.stmt], where: str, names: set[str], attributes: str
) -> Iterator[NumericConstant]:
    """Yield the numeric constants of a module or a class, and those of the classes in it."""
    for index, statement in enumerate(body):
        following = body[index + 1] if index + 1 < len(body) else None
        if isinstance(statement, ast.ClassDef):
            documented = ast.get_docstring(statement) or ""
            yield from constants_in(lines, statement.body, f"{where}{statement.name}.", names, documented)
            continue
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ):
                pass
            case ast.Assign(targets=[ast.Tuple() as target], value=value):
                name = ast.unparse(target).strip("()")
            case _:
                continue
        if name.strip("_").islower() and not where:
            continue
        if not is_numeric(value, names) or (where and starting_value(value) in STARTS):
            continue
        names.add(name)
        reason = has_sentence(lines, statement, following) or f"\n    {name}: " in f"\n{attributes}"
        yield NumericConstant("", statement.lineno, where + name, ast.unparse(value) if value else "", reason)


def numeric_constants(package: str) -> list[NumericConstant]:
    """Return the numeric constants of a package, in the order of its files."""
    found: list[NumericConstant] = []
    for path in sorted((PACKAGE / package).rglob("*.py")):
        text, name = path.read_text(), path.relative_to(PACKAGE).as_posix()
        found += [c._replace(path=name) for c in constants_in(text.splitlines(), ast.parse(text).body, "", set(), "")]
    return found


@pytest.mark.deep
@pytest.mark.smoke
def test_every_constant_of_a_complete_package_has_its_reason():
    missing = [
        f"{c.path}:{c.line} {c.name} = {c.value}" for p in COMPLETE for c in numeric_constants(p) if not c.has_reason
    ]
    assert not missing, f"add a sentence with the reason beside each:\n{chr(10).join(missing)}"


@pytest.mark.deep
@pytest.mark.smoke
def test_the_name_of_a_constant_has_its_unit():
    found = [constant for package in NAMED_BY_UNIT for constant in numeric_constants(package)]
    missing = [
        f"{c.path}:{c.line} {c.name}"
        for c in found
        if c.name.isupper() and not re.search(r"S(_|$)", c.name) and c.name.split("_")[-1] not in WITHOUT_UNIT
    ]
    assert not missing, f"add what each counts to its name:\n{chr(10).join(missing)}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("MAX_A = 3\n", [("MAX_A", False)]),
        ('MAX_A = 3\n"""Why."""\n', [("MAX_A", True)]),
        ("# It is as long as\n# a line.\nMAX_A: Final = -3.5\n", [("MAX_A", True)]),
        ("MAX_A = 4 * 1024  # as much as a page has\nMAX_B = 2 * MAX_A\n", [("MAX_A", True), ("MAX_B", False)]),
        ("A = True\nB = 'text'\nC = names + more\n", []),
        ("class Limits:\n    seconds: float = 3\n    count: int = 0\n", [("Limits.seconds", False)]),
        (
            'class Limits:\n    """\n    Limits.\n\n    Attributes:\n        seconds: Why.\n    """\n\n    seconds: float = 3\n',
            [("Limits.seconds", True)],
        ),
    ],
)
def test_a_constant_without_a_sentence_is_found(source, found):
    body = ast.parse(source).body
    assert [(c.name, c.has_reason) for c in constants_in(source.splitlines(), body, "", set(), "")] == found
