"""
Simulated failures: what ``stepengine test --chaos`` and ``simulate`` find in a careless handler, and a careful handler that passes.

``python examples/chaos.py`` needs no key, because nothing is called. To simulate many more runs, use
``stepengine test --chaos examples/chaos.py "10 roses" -n 1000 --results '{"find_price": 30}'``.
``--seed N -n 1`` repeats one of them.
"""

from stepengine import AgentDefinition, Engine, Perform, StepContext, Steps, ToolCall, tool
from stepengine.errors import PerformError, ToolError
from stepengine.testing import ScriptedModel, SimulationFailed, simulate


@tool
def find_price(goods: str) -> int:
    """
    Return what goods cost.

    Args:
        goods: What is bought.
    """
    return 30 if "roses" in goods else 3


def order(goods: str, price: int) -> str:
    """Order goods: what must never happen twice, whenever the process dies."""
    return f"ordered {goods} for {price}"


def careless(ctx: StepContext) -> Steps[str]:
    """Take every price for one."""
    found = yield ToolCall(find_price, {"goods": ctx.prompt})
    price = found.tool_result.data + 5  # None, where the tool failed
    return (yield from Perform(order, ctx.prompt, price))


def careful(ctx: StepContext) -> Steps[str]:
    """Say what went wrong; an order that may or may not have been made is left to a person."""
    try:
        found = yield from ToolCall(find_price, {"goods": ctx.prompt})
        return (yield from Perform(order, ctx.prompt, found.data + 5))
    except ToolError:
        return "no price, so nothing was ordered"
    except PerformError as error:
        return f"somebody has to look at it: {error.kind}"


agent = AgentDefinition("buyer", tools=[find_price], handle_steps=careful)
careless_agent = AgentDefinition("careless-buyer", tools=[find_price], handle_steps=careless)


def main() -> None:
    worlds = {"seeds": range(60), "prompt": "10 roses", "results": {"find_price": 30, "order": "ordered"}}
    try:
        simulate(careless_agent, **worlds)
    except SimulationFailed as failed:
        print(f"careless: fails in the world {failed.seed}, with {len(failed.faults)} fault: {failed.faults[0]}")
    seen = simulate(agent, **worlds)
    faults = ", ".join(f"{times} {kind}" for kind, times in sorted(seen.faults.items()))
    print(f"careful: {seen.runs} worlds with {faults}: everything held")

    with Engine([agent], models=ScriptedModel([])) as engine:
        print("and in this world:", engine.run_sync(agent, "10 roses").output)


if __name__ == "__main__":
    main()
