"""``check_installation``: installed and missing packages, usual mistakes, and a remedy for each."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from attrs import frozen

from stepengine.data.tools import Ordinary, ToolLike
from stepengine.data.visible import to_ascii_json
from stepengine.engine import ListedAgent, list_agents
from stepengine.engine.settings import KEYS, PREFIX, Settings
from stepengine.engine.trust import LOCAL, find_untrusted_folder
from stepengine.errors import DefinitionError, JournalError
from stepengine.journal.recorded_runs import get_runs_folder, list_runs
from stepengine.models import ListedProvider, list_providers
from stepengine.workspace.installation import get_install_source

if TYPE_CHECKING:
    import httpx2

State: TypeAlias = Literal["ok", "note", "wrong"]
SECONDS = 5
LOW_BYTES = 100 * 1024**2
REQUIREMENT = re.compile(r"[A-Za-z0-9._-]+")
EXTRA = re.compile(r"""extra\s*==\s*['"]([^'"]+)['"]""")
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")
PLACEHOLDER = re.compile(r"(?i)(?:<.*>|\.{3}|x{3,}|your[-_ ].*|changeme|todo|none|null|sk-\.{3})")
FAMILIES = {
    "sk-ant-": "anthropic", "sk-or-": "openrouter", "AIza": "google", "gsk_": "groq", "xai-": "xai", "csk-": "cerebras",
    "fw_": "fireworks", "hf_": "huggingface", "pplx-": "perplexity",
}  # fmt: skip
"""The prefixes of keys that identify their provider."""
TAKEN = ("anthropic", "attr", "attrs", "httpx2", "openai", "pydantic", "pytest", "rich", "stepengine", "typer", "yaml")
"""Modules that a file of the working folder must not be called like."""
KEY_LONGEST = 4096
DEVELOPMENT = ("dev", "docs", "faults", "http-clients", "logfire", "recorders", "suite")
"""Extras that only work on the package itself needs."""
OTHER_VARIABLES = frozenset(
    [
        "STEPENGINE_STATE_DIR",
        "STEPENGINE_KEY_HOSTS",
        "STEPENGINE_CALL",
        "STEPENGINE_OPENAI_CHAT_BASE_URL",
    ]
)
"""Further variables that are read, apart from settings and providers' keys."""


@frozen
class Finding:
    """
    A checked item of an installation.

    Attributes:
        area: Its heading.
        state: ``ok``; ``note`` for what works and may surprise; ``wrong`` for what will fail.
        text: The finding. Never a key.
        repair: The remedy; ``""`` if none is needed.
    """

    area: str
    state: State
    text: str
    repair: str = ""


def check_installation(config: Path | None = None, *, reach: bool = False) -> Iterator[Finding]:
    """
    Check versions, settings, keys, recorded runs, agents and environment of this user, and yield the findings.

    Nothing is changed.

    Args:
        config: A file of settings, trusted as that of the user.
        reach: Test over the network whether the address of each usable provider answers; no key is sent.
    """
    yield from _check_versions()
    try:
        settings = Settings.load(Path.cwd(), config=config)
    except DefinitionError as problem:
        yield Finding("settings", "wrong", problem.message, "correct the file or variable named in the message")
        settings = Settings()
    else:
        yield from _report_settings(settings)
    providers = list_providers(settings.make_models())
    yield from _check_keys(providers)
    yield from _check_recording(settings)
    yield from _check_agents(settings)
    yield from _check_environment(providers)
    if reach:
        yield from _probe_provider_addresses(providers)


# --- versions ---------------------------------------------------------------------------------------------------------


def _check_versions() -> Iterator[Finding]:
    """Yield the versions of Python and the packages, and missing requirements and extras."""
    area = "versions"
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding(area, "ok", f"Python {python}, {sys.executable}")
    if sys.platform != "linux":
        yield Finding(area, "note", f"stepengine is tested on Linux only; this system is {sys.platform}")
    try:
        own = metadata.distribution("stepengine")
    except metadata.PackageNotFoundError:
        yield Finding(
            area,
            "wrong",
            "stepengine is not installed in this environment",
            get_install_source().pip_install_command(),
        )
        return
    yield Finding(area, "ok", f"stepengine {own.version}, {Path(__file__).parents[1]}")
    for name in ("anthropic", "openai", "google-genai"):
        if (version := _find_version(name)) is not None:
            yield Finding(area, "ok", f"{name} {version}")
    yield from _check_extras(own.requires or ())


