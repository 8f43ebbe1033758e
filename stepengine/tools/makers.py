"""
What gives an engine each bundled tool: a permission of its workspace, or a function of ``stepengine.tools.bundled``.

Messages of an engine name the line that mends the mistake. So the names are here, and the tools themselves are not.
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
        arguments: What it is given, as Python is written: first what has to be given, then options without which it does
            not make the tool.
    """

    function: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.function}({', '.join(self.arguments)})"


def _map_names_to_maker(maker: ToolMaker | None, *names: str) -> dict[str, ToolMaker | None]:
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
        # One that searches for tools is offered by itself: nobody names it.
        **_map_names_to_maker(None, *[action for action in get_args(Action) if action != FIND_TOOLS]),
    }
)
"""What makes each bundled tool but those that only a workspace gives, such as ``watch``; ``None`` for those that every run knows."""
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
"""The tools that agents get from the engine's workspace, and the option of ``Workspace`` that allows each; ``""`` for always."""
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
"""The category of each bundled tool that not every run knows, as the tool itself has it."""


def make_python_for_tools(names: Iterable[str]) -> str:
    """Return Python code, with imports, that gives these tools to an engine; ``""`` if none of them is bundled."""
    wanted: dict[str, dict[str, None]] = {}
    for name in names:
        maker = MAKERS.get(name)
        if maker is not None:
            wanted.setdefault(maker.function, {}).update(dict.fromkeys(maker.arguments))
    if not wanted:
        return ""
    sets = ", ".join([f"*{ToolMaker(function, tuple(given))}" for function, given in wanted.items()])
    return f"tools=[{sets}], with `from stepengine.tools.bundled import {', '.join(wanted)}`"
