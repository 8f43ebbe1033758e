"""
Tools: what agents can do. Nothing is registered by default; whoever builds an agent or engine passes tools to it.

``@tool`` makes a tool of a typed function. The bundled sets are built with a root folder and hold the posture that the
documentation describes.
"""

from __future__ import annotations

from stepengine.data.results import ToolResult
from stepengine.tools.bundled import file_tools, search_tools
from stepengine.tools.context import ResourceMap, ToolContext, Workspace
from stepengine.tools.control import ask_user_tool, control_tools, spawn_tools
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool, ToolPreview
from stepengine.tools.depends import Depends
from stepengine.tools.registry import ToolRegistry
from stepengine.tools.threads import ThreadPool
from stepengine.tools.typed import decode_result

__all__ = (
    "Depends",
    "ResourceMap",
    "ThreadPool",
    "Tool",
    "ToolContext",
    "ToolPreview",
    "ToolRegistry",
    "ToolResult",
    "Workspace",
    "ask_user_tool",
    "control_tools",
    "decode_result",
    "file_tools",
    "search_tools",
    "spawn_tools",
    "tool",
)