def _check_extras(requirements: Iterable[str]) -> Iterator[Finding]:
    """Yield missing requirements, and the extras that are completely installed."""
    area = "versions"
    needed: dict[str, list[str]] = {"": []}
    for line in requirements:
        named, extra = REQUIREMENT.match(line), EXTRA.search(line)
        if named is not None and named[0] != "stepengine":
            needed.setdefault(extra[1] if extra else "", []).append(named[0])
    for name in [name for name in needed.pop("") if _find_version(name) is None]:
        repair = get_install_source().pip_install_command()
        yield Finding(area, "wrong", f"{name} is not installed, but stepengine needs it", repair)
    for name in DEVELOPMENT:
        needed.pop(name, None)
    here = [extra for extra, names in needed.items() if all(map(_find_version, names))]
    other = [extra for extra in needed if extra not in here]
    text = f"extras installed: {', '.join(here) or 'none'}; not installed: {', '.join(other) or 'none'}"
    yield Finding(area, "ok", text, f"{get_install_source().pip_install_command('NAME')} adds one" if other else "")
    if "test" in other:
        yield Finding(
            area,
            "note",
            "packages that the test kit needs are missing",
            get_install_source().pip_install_command("test"),
        )


def _find_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# --- settings, keys, runs, agents -------------------------------------------------------------------------------------


def _report_settings(settings: Settings) -> Iterator[Finding]:
    """Yield the notes of the settings, and each value that is not a default with its origin."""
    for note in settings.notes:
        yield Finding("settings", "note", note)
    for name, value in sorted(settings.values.items()):
        yield Finding("settings", "ok", f"{name} = {to_ascii_json(value)}, from {settings.origin(name)}")
    if not settings.values:
        yield Finding("settings", "ok", "all at their defaults; `stepengine config show` lists them")


def _check_keys(providers: list[ListedProvider]) -> Iterator[Finding]:
    """Yield the keys that are set, providers with unusable keys, and keys in a wrong format; a note if no key is set."""
    area = "keys"
    usable = [p for p in providers if p.key == "set"]
    for one in usable:
        yield Finding(area, "ok", f"{one.prefix}: {one.key_from} is set")
    for one in providers:
        if one.key.startswith("cannot"):
            yield Finding(area, "wrong", f"{one.prefix}: {one.key}")
    if not usable:
        free = ", ".join([p.prefix for p in providers if p.key == "not needed"])
        repair = "set ANTHROPIC_API_KEY, OPENAI_API_KEY or GEMINI_API_KEY; `stepengine agents models` names the others"
        yield Finding(area, "note", f"no key is set; these providers need none if their server runs: {free}", repair)
    yield from _check_key_formats(providers)


def _check_key_formats(providers: list[ListedProvider]) -> Iterator[Finding]:
    """Yield each key variable whose value does not look like a key of its provider."""
    area = "keys"
    variables: dict[str, str] = {}
    for one in providers:
        for name in one.key_variables:
            variables.setdefault(name, one.prefix)
    found = {name: prefix for name, prefix in variables.items() if name in os.environ}
    for name, prefix in found.items():
        if why := _describe_key_problem(os.environ[name], prefix):
            yield Finding(area, "wrong", f"{name} {why}", f"set {name} to the key alone, as {prefix} displays it")
    if {"GEMINI_API_KEY", "GOOGLE_API_KEY"} <= set(found):
        yield Finding(
            area,
            "note",
            "GEMINI_API_KEY and GOOGLE_API_KEY are both set; `stepengine agents models` shows which one is used",
        )


