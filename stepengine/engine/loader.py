"""
Loads agent files: Python files that hold ``agent = AgentDefinition(...)`` or ``agents = [...]`` at module level.

Beside them stands ``schedule = Schedule(...)`` or ``schedules = [...]`` where they are started at times of their own.
How their modules are named and what they import from beside them is in ``neighbour_imports``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Self

import attrs
from attrs import frozen

from stepengine.data.alike import NEAR_RATIO, did_you_mean, list_names
from stepengine.data.definition import AgentDefinition, ToolSource, find_published_name, normalised_id
from stepengine.data.messages import to_tuple
from stepengine.data.tools import ToolLike
from stepengine.engine import packages, trust
from stepengine.engine.modules import EXPECTED, get_exported_agents, load_sandboxed_agents
from stepengine.engine.neighbour_imports import load_module_at, load_module_from_source
from stepengine.errors import DefinitionError
from stepengine.machine.author import add_location, find_raise_line
from stepengine.machine.child_effects import describe_substitution
from stepengine.runtime.logs import log_once
from stepengine.workspace.paths import make_missing_path_hint, to_path

if TYPE_CHECKING:
    from stepengine.engine.schedules import Schedule

IN_SANDBOX = "sandboxed:"
"""Before the path of an agent file: it is a stranger's, and runs in the sandbox alone."""


class BrokenFile(UserWarning):
    """A file of a folder cannot be loaded, so that its agents are missing; the others are there."""


@frozen
class AgentLocation:
    """
    The file of an agent, its id if the file has several, and whether it runs in the sandbox.

    Attributes:
        file: Its file.
        id: Which agent of the file; ``""`` for the only one.
        sandboxed: Whether the file is a stranger's: it is not imported, and its handler runs in the sandbox.
    """

    file: Path
    id: str = ""
    sandboxed: bool = False

    def __str__(self) -> str:
        name = f"{self.file}#{self.id}" if self.id else str(self.file)
        return f"{IN_SANDBOX}{name}" if self.sandboxed else name

    @classmethod
    def from_text(cls, text: str | Path) -> Self | None:
        """
        Return the location that ``FILE`` or ``FILE#id`` names, even if the file is missing; ``None`` for an id.

        A file ends in ``.py``: a folder that somebody else made could hold one that is called like an id. ``sandboxed:FILE`` is a
        file whose handler runs in the sandbox.
        """
        if str(text).startswith(IN_SANDBOX):
            inner = cls.from_text(str(text).removeprefix(IN_SANDBOX))
            return None if inner is None else attrs.evolve(inner, sandboxed=True)
        path = to_path(text, "an agent file")
        if path.suffix == ".py":
            return cls(path)
        file, separator, agent_id = str(text).rpartition("#")
        return cls(Path(file), normalised_id(agent_id)) if separator and file.endswith(".py") else None

    def with_root(self, root: Path) -> Self:
        """Return the same location with its file joined to *root*."""
        return attrs.evolve(self, file=root / self.file)

    def load_all(self) -> tuple[AgentDefinition, ...]:
        """
        Return the agents of the file, loaded for the sandbox if the location says so.

        Raises:
            DefinitionError: naming the file and what it should hold.
        """
        return load_sandboxed_agents(self.file) if self.sandboxed else load_agents_of_file(self.file)

    def load(self) -> AgentDefinition:
        """
        Load the file and return its agent with the id of this location, or its only agent if there is no id.

        Raises:
            DefinitionError: when the file holds no such agent, or several and it is not said which.
        """
        found = self.load_all()
        chosen = [agent for agent in found if normalised_id(agent.id) == self.id] if self.id else found
        if len(chosen) == 1:
            return chosen[0]
        held = list_names([agent.id for agent in found], self.id or "", quoted=True)
        if self.id:
            msg = f"{self.file} has no agent {self.id!r}; its agents: {held}"
        else:
            named = attrs.evolve(self, id=found[0].id)
            msg = f"{self.file} has several agents: {held}; choose one, such as '{named}'"
        raise DefinitionError(msg)


