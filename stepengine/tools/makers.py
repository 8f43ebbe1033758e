"""
The source of each bundled tool: a permission of the workspace, or a function of ``stepengine.tools.bundled``.

Messages of an engine suggest the line of code that adds a missing tool. So this module has the names, but not the tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, get_args

from stepengine.data.tools import FIND_TOOLS, Action


class ToolMaker(NamedTuple):
    """
    A function that creates a bundled tool.

    Attributes:
        function: Its name in ``stepengine.tools.bundled``.
        arguments: The arguments as Python code: the required ones, then the options that add the tool.
    """

    function: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.function}({', '.join(self.arguments)})"


def _map_names_to_maker(maker: ToolMaker | None, *names: str) -> dict[str, ToolMaker | None]:
    """Return a dict with *maker* for each of *names*."""
    return dict.fromkeys(names, maker)


ROOT = '"."'
MAKERS: Mapping[str, ToolMaker | None] = MappingProxyType(
    {
        **_map_names_to_maker(ToolMaker("file_tools", (ROOT,)), "read_files", "list_directory", "read_subtree"),
        **_map_names_to_maker(ToolMaker("file_tools", (ROOT, "write=True")), "write_file", "str_replace"),
        **_map_names_to_maker(ToolMaker("file_tools", (ROOT, "write=True", "delete=True")), "delete_file"),
        **_map_names_to_maker(
            ToolMaker("file_tools", (ROOT, "propose=True")), "propose_write_file", "propose_str_replace"
        ),
        **_map_names_to_maker(ToolMaker("search_tools", (ROOT,)), "code_search", "glob", "find_files"),
        **_map_names_to_maker(ToolMaker("shell_tools", (ROOT,)), "run_terminal_command", "check_job", "kill_job"),
        **_map_names_to_maker(ToolMaker("change_hook_tools", (ROOT, "hooks")), "run_file_change_hooks"),
        **_map_names_to_maker(ToolMaker("web_tools", ("search=...",)), "web_search"),
        **_map_names_to_maker(ToolMaker("web_tools", ("docs=...",)), "read_docs"),
        **_map_names_to_maker(ToolMaker("web_tools", ("fetch=...",)), "read_url"),
        **_map_names_to_maker(ToolMaker("skill_tools", (ROOT,)), "skill"),
        **_map_names_to_maker(ToolMaker("memory_tools"), "remember", "recall", "forget"),
        **_map_names_to_maker(ToolMaker("followup_tools"), "suggest_followups"),
        **_map_names_to_maker(None, "ask_user", "spawn_agents", "spawn_agent_inline"),
        # The tool that searches for tools is added automatically.
        **_map_names_to_maker(None, *[action for action in get_args(Action) if action != FIND_TOOLS]),
    }
)
"""The maker of each bundled tool except those that only a workspace has, such as ``watch``; ``None`` for the tools of every run."""
WORKSPACE_TOOLS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("read_files", "list_directory", "read_subtree", "code_search", "glob", "find_files"), ""),
        **dict.fromkeys(
            ("propose_write_file", "propose_str_replace", "suggest_followups", "sleep", "recall_history"), ""
        ),
        **dict.fromkeys(("start_agents", "wait_agents", "message_agent", "cancel_agent", "list_agents"), ""),
        **dict.fromkeys(("write_file", "str_replace"), "write"),
        **dict.fromkeys(("run_terminal_command", "check_job", "kill_job", "watch"), "shell"),
        **dict.fromkeys(("web_search", "read_docs", "read_url"), "web"),
    }
)
"""The tools of the engine's workspace, each with the option of ``Workspace`` that allows it; ``""`` for none."""
CATEGORIES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("read_files", "list_directory", "read_subtree", "code_search", "glob", "find_files"), "read"),
        **dict.fromkeys(("propose_write_file", "propose_str_replace", "skill", "recall", "recall_history"), "read"),
        **dict.fromkeys(("write_file", "str_replace", "delete_file"), "write"),
        **dict.fromkeys(("run_terminal_command", "check_job", "kill_job", "watch", "run_file_change_hooks"), "execute"),
        **dict.fromkeys(("web_search", "read_docs", "read_url"), "network"),
        **dict.fromkeys(("remember", "forget"), "memory"),
        **dict.fromkeys(
            ("start_agents", "wait_agents", "message_agent", "cancel_agent", "list_agents", "sleep"), "agent"
        ),
        "suggest_followups": "control",
    }
)
"""The category of each bundled tool, except for the tools of every run."""


def format_tools_argument(names: Iterable[str]) -> str:
    """Return the ``tools=`` argument, with its import, that adds these tools to an engine, for a message; ``""`` if none is bundled."""
    wanted: dict[str, dict[str, None]] = {}
    for name in names:
        maker = MAKERS.get(name)
        if maker is not None:
            wanted.setdefault(maker.function, {}).update(dict.fromkeys(maker.arguments))
    if not wanted:
        return ""
    sets = ", ".join([f"*{ToolMaker(function, tuple(given))}" for function, given in wanted.items()])
    return f"tools=[{sets}], with `from stepengine.tools.bundled import {', '.join(wanted)}`"
