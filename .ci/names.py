"""
Check names: modules are nouns, functions are no prepositions or participles, class names are unique, tests have ten words at most.

Run ``python .ci/names.py [FOLDER]``. The words are in ``names.toml``, next to this file. A module must not be a gerund, except for
terms of the field. Some older functions and classes still break a rule; ``[left]`` has their number. A new one is an error. After
a renaming, lower the number.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_WORDS = 10
WORDS = tomllib.loads((ROOT / ".ci" / "names.toml").read_text(encoding="utf-8"))


def find_gerunds(package: Path) -> Iterator[str]:
    """Yield a line for each module and folder that is named by a gerund."""
    modules = list(package.rglob("*.py"))
    for path in sorted({*modules, *[module.parent for module in modules]}):
        name = path.stem.strip("_")
        if re.fullmatch(r"[a-z]+ing", name) and name not in WORDS["terms"]:
            yield f"{path.relative_to(package.parent).as_posix()}: {name!r} is a gerund; name the module by a noun for its content"


def find_functions(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yield kind, line and name of each function that is named by a preposition or a participle; a property may be a participle."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = node.name.strip("_")
        if name in WORDS["prepositions"]:
            yield "preposition", node.lineno, node.name
        elif name in WORDS["participles"] and not any("property" in ast.unparse(mark) for mark in node.decorator_list):
            yield "participle", node.lineno, node.name


def find_all(package: Path) -> dict[str, list[str]]:
    """Return a line for each function and class of *package* that breaks a rule, by kind."""
    found: dict[str, list[str]] = {"preposition": [], "participle": [], "class": []}
    classes: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at = path.relative_to(package.parent).as_posix()
        for kind, line, name in find_functions(tree):
            found[kind].append(
                f"{at}:{line}: function {name!r} is a {kind}; name it by a verb, or by a noun for its result"
            )
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(f"{at}:{node.lineno}")
    shared = {name: places for name, places in classes.items() if len(places) > 1}
    found["class"] = [
        f"{', '.join(places)}: {len(places)} classes are called {name!r}" for name, places in shared.items()
    ]
    return found


def check(package: Path, left: Mapping[str, int]) -> list[str]:
    """Return a line for each fault in the names of *package*; *left* has the known number of each kind."""
    faults = list(find_gerunds(package))
    for kind, lines in find_all(package).items():
        if len(lines) > left[kind]:
            faults += [
                *lines,
                f"{len(lines)} names of the kind {kind!r}, and {left[kind]} were left: rename the new one",
            ]
        elif len(lines) < left[kind]:
            faults.append(
                f"{len(lines)} names of the kind {kind!r} are left: write this number into [left] of .ci/names.toml"
            )
    return faults


def find_long_test_names(tests: Path) -> Iterator[str]:
    """Yield a line for each test whose name has more than ten words, which a list of failures would cut."""
    for path in sorted(tests.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            words = node.name.split("_")[1:] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []
            if len(words) > MOST_WORDS and node.name.startswith("test_"):
                at = f"{path.relative_to(tests.parent).as_posix()}:{node.lineno}"
                yield f"{at}: {node.name!r} has {len(words)} words; say in at most {MOST_WORDS} what is promised"


def main(arguments: list[str]) -> int:
    """Print the faults; return 1 if there are any."""
    package = Path(arguments[0]) if arguments else ROOT / "stepengine"
    faults = [*check(package, WORDS["left"]), *find_long_test_names(ROOT / "tests")]
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{len(list(package.rglob('*.py')))} modules, {len(faults)} problems")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
