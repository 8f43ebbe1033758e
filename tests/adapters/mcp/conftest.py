"""
What the tests of MCP share: a small real server as a process, and agents that use it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition
from stepengine.adapters.mcp import McpTools, mcp_tools

pytest.importorskip("mcp", reason="the extra mcp is not installed")

SERVER = Path(__file__).with_name("server.py")


@pytest.fixture(scope="session", autouse=True)
def package_is_loaded() -> None:
    """
    The package is imported before a test begins: its imports take most of a second, which no time-out has to hold.
    """
    import mcp_types  # noqa: F401


@pytest.fixture
def small() -> Any:
    """
    Make sources of tools of the small server: `small("stubborn", timeout=5)`.
    """

    def make(*modes: str, name: str = "small", **options: Any) -> McpTools:
        return mcp_tools([sys.executable, str(SERVER), *modes], name=name, **{"start_timeout": 30, **options})

    return make


@pytest.fixture
def odd() -> Any:
    """
    Make sources of the one tool of a server that speaks the protocol by hand; as a process that starts at once.
    """

    def make(mode: str = "plain", *more: str, **options: Any) -> McpTools:
        command = [sys.executable, "-S", "-E", str(SERVER.with_name("odd_server.py")), mode, *more]
        return mcp_tools(command, name="odd", **{"start_timeout": 30, **options})

    return make


@pytest.fixture
def near() -> Any:
    """
    Make sources of tools of the small server in this process, where nothing has to be started.
    """
    from .server import made

    def make(*modes: str, name: str = "small", **options: Any) -> McpTools:
        return mcp_tools(made(*modes), name=name, **options)

    return make


@pytest.fixture
def agent() -> Any:
    """
    Make an agent with the tools of a source.
    """

    def make(*tools: Any, **options: Any) -> AgentDefinition[Any]:
        return AgentDefinition("worker", model="test/model", tools=[*tools], **options)

    return make
