"""
Agents of installed packages: which there are, and how one of them is loaded.

A package names where its agents are in the entry-point group ``stepengine.agents``; what the entry is called is their
publisher. Beside the code lies ``stepengine-agents.json``, which says what the agents are and want. It is read before anything
of the package is imported, so that a person can be asked first; what the code has beyond it is refused. Must not be here:
asking and printing; the command line does that.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition, normalised_id, split_agent_id
from stepengine.data.tools import ToolLike
from stepengine.engine import trust
from stepengine.engine.modules import get_exported_agents, load_sandboxed_agents
from stepengine.errors import DefinitionError
from stepengine.machine.author import find_raise_line
from stepengine.tools.agent_tools import BUILT_IN, iterate_reachable_tools, list_agents_run_by_tools
from stepengine.tools.makers import CATEGORIES

if TYPE_CHECKING:
    from importlib import metadata

    from stepengine.journal.history import History

GROUP = "stepengine.agents"
FILE = "stepengine-agents.json"
FORMAT = "stepengine.agents/1"
OWN = "stepengine"
"""The reserved publisher: ids with this prefix belong to the bundled agents."""
MAX_FILE_BYTES = 256 * 1024
"""Two hundred agents with some sentences each take less; it is read before anything in the package is trusted."""
MAX_AGENTS = 200
"""A person looks through the list before they agree; the largest collection by guess has fewer."""
MAX_MEMBERS = 500
"""Entries of one list or object of an agent, such as its tools: no model is offered as many."""
MAX_WISHES = 500
"""A person reads all of them before they agree, and nobody reads more."""
ID_CHARS = 100
"""Ids are typed and listed in columns; names of Python packages are mostly shorter than 50 characters."""
TEXT_CHARS = 300
"""Room for a path, an address or a host: each is one line of what a person agrees to."""
DESCRIPTION_CHARS = 2_000
"""About a screen: enough to choose an agent by, and no manual."""
ID = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
TOOL = re.compile(r"[A-Za-z0-9_-]{1,64}")
CATEGORY = re.compile(r"[A-Za-z0-9_-]{0,40}")
HOST = re.compile(r"\*|(?:\*\.)?[a-z0-9_][a-z0-9._-]*(?::[0-9]{1,5})?|\[[0-9a-f:.]+\](?::[0-9]{1,5})?")
PACKAGE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
VALUE = re.compile(r"(?P<module>\w+(?:\.\w+)*)(?::(?P<attribute>\w+(?:\.\w+)*))?")


@frozen
class DeclaredAgent:
    """
    The declaration of one agent of a package.

    Attributes:
        id: Its id within the package.
        description: The purpose of the agent.
        tools: The names of its tools with their categories; ``""`` for a tool without one.
        spawns: Ids of the agents that it may spawn.
    """

    id: str
    description: str
    tools: Mapping[str, str]
    spawns: tuple[str, ...]


@frozen(kw_only=True)
class Package:
    """
    An installed package with agents, as its metadata tells.

    Attributes:
        name: What is installed, as pip names it.
        version: Its version.
        publisher: What its agents' ids begin with; a word of its author's, which nobody checks.
        value: Where its agents are: a module, or ``module:attribute``.
        folder: The folder of that code.
        agents: What it says of its agents, by id.
        reads: Folders that they read.
        writes: Folders that they change.
        hosts: Hosts that they reach.
    """

    name: str
    version: str
    publisher: str
    value: str
    folder: Path
    agents: Mapping[str, DeclaredAgent]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def access_request(self) -> trust.AccessRequest:
        """The access that a person is asked to approve: tools by category, agents of others, folders, hosts."""
        tools = sorted({(name, kind) for agent in self.agents.values() for name, kind in agent.tools.items()})
        others = sorted({wanted for agent in self.agents.values() for wanted in agent.spawns if "/" in wanted})
        asks = (
            *[f"tool {name}: {kind or 'of no category'}" for name, kind in tools],
            *[f"agent {wanted}" for wanted in others],
            *[f"reads {folder}" for folder in self.reads],
            *[f"writes {folder}" for folder in self.writes],
            *[f"host {host}" for host in self.hosts],
        )
        return trust.AccessRequest(self.name, self.version, self.publisher, asks)


class InstalledPackages(NamedTuple):
    """
    The installed agent packages.

    Attributes:
        packages: Packages whose agents can be named, by their names.
        problems: Why the agents of others cannot, by publisher and package.
    """

    packages: tuple[Package, ...]
    problems: Mapping[tuple[str, str], str]


@frozen
class PackagedAgent:
    """An agent of a package."""

    package: Package
    declared: DeclaredAgent

    def __str__(self) -> str:
        return f"{self.id} of {self.package}"

    @property
    def id(self) -> str:
        """Its id for others: ``publisher/name``."""
        return f"{self.package.publisher}/{self.declared.id}"

    def load(self) -> AgentDefinition:
        """
        Return the agent. At the command line, a person must first approve the access that its package declares.

        Raises:
            DefinitionError: When the access is not approved, the code fails, or its agents or tools differ from the metadata.
        """
        gate = trust.GATE.get()
        if gate is not None and not gate.approves_access(self.package.access_request):
            msg = f"{self} was not loaded: no one approved the access that its package requests; run `{self.package.access_request.approve_command}`"
            raise DefinitionError(msg)
        held = _load_and_verify_agents(self.package)
        known = held.agents.get(self.declared.id)
        if known is None:
            problem = find_declaration_mismatches(self.package, held)
            msg = f"{self.package}: {'; '.join(problem)}"
            raise DefinitionError(msg)
        return known

    def load_sibling(self, agent_id: str) -> AgentDefinition | None:
        """Return the agent of the same package with this id, or ``None``."""
        declared = self.package.agents.get(normalised_id(agent_id))
        return None if declared is None else PackagedAgent(self.package, declared).load()


# --- which there are --------------------------------------------------------------------------------------------------


def list_installed_agent_packages() -> InstalledPackages:
    """Return the installed agent packages from their metadata; none of them is imported."""
    from importlib import metadata

    packages: list[Package] = []
    problems: dict[tuple[str, str], str] = {}
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda e: (_get_package_name(e), e.name)):
        key = (entry.name[:ID_CHARS], _get_package_name(entry))
        try:
            packages.append(_read_package_metadata(entry))
        except (DefinitionError, ValueError, OSError) as error:
            problems[key] = f"the agents of {key[1]!r} cannot be used: {error}"
    twice = {p.name for p in packages if sum(other.name == p.name for other in packages) > 1}
    for name in sorted(twice):
        said = f"the agents of {name!r} cannot be used: it has several entries in {GROUP!r}; declare one publisher with all agents"
        problems |= {(p.publisher, name): said for p in packages if p.name == name}
    return InstalledPackages(tuple([p for p in packages if p.name not in twice]), problems)


def approve_package(name: str) -> trust.AccessRequest:
    """
    Approve the declared access of an installed agent package permanently, and return it. The package is not imported.

    The approval covers this version and later ones that ask for no more.

    Args:
        name: The package, by its pip name.

    Raises:
        DefinitionError: when no package of that name with agents is installed, it cannot be used, or the approval cannot be
            stored; in a command that a tool runs.
    """
    trust.refuse_inside_tool("approve_package")
    found, plain = list_installed_agent_packages(), trust.normalise_package_name(name)
    package = next((one for one in found.packages if trust.normalise_package_name(one.name) == plain), None)
    if package is None:
        said = [said for (_, theirs), said in found.problems.items() if trust.normalise_package_name(theirs) == plain]
        there = list_names([one.name for one in found.packages], name)
        msg = said[0] if said else f"there is no package {name!r} with agents; installed packages: {there}"
        raise DefinitionError(msg)
    trust.approve_access(package.access_request)
    return package.access_request


def list_agent_package_versions() -> dict[str, str]:
    """Return ``name==version`` of each agent of an installed package, by ``publisher/name``."""
    return {
        f"{p.publisher}/{agent_id}": f"{p.name}=={p.version}"
        for p in list_installed_agent_packages().packages
        for agent_id in p.agents
    }


def describe_package_version_changes(history: History) -> list[str]:
    """Return a sentence for each package of recorded agents that has another version now, or is missing."""
    from stepengine.journal.history import describe_package_changes

    head = history.head
    if head is None or not head.packages:
        return []
    return [*describe_package_changes(head, list_agent_package_versions(), history.name)]


def find_published_agent(agent_id: str) -> PackagedAgent | None:
    """
    Return the packaged agent ``publisher/name`` or ``publisher/name@version``, or ``None``; raise if only another version is installed.

    Raises:
        DefinitionError: when another version is installed, two packages have an agent of that id, or the package that could
            have it cannot be used.
    """
    publisher, name, version = split_agent_id(agent_id)
    if publisher is None or name is None:
        return None
    found = list_installed_agent_packages()
    members = [
        PackagedAgent(p, p.agents[name]) for p in found.packages if p.publisher == publisher and name in p.agents
    ]
    if not members:
        if problem := next((said for (theirs, _), said in found.problems.items() if theirs == publisher), None):
            msg = f"{agent_id!r}: {problem}"
            raise DefinitionError(msg)
        return None
    if len(members) > 1:
        both = " and ".join([str(member.package) for member in members])
        msg = f"{members[0].id!r} is an agent of both {both}, so it is ambiguous; uninstall one of them"
        raise DefinitionError(msg)
    (member,) = members
    if version is not None and not _matches_version(version, member, agent_id):
        msg = (
            f"{agent_id!r} is not installed, but {member.package} is; install {member.package.name}=={version}, "
            f"or use {member.id!r}"
        )
        raise DefinitionError(msg)
    return member


def _matches_version(version: str, member: PackagedAgent, agent_id: str) -> bool:
    """Return whether a package has this version; raise ``DefinitionError`` if *version* is not one."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version) == Version(member.package.version)
    except InvalidVersion:
        msg = f"{version[:ID_CHARS]!r} in {agent_id[:TEXT_CHARS]!r} is not a version; write one like '1.2'"
        raise DefinitionError(msg) from None


