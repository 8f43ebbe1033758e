"""
Tools: what agents can do. Nothing is registered by default; whoever builds an agent or engine passes tools to it.

``@tool`` makes a tool of a typed function. The bundled sets are built with a root folder and hold the posture that the
documentation describes.
"""

from __future__ import annotations

from stepengine.data.messages import ToolReferencePart, ToolResult
from stepengine.tools.bundled import (
    change_hook_tools,
    file_tools,
    followup_tools,
    memory_tools,
    search_tools,
    shell_tools,
    skill_tools,
    web_tools,
)
from stepengine.tools.changes import FileChangeHook
from stepengine.tools.context import ResourceMap, ToolContext, Workspace
from stepengine.tools.control import ask_user_tool, control_tools
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool, ToolPreview, decode_result
from stepengine.tools.depends import Depends
from stepengine.tools.files.edits import unified_diff
from stepengine.tools.memory import FileMemory, MemoryStore, Note
from stepengine.tools.registry import ToolRegistry
from stepengine.tools.spawning import agent_tool, spawn_tools, task_tool
from stepengine.tools.threads import ThreadPool
from stepengine.tools.web.fetching import Fetched, Fetcher, SafeFetcher
from stepengine.tools.web.searching import (
    BraveSearch,
    DocsBackend,
    DocsSites,
    SearchBackend,
    SearchedDocs,
    SearchHit,
    SearxngSearch,
)

__all__ = (
    "BraveSearch",
    "Depends",
    "DocsBackend",
    "DocsSites",
    "Fetched",
    "Fetcher",
    "FileChangeHook",
    "FileMemory",
    "MemoryStore",
    "Note",
    "ResourceMap",
    "SafeFetcher",
    "SearchBackend",
    "SearchHit",
    "SearchedDocs",
    "SearxngSearch",
    "ThreadPool",
    "Tool",
    "ToolContext",
    "ToolPreview",
    "ToolReferencePart",
    "ToolRegistry",
    "ToolResult",
    "Workspace",
    "agent_tool",
    "ask_user_tool",
    "change_hook_tools",
    "control_tools",
    "decode_result",
    "file_tools",
    "followup_tools",
    "memory_tools",
    "search_tools",
    "shell_tools",
    "skill_tools",
    "spawn_tools",
    "task_tool",
    "tool",
    "unified_diff",
    "web_tools",
)