def load_agent(path_or_id: str | Path, *, folders: Iterable[Path] = (), sandboxed: bool = False) -> AgentDefinition:
    """
    Return the agent in a file, or the one with this id in ``./agents``, *folders*, installed packages or stepengine itself.

    Args:
        path_or_id: A path to a ``.py`` file, with ``#id`` where it holds several agents, or an agent's id. An id is looked for
            in ``./agents``, then in *folders*, then among the agents that come with stepengine; its file is called like the
            id, with ``_`` for ``-``, or holds an agent of that id. ``publisher/name`` is an agent of an installed package, and
            ``publisher/name@version`` that version of it; where no package has it, the name is looked for, and the version is
            not checked. A path is never asked about. ``./agents`` is searched where its code may run: a person
            trusted it (``stepengine agents trust``), or code of its project runs already, such as the main file or tests.
        folders: More folders to look in.
        sandboxed: Whether the file, which is named by its path, is a stranger's: it is not imported, and its handler runs in the
            sandbox, which needs the extra ``programs``. ``"sandboxed:FILE"`` says the same.

    Raises:
        DefinitionError: naming the file and what it should hold, or where was searched; when another version is installed, or
            two packages have that agent; with ``sandboxed``, for an id.
    """
    is_named = AgentLocation.from_text(path_or_id) is not None
    if sandboxed and not is_named:
        name = find_published_name(str(path_or_id)) or path_or_id
        msg = (
            f"name an agent that runs in the sandbox by its file, such as './agents/{name}.py', not {str(path_or_id)!r}"
        )
        raise DefinitionError(msg)
    if (member := find_packaged_agent(path_or_id)) is not None:
        return member.load()
    place = locate_agent(path_or_id, folders=folders)
    if sandboxed or place.sandboxed:
        return attrs.evolve(place, sandboxed=True).load()
    if is_named:
        trust.mark_folder_as_run(place.file)
    return place.load()


def find_packaged_agent(path_or_id: str | Path) -> packages.PackagedAgent | None:
    """
    Return the named agent of an installed package; ``None`` for a file or any other agent.

    Raises:
        DefinitionError: as ``load_agent`` does.
    """
    is_file = isinstance(path_or_id, Path) or AgentLocation.from_text(path_or_id) is not None
    return None if is_file else packages.find_published_agent(str(path_or_id))


def locate_agent(path_or_id: str | Path, *, folders: Iterable[Path] = ()) -> AgentLocation:
    """
    Return the location of the agent that is named as for ``load_agent``.

    Raises:
        DefinitionError: when there is none.
    """
    place = AgentLocation.from_text(path_or_id)
    if place is not None:
        if not place.file.is_file():
            msg = f"there is no agent file {str(place.file)!r}{make_missing_path_hint(place.file)}"
            raise DefinitionError(msg)
        return place
    if Path(path_or_id).is_dir():
        example = f"{Path(path_or_id).as_posix()}/{next((f.name for f in _iterate_agent_files(Path(path_or_id))), 'reviewer.py')}"
        example = example if Path(path_or_id).is_absolute() else f"./{example}"
        msg = (
            f"{str(path_or_id)!r} is a folder; name a file in it, such as {example!r}; load_agents(...) loads them all"
        )
        raise DefinitionError(msg)
    return _locate_by_id(str(path_or_id), list_trusted_agent_folders(folders))


def find_agent_location(agent_id: str, *, folders: Iterable[Path]) -> AgentLocation | None:
    """Return the location where ``load_agent`` finds the agent with this id, or ``None``."""
    return _find_agent_in_folders(
        normalised_id(_strip_versioned_publisher(agent_id)), list_trusted_agent_folders(folders), []
    )


def _find_agent_in_folders(agent_id: str, folders: Iterable[Path], broken: list[str]) -> AgentLocation | None:
    """Return the location in the first folder that has the agent, and warn of files skipped there; ``None`` if no folder has it."""
    for folder in folders:
        found = _find_agent_in_folder(folder, agent_id, broken)
        if found is not None:
            for said in broken:
                warn_of_skipped_file(said)
            _report_shadowed_bundled_agent(found, agent_id)
            return found
    return None