def _get_package_name(entry: metadata.EntryPoint) -> str:
    name = None if entry.dist is None else entry.dist.metadata["Name"]
    return str(name or "a package without a name")[:ID_CHARS]


def _read_package_metadata(entry: metadata.EntryPoint) -> Package:
    """Return the package of an entry point with its declared agents; raise ``DefinitionError`` for invalid metadata."""
    from packaging.version import InvalidVersion, Version

    name, value = _get_package_name(entry), VALUE.fullmatch(entry.value.strip()[:TEXT_CHARS])
    _require(
        ID.fullmatch(entry.name) is not None and len(entry.name) <= ID_CHARS,
        f"its publisher must be lower-case letters, digits and single hyphens, not {entry.name[:ID_CHARS]!r}",
    )
    _require(entry.name != OWN, f"the publisher {OWN!r} is reserved for bundled agents; use another name")
    dist = entry.dist
    if value is None or dist is None:
        msg = f"its entry in {GROUP!r} must be a module or 'module:attribute', not {entry.value[:TEXT_CHARS]!r}"
        raise DefinitionError(msg)
    version = str(dist.metadata["Version"] or "")
    try:
        Version(version)
    except InvalidVersion:
        msg = f"its version is {version[:ID_CHARS]!r}, which is not a version"
        raise DefinitionError(msg) from None
    folder = _get_code_folder(dist, value["module"])
    return Package(
        name=name,
        version=version,
        publisher=entry.name,
        value=value[0],
        folder=folder,
        **read_declaration(folder / FILE),
    )


