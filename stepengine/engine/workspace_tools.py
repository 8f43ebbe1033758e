"""``WorkspaceTools``: the bundled tools that the workspace of an engine gives to agents that name them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from stepengine.errors import DefinitionError
from stepengine.tools.makers import WORKSPACE_TOOLS

if TYPE_CHECKING:
    from stepengine.data.tools import ToolLike
    from stepengine.tools.definition import Tool
    from stepengine.workspace.workspace import Workspace

SEARXNG = "http://localhost:8080"
"""An example of the address of a SearXNG instance, for error messages."""


class WorkspaceTools:
    """
    The bundled tools of one engine.

    Args:
        workspace: The engine's workspace; ``None`` for none, which gives no tools.
        check: Raises for tools that the engine must not have.

    Attributes:
        built: The tools that were built so far, by name.
    """

    def __init__(self, workspace: Workspace | None, check: Callable[[Iterable[ToolLike]], None]) -> None:
        self._workspace = workspace
        self._check = check
        self.built: dict[str, ToolLike] = {}

    def build_tools(self, names: Iterable[str]) -> dict[str, ToolLike]:
        """
        Return the tools of these names that the workspace allows.

        Raises:
            DefinitionError: when the workspace has no root that tools can be confined to.
            WorkspaceLost: when the workspace cannot be reached.
        """
        place, wanted = self._workspace, {name for name in names if name in WORKSPACE_TOOLS}
        if place is None or not wanted:
            return {}
        from stepengine.tools.bundled.bundled import rootless_tools, workspace_tools

        # Built for the first agent that names one. An engine may have a workspace only for tools of its own, and that may be a place
        # where no bundled tool can work.
        if not self.built:
            self._check_and_add_tools(rootless_tools(place.web))
        if left := sorted(wanted - self.built.keys()):
            try:
                self._check_and_add_tools(workspace_tools(place))
            except DefinitionError as error:
                why = error.message.partition(";")[0]
                msg = (
                    f"{', '.join(left)} cannot work in the engine's workspace: {why}; name a project folder, such as "
                    'Engine(workspace=Workspace("project"))'
                )
                raise DefinitionError(msg) from error
        return {name: self.built[name] for name in wanted if name in self.built}

    def _check_and_add_tools(self, tools: Iterable[Tool]) -> None:
        self._check(tools)
        self.built |= {tool.name: tool for tool in tools}

    def format_workspace_argument(self, names: Iterable[str]) -> str:
        """Return the ``Engine`` argument that provides these tools, as Python source."""
        from stepengine.workspace.urls import remove_user_info

        place, needed = self._workspace, {WORKSPACE_TOOLS[name] for name in names}
        has_write, has_shell, web = (False, False, None) if place is None else (place.write, place.shell, place.web)
        shell = _quote(has_shell) if isinstance(has_shell, str) else "True"
        options = [
            *(["write=True"] if has_write or "write" in needed else []),
            *([f"shell={shell}"] if has_shell or "shell" in needed else []),
            *([f"web={_quote(remove_user_info(web or SEARXNG))}"] if web or "web" in needed else []),
        ]
        if place is not None and place.system is not None:
            return f"workspace=workspace.with_access({', '.join(options)})"
        if place is not None and place.trusted:
            options.append(f"trusted=[{', '.join(map(_quote, place.trusted))}]")
        return f"workspace=Workspace({', '.join([_quote('.' if place is None else str(place.root)), *options])})"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