def _locate_by_id(agent_id: str, folders: tuple[Path, ...]) -> AgentLocation:
    """Return the location of the agent with this id; raise ``DefinitionError`` that lists the searched folders."""
    wanted = normalised_id(_strip_versioned_publisher(agent_id))
    broken: list[str] = []
    if (found := _find_agent_in_folders(wanted, folders, broken)) is not None:
        return found
    names = [normalised_id(file.stem) for folder in folders for file in _iterate_agent_files(folder)]
    searched = ", ".join([str(f) for f in folders]) or "no folder, because ./agents does not exist"
    beside = Path(f"{agent_id}.py")
    near = (
        f"; did you mean ./{beside.as_posix()}?"
        if beside.is_file()
        else did_you_mean(wanted, names, min_similarity=NEAR_RATIO)
    )
    having = " and ".join(
        [f"{p.publisher}/{wanted}" for p in packages.list_installed_agent_packages().packages if wanted in p.agents]
    )
    having = f". An installed package has {having}: use that id" if having else ""
    msg = f"no agent has the id {agent_id!r}; searched: {searched}{having}. Give a path such as './agents/reviewer.py', or an id{near}"
    foreign = trust.find_untrusted_folder(trust.LOCAL) if trust.LOCAL not in folders else None
    if foreign is not None:
        msg = f"{msg}. Not searched, because it is not trusted: {foreign}; to trust it, run `{foreign.trust_command}`"
    raise DefinitionError("\n  not read: ".join([msg, *broken]))


def _report_shadowed_bundled_agent(location: AgentLocation, agent_id: str) -> None:
    """Report it if an agent of the working folder hides the bundled agent with the same id."""
    if (
        location.file.parent == trust.LOCAL
        and find_bundled_id(agent_id)
        and location.file.resolve().parent not in _list_resolved_bundled_folders()
    ):
        trust.print_or_log_message(f"the agent {agent_id!r} is loaded from {location.file}, not from stepengine")


@frozen
class LoadedFolder:
    """The agents, schedules and tools of a folder, and the problems of the files that cannot be loaded."""

    agents: tuple[AgentDefinition, ...]
    problems: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    tools: tuple[ToolLike | ToolSource, ...]


def load_agents(path: str | Path, *, sandboxed: bool = False) -> tuple[AgentDefinition, ...]:
    """
    Return the agents of a file, or of all files of a folder, in the order of their names; subfolders and ``_*.py`` are not read.

    A file of a folder that cannot be loaded costs its own agents only; a ``UserWarning`` names it.

    Args:
        path: The file or folder.
        sandboxed: Whether the files are strangers': none is imported, and their handlers run in the sandbox, which needs the extra
            ``programs``.

    Raises:
        DefinitionError: when there is no such file or folder, or nothing of it can be loaded.
    """
    if sandboxed:
        return _load_sandboxed_file_or_folder(Path(path))
    place = AgentLocation.from_text(path)
    if place is not None:
        if not place.sandboxed:
            trust.mark_folder_as_run(place.file)
        return (place.load(),) if place.id else locate_agent(path).load_all()
    loaded = load_folder(Path(path))
    for said in loaded.problems:
        warn_of_skipped_file(said)
    return loaded.agents


def _load_sandboxed_file_or_folder(path: Path) -> tuple[AgentDefinition, ...]:
    """Return the agents of a file or folder for the sandbox; warn of broken files, and raise if no file can be loaded."""
    place = AgentLocation.from_text(path)
    if place is not None:
        place = attrs.evolve(place, sandboxed=True)
        return (place.load(),) if place.id else place.load_all()
    if not path.is_dir():
        msg = f"there is no file or folder {str(path)!r} with agents{make_missing_path_hint(path)}"
        raise DefinitionError(msg)
    found: list[AgentDefinition] = []
    broken: dict[Path, DefinitionError] = {}
    for file in _iterate_agent_files(path):
        try:
            found += load_sandboxed_agents(file)
        except DefinitionError as error:
            broken[file] = error
    if not found:
        raise next(iter(broken.values()), None) or DefinitionError(f"there are no agent files in {str(path)!r}")
    for file, problem in broken.items():
        warn_of_skipped_file(_format_load_error(file, problem))
    return tuple(found)