def _get_code_folder(dist: metadata.Distribution, module: str) -> Path:
    """Return the folder with a package's code and declaration, without importing it; raise if the distribution has none."""
    top, *below = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        msg = f"there is no module {top!r}"
        raise DefinitionError(msg)
    roots = [Path(str(dist.locate_file(""))).resolve(), *_find_editable_folder(dist)]
    for place in spec.submodule_search_locations or ():
        folder = Path(place).resolve()
        for part in below:
            folder = folder / part if (folder / part).is_dir() else folder
        if (folder / FILE).is_file() and any(folder.is_relative_to(root) for root in roots):
            return folder
    msg = f"the folder of {module!r} has no {FILE!r}; run `stepengine agents check --write` in its project to create it"
    raise DefinitionError(msg)


def _find_editable_folder(dist: metadata.Distribution) -> Iterator[Path]:
    """Yield the project folder of an editable installation."""
    try:
        told: Any = json.loads((dist.read_text("direct_url.json") or "{}")[:MAX_FILE_BYTES])
        if told.get("dir_info", {}).get("editable"):
            yield Path(unquote(urlsplit(told["url"]).path)).resolve()
    except (ValueError, KeyError, AttributeError, RecursionError):
        return


# --- what is declared -------------------------------------------------------------------------------------------------


