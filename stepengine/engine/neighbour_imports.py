"""
Imports between agent files: ``import helper`` in one finds ``helper.py`` in its folder, and takes no import name.

A folder of agent files is not an import package. Its files are loaded under a made-up package whose path is the folder, and what
they import from beside them is loaded below that package too: the names of such imports are changed when a file is
compiled. So nothing of a folder can stand in for a module that others import, which a folder at the front of ``sys.path`` does.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from stepengine.errors import DefinitionError

PREFIX = "stepengine_agents_"
OWN = "stepengine"
"""A folder of this name next to an agent file, such as in a clone of the package, is not imported: the name is the package's own."""
WORD = re.compile(r"[^\W\d]\w*")


def load_module_at(file: Path) -> ModuleType:
    """
    Import an agent file once, as a module of the made-up package of its folder, and return the module.

    Raises:
        DefinitionError: when its name cannot be that of a module, or it imports what could be two things.
        Exception: whatever its code raises.
    """
    resolved = file.resolve()
    if not resolved.stem.isidentifier():
        msg = f"{file}: the name of an agent file must be a valid Python module name, such as 'code_reviewer.py'"
        raise DefinitionError(msg)
    name = f"{_register_folder_package(resolved.parent)}.{resolved.stem}"
    if name not in sys.modules:
        _clear_finder_caches()
    return importlib.import_module(name)


