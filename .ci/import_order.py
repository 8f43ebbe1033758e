"""
Check that the modules of the package can be read in an order: no import circles, and no import upwards.

Run ``python .ci/import_order.py [FOLDER] [PYPROJECT]``. Every import counts: at the top of a module, under ``TYPE_CHECKING``, inside a
function, and by ``import_module("...")`` with a literal name. The order of the packages is that of the contract of type ``layers`` in
``pyproject.toml``.

What no search of the text can find is a module whose name is computed.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOADERS = frozenset({"import_module", "__import__", "find_spec"})

Imports = dict[str, dict[str, int]]
"""Module -> each module that it imports -> the first line that does."""


def read_imports(folder: Path) -> Imports:
    """Return the imports between the modules below *folder*, a package."""
    paths = {_name_of(folder, path): path for path in sorted(folder.rglob("*.py"))}
    imports: Imports = {}
    for module, path in paths.items():
        found: dict[str, int] = {}
        tree = ast.parse(path.read_bytes())
        for name, line in _imported_names(tree, module, is_package=path.name == "__init__.py"):
            target = _module_of(name, paths)
            if target not in ("", module):
                found[target] = min(line, found.get(target, line))
        imports[module] = found
    return imports


def _name_of(folder: Path, path: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _module_of(name: str, modules: Iterable[str]) -> str:
    """Return the module that has *name*, or that is it; ``""`` for one of another package."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def _imported_names(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from [(alias.name, node.lineno) for alias in names]
            case ast.ImportFrom(module=source, names=names, level=level):
                base = module.split(".")
                outer = base[: len(base) - level + is_package] if level else []
                package = ".".join([*outer, *([source] if source else [])])
                yield from [(f"{package}.{alias.name}", node.lineno) for alias in names]
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[argument, *_]) if name in LOADERS:
                yield _text_of(argument), node.lineno
            case _:
                pass


def _text_of(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def find_circles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or through others: the strongly connected components."""
    reached = {module: _reached_from(module, imports) for module in imports}
    circles = {
        tuple(sorted([other for other in reached[module] if module in reached[other]]))
        for module in imports
        if module in reached[module]
    }
    return [list(circle) for circle in sorted(circles)]


def _reached_from(module: str, imports: Mapping[str, Iterable[str]]) -> set[str]:
    found = set[str]()
    waiting = [*imports[module]]
    while waiting:
        target = waiting.pop()
        if target not in found:
            found.add(target)
            waiting += imports[target]
    return found


def read_layers(pyproject: Path) -> list[frozenset[str]]:
    """Return the packages of each layer, the highest first."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [frozenset(name.strip(" ()") for name in layer.split("|")) for layer in layers]


def find_upward(imports: Imports, layers: list[frozenset[str]]) -> list[tuple[str, str]]:
    """Return the imports of a module from a package of a higher layer; packages in no layer do not count."""
    height = {package: -number for number, layer in enumerate(layers) for package in layer}

    def height_of(module: str) -> int | None:
        return height.get(_package_of(module))

    return [
        (module, target)
        for module, targets in imports.items()
        for target in targets
        if (own := height_of(module)) is not None and (other := height_of(target)) is not None and other > own
    ]


def find_problems(imports: Imports, layers: list[frozenset[str]]) -> list[str]:
    """Return a line for each circle inside a package, with the imports that close it, and for each import upwards."""
    inside = _by_package(imports).values()
    circles = [_describe(circle, inner) for inner in inside for circle in find_circles(inner)]
    upward = [
        f"{module}:{imports[module][target]} imports upwards: {target}"
        for module, target in find_upward(imports, layers)
    ]
    return [*circles, *upward]


def _by_package(imports: Imports) -> dict[str, Imports]:
    """Return the imports inside of each package that is directly below the whole one."""
    found: dict[str, Imports] = {}
    for module, targets in imports.items():
        package = _package_of(module)
        inner = {target: line for target, line in targets.items() if _package_of(target) == package}
        found.setdefault(package, {})[module] = inner
    return found


def _package_of(module: str) -> str:
    return ".".join(module.split(".")[1:2])


def _describe(circle: Collection[str], imports: Imports) -> str:
    lines = [
        f"  {module}:{line} imports {target}"
        for module in circle
        for target, line in imports[module].items()
        if target in circle
    ]
    return "\n".join([f"{len(circle)} modules import each other:", *lines])


def main(folder: Path, pyproject: Path) -> int:
    """Print the problems and return the exit code."""
    imports = read_imports(folder)
    problems = find_problems(imports, read_layers(pyproject))
    print(*problems, f"{len(imports)} modules, {len(problems)} problems", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    defaults = [ROOT / "stepengine", ROOT / "pyproject.toml"]
    sys.exit(main(*given, *defaults[len(given) :]))
