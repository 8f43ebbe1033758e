"""Answer a customer with Pydantic AI: a streamed run of an agent with a tool."""

import asyncio

from orders import find_order
from pydantic_ai import Agent

PROMPT = "You answer the customers of a shop in one sentence."


async def answer(question: str) -> str:
    agent = Agent("anthropic:claude-opus-5", instructions=PROMPT, tools=[find_order])
    text = ""
    async with agent.run_stream(question) as run:
        async for piece in run.stream_text(delta=True):
            text += piece
    return text


if __name__ == "__main__":
    print(asyncio.run(answer("Where is order 17?")))