def read_declaration(file: Path) -> dict[str, Any]:
    """
    Return ``agents``, ``reads``, ``writes`` and ``hosts`` of a ``stepengine-agents.json``, as ``Package`` has them.

    Raises:
        DefinitionError: when it is too large, or not of that form; it says which member, and what would be fine.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        msg = f"{file.name} cannot be read: {error.strerror}"
        raise DefinitionError(msg) from None
    return parse_declaration(content, file.name)


def parse_declaration(content: bytes, where: str = FILE) -> dict[str, Any]:
    """Parse the content of a ``stepengine-agents.json``; *where* is its name in errors, which are those of ``read_declaration``."""
    _require(len(content) <= MAX_FILE_BYTES, f"{where} has more than {MAX_FILE_BYTES:,} bytes")
    try:
        told = json.loads(content)
    except (ValueError, RecursionError) as error:
        msg = f"{where} is not JSON: {error}"
        raise DefinitionError(msg) from None
    _require_object(told, where, "format", "agents", "reads", "writes", "hosts")
    _require(
        told.get("format") == FORMAT,
        f"{where}: its format must be {FORMAT!r}, not {_short_repr(told.get('format'))}",
    )
    agents = told.get("agents")
    _require(
        isinstance(agents, dict) and 0 < len(agents) <= MAX_AGENTS,
        f"{where}: agents must be an object with 1 to {MAX_AGENTS} members",
    )
    found = [
        _parse_declared_agent(str(key), value, f"{where}: agents.{str(key)[:ID_CHARS]}")
        for key, value in agents.items()
    ]
    lists = {name: _require_texts(told.get(name, []), f"{where}: {name}") for name in ("reads", "writes", "hosts")}
    lists["hosts"] = tuple([_host_to_ascii(host, f"{where}: hosts") for host in lists["hosts"]])
    declared = {"agents": {each.id: each for each in found}, **lists}
    wanted = len({name for each in found for name in (*each.tools, *each.spawns)}) + sum(map(len, lists.values()))
    _require(
        wanted <= MAX_WISHES,
        f"{where} requests {wanted:,} tools, agents, folders and hosts; at most {MAX_WISHES} are allowed, because a person must approve them",
    )
    return declared


def _host_to_ascii(host: str, where: str) -> str:
    """Return a host in ASCII, with IDNA for other letters, which may look like those of a known host; raise if it is not a host."""
    found = host.lower()
    if not host.isascii():
        import idna

        name, colon, port = host.removeprefix("*.").partition(":")
        try:
            encoded = idna.encode(name, uts46=True).decode("ascii").lower()
        except (idna.IDNAError, UnicodeError):
            encoded = ""
        found = f"{'*.' if host.startswith('*.') else ''}{encoded}{colon}{port}"
    # Two hosts in one text, or a user before a host, would be read as something else than they are.
    _require(
        HOST.fullmatch(found) is not None,
        f"{where} has {_short_repr(host)}, which is not a host; write one like 'api.example.com'",
    )
    return found


def _parse_declared_agent(agent_id: str, value: object, where: str) -> DeclaredAgent:
    """Return the declaration of one agent; raise ``DefinitionError`` if it is not valid."""
    _require(
        ID.fullmatch(agent_id) is not None and len(agent_id) <= ID_CHARS,
        f"{where} is not an id such as 'code-reviewer'",
    )
    told = _require_object(value, where, "description", "tools", "spawns")
    description, tools = told.get("description", ""), told.get("tools", {})
    _require(
        isinstance(description, str) and len(description) <= DESCRIPTION_CHARS,
        f"{where}.description must be a text of at most {DESCRIPTION_CHARS:,} characters",
    )
    _require(
        isinstance(tools, dict) and len(tools) <= MAX_MEMBERS,
        f"{where}.tools must be an object of at most {MAX_MEMBERS} tools",
    )
    _require_texts(
        [*tools, *[kind or "none" if isinstance(kind, str) else kind for kind in tools.values()]], f"{where}.tools"
    )
    for name, kind in tools.items():
        # Letters of other scripts and signs look like another tool or category, or like more of the list.
        is_plain = TOOL.fullmatch(name) is not None and (
            not isinstance(kind, str) or CATEGORY.fullmatch(kind) is not None
        )
        _require(
            is_plain,
            f"{where}.tools has {_short_repr(name)}: {_short_repr(kind)}; names and categories may contain a to z, digits, '_' and '-'",
        )
    return DeclaredAgent(agent_id, description, tools, _require_texts(told.get("spawns", []), f"{where}.spawns"))


def _require_object(value: object, where: str, *known: str) -> dict[str, Any]:
    """Return *value* if it is an object with *known* members only; raise ``DefinitionError`` for anything else."""
    if not isinstance(value, dict):
        msg = f"{where} must be an object, not {_short_repr(value)}"
        raise DefinitionError(msg)
    strange = [key for key in value if key not in known]
    _require(
        not strange,
        f"{where} has {_short_repr(strange[:1])}, which is unknown; valid members: {list_names(known, strange[0] if strange else '')}",
    )
    return value


def _require_texts(value: object, where: str) -> tuple[str, ...]:
    """Return a list of short printable texts as a tuple; raise ``DefinitionError`` for anything else."""
    texts = value if isinstance(value, list) else [value]
    fits = [
        isinstance(one, str) and 0 < len(one) <= TEXT_CHARS and one.isprintable() for one in texts[: 2 * MAX_MEMBERS]
    ]
    if texts is not value or len(texts) > 2 * MAX_MEMBERS or not all(fits):
        msg = f"{where} should hold at most {MAX_MEMBERS} printable texts of 1 to {TEXT_CHARS} characters"
        raise DefinitionError(msg)
    return tuple(texts)


def _require(condition: bool, problem: str) -> None:  # noqa: FBT001 - it reads as an assertion
    """Raise ``DefinitionError`` with the text *problem* unless *condition* is true."""
    if not condition:
        raise DefinitionError(problem)


def _short_repr(value: object) -> str:
    return repr(value)[:ID_CHARS]


# --- what the code has ------------------------------------------------------------------------------------------------


@frozen
class PackageAgents:
    """The agents that the code of a package has, by id, and why some of its modules gave none."""

    agents: Mapping[str, AgentDefinition]
    problems: tuple[str, ...] = ()


_HELD: dict[tuple[str, str, str, Path, bool], PackageAgents] = {}
_MEMBERS: dict[int, tuple[AgentDefinition, PackagedAgent]] = {}


def packaged_agent_from_definition(definition: AgentDefinition) -> PackagedAgent | None:
    """Return the packaged agent from which *definition* was loaded; ``None`` for a definition from elsewhere."""
    found = _MEMBERS.get(id(definition))
    return None if found is None else found[1]


def register_in_same_package(variant: AgentDefinition, original: AgentDefinition) -> None:
    """Register *variant*, evolved from *original*, as an agent of the same package, if that is of one."""
    member = packaged_agent_from_definition(original)
    if member is not None:
        _MEMBERS[id(variant)] = variant, member


def get_published_id(definition: AgentDefinition) -> str:
    """Return the id by which an agent is found: its own, or ``publisher/name`` for a package's agent."""
    member = packaged_agent_from_definition(definition)
    return definition.id if member is None else member.id


