"""
Code mode: the model writes a program that gets twenty prices in one reply and asks a person; another process resumes it.

``python examples/programs.py`` needs no key, but the extra ``programs``: scripted replies replace the model, and its program really
runs. To call a real model, omit ``models=`` and set ANTHROPIC_API_KEY.
"""

import tempfile
from pathlib import Path

from stepengine import AgentDefinition, Engine, RunStatus, tool
from stepengine.permissions import Policy, Rule
from stepengine.sandbox import code_mode
from stepengine.testing import ScriptedModel, text, tool_call

SHOPS = {f"shop-{n}": 60 + n * 7 % 20 for n in range(20)}
done: list[str] = []


@tool(requires_permission=False)
def price(shop: str, item: str) -> int:
    """What an item costs in a shop, in euros."""
    done.append(f"asked {shop}")
    return SHOPS[shop]


@tool(category="network")
def order(shop: str, item: str) -> str:
    """Order an item in a shop."""
    done.append(f"ordered in {shop}")
    return f"{item} is on its way from {shop}"


# What the model writes. An order has to be allowed by a person, so the program waits in that line, for as long as it takes.
PROGRAM = """\
import asyncio

shops = [f"shop-{n}" for n in range(20)]
prices = await asyncio.gather(*[price(shop, "kettle") for shop in shops])
cheapest, shop = min(zip(prices, shops))
print(f"{len(prices)} shops, from {cheapest} to {max(prices)} euros")
try:
    said = await order(shop, "kettle")
except PermissionError as error:
    said = f"not ordered: {error}"
said
"""

buyer = AgentDefinition("buyer", model="anthropic/claude-sonnet-4-5", tools=[code_mode(price, order)])
# Programs may run; each of their calls is judged by itself, and nobody has said that orders may be made.
policy = Policy([Rule.allow_tool("run_code")])


def main() -> None:
    model = ScriptedModel([tool_call("run_code", {"code": PROGRAM}), text("The cheapest kettle is on its way.")])
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "kettle.jsonl"
        with Engine([buyer], models=model, permissions=policy) as engine:
            waiting = engine.run_sync(buyer, "Find the cheapest kettle and order it.", journal=journal)
        assert waiting.status is RunStatus.SUSPENDED
        (question,) = waiting.pending_questions
        print(question.text, question.details)
        # Days later, in another process: no price is asked for again.
        with Engine([buyer], models=model, permissions=policy) as engine:
            result = engine.resume_sync(journal, answers={question.id: "yes"})
            assert engine.replay_sync(journal) == result
    print(result.tool_calls[0].result.text)
    print(result.text)
    print(f"{len(model.calls)} requests to the model, {len(done)} calls of tools")
    assert sorted(done) == sorted([*[f"asked {shop}" for shop in SHOPS], "ordered in shop-0"])


if __name__ == "__main__":
    main()