def _describe_key_problem(key: str, prefix: str) -> str:
    """Return the problem of a key of the provider *prefix*: a wrong format, or the look of another provider's key; ``""`` for none."""
    bare = key.strip()
    if not bare:
        return "is set but empty"
    if len(bare) > KEY_LONGEST:
        return f"has more than {KEY_LONGEST:,} characters"
    if bare[0] in "\"'" or bare[-1] in "\"'":
        return "has quotation marks around it"
    if any(character.isspace() for character in bare):
        return "has white space in it"
    if PLACEHOLDER.fullmatch(bare[:100]):
        return "is a placeholder"
    other = next((family for start, family in FAMILIES.items() if bare.startswith(start)), prefix)
    # A gateway of one's own may want any key; only the providers that keys tell apart are compared.
    known = {*FAMILIES.values(), "openai"}
    return f"starts like a key of {other}" if other != prefix and prefix in known else ""


def _check_recording(settings: Settings) -> Iterator[Finding]:
    """Yield whether runs are recorded and where, and problems of that folder, such as a full disk."""
    area = "runs"
    folder = get_runs_folder()
    if settings.get("journal.record") is False:
        yield Finding(
            area, "note", f"runs are not recorded: journal.record is false, from {settings.origin('journal.record')}"
        )
        return
    if folder is None:
        yield Finding(area, "wrong", "there is no home folder to record runs in", "set STEPENGINE_STATE_DIR")
        return
    try:
        runs = list_runs()
    except JournalError as problem:
        yield Finding(area, "wrong", problem.message)
        return
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if not os.access(there, os.W_OK):
        yield Finding(area, "wrong", f"{there} is not writable", "set STEPENGINE_STATE_DIR to a folder of your own")
        return
    waiting = sum(run.status == "suspended" for run in runs)
    count = f"{len(runs)} runs, {waiting} of them waiting" if runs else "none yet"
    yield Finding(area, "ok", f"recorded in {folder}: {count}")
    if (free := shutil.disk_usage(there).free) < LOW_BYTES:
        yield Finding(
            area,
            "wrong",
            f"the disk of the runs folder has {free // 1024**2} MiB left",
            "free some space, or set STEPENGINE_STATE_DIR",
        )


def _check_agents(settings: Settings) -> Iterator[Finding]:
    """Yield broken and hidden agents, the number of agent files, and problems of their folders and tools."""
    area = "agents"
    found = list_agents(settings.agent_folders)
    for one in found:
        if one.problem is not None:
            yield Finding(area, "wrong", "\n  ".join([str(one.problem), *getattr(one.problem, "__notes__", ())]))
        elif one.agent is not None and one.hidden_by is not None:
            yield Finding(
                area, "note", f"{one.source} is hidden: {one.agent.id} refers to {one.hidden_by}", "rename one of them"
            )
    local = Path(os.path.realpath("agents"))  # a link may lead in a circle
    own = [one for one in found if local in one.source.parents]
    yield from _report_agent_counts(len(found), len(own))
    yield from _find_undeclared_tools(found)
    for folder in settings.agent_folders:
        if not folder.is_dir():
            yield Finding(area, "wrong", f"the setting `agents` names the folder {folder}, which does not exist")
    if Path("agents").is_dir() and not Path("agents/__init__.py").exists():
        spec = find_spec("agents")
        if spec is not None and spec.origin is not None:
            repair = "if tests import your agents, add an empty agents/__init__.py"
            yield Finding(area, "note", f"`import agents` imports the installed package in {spec.origin}", repair)


def _report_agent_counts(count: int, own: int) -> Iterator[Finding]:
    """Yield the numbers of agent files, and before them a note if the local folder is not trusted."""
    foreign = find_untrusted_folder(LOCAL)
    if foreign is not None:
        how = f"review it, then run: {foreign.trust_command}"
        yield Finding("agents", "note", f"not run, because it is not trusted: {foreign}", how)
    repair = "" if own or foreign else "`stepengine init my-agent` creates a project with one"
    yield Finding("agents", "ok", f"{count} agent files, {own} of them in ./agents", repair)


