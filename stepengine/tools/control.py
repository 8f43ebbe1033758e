"""
The tools that the machine carries out itself or turns into other effects (requirements F10, F17, F19, J1, K1).

What they mean stands in the machine; here they become tools that an agent or engine can be given.
"""

from __future__ import annotations

from typing import Any

import attrs

from stepengine.data.definition import AgentDefinition
from stepengine.data.questions import Interactor, checked_interactor
from stepengine.data.tools import ToolBinding, ToolLike, ToolSpec
from stepengine.machine.control import CONTROL_BINDINGS, CONTROL_SPECS, HANDLER_ONLY
from stepengine.tools.repair import Aliases, repairer

__all__ = ("MachineTool", "ask_user_tool", "control_tools", "machine_tool")

ALIASES: Aliases = {
    "agents.agent_type": ("agent", "agent_id", "agentId"),
    "agent_type": ("agent", "agent_id", "agentId"),
    "questions.multi_select": ("multiple",),
}


@attrs.frozen(eq=False)
class MachineTool:
    """
    A tool without a body of its own.

    Attributes:
        spec: What is known of it.
        interactor: Who answers in process; only for ``ask_user``.
        agents: The agents that it carries; whoever has the tool may run them.
    """

    spec: ToolSpec
    interactor: Interactor | None = None
    agents: tuple[AgentDefinition[Any], ...] = ()
    _binding: ToolBinding = attrs.field(alias="binding", kw_only=True, repr=False)

    def binding(self) -> ToolBinding:
        """Return the tool as the machine knows it, with repair of what models often get wrong."""
        return self._binding


def machine_tool(name: str, interactor: Interactor | None = None) -> MachineTool:
    """Return a tool that every machine knows, with repair of what models often get wrong."""
    binding = CONTROL_BINDINGS[name]
    mended = attrs.evolve(binding, repair=repairer(binding.spec.input_schema, ALIASES))
    return MachineTool(binding.spec, interactor, binding=mended)


def control_tools() -> list[ToolLike]:
    """
    Return ``set_output``, ``end_turn``, ``task_completed``, ``write_todos`` and ``think_deeply``.

    Handlers may always use these; passing them to an agent offers them to its model. ``set_messages`` and
    ``add_message`` are for handlers alone and not among them.
    """
    return [machine_tool(name) for name in CONTROL_SPECS if name not in HANDLER_ONLY]


def ask_user_tool(interactor: Interactor | None = None) -> ToolLike:
    """
    Return ``ask_user``, which puts the model's questions to a person.

    Args:
        interactor: Who answers the questions of this tool in process, an object with a method ``ask(question)``; without
            one the engine's interactor does, or the run suspends.

    Raises:
        DefinitionError: when *interactor* cannot be asked.
    """
    return machine_tool("ask_user", checked_interactor(interactor, "ask_user_tool(interactor)"))