def _register_folder_package(folder: Path) -> str:
    """Create the made-up package of a folder and the finder for it, unless they exist, and return the package's name."""
    package = f"{PREFIX}{sha256(os.fsencode(folder)).hexdigest()[:8]}"  # a process loads some dozen folders
    if package not in sys.modules:
        module = ModuleType(package)
        module.__path__ = [str(folder)]
        sys.modules[package] = module
    if not any(isinstance(finder, _AgentFolderFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AgentFolderFinder())
    return package


def _clear_finder_caches() -> None:
    """Clear Python's import caches, so that files written since they were filled are found."""
    # What `importlib.invalidate_caches` does, but for the metadata of distributions: from Python 3.13 on that loads their reader, and
    # with it the parser of mails, 20 ms of CPU before the first effect of each `stepengine run`, for nobody who asked.
    for path, finder in list(sys.path_importer_cache.items()):
        if finder is None:
            del sys.path_importer_cache[path]
        elif hasattr(finder, "invalidate_caches"):
            finder.invalidate_caches()


def load_module_from_source(file: Path, source: bytes) -> ModuleType:
    """
    Return a new module of an agent file with *source* as its text; the file and its loaded module stay as is.

    What it imports from beside it is what the file gets, too.

    Raises:
        Exception: whatever the code raises, ``SyntaxError`` included.
    """
    return _execute_source(load_module_at(file).__name__.partition(".")[0], file, source)


def load_fresh_module(file: Path) -> ModuleType:
    """
    Return a new module of a file as it is now; it imports its neighbours as an agent file does, and may have any name.

    Raises:
        OSError: when the file cannot be read.
        Exception: whatever the code raises, ``SyntaxError`` included.
    """
    resolved = file.resolve()
    package = _register_folder_package(resolved.parent)
    _clear_finder_caches()
    module = _execute_source(package, resolved, resolved.read_bytes())
    # Nothing finds it by its name later, and what it holds (scripted errors with their frames) is released with it.
    sys.modules.pop(module.__name__, None)
    return module


def _execute_source(package: str, file: Path, source: bytes) -> ModuleType:
    """Return a new module of the made-up *package* that has executed *source*; it stays in ``sys.modules``."""
    name = f"{package}.{file.resolve().stem}_{sha256(source).hexdigest()[:12]}"
    loader = _SourceTextLoader(name, str(file.resolve()))
    loader.source = source
    spec = ModuleSpec(name, loader, origin=loader.path)
    spec.has_location = True
    module = module_from_spec(spec)
    # While its classes are made, pydantic and typing look their annotations up there.
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _AgentFolderFinder:
    """Finds modules below made-up packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module in the made-up package of a folder; ``None`` for all others."""
        if path is None or not fullname.startswith(PREFIX):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _AgentFileLoader(spec.loader.name, spec.loader.path)
        return spec


class _AgentFileLoader(SourceFileLoader):
    """Loads a file of a made-up package; modules of the same folder are imported below that package."""

    def get_data(self, path: str) -> bytes:
        """
        Return the bytes of a source file; raise for cached bytecode, so that only readable source is executed.

        Raises:
            OSError: when it cannot be read, and for bytecode.
        """
        if path.endswith(".pyc"):
            msg = f"{path} is bytecode; stepengine reads only the source"
            raise FileNotFoundError(msg)
        return super().get_data(path)

    def get_code(self, fullname: str) -> CodeType | None:
        """
        Return the module's code, compiled with imports from its folder changed to imports from the made-up package.

        Raises:
            DefinitionError: when a name that it imports is one of the standard library and of a file beside it.
        """
        package = fullname.partition(".")[0]
        (folder,) = sys.modules[package].__path__
        source = self.get_data(self.path)
        text = source.decode("utf-8", "replace")
        named = _list_importable_names(Path(folder)) & {*WORD.findall(text)} if "import" in text else set()
        if not named:
            return super().get_code(fullname)
        tree = ast.parse(source, self.path)
        moved = _NeighbourImportRewriter(package, named, Path(folder), self.path)
        changed = moved.visit(tree)
        if not moved.has_moved:
            return super().get_code(fullname)
        # The bytecode is not cached next to the file, where others would load it under the file's own name.
        return self.source_to_code(ast.fix_missing_locations(changed), self.path)


class _SourceTextLoader(_AgentFileLoader):
    """Loads a given source text as the text of a file."""

    source: bytes

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """
        Raise, so that no bytecode is cached for a file with another text.

        Raises:
            OSError: always.
        """
        msg = f"{path} holds something else"
        raise OSError(msg)

    def get_data(self, path: str) -> bytes:
        """
        Return the stored source for the module's own path; read any other path from disk.

        Raises:
            OSError: when another path cannot be read or is bytecode.
        """
        return self.source if path == self.path else super().get_data(path)


def _list_importable_names(folder: Path) -> set[str]:
    """Return the names under which something in a folder can be imported."""
    found = {path.stem if path.suffix == ".py" else path.name for path in folder.iterdir() if _is_module(path)}
    return {name for name in found if name.isidentifier()} - {OWN}


def _is_module(path: Path) -> bool:
    """Return whether a path is a Python file, or a folder with Python files and an importable name."""
    return path.suffix == ".py" or (path.is_dir() and path.name.isidentifier() and any(path.glob("*.py")))


class _NeighbourImportRewriter(ast.NodeTransformer):
    """Rewrites imports of modules in the folder of an agent file."""

    def __init__(self, package: str, beside: set[str], folder: Path, file: str) -> None:
        self.has_moved = False
        self._package, self._beside, self._folder, self._file = package, beside, folder, file

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        """Change ``from helper import name``."""
        if node.level == 0 and node.module is not None and self._must_rewrite(node.module, node.lineno):
            node.module = f"{self._package}.{node.module}"
        return node

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        """Change ``import helper``, ``import helper as h`` and ``import lib.helper``."""
        return [
            ast.copy_location(made, node) for alias in node.names for made in self._rewrite_import(alias, node.lineno)
        ]

    def _rewrite_import(self, alias: ast.alias, line: int) -> Iterator[ast.stmt]:
        """Yield the statements that replace one imported name; the same import if it is not of the folder."""
        if not self._must_rewrite(alias.name, line):
            yield ast.Import([alias])
            return
        above, _, name = f"{self._package}.{alias.name}".rpartition(".")
        top = alias.name.partition(".")[0]
        yield ast.ImportFrom(above, [ast.alias(name, alias.asname or top)], 0)
        if alias.asname is None and top != alias.name:
            # `import lib.helper` loads the module and names the folder.
            yield ast.ImportFrom(self._package, [ast.alias(top)], 0)

    def _must_rewrite(self, name: str, line: int) -> bool:
        """Return whether an import names a module of the folder, and record it; raise if the standard library has the name, too."""
        top = name.partition(".")[0]
        if top not in self._beside:
            return False
        # A folder gives way to whatever else can be imported by its name, as it does in Python.
        file = self._folder / f"{top}.py"
        is_standard = top in sys.stdlib_module_names
        if not file.is_file() and (is_standard or PathFinder.find_spec(top) is not None):
            return False
        if is_standard:
            msg = (
                f"{self._file}:{line}: {top!r} is a module of the standard library, and {file.name!r} is next to the agent file. "
                f"Rename that file, or write `from . import {top}` to import it"
            )
            raise DefinitionError(msg)
        self.has_moved = True
        return True