def _load_and_verify_agents(package: Package) -> PackageAgents:
    """Return a package's agents, imported or loaded for the sandbox once; raise ``DefinitionError`` if its declaration differs."""
    is_sandboxed = trust.is_package_sandboxed(package.name) or trust.is_sandboxed(package.folder)
    key = (package.name, package.version, package.value, package.folder, is_sandboxed)
    if key not in _HELD:
        if not is_sandboxed:
            _report_unknown_sandboxed_names()
        held = _load_sandboxed_agents(package) if is_sandboxed else import_agents(package.value)
        if problems := find_declaration_mismatches(package, held):
            msg = f"{package} does not match its {FILE}: {'; '.join(problems)}. None of its agents are loaded"
            raise DefinitionError(msg)
        _HELD[key] = held
        for agent_id, agent in held.agents.items():
            _MEMBERS[id(agent)] = agent, PackagedAgent(package, package.agents[agent_id])
    return _HELD[key]


def _report_unknown_sandboxed_names() -> None:
    """Report each name in ``SANDBOXED`` without an installed package, a file or a folder, since a misspelt one has no effect."""
    listed = trust.SANDBOXED.get()
    if not listed:
        return
    existing = {Path(one).name for one in listed if Path(one).exists()}
    found = list_installed_agent_packages()
    known = sorted({*[one.name for one in found.packages], *[name for _, name in found.problems]})
    plain = {trust.normalise_package_name(name) for name in known}
    for name in sorted(one for one in listed if PACKAGE_NAME.fullmatch(one) and one not in existing):
        if trust.normalise_package_name(name) not in plain:
            trust.print_or_log_message(
                f"the setting 'sandboxed' lists {name!r}, which is not an installed package with agents, a file or a folder, so it has "
                f"no effect. Correct the name; installed packages: {list_names(known, name)}"
            )