def _find_undeclared_tools(listed_agents: Iterable[ListedAgent]) -> Iterator[Finding]:
    """Yield a note for each agent file with tools that declare no files: rules about files cannot judge their calls."""
    from stepengine.permissions.rules import is_checkable_by_path_rules

    tools: dict[Path, dict[str, None]] = {}
    for one in listed_agents:
        for tool in one.agent.tools if one.agent is not None else ():
            if not isinstance(tool, ToolLike) or not isinstance(tool.binding().runs, Ordinary):
                continue
            if _is_third_party_tool(tool) and not is_checkable_by_path_rules(tool.spec):
                tools.setdefault(one.source, {})[tool.spec.name] = None
    for source, names in tools.items():
        yield Finding(
            "agents",
            "note",
            f"path rules do not follow links for the tools {', '.join(names)} of {source}, which do not declare their files",
            'declare them with @tool(about="{name_of_a_parameter}"), or about=() for a tool that touches no files',
        )


def _is_third_party_tool(tool: object) -> bool:
    """Return whether the body of a tool is third-party code; bundled tools check each file themselves."""
    module = getattr(getattr(tool, "fn", None), "__module__", None)
    return not (
        isinstance(module, str) and module.split(".")[0] == "stepengine" and not module.startswith("stepengine._agents")
    )


def _check_environment(providers: list[ListedProvider]) -> Iterator[Finding]:
    """Yield unused variables, files that hide packages, proxies and missing programs."""
    area = "surroundings"
    for name in _find_unused_variables(providers):
        yield Finding(
            area,
            "note",
            f"{name} is set, but nothing reads it",
            "`stepengine config show --help` explains how to name a setting",
        )
    for name in TAKEN:
        for path in (Path(f"{name}.py"), Path(name, "__init__.py")):
            if path.exists() and not Path(name, "cli").is_dir():
                repair = "rename it: Python imports it instead of that package"
                yield Finding(area, "wrong", f"{path} has the name of a required package", repair)
    proxies = [name for name in PROXIES if os.environ.get(name)]
    if proxies:
        yield Finding(area, "note", f"{', '.join(proxies)}: requests to providers go through a proxy")
    if os.environ.get("CI"):
        yield Finding(area, "note", "CI is set: tests replay and refuse to record")
    if not shutil.which("git"):
        yield Finding(area, "note", "git is not installed: agents get less information about repositories")
    yield Finding(area, "ok", f"working folder {Path.cwd()}")


def _find_unused_variables(providers: list[ListedProvider]) -> list[str]:
    """Return the environment variables that look like settings of stepengine but are not."""
    read = {*OTHER_VARIABLES, *[name for one in providers for name in one.key_variables]}
    ours = [name for name in sorted(os.environ) if name.startswith(PREFIX) and name not in read]
    # One with a dot that is no setting is refused with all others; here are those that nobody complains about.
    settings = {key.name for key in KEYS}
    return [name for name in ours if "__" not in name and name.removeprefix(PREFIX).lower() not in settings]


# --- the network ------------------------------------------------------------------------------------------------------


def _probe_provider_addresses(providers: list[ListedProvider]) -> Iterator[Finding]:
    """Send a request without a key to the address of each usable provider, and yield whether a server answers."""
    import httpx2

    with httpx2.Client(timeout=SECONDS, follow_redirects=False) as client:
        for one in providers:
            if one.base_url is not None and one.key in ("set", "not needed"):
                yield _probe_provider_address(client, one, one.base_url)


def _probe_provider_address(client: httpx2.Client, provider: ListedProvider, url: str) -> Finding:
    """Send a request without a key to *url*, and return the finding: whether a server answers."""
    import httpx2

    try:
        status = client.get(url).status_code
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, OSError) as error:
        why = str(error) or type(error).__name__
        if provider.key == "not needed":
            return Finding(
                "network", "note", f"{provider.prefix}: nothing answers at {url}: {why}", "start it if you need it"
            )
        return Finding(
            "network",
            "wrong",
            f"{provider.prefix}: {url} cannot be reached: {why}",
            "check network, proxy and firewall",
        )
    return Finding("network", "ok", f"{provider.prefix}: {url} answers (HTTP {status})")
