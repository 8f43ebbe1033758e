"""
Loads agent files: Python files that hold ``agent = AgentDefinition(...)`` or ``agents = [...]`` at module level.

How their modules are named and what they import from beside them is told in ``beside``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Self

import attrs

from stepengine.data.alike import did_you_mean
from stepengine.data.definition import AgentDefinition, name_of_published, normalised_id
from stepengine.engine import trust
from stepengine.engine.beside import module_at
from stepengine.errors import DefinitionError
from stepengine.machine.author import noted, raised_at
from stepengine.machine.spawning import stands_for
from stepengine.runtime.logs import log_once

__all__ = (
    "AgentPlace",
    "BrokenFile",
    "Loaded",
    "agent_folders",
    "agent_place",
    "agents_in",
    "bundled_agent",
    "bundled_agents",
    "bundled_id",
    "load_agent",
    "load_agents",
    "load_folder",
    "module_of",
)

NEAR = 0.75
EXPECTED = "`agent = AgentDefinition(...)` or `agents = [AgentDefinition(...), ...]` at module level"


class BrokenFile(UserWarning):
    """A file of a folder cannot be loaded, so that its agents are missing; the others are there."""


@attrs.frozen
class AgentPlace:
    """
    Where an agent is.

    Attributes:
        file: Its file.
        id: Which agent of the file; ``""`` for the only one.
    """

    file: Path
    id: str = ""

    def __str__(self) -> str:
        return f"{self.file}#{self.id}" if self.id else str(self.file)

    @classmethod
    def of_text(cls, text: str | Path) -> Self | None:
        """
        Return the place that ``FILE`` or ``FILE#id`` names, whether there is such a file or not; ``None`` for an id.

        A file ends in ``.py``: a folder that somebody else made could hold one that is called like an id.
        """
        path = Path(text)
        if path.suffix == ".py":
            return cls(path)
        file, separator, agent_id = str(text).rpartition("#")
        return cls(Path(file), normalised_id(agent_id)) if separator and file.endswith(".py") else None

    def load(self) -> AgentDefinition:
        """
        Return the agent.

        Raises:
            DefinitionError: when the file holds no such agent, or several and it is not said which.
        """
        found = agents_in(self.file)
        chosen = [agent for agent in found if normalised_id(agent.id) == self.id] if self.id else found
        if len(chosen) == 1:
            return chosen[0]
        held = ", ".join([repr(agent.id) for agent in found])
        if self.id:
            msg = f"{self.file} holds no agent {self.id!r}; it holds {held}"
        else:
            msg = f"{self.file} holds several agents: {held}; say which, such as '{self.file}#{found[0].id}'"
        raise DefinitionError(msg)


def load_agent(path_or_id: str | Path, *, folders: Iterable[Path] = ()) -> AgentDefinition:
    """
    Return one agent.

    Args:
        path_or_id: A path to a ``.py`` file, with ``#id`` where it holds several agents, or an agent's id. An id is looked for
            in ``./agents``, then in *folders*, then among the agents that come with stepengine; its file is called like the
            id, with ``_`` for ``-``, or holds an agent of that id. Of ``publisher/name@version`` the name is looked for, and
            the version is not checked. A path is never asked about. ``./agents`` is searched where its code may run: a person
            trusted it (``stepengine trust``), or code of its project runs already, such as the main file or tests.
        folders: More folders to look in.

    Raises:
        DefinitionError: naming the file and what it should hold, or where was searched.
    """
    place = agent_place(path_or_id, folders=folders)
    if AgentPlace.of_text(path_or_id) is not None:
        trust.has_run(place.file)
    return place.load()


def agent_place(path_or_id: str | Path, *, folders: Iterable[Path] = ()) -> AgentPlace:
    """
    Return where an agent is, which is named as for ``load_agent``.

    Raises:
        DefinitionError: when there is none.
    """
    place = AgentPlace.of_text(path_or_id)
    if place is not None:
        if not place.file.is_file():
            msg = f"there is no agent file {str(place.file)!r}"
            raise DefinitionError(msg)
        return place
    if Path(path_or_id).is_dir():
        example = f"{Path(path_or_id).as_posix()}/{next((f.name for f in _files(Path(path_or_id))), 'reviewer.py')}"
        example = example if Path(path_or_id).is_absolute() else f"./{example}"
        msg = (
            f"{str(path_or_id)!r} is a folder; name a file in it, such as {example!r}; load_agents(...) loads them all"
        )
        raise DefinitionError(msg)
    return _place_of_id(str(path_or_id), agent_folders(folders))


def _place_of_id(agent_id: str, places: tuple[Path, ...]) -> AgentPlace:
    wanted = normalised_id(_name_of(agent_id))
    broken: list[str] = []
    for folder in places:
        found = _find(folder, wanted, broken)
        if found is not None:
            for said in broken:
                _warn_of(said)
            _tell_of_shadow(found, wanted)
            return found
    names = [normalised_id(file.stem) for folder in places for file in _files(folder)]
    searched = ", ".join([str(f) for f in places]) or "no folder: there is no ./agents"
    near = did_you_mean(wanted, names, alike=NEAR)
    msg = f"no agent has the id {agent_id!r}; searched: {searched}. Give a path such as './agents/reviewer.py', or an id{near}"
    foreign = trust.foreign_at(trust.LOCAL) if trust.LOCAL not in places else None
    if foreign is not None:
        msg = f"{msg}. Not searched, because nobody trusts it: {foreign}; `{foreign.how}` does"
    raise DefinitionError("\n  not read: ".join([msg, *broken]))


def _tell_of_shadow(found: AgentPlace, wanted: str) -> None:
    """Say when an agent of the working folder is taken where the same id comes with stepengine, too."""
    if found.file.parent == trust.LOCAL and bundled_id(wanted) and found.file.resolve().parent not in _own_real():
        trust.tell(f"the agent {wanted!r} is that of {found.file}, and not the one that comes with stepengine")


@attrs.frozen
class Loaded:
    """The agents of a folder, and what is wrong with the files that hold none."""

    agents: tuple[AgentDefinition, ...]
    problems: tuple[str, ...]


def load_agents(path: str | Path) -> tuple[AgentDefinition, ...]:
    """
    Return the agents of a file, or of all files of a folder, in the order of their names; subfolders and ``_*.py`` are not read.

    A file of a folder that cannot be loaded costs its own agents only; a ``UserWarning`` names it.

    Raises:
        DefinitionError: when there is no such file or folder, or nothing of it can be loaded.
    """
    place = AgentPlace.of_text(path)
    if place is not None:
        trust.has_run(place.file)
        return (place.load(),) if place.id else agents_in(agent_place(path).file)
    loaded = load_folder(Path(path))
    for said in loaded.problems:
        _warn_of(said)
    return loaded.agents


def load_folder(folder: Path) -> Loaded:
    """
    Return the agents of all files of a folder, and why some are missing.

    Raises:
        DefinitionError: when there is no such folder, or it holds files and none of them can be loaded.
    """
    if not folder.is_dir():
        msg = f"there is no folder {str(folder)!r} with agent files"
        raise DefinitionError(msg)
    agents: list[AgentDefinition] = []
    broken: dict[Path, DefinitionError] = {}
    for file in _files(folder):
        try:
            agents += agents_in(file)
        except DefinitionError as error:
            broken[file] = error
    if broken and not agents:
        raise next(iter(broken.values()))
    return Loaded(tuple(agents), tuple([_said_of(file, error) for file, error in broken.items()]))


def agent_folders(more: Iterable[Path] = ()) -> tuple[Path, ...]:
    """
    Return the folders in which an id is looked for, in order, *more* of them after ``./agents``; only those that exist.

    ``./agents`` is one of them where its files may run; at the command line that holds for every relative folder.
    """
    given = tuple(more)
    named = {f.resolve() for f in given if f.is_absolute() or trust.GATE.get() is None}
    known = {*named, *_own_real()}
    searched = [f for f in (trust.LOCAL, *given) if f.is_dir() and (f.resolve() in known or trust.may_run(f))]
    return (*searched, *[f for f in _own_folders() if f.is_dir()])


def _own_real() -> set[Path]:
    return {folder.resolve() for folder in _own_folders()}


def bundled_agents() -> list[str]:
    """Return the ids of the agents that come with stepengine, by the names of their files; none is loaded."""
    return [file.stem.replace("_", "-") for folder in _own_folders() for file in _files(folder)]


def bundled_id(agent_id: str) -> str | None:
    """Return the id of an agent that comes with stepengine, as ``load_agent`` takes it; ``None`` for any other."""
    wanted = normalised_id(agent_id)
    return wanted if wanted in bundled_agents() else None


def bundled_agent(agent_id: str) -> AgentDefinition | None:
    """Return the agent of that id that comes with stepengine, ``None`` when there is none."""
    wanted = bundled_id(agent_id)
    places = [folder / f"{(wanted or '').replace('-', '_')}.py" for folder in _own_folders()]
    return next((AgentPlace(file, wanted).load() for file in places if wanted and file.is_file()), None)


def _name_of(agent_id: str) -> str:
    """Return the name in ``publisher/name@version``, else *agent_id*: without a version it may be a path."""
    name = name_of_published(agent_id) if "@" in agent_id else None
    if name is None:
        return agent_id
    log_once(stands_for(agent_id, name))
    return name


def _own_folders() -> list[Path]:
    """Return where the agents of the package are: in a wheel inside of it, in a checkout beside it."""
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent
    beside = [checkout / "agents"] if (checkout / "pyproject.toml").is_file() else []
    return [package / "_agents", *beside]


def agents_in(file: Path) -> tuple[AgentDefinition, ...]:
    """
    Return the agents of one file; at least one.

    Raises:
        DefinitionError: naming the file and what it should hold.
    """
    return agents_of(module_of(file), str(file))


def agents_of(module: ModuleType, name: str) -> tuple[AgentDefinition, ...]:
    """
    Return the agents of a module, which is called *name* in messages; at least one.

    Raises:
        DefinitionError: when it holds none, or both ``agent`` and ``agents``, or two of one id.
    """
    one, several = getattr(module, "agent", None), getattr(module, "agents", None)
    if one is not None and several is not None:
        msg = f"{name}: holds both 'agent' and 'agents'; one of them would be fine: {EXPECTED}"
        raise DefinitionError(msg)
    if isinstance(one, AgentDefinition):
        return (one,)
    if not isinstance(several, list | tuple) or not several:
        found = "nothing called 'agent' or 'agents'"
        found = found if one is None else f"an 'agent' that is {one!r}"
        found = found if several is None else f"'agents' that are {several!r}"
        msg = f"{name}: expected {EXPECTED}, found {found}"
        raise DefinitionError(msg)
    ids: set[str] = set()
    for agent in several:
        if not isinstance(agent, AgentDefinition):
            msg = f"{name}: expected {EXPECTED}, found {agent!r} in 'agents'"
            raise DefinitionError(msg)
        if normalised_id(agent.id) in ids:
            msg = f"{name}: 'agents' holds two agents of the id {agent.id!r}; each needs its own"
            raise DefinitionError(msg)
        ids.add(normalised_id(agent.id))
    return tuple(several)


def module_of(file: Path) -> ModuleType:
    """
    Return the module of an agent file, loaded once.

    Raises:
        DefinitionError: when loading it fails.
    """
    try:
        return module_at(file)
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


def _files(folder: Path) -> Iterator[Path]:
    return (f for f in sorted(folder.glob("*.py")) if not f.name.startswith("_"))


def _find(folder: Path, wanted: str, broken: list[str]) -> AgentPlace | None:
    """Return where a folder has an agent; why other files of it cannot be loaded is added to *broken*."""
    named = folder / f"{wanted.replace('-', '_')}.py"
    if named.is_file():
        return AgentPlace(named, wanted if len(agents_in(named)) > 1 else "")
    for file in _files(folder):
        try:
            found = agents_in(file)
        except DefinitionError as error:
            broken.append(_said_of(file, error))
            continue
        if wanted in [normalised_id(agent.id) for agent in found]:
            return AgentPlace(file, wanted if len(found) > 1 else "")
    return None


def _said_of(file: Path, error: DefinitionError) -> str:
    """Return why a file cannot be loaded, beginning with the file, which the error of a definition does not name."""
    return error.message if error.message.startswith(f"{file}: ") else f"{file}: {error.message}"


def _warn_of(said: str) -> None:
    warnings.warn(f"{said}; this file is left out", BrokenFile, stacklevel=3)
