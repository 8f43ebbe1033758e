"""
The bundled tools. An engine has those that its workspace allows, for agents that name them.

The bundled sets are built with a root folder and hold the posture that the
documentation describes: files are walked by descriptor below the root and never by a name that was checked before, links are not
written through, commands are lists of words in a clean environment, addresses are judged where they are connected to. A model, and
whatever it has read, may ask for anything; so each tool protects itself, and needs no policy for it.

A name such as ``read_files`` makes no tool: it is that of a bundled tool, with its types.

Must not be here: anything that an engine could not do without (``stepengine.tools``), and any knowledge of runs and records. These
tools use what anybody's could use.

Begin with ``bundled``, the sets; then ``files``, ``shell``, ``search`` or ``web``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.tools.agent_tools import agent_tool, spawn_tools, task_tool
    from stepengine.tools.bundled.bundled import (
        change_hook_tools,
        file_tools,
        followup_tools,
        memory_tools,
        recall_history_tool,
        search_tools,
        shell_tools,
        skill_tools,
        web_tools,
    )
    from stepengine.tools.bundled.changes import FileChangeHook
    from stepengine.tools.bundled.files.edits import unified_diff
    from stepengine.tools.bundled.memory import FileMemory, MemoryStore, Note
    from stepengine.tools.bundled.names import (
        add_message,
        ask_user,
        check_job,
        code_search,
        delete_file,
        end_turn,
        find_files,
        forget,
        glob,
        hand_off,
        kill_job,
        list_directory,
        lookup_agent_info,
        propose_str_replace,
        propose_write_file,
        read_docs,
        read_files,
        read_subtree,
        read_url,
        recall,
        remember,
        run_file_change_hooks,
        run_terminal_command,
        set_messages,
        set_output,
        skill,
        spawn_agent_inline,
        spawn_agents,
        str_replace,
        suggest_followups,
        task_completed,
        think_deeply,
        web_search,
        write_file,
        write_todos,
    )
    from stepengine.tools.bundled.reference import ToolPage, document_tools
    from stepengine.tools.bundled.web.fetcher import Fetched, Fetcher, SafeFetcher
    from stepengine.tools.bundled.web.search_queries import (
        BraveSearch,
        DocsBackend,
        DocsSites,
        SearchBackend,
        SearchedDocs,
        SearchHit,
        SearxngSearch,
    )
    from stepengine.tools.children import child_tools, sleep_tool
    from stepengine.tools.control import ask_user_tool, control_tools
else:
    __getattr__, __dir__ = make_lazy_exports(
        __name__,
        {
            "stepengine.tools.control": (
                "ask_user_tool",
                "control_tools",
            ),
            "stepengine.tools.children": (
                "child_tools",
                "sleep_tool",
            ),
            "stepengine.tools.agent_tools": (
                "agent_tool",
                "spawn_tools",
                "task_tool",
            ),
            "stepengine.tools.bundled.bundled": (
                "change_hook_tools",
                "file_tools",
                "followup_tools",
                "memory_tools",
                "recall_history_tool",
                "search_tools",
                "shell_tools",
                "skill_tools",
                "web_tools",
            ),
            "stepengine.tools.bundled.changes": ("FileChangeHook",),
            "stepengine.tools.bundled.files.edits": ("unified_diff",),
            "stepengine.tools.bundled.memory": (
                "FileMemory",
                "MemoryStore",
                "Note",
            ),
            "stepengine.tools.bundled.names": (
                "add_message",
                "ask_user",
                "check_job",
                "code_search",
                "delete_file",
                "end_turn",
                "find_files",
                "forget",
                "glob",
                "hand_off",
                "kill_job",
                "list_directory",
                "lookup_agent_info",
                "propose_str_replace",
                "propose_write_file",
                "read_docs",
                "read_files",
                "read_subtree",
                "read_url",
                "recall",
                "remember",
                "run_file_change_hooks",
                "run_terminal_command",
                "set_messages",
                "set_output",
                "skill",
                "spawn_agent_inline",
                "spawn_agents",
                "str_replace",
                "suggest_followups",
                "task_completed",
                "think_deeply",
                "web_search",
                "write_file",
                "write_todos",
            ),
            "stepengine.tools.bundled.reference": (
                "ToolPage",
                "document_tools",
            ),
            "stepengine.tools.bundled.web.fetcher": (
                "Fetched",
                "Fetcher",
                "SafeFetcher",
            ),
            "stepengine.tools.bundled.web.search_queries": (
                "BraveSearch",
                "DocsBackend",
                "DocsSites",
                "SearchBackend",
                "SearchedDocs",
                "SearchHit",
                "SearxngSearch",
            ),
        },
    )

__all__ = (
    "BraveSearch",
    "DocsBackend",
    "DocsSites",
    "Fetched",
    "Fetcher",
    "FileChangeHook",
    "FileMemory",
    "MemoryStore",
    "Note",
    "SafeFetcher",
    "SearchBackend",
    "SearchHit",
    "SearchedDocs",
    "SearxngSearch",
    "ToolPage",
    "add_message",
    "agent_tool",
    "ask_user",
    "ask_user_tool",
    "change_hook_tools",
    "check_job",
    "child_tools",
    "code_search",
    "control_tools",
    "delete_file",
    "document_tools",
    "end_turn",
    "file_tools",
    "find_files",
    "followup_tools",
    "forget",
    "glob",
    "hand_off",
    "kill_job",
    "list_directory",
    "lookup_agent_info",
    "memory_tools",
    "propose_str_replace",
    "propose_write_file",
    "read_docs",
    "read_files",
    "read_subtree",
    "read_url",
    "recall",
    "recall_history_tool",
    "remember",
    "run_file_change_hooks",
    "run_terminal_command",
    "search_tools",
    "set_messages",
    "set_output",
    "shell_tools",
    "skill",
    "skill_tools",
    "sleep_tool",
    "spawn_agent_inline",
    "spawn_agents",
    "spawn_tools",
    "str_replace",
    "suggest_followups",
    "task_completed",
    "task_tool",
    "think_deeply",
    "unified_diff",
    "web_search",
    "web_tools",
    "write_file",
    "write_todos",
)
