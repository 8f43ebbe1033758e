"""
Tools with detailed descriptions, validated input, dependencies and access to their run.

``python examples/custom_tools.py`` needs no key: scripted replies replace the model, and the tools really run. To call a real model,
omit ``models=`` and set OPENAI_API_KEY.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from stepengine import AgentDefinition, Depends, Engine, ToolContext, tool
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls

Shelf = dict[str, int]


class Line(BaseModel):
    """One line of an order."""

    article: str = Field(pattern="^[a-z]+$", description="The article's name, in the singular.")
    count: int = Field(ge=1, le=100, description="How many pieces.")


def get_shelf() -> Shelf:
    """Give the stock; tests and other shops put something else in its place with ``dependency_overrides``."""
    return {"apple": 7, "pear": 2}


@tool(category="write", requires_permission=False)  # a tool of this category is asked about by default
def reserve(
    ctx: ToolContext,
    lines: Annotated[list[Line], Field(min_length=1)],
    when: Literal["today", "tomorrow"] = "today",
    shelf: Shelf = Depends(get_shelf),
) -> dict[str, int]:
    """
    Reserve articles for the customer, all lines or none.

    Usage:
        - One call per order, with all its lines.

    Examples:
        {"lines": [{"article": "apple", "count": 2}], "when": "tomorrow"}

    Args:
        lines: What is ordered.
        when: The day on which it is fetched.
    """
    short = [line.article for line in lines if shelf.get(line.article, 0) < line.count]
    if short:
        msg = f"not enough of {', '.join(short)}; there are {shelf}"
        raise ValueError(msg)  # becomes an error result, which the model reads and may act upon
    ctx.logger.info("reserved", agent=ctx.agent_id, when=when)
    return {line.article: shelf[line.article] - line.count for line in lines}


clerk = AgentDefinition("clerk", model="openai/gpt-5", tools=[reserve])


def order(count: int, article: str = "pear") -> object:
    return tool_call(reserve, {"lines": [{"article": article, "count": count}]})


def main() -> None:
    replies = [tool_calls(order(0), order(3)), order(2), text("Two pears wait for you, there were no three.")]
    with Engine([clerk], models=ScriptedModel(replies)) as engine:
        result = engine.run_sync(clerk, "Three pears, please, or as many as there are.")
    for done in result.tool_calls:
        print(f"  {done.input['lines']} -> {done.result.status}: {done.result.text.splitlines()[0]}")
    print(result.output)
    assert [done.is_error for done in result.tool_calls] == [True, True, False]


if __name__ == "__main__":
    main()
