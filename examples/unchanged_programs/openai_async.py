"""Answer a customer with the asynchronous OpenAI SDK: the Responses API, streamed, and a tool loop."""

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI
from orders import find_order

PROMPT = "You answer the customers of a shop in one sentence."
NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOL: Any = {
    "type": "function",
    "name": "find_order",
    "description": find_order.__doc__,
    "parameters": NUMBER,
    "strict": False,
}

client = AsyncOpenAI()


async def answer(question: str) -> str:
    items: list[Any] = [{"role": "user", "content": question}]
    while True:
        text, calls = "", []
        stream = await client.responses.create(
            model="gpt-5", instructions=PROMPT, input=items, tools=[TOOL], stream=True, store=False
        )
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type == "response.output_item.done" and event.item.type == "function_call":
                calls.append(event.item)
        if not calls:
            return text
        for call in calls:
            named = {"call_id": call.call_id, "name": call.name, "arguments": call.arguments}
            items.append({"type": "function_call", **named})
            result = find_order(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


if __name__ == "__main__":
    print(asyncio.run(answer("Where is order 17?")))