def load_schedules(path: str | Path) -> tuple[Schedule, ...]:
    """
    Return the schedules of an agent file, or of all files of a folder, in the order of their names.

    A file of a folder that cannot be loaded costs what it holds only; a ``UserWarning`` names it.

    Raises:
        DefinitionError: when there is no such file or folder, nothing of it can be loaded, or two schedules have one id.
    """
    place = AgentLocation.from_text(path)
    if place is not None:
        if place.sandboxed:
            return ()
        trust.mark_folder_as_run(place.file)
        file = locate_agent(place.file).file
        load_agents_of_file(file)
        return load_schedules_of_file(file)
    loaded = load_folder(Path(path))
    for said in loaded.problems:
        warn_of_skipped_file(said)
    return loaded.schedules


def load_folder(folder: Path) -> LoadedFolder:
    """
    Return the agents, schedules and tools of all files of a folder, and the problems of files that cannot be loaded.

    Raises:
        DefinitionError: when there is no such folder, it holds files and none of them can be loaded, or schedules of two files
            have one id, or their tools one name.
    """
    if not folder.is_dir():
        msg = f"there is no folder {str(folder)!r} with agent files{make_missing_path_hint(folder)}"
        raise DefinitionError(msg)
    agents: list[AgentDefinition] = []
    schedules: dict[str, tuple[Schedule, Path]] = {}
    broken: dict[Path, DefinitionError] = {}
    for file in _iterate_agent_files(folder):
        try:
            found = load_agents_of_file(file), load_schedules_of_file(file)
        except DefinitionError as error:
            broken[file] = error
            continue
        agents += found[0]
        for schedule in found[1]:
            _, first = schedules.setdefault(schedule.id, (schedule, file))
            if first != file:
                msg = f"{first} and {file} both have a schedule with the id {schedule.id!r}; give each its own id"
                raise DefinitionError(msg)
    if broken and not agents:
        raise next(iter(broken.values()))
    problems = tuple([_format_load_error(file, error) for file, error in broken.items()])
    tools = merge_tools({file: load_tools_of_file(file) for file in _iterate_agent_files(folder) if file not in broken})
    return LoadedFolder(tuple(agents), problems, tuple([schedule for schedule, _ in schedules.values()]), tuple(tools))


def list_trusted_agent_folders(extra_folders: Iterable[Path]) -> tuple[Path, ...]:
    """
    Return the existing folders in which ids are looked up, in order; report and omit untrusted ones.

    ``./agents`` is included if its files may run. At the command line, every relative folder is checked in the same way.
    """
    given = to_tuple(extra_folders)
    named = {f.resolve() for f in given if f.is_absolute() or trust.GATE.get() is None}
    known = {*named, *_list_resolved_bundled_folders()}
    searched = [
        f for f in (trust.LOCAL, *given) if f.is_dir() and (f.resolve() in known or trust.may_run_agent_files(f))
    ]
    return (*searched, *[f for f in _list_bundled_folders() if f.is_dir()])


@frozen
class ListedAgent:
    """
    An agent of a file.

    Attributes:
        source: The file.
        agent: The agent; ``None`` when the file cannot be loaded.
        problem: Why it cannot be loaded.
        hidden_by: The file that is taken instead when the agent is named by its id.
    """

    source: Path
    agent: AgentDefinition | None
    problem: DefinitionError | None = None
    hidden_by: Path | None = None


def list_agents(folders: Iterable[Path] = ()) -> list[ListedAgent]:
    """
    Return the agents of every file in the agent folders, and each file that cannot be loaded.

    Args:
        folders: More folders, searched after ``./agents`` and before the shipped agents.
    """
    listed: list[ListedAgent] = []
    seen: dict[str, Path] = {}
    for folder in dict.fromkeys([f.resolve() for f in list_trusted_agent_folders(folders)]):
        for file in _iterate_agent_files(folder):
            try:
                found = load_agents_of_file(file)
            except DefinitionError as error:
                listed.append(ListedAgent(file, None, error))
                continue
            for agent in found:
                first = seen.setdefault(normalised_id(agent.id), file)
                listed.append(ListedAgent(file, agent, hidden_by=None if first == file else first))
    return listed


