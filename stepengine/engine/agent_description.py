"""An agent as its engine uses it: tools with schemas, additions to its prompts, and the rules for its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.data.tools import ToolSpec
from stepengine.engine.run_plans import RunRequest
from stepengine.errors import MissingKey, StepEngineError, UnknownModel

if TYPE_CHECKING:
    from stepengine.engine.engine import Engine


@frozen(kw_only=True)
class AgentDescription:
    """
    An agent's offered tools, added instructions and policy, as its engine has them.

    Attributes:
        tools: The names of the tools offered to its models, in order.
        instructions: Its instructions with what the engine adds to them.
        policy: The rules for its calls, as ``Policy.to_json`` tells them; ``None`` where every call is allowed.
    """

    tools: tuple[ToolSpec, ...]
    instructions: str
    policy: dict[str, Any] | None


def describe_agent(engine: Engine, agent_id: str) -> AgentDescription:
    """
    Return the offered tools, added instructions and policy of an agent, as its engine has them.

    Raises:
        AgentError: when the engine has no such agent.
    """
    catalog = engine._launcher.catalog  # noqa: SLF001 - of the same package; who uses an engine has no business with it
    agent = catalog.get_agent(agent_id)
    added = (agent.definition.instructions_prompt, agent.instructions_note)
    return AgentDescription(
        tools=tuple([agent.tools[name].spec for name in agent.offered if name in agent.tools]),
        instructions="\n\n".join([text for text in added if text]),
        policy=None if catalog.policy is None else catalog.policy.to_json(),
    )


def explain_missing_model(engine: Engine, agent_id: str) -> str:
    """
    Return why no run of an agent can start for lack of a model or key, without a call; ``""`` if one can.

    Raises:
        AgentError: when the engine has no such agent.
    """
    launcher = engine._launcher  # noqa: SLF001 - of the same package
    agent = launcher.catalog.get_agent(agent_id)
    try:
        # The model comes first, so that a prompt or params that are wanting, as here, are no matter.
        launcher.plan_root_run(RunRequest(agent=agent))
    except (MissingKey, UnknownModel) as error:
        return error.message
    except StepEngineError:
        return ""
    return ""
