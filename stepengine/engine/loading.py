"""
Loads agent files: a Python file that holds ``agent = AgentDefinition(...)`` at module level (requirements J18).

A folder of agent files is no import package. Its files are loaded under a made-up package whose path is the folder, so
that ``from .lib.prompts import X`` works between them and the name ``agents`` stays free for others.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from stepengine.data.definition import AgentDefinition, name_of_published, normalised_id
from stepengine.errors import DefinitionError
from stepengine.machine.author import noted, raised_at
from stepengine.machine.spawning import stands_for
from stepengine.runtime.logs import log_once

__all__ = ("agent_file", "agent_folders", "bundled_agent", "load_agent", "load_agents")

NEAR = 0.75
EXPECTED = "`agent = AgentDefinition(...)` at module level"


def load_agent(path_or_id: str | Path, *, folders: Iterable[Path] = ()) -> AgentDefinition[Any]:
    """
    Return the agent of one file.

    Args:
        path_or_id: A path to a ``.py`` file, or an agent's id. An id is looked for in ``./agents``, then in *folders*, then
            among the agents that come with stepengine; its file is called like the id, with ``_`` for ``-``, or holds an
            agent of that id. Of ``publisher/name@version`` the name is looked for, and the version is not checked.
        folders: More folders to look in.

    Raises:
        DefinitionError: naming the file and what it should hold, or where was searched.
    """
    return _agent_of(agent_file(path_or_id, folders=folders))


def agent_file(path_or_id: str | Path, *, folders: Iterable[Path] = ()) -> Path:
    """
    Return the file of an agent, which is named as for ``load_agent``.

    Raises:
        DefinitionError: when there is none.
    """
    path = Path(path_or_id)
    if path.suffix == ".py" or path.is_file():
        if not path.is_file():
            msg = f"there is no agent file {str(path)!r}"
            raise DefinitionError(msg)
        return path
    if path.is_dir():
        msg = f"{str(path)!r} is a folder; load_agents(...) loads all agents of one"
        raise DefinitionError(msg)
    wanted = normalised_id(_name_of(str(path_or_id)))
    places = agent_folders(folders)
    for folder in places:
        found = _find(folder, wanted)
        if found is not None:
            return found
    names = [normalised_id(file.stem) for folder in places for file in _files(folder)]
    near = get_close_matches(wanted, names, 1, NEAR)
    searched = ", ".join([str(f) for f in places]) or "no folder: there is no ./agents"
    msg = f"no agent has the id {str(path_or_id)!r}; searched: {searched}. Give a path such as './agents/reviewer.py', or an id"
    msg = f"{msg}; did you mean {near[0]!r}?" if near else msg
    raise DefinitionError(msg)


def load_agents(folder: str | Path) -> tuple[AgentDefinition[Any], ...]:
    """
    Return the agents of all files of a folder, in the order of their names; subfolders and ``_*.py`` are not read.

    Raises:
        DefinitionError: when there is no such folder, or a file holds no agent.
    """
    path = Path(folder)
    if not path.is_dir():
        msg = f"there is no folder {str(path)!r} with agent files"
        raise DefinitionError(msg)
    return tuple([_agent_of(file) for file in _files(path)])


def agent_folders(more: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the folders in which an id is looked for, in order, *more* of them after ``./agents``; only those that exist."""
    folders = [Path("agents"), *more, *_bundled_folders()]
    return tuple([f for f in folders if f.is_dir()])


def bundled_agent(agent_id: str) -> AgentDefinition[Any] | None:
    """Return the agent of that id that comes with stepengine, ``None`` when there is none."""
    for folder in _bundled_folders():
        file = folder / f"{normalised_id(agent_id).replace('-', '_')}.py"
        if file.is_file():
            return _agent_of(file)
    return None


def _bundled_folders() -> list[Path]:
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent
    return [package / "_agents", *([checkout / "agents"] if (checkout / "pyproject.toml").is_file() else [])]


def _name_of(agent_id: str) -> str:
    """Return the name in ``publisher/name@version``, else *agent_id*: without a version it may be a path."""
    name = name_of_published(agent_id) if "@" in agent_id else None
    if name is None:
        return agent_id
    told = stands_for(agent_id, name)
    log_once(told)
    return name


def _files(folder: Path) -> Iterator[Path]:
    return (f for f in sorted(folder.glob("*.py")) if not f.name.startswith("_"))


def _find(folder: Path, wanted: str) -> Path | None:
    named = folder / f"{wanted.replace('-', '_')}.py"
    if named.is_file():
        return named
    for file in _files(folder):
        agent = getattr(_module(file), "agent", None)
        if isinstance(agent, AgentDefinition) and normalised_id(agent.id) == wanted:
            return file
    return None


def _agent_of(file: Path) -> AgentDefinition[Any]:
    agent = getattr(_module(file), "agent", None)
    if isinstance(agent, AgentDefinition):
        return agent
    what = "nothing called 'agent'" if agent is None else f"an 'agent' that is {agent!r}"
    msg = f"{file}: expected {EXPECTED}, found {what}"
    raise DefinitionError(msg)


def _module(file: Path) -> ModuleType:
    resolved = file.resolve()
    if not resolved.stem.isidentifier():
        msg = f"{file}: an agent file is called like a Python module, such as 'code_reviewer.py'"
        raise DefinitionError(msg)
    package = f"stepengine_agents_{sha256(str(resolved.parent).encode()).hexdigest()[:8]}"
    if package not in sys.modules:
        module = ModuleType(package)
        module.__path__ = [str(resolved.parent)]
        sys.modules[package] = module
    importlib.invalidate_caches()
    try:
        return importlib.import_module(f"{package}.{resolved.stem}")
    except DefinitionError as error:
        noted(error)
        raise
    except (Exception, SystemExit) as error:  # a script that ends itself is no agent file, and nothing to end over
        where = raised_at(error)
        msg = (
            f"{file}: loading it failed with {type(error).__name__}: {error}{f' ({where})' if where else ''}; "
            f"expected {EXPECTED}"
        )
        raise DefinitionError(msg) from error