def _list_resolved_bundled_folders() -> set[Path]:
    return {folder.resolve() for folder in _list_bundled_folders()}


def list_bundled_ids() -> list[str]:
    """Return the ids of the bundled agents from the names of their files, without loading them."""
    return [file.stem.replace("_", "-") for folder in _list_bundled_folders() for file in _iterate_agent_files(folder)]


def find_bundled_id(agent_id: str) -> str | None:
    """Return the normalised id of a bundled agent; ``None`` for any other id."""
    wanted = normalised_id(agent_id)
    return wanted if wanted in list_bundled_ids() else None


def find_bundled_agent(agent_id: str) -> AgentDefinition | None:
    """Return the bundled agent with this id, or ``None``."""
    wanted = find_bundled_id(agent_id)
    places = [folder / f"{(wanted or '').replace('-', '_')}.py" for folder in _list_bundled_folders()]
    return next((AgentLocation(file, wanted).load() for file in places if wanted and file.is_file()), None)


def _strip_versioned_publisher(agent_id: str) -> str:
    """Return the name in ``publisher/name@version`` and log the substitution; return any other *agent_id* unchanged."""
    name = find_published_name(agent_id) if "@" in agent_id else None
    if name is None:
        return agent_id
    log_once(describe_substitution(agent_id, name))
    return name


def _list_bundled_folders() -> list[Path]:
    """Return the folders of the bundled agents: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    checkout = package.parent
    beside = [checkout / "agents"] if (checkout / "pyproject.toml").is_file() else []
    return [package / "_agents", *beside]


def load_agents_of_file(file: Path) -> tuple[AgentDefinition, ...]:
    """
    Return the agents of one file; at least one.

    Raises:
        DefinitionError: naming the file and what it should hold.
    """
    return (
        load_sandboxed_agents(file) if trust.is_sandboxed(file) else get_exported_agents(load_module(file), str(file))
    )


def load_agents_from_source(file: Path, source: bytes) -> tuple[AgentDefinition, ...]:
    """
    Return the agents that a file would hold if its text were *source*; the file and the agents in it stay as they are.

    Raises:
        DefinitionError: naming the file, when loading that fails or it holds no agent.
    """
    return get_exported_agents(
        _load_with_definition_errors(file, lambda: load_module_from_source(file, source)), str(file)
    )


def get_module_schedules(module: ModuleType, name: str) -> tuple[Schedule, ...]:
    """
    Return the schedules of a module, which is called *name* in messages; most have none.

    Raises:
        DefinitionError: when both ``schedule`` and ``schedules`` hold some, the list holds something else, too, or two have one id.
    """
    one, several = getattr(module, "schedule", None), getattr(module, "schedules", None)
    if one is None and several is None:
        return ()
    # Most modules have none, and need not wait for what schedules are made of.
    from stepengine.engine.schedules import Schedule, require_unique_ids

    # A file may use either word for something of its own.
    singles = [one] if isinstance(one, Schedule) else []
    listed = several if isinstance(several, list | tuple) and any(isinstance(s, Schedule) for s in several) else ()
    if singles and listed:
        msg = f"{name}: defines both 'schedule' and 'schedules'; keep one of them"
        raise DefinitionError(msg)
    try:
        return require_unique_ids(singles or listed)
    except DefinitionError as error:
        msg = f"{name}: {error.message}"
        raise DefinitionError(msg) from None


def load_schedules_of_file(file: Path) -> tuple[Schedule, ...]:
    """
    Return the schedules of an agent file; a file in the sandbox has none, since they are the host's.

    Raises:
        DefinitionError: when loading the file fails, or as ``get_module_schedules`` does.
    """
    return () if trust.is_sandboxed(file) else get_module_schedules(load_module(file), str(file))


def load_tools_of_file(file: Path) -> tuple[ToolLike | ToolSource, ...]:
    """
    Return the tools of an agent file: ``tools = [...]`` at module level.

    Raises:
        DefinitionError: when loading the file fails.
    """
    return () if trust.is_sandboxed(file) else get_listed_tools(load_module(file))


def get_listed_tools(module: ModuleType) -> tuple[ToolLike | ToolSource, ...]:
    """Return the tool objects in the module's ``tools`` list; empty if the list is missing or holds only names."""
    given = getattr(module, "tools", ())
    has_tools = isinstance(given, list | tuple) and any(isinstance(one, ToolLike | ToolSource) for one in given)
    return tuple([one for one in given if not isinstance(one, str)]) if has_tools else ()