def _load_sandboxed_agents(package: Package) -> PackageAgents:
    """Return the agents in a package's files, which are not imported; raise ``DefinitionError`` if no file has one."""
    agents, problems = list[AgentDefinition](), list[str]()
    for file in sorted(package.folder.glob("*.py")):
        if not file.name.startswith("_"):
            try:
                agents += load_sandboxed_agents(file)
            except DefinitionError as error:
                problems.append(error.message)
    if not agents:
        msg = (
            f"{package} has no agent that can run in the sandbox: {'; '.join(problems) or 'none of its files has one'}"
        )
        raise DefinitionError(msg)
    return PackageAgents(_index_by_id(agents, str(package)), tuple(problems))


def import_agents(entry_point: str) -> PackageAgents:
    """
    Import the module of an entry point, and return its agents.

    Args:
        entry_point: A module with ``agent`` or ``agents``, a package whose modules have them, or ``module:attribute`` of an agent, a
            list of agents or such a module.

    Raises:
        DefinitionError: when the module cannot be imported, or names no agent.
    """
    module, _, attribute = entry_point.partition(":")
    held: Any = _import_module(module)
    for name in filter(None, attribute.split(".")):
        held = getattr(held, name, None)
    if isinstance(held, ModuleType):
        return _load_agents_of_module(held)
    agents = [held] if isinstance(held, AgentDefinition) else held
    if not isinstance(agents, list | tuple) or not agents or not all(isinstance(a, AgentDefinition) for a in agents):
        msg = f"{entry_point!r} must be an agent, a list of agents, or a module with `agent` or `agents`, not {_short_repr(held)}"
        raise DefinitionError(msg)
    return PackageAgents(_index_by_id(agents, entry_point))


