"""What an agent is to its engine: its tools with their schemas, what is added to its prompts, and the rules for its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.data.tools import ToolSpec
from stepengine.engine.planning import RunRequest
from stepengine.errors import MissingKey, StepEngineError, UnknownModel

if TYPE_CHECKING:
    from stepengine.engine.engine import Engine

__all__ = ("Described", "described", "missing_model")


@frozen(kw_only=True)
class Described:
    """
    An agent as its engine has it.

    Attributes:
        tools: What its models are offered, in order.
        instructions: Its instructions with what the engine adds to them.
        policy: The rules for its calls, as ``Policy.to_json`` tells them; ``None`` where every call is allowed.
    """

    tools: tuple[ToolSpec, ...]
    instructions: str
    policy: dict[str, Any] | None


def described(engine: Engine, agent_id: str) -> Described:
    """
    Return what an agent is to its engine.

    Raises:
        AgentError: when the engine has no such agent.
    """
    catalog = engine._launcher.catalog  # noqa: SLF001 - of the same floor; who uses an engine has no business with it
    agent = catalog.find(agent_id)
    added = (agent.definition.instructions_prompt, agent.note)
    return Described(
        tools=tuple([agent.tools[name].spec for name in agent.offered if name in agent.tools]),
        instructions="\n\n".join([text for text in added if text]),
        policy=None if catalog.policy is None else catalog.policy.to_json(),
    )


def missing_model(engine: Engine, agent_id: str) -> str:
    """
    Return why no run of an agent could begin for want of a model that can be asked, as far as nobody has to be asked; ``""`` where one can.

    Raises:
        AgentError: when the engine has no such agent.
    """
    launcher = engine._launcher  # noqa: SLF001 - of the same floor
    agent = launcher.catalog.find(agent_id)
    try:
        # The model comes first, so that a prompt or params that are wanting, as here, are no matter.
        launcher.plan(RunRequest(agent=agent))
    except (MissingKey, UnknownModel) as error:
        return error.message
    except StepEngineError:
        return ""
    return ""
