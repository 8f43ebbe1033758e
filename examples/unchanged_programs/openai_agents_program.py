"""Answer a customer with the OpenAI Agents SDK: a streamed run of an agent with a tool."""

import asyncio

from openai.types.responses import ResponseTextDeltaEvent
from orders import find_order

from agents import Agent, Runner, function_tool

PROMPT = "You answer the customers of a shop in one sentence."

agent = Agent(name="Orders", instructions=PROMPT, model="gpt-5", tools=[function_tool(find_order)])


async def answer(question: str) -> str:
    text = ""
    run = Runner.run_streamed(agent, question)
    async for event in run.stream_events():
        if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
            text += event.data.delta
    return text


if __name__ == "__main__":
    print(asyncio.run(answer("Where is order 17?")))
