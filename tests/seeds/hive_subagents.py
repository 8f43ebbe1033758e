"""
Seed 000, "Sub-Agent System" and "With Sub-Agents".

A registry of sub-agents behind one tool `task`, whose description lists them and whose result is the sub-agent's final text; and
a tool whose body runs another agent by itself.
"""

import asyncio

from stepengine import AgentDefinition, Engine, ToolContext, tool
from stepengine.models import ModelReply, ModelRequest
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import task_tool

research = AgentDefinition(
    "research",
    model="anthropic/claude-haiku-4-5",
    description="Deep research on any topic, returns summary",
    system_prompt="You research topics thoroughly and return concise summaries.",
)
code_review = AgentDefinition(
    "code-review",
    description="Reviews code for bugs, security issues, and improvements",
    system_prompt="You are a senior code reviewer. Find bugs and suggest fixes.",
)
planner = AgentDefinition(
    "planner",
    description="Creates detailed implementation plans",
    system_prompt="You are a software architect. Create step-by-step plans.",
)
chief = AgentDefinition(
    "chief", model="anthropic/claude-sonnet-4-5", tools=[task_tool([research, code_review, planner])]
)


@tool(requires_permission=False)
async def look_up(ctx: ToolContext, topic: str) -> str:
    """
    Research a topic in depth.

    Args:
        topic: The topic.
    """
    engine = ctx.resources.get(Engine)
    assert engine is not None
    return (await engine.run(research, f"Research: {topic}")).unwrap()


helper = AgentDefinition("helper", model="anthropic/claude-sonnet-4-5", tools=[look_up])


def reply(request: ModelRequest) -> ModelReply:
    last = request.messages[-1]
    if request.system_prompt.startswith("You research"):
        assert request.model == "anthropic/claude-haiku-4-5"
        return text(f"Summary of: {last.text}")
    if last.role == "tool":
        return text(f"I was told: {last.text}")
    if request.tools[0].name == "task":
        return tool_call("task", {"agent": "research", "prompt": "Best practices for rate limiting"})
    return tool_call("look_up", {"topic": "rate limiting"})


async def main() -> None:
    model = ScriptedModel([reply] * 6)
    async with Engine([chief, helper, research], models=model) as engine:
        first = await engine.run(chief, "How do I limit rates?")
    own = Engine([helper, research], models=model)
    async with Engine([helper, research], models=model, resources=[own]) as engine, own:
        second = await engine.run(helper, "How do I limit rates?")
    print(first.output)
    print(second.output)

    assert first.output == "I was told: Summary of: Best practices for rate limiting"
    assert second.output == "I was told: Summary of: Research: rate limiting"
    assert [child.agent_id for child in first.children] == ["research"]
    description = model.calls[0].tools[0].description
    assert all(f"- {agent.id}: {agent.description}" in description for agent in (research, code_review, planner))
    assert model.calls[0].tools[0].input_schema["properties"]["agent"]["enum"] == ["research", "code-review", "planner"]


if __name__ == "__main__":
    asyncio.run(main())