def merge_tools(by_file: Mapping[Path, Iterable[ToolLike | ToolSource]]) -> list[ToolLike | ToolSource]:
    """
    Return the tools of several files, each once.

    Raises:
        DefinitionError: when two files have different tools of one name.
    """
    found: dict[str, tuple[ToolLike | ToolSource, Path]] = {}
    for file, tools in by_file.items():
        for tool in tools:
            # What is no tool at all is refused by the engine.
            name = tool.spec.name if isinstance(tool, ToolLike) else str(getattr(tool, "name", tool))
            first, where = found.setdefault(name, (tool, file))
            if first is not tool:
                msg = f"{where} and {file} both have a tool {name!r} in their 'tools'. List it in the tools of the agents that use it."
                raise DefinitionError(msg)
    return [tool for tool, _ in found.values()]


def load_module(file: Path) -> ModuleType:
    """
    Return the module of an agent file, loaded once; raise ``DefinitionError`` for a sandboxed file.

    Raises:
        DefinitionError: when loading it fails.
    """
    if trust.is_sandboxed(file):
        msg = f"{file}: is not imported, because the settings allow it to run only in the sandbox"
        raise DefinitionError(msg)
    return _load_with_definition_errors(file, lambda: load_module_at(file))


def _load_with_definition_errors(file: Path, load: Callable[[], ModuleType]) -> ModuleType:
    """Return the module that *load* loads; any error becomes a ``DefinitionError`` with the file."""
    try:
        return load()
    except DefinitionError as error:
        add_location(error)
        raise
    except (Exception, SystemExit) as error:  # a script that ends itself is not an agent file, and no reason to end
        where = find_raise_line(error)
        msg = (
            f"{file}: loading it failed with {type(error).__name__}: {error}{f' ({where})' if where else ''}; "
            f"expected {EXPECTED}"
        )
        raise DefinitionError(msg) from error


def _iterate_agent_files(folder: Path) -> Iterator[Path]:
    return (f for f in sorted(folder.glob("*.py")) if not f.name.startswith("_"))


def find_file_named_like(agent_id: str, folder: Path) -> Path | None:
    """Return the agent file of a folder whose name is an id with ``_`` for ``-``, or ``None``."""
    file = folder / f"{agent_id.replace('-', '_')}.py"
    # An id such as '../name', 'sub/name' or '_name' leads to files that whoever trusted the folder was not shown.
    return file if file.is_file() and file in _iterate_agent_files(folder) else None


def _find_agent_in_folder(folder: Path, agent_id: str, broken: list[str]) -> AgentLocation | None:
    """
    Return the location of an agent in a folder, or ``None``; append load errors of other files to *broken*.

    The file that is named like the id comes first, whatever the id of its only agent is. Then the ids in all files are compared.

    Raises:
        DefinitionError: when the file that is named like the id cannot be loaded.
    """
    named = find_file_named_like(agent_id, folder)
    if named is not None:
        return AgentLocation(named, agent_id if len(load_agents_of_file(named)) > 1 else "")
    for file in _iterate_agent_files(folder):
        try:
            found = load_agents_of_file(file)
        except DefinitionError as error:
            broken.append(_format_load_error(file, error))
            continue
        if agent_id in [normalised_id(agent.id) for agent in found]:
            return AgentLocation(file, agent_id if len(found) > 1 else "")
    return None


def _format_load_error(file: Path, error: DefinitionError) -> str:
    """Return why a file cannot be loaded, beginning with the file, which the error of a definition does not name."""
    return error.message if error.message.startswith(f"{file}:") else f"{file}: {error.message}"


def warn_of_skipped_file(problem: str) -> None:
    """Emit a ``BrokenFile`` warning with the problem of a file that is skipped."""
    warnings.warn(f"{problem}; this file is skipped", BrokenFile, stacklevel=3)
