"""``ToolSource``: tools that are only known when a run begins, as the floors below whoever makes one know it."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Protocol, runtime_checkable

from stepengine.data.hooks import Change, HookContext

__all__ = ("ToolSource",)


@runtime_checkable
class ToolSource(Protocol):
    """
    Tools that are only known when a run begins, such as those of a server: an agent definition and an engine accept it.

    ``stepengine.mcp.mcp_tools`` makes one. The engine closes what it opened. A source that several engines may have at a time
    has a method ``for_engine()`` that returns what one of them has of it, and is asked for it by each.
    """

    @property
    def name(self) -> str:
        """Its name, by which an agent lists it when the engine has it."""

    def pre_run(self, ctx: HookContext, /) -> Generator[Any, Any, Change]:
        """Return ``Change(tools=...)``; it is a ``pre_run`` hook, so what it looks up by ``Perform`` is recorded."""

    async def aclose(self, blocked: Any = None) -> None:
        """Give back what was opened, in every event loop but *blocked*, which stands still and is only told."""
