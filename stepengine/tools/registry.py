"""``ToolRegistry``: tools by name, for programs that assemble them and for unit tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition
from stepengine.data.json import freeze_object
from stepengine.data.messages import ToolResult
from stepengine.data.tools import Ordinary, ToolLike, ToolSpec
from stepengine.errors import DataError, DefinitionError, ToolInputError, ToolNotAvailable
from stepengine.tools.context import ToolContext
from stepengine.tools.definition import NO_OVERRIDES, Tool
from stepengine.tools.depends import Overrides
from stepengine.tools.makers import format_tools_argument


class ToolRegistry:
    """
    Tools by name; a new registry is empty.

    Args:
        tools: The first tools.

    Raises:
        DefinitionError: If two tools have the same name.
    """

    def __init__(self, tools: Iterable[ToolLike] = ()) -> None:
        self._tools: dict[str, ToolLike] = {}
        for one in tools:
            self.register(one)

    def register(self, tool: ToolLike, *, replace: bool = False) -> None:
        """
        Add a tool.

        Raises:
            DefinitionError: If another tool has the name and *replace* is False, or *tool* is not a tool.
        """
        if not isinstance(tool, ToolLike):
            msg = f"register() takes a tool, not {tool!r}; put @tool above the function"
            raise DefinitionError(msg)
        name = tool.spec.name
        if name in self._tools and self._tools[name] is not tool and not replace:
            msg = f"two tools are named {name!r}; rename one, or register(tool, replace=True)"
            raise DefinitionError(msg)
        self._tools[name] = tool

    def get(self, name: str) -> ToolLike | None:
        """Return the tool of that name, or ``None``."""
        return self._tools.get(name)

    def has(self, name: str) -> bool:
        """Return True if there is a tool of that name."""
        return name in self._tools

    def list(self) -> tuple[ToolLike, ...]:
        """Return all tools in the order of their registration."""
        return tuple(self._tools.values())

    def for_agent(self, agent: AgentDefinition) -> tuple[ToolLike, ...]:
        """
        Return the tools of an agent in its order, with names looked up; those of a ``ToolSource`` are omitted.

        Raises:
            ToolNotAvailable: If the agent names a tool that is not registered.
        """
        return tuple(
            [self._get_tool(t) if isinstance(t, str) else t for t in agent.tools if isinstance(t, str | ToolLike)]
        )

    def specs(self, names: Iterable[str] | None = None) -> Mapping[str, ToolSpec]:
        """Return the specifications by tool name, of all tools or of those in *names*."""
        tools = self.list() if names is None else [self._get_tool(n) for n in names]
        return {t.spec.name: t.spec for t in tools}

    def category(self, name: str) -> str:
        """Return the category of a tool; raise ``ToolNotAvailable`` for an unknown name."""
        return self._get_tool(name).spec.category

    async def execute(
        self,
        name: str,
        input: Mapping[str, object],
        ctx: ToolContext | None = None,
        *,
        overrides: Overrides = NO_OVERRIDES,
    ) -> ToolResult:
        """
        Repair and validate an input and run the tool, without engine, hooks or permissions.

        Returns:
            The tool's result; an error result for an unknown tool, an invalid input, or a failing body.
        """
        found = self._tools.get(name)
        if found is None:
            return ToolResult.error(self._explain_unknown_tool(name))
        binding = found.binding()
        if not isinstance(found, Tool) or not isinstance(binding.runs, Ordinary):
            return ToolResult.error(
                f"tool {name!r} runs only as part of an agent run; it cannot be executed on its own"
            )
        try:
            given = freeze_object(input)
            validated = binding.validate(binding.repair(given) if binding.repair else given)
        except (ToolInputError, DataError) as error:
            return ToolResult.error(error.message)
        return await found.execute(validated.arguments, ctx or ToolContext.for_test(), overrides=overrides)

    def _get_tool(self, name: str) -> ToolLike:
        """Return a tool by its name; raise ``ToolNotAvailable`` for an unknown one."""
        found = self._tools.get(name)
        if found is None:
            raise ToolNotAvailable(self._explain_unknown_tool(name), tool_name=name, available=tuple(self._tools))
        return found

    def _explain_unknown_tool(self, name: str) -> str:
        """Return the message for an unknown tool, with the available ones and how to add a bundled one."""
        line = format_tools_argument([name])
        hint = f". It comes with stepengine: {line}" if line else ""
        return f"Tool {name!r} is not available. Available tools: {list_names(self._tools, name)}{hint}"
