"""
What gives an engine each bundled tool: a permission of its workspace, or a function of ``stepengine.tools.bundled``.

Messages of an engine name the line that mends the mistake. So the names are here, and the tools themselves are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple, get_args

from stepengine.data.tools import FIND_TOOLS, Action

__all__ = ("CATEGORIES", "MAKERS", "WORKSPACE_TOOLS", "Maker", "line_for")


class Maker(NamedTuple):
    """
    The function that makes a tool.

    Attributes:
        function: Its name in ``stepengine.tools.bundled``.
        arguments: What it is given, as Python is written: first what has to be given, then options without which it does
            not make the tool.
    """

    function: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.function}({', '.join(self.arguments)})"


def _same_maker_for(maker: Maker | None, *names: str) -> dict[str, Maker | None]:
    return dict.fromkeys(names, maker)


ROOT = '"."'
MAKERS: Mapping[str, Maker | None] = MappingProxyType(
    {
        **_same_maker_for(Maker("file_tools", (ROOT,)), "read_files", "list_directory", "read_subtree"),
        **_same_maker_for(Maker("file_tools", (ROOT, "write=True")), "write_file", "str_replace"),
        **_same_maker_for(Maker("file_tools", (ROOT, "write=True", "delete=True")), "delete_file"),
        **_same_maker_for(Maker("file_tools", (ROOT, "propose=True")), "propose_write_file", "propose_str_replace"),
        **_same_maker_for(Maker("search_tools", (ROOT,)), "code_search", "glob", "find_files"),
        **_same_maker_for(Maker("shell_tools", (ROOT,)), "run_terminal_command", "check_job", "kill_job"),
        **_same_maker_for(Maker("change_hook_tools", (ROOT, "hooks")), "run_file_change_hooks"),
        **_same_maker_for(Maker("web_tools", ("search=...",)), "web_search"),
        **_same_maker_for(Maker("web_tools", ("docs=...",)), "read_docs"),
        **_same_maker_for(Maker("web_tools", ("fetch=...",)), "read_url"),
        **_same_maker_for(Maker("skill_tools", (ROOT,)), "skill"),
        **_same_maker_for(Maker("memory_tools"), "remember", "recall", "forget"),
        **_same_maker_for(Maker("followup_tools"), "suggest_followups"),
        **_same_maker_for(None, "ask_user", "spawn_agents", "spawn_agent_inline"),
        # One that searches for tools is offered by itself: nobody names it.
        **_same_maker_for(None, *[action for action in get_args(Action) if action != FIND_TOOLS]),
    }
)
"""What makes each bundled tool; ``None`` for those that every run knows."""
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
        **dict.fromkeys(("propose_write_file", "propose_str_replace", "skill", "recall"), "read"),
        **dict.fromkeys(("write_file", "str_replace", "delete_file"), "write"),
        **dict.fromkeys(("run_terminal_command", "check_job", "kill_job", "run_file_change_hooks"), "execute"),
        **dict.fromkeys(("web_search", "read_docs", "read_url"), "network"),
        **dict.fromkeys(("remember", "forget"), "memory"),
        "suggest_followups": "control",
    }
)
"""The category of each bundled tool that something makes, as the tool itself has it."""


def line_for(names: Iterable[str]) -> str:
    """Return the Python that gives an engine these tools, and what it imports; ``""`` when none of them is bundled."""
    wanted: dict[str, dict[str, None]] = {}
    for name in names:
        maker = MAKERS.get(name)
        if maker is not None:
            wanted.setdefault(maker.function, {}).update(dict.fromkeys(maker.arguments))
    if not wanted:
        return ""
    sets = ", ".join([f"*{Maker(function, tuple(given))}" for function, given in wanted.items()])
    return f"tools=[{sets}], with `from stepengine.tools.bundled import {', '.join(wanted)}`"
