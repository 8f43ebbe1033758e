"""The tools of a run on the command line: what the agents name, as far as the options allow it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from stepengine.cli.options import Options
from stepengine.cli.recording import EDITORS, HISTORY, runs_folder
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition
from stepengine.errors import DefinitionError

if TYPE_CHECKING:
    from stepengine.data.tools import ToolLike, ToolSpec

__all__ = ("allowed_tools", "uncalled_tools")

FLAGS = (
    ("write", "changes files", "--write"),
    ("execute", "runs programs", "--shell"),
    ("network", "reaches the web", "--web URL, the address of a SearXNG instance"),
)
"""Category of tools, what they do, and the option that allows it."""


def uncalled_tools(root: Path) -> list[ToolLike]:
    """Return the tools for their names and schemas: what they may touch does not matter, they are never called."""
    from stepengine.tools import file_tools, followup_tools, search_tools, shell_tools

    files = file_tools(root, write=True, propose=True, allow_wide_root=True)
    searches, shell = search_tools(root, allow_wide_root=True), shell_tools(root, allow_wide_root=True)
    return [*files, *searches, *shell, *followup_tools(), *_web_tools("http://localhost")]


@cache
def _specs() -> dict[str, ToolSpec]:
    """Return what the tools are called and say of themselves, which is the same below every root."""
    return {tool.spec.name: tool.spec for tool in uncalled_tools(Path("/"))}


def _web_tools(searxng: str) -> list[ToolLike]:
    """Return the tools that reach the public web; searches go to the SearXNG instance at that address."""
    from stepengine.tools import SafeFetcher, SearchedDocs, SearxngSearch, web_tools

    search, fetcher = SearxngSearch(searxng), SafeFetcher(allow="public")
    return [*web_tools(search, SearchedDocs(search, fetcher), fetcher)]


def _files_of(journal: str, root: Path) -> list[str]:
    """Return patterns of the files of a journal that are below *root*."""
    from stepengine.journal.finding import database_of

    database = database_of(journal)
    path = Path(journal if database is None else database[0])
    place = path.parent.resolve() / path.name
    if not journal or not place.is_relative_to(root):
        return []
    file = place.relative_to(root)
    more = f"{file.stem}.before-*{file.suffix}" if database is None else f"{file.name}-*"
    return [file.as_posix(), file.with_name(more).as_posix()]


def _kept_below(root: Path) -> list[str]:
    """Return the patterns of what is kept of runs, editors' sessions and chats, as far as it is below *root*."""
    runs = runs_folder()
    kept = [] if runs is None else [(runs, "/"), (runs.parent / EDITORS, "/"), (runs.parent / HISTORY, "")]
    return [f"{place.relative_to(root).as_posix()}{end}" for place, end in kept if place.is_relative_to(root)]


def allowed_tools(options: Options, agents: list[AgentDefinition], journals: Sequence[str] = ()) -> list[ToolLike]:
    """
    Return the tools that the options allow; they do not show *journals*, in which they would find what they say themselves.

    Raises:
        UsageProblem: when a tool that an agent names cannot work, or needs an option that was not given.
    """
    from stepengine.tools import file_tools, followup_tools, search_tools, shell_tools

    root = options.cwd.resolve()
    hidden = [*_kept_below(root), *[pattern for journal in journals for pattern in _files_of(journal, root)]]
    named = [name for agent in agents for name in agent.tool_names]
    wanted = {name: spec for name, spec in _specs().items() if name in named}
    try:
        tools: list[ToolLike] = [
            *file_tools(root, write=options.write, propose=True, withhold=hidden, buffers=options.buffers),
            *search_tools(root, withhold=hidden),
        ]
        tools += shell_tools(root, terminals=options.terminals) if options.shell else []
    except DefinitionError as error:
        if local := sorted([name for name, spec in wanted.items() if spec.category != "network"]):
            why = error.message.partition(";")[0]
            msg = f"{', '.join(local)} cannot work there: {why}; name a project folder with --cwd"
            raise UsageProblem(msg) from None
        tools = []
    tools += followup_tools()
    if options.web:
        try:
            tools += _web_tools(options.web)
        except DefinitionError as error:
            msg = f"--web: {error.message}"
            raise UsageProblem(msg) from None
    missing = set(wanted) - {tool.spec.name for tool in tools}
    for category, does, flag in FLAGS:
        if names := sorted([name for name in missing if wanted[name].category == category]):
            msg = f"agent {agents[0].id!r} {does} with {', '.join(names)}; allow that with {flag}"
            raise UsageProblem(msg)
    return tools