def _load_agents_of_module(module: ModuleType) -> PackageAgents:
    """Return the agents of a module, or those of all modules in a package; modules without agents are skipped."""
    if hasattr(module, "agent") or hasattr(module, "agents") or not hasattr(module, "__path__"):
        return PackageAgents(_index_by_id(get_exported_agents(module, module.__name__), module.__name__))
    agents, problems = list[AgentDefinition](), list[str]()
    files = [file for folder in module.__path__ for file in sorted(Path(folder).glob("*.py"))]
    for file in [file for file in files if file.stem.isidentifier() and not file.name.startswith("_")]:
        try:
            found = _import_module(f"{module.__name__}.{file.stem}")
            agents += get_exported_agents(found, file.name) if {"agent", "agents"} & {*vars(found)} else ()
        except DefinitionError as error:
            problems.append(error.message)
    return PackageAgents(_index_by_id(agents, module.__name__), tuple(problems))


def _import_module(module: str) -> ModuleType:
    """Import a module; raise ``DefinitionError`` for whatever its code raises."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # a module that ends the process has no agents, and is nothing to end over
        where = find_raise_line(error)
        said = f"importing {module!r} failed with {type(error).__name__}: {error}"[: 2 * TEXT_CHARS]
        msg = f"{said}{f' ({where})' if where else ''}"
        raise DefinitionError(msg) from error


def _index_by_id(agents: Iterable[AgentDefinition], where: str) -> dict[str, AgentDefinition]:
    """Return agents by normalised id; raise ``DefinitionError`` if two have the same id."""
    found: dict[str, AgentDefinition] = {}
    for agent in agents:
        if found.setdefault(normalised_id(agent.id), agent) is not agent:
            msg = f"{where!r} has two agents with the id {agent.id!r}; give each its own id"
            raise DefinitionError(msg)
    return found


def make_declaration(agent: AgentDefinition) -> DeclaredAgent:
    """Return the declaration of an agent: its tools and spawnable agents, including those that its tools and children bring along."""
    tools, spawns = dict[str, str](), dict[str, None]()
    waiting, met = [agent], list[AgentDefinition]()
    for each in waiting:
        if any(each is one for one in met):
            continue
        met.append(each)
        tools |= dict(_list_tools_with_categories(each))
        spawns |= dict.fromkeys([child for child in each.spawnable_agents if isinstance(child, str)])
        held = [child for child in each.spawnable_agents if not isinstance(child, str)]
        waiting += [*held, *list_agents_run_by_tools(each.tools)]
    return DeclaredAgent(normalised_id(agent.id), agent.description, tools, tuple(spawns))


def _list_tools_with_categories(agent: AgentDefinition) -> Iterator[tuple[str, str]]:
    """Yield name and category of each tool of an agent, and of the tools that these use."""
    kinds = {**CATEGORIES, **{name: tool.spec.category for name, tool in BUILT_IN.items()}}
    own = [tool for tool in agent.tools if isinstance(tool, ToolLike)]
    for name in agent.tool_names:
        yield name, kinds.get(name, "")
    for tool in iterate_reachable_tools(own):
        yield tool.spec.name, tool.spec.category


def find_declaration_mismatches(package: Package, agents: PackageAgents) -> list[str]:
    """Return a sentence for each difference between a package's code and its declaration."""
    problems: list[str] = []
    for agent_id in sorted({*package.agents} - {*agents.agents}):
        why = f" ({'; '.join(agents.problems)})" if agents.problems else ""
        problems.append(f"its code has no agent {agent_id!r}{why}")
    for agent_id, agent in agents.agents.items():
        said, there = package.agents.get(agent_id), make_declaration(agent)
        if said is None:
            problems.append(f"its agent {agent_id!r} is not declared")
            continue
        for name, kind in there.tools.items():
            if said.tools.get(name) != kind:
                as_said = f"declared as {said.tools[name]!r}" if name in said.tools else "not declared"
                problems.append(f"the tool {name!r} ({kind or 'no category'}) of its agent {agent_id!r} is {as_said}")
        problems += [
            f"its agent {agent_id!r} may spawn {child!r}, which is not declared"
            for child in there.spawns
            if child not in said.spawns
        ]
    return problems
